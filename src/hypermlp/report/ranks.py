"""Rows by the rank of the mixing, for documents: a label has the paper's; what the search gave another has its own row.

A registered study judges a mixer with the rank that its search chose. Here its runs stand under the names that say the rank,
such as G-cg-q-12o@8, and runs at the paper's rank that a later study made (protocol rank16) take the places left.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from hypermlp.files import Record
from hypermlp.mixers.hybrid import is_hybrid
from hypermlp.report.table1 import Cell, Row, columns, grid, new_row, rows_markdown
from hypermlp.verdicts.results import AVERAGE, LOSSES, Results, table_order


def own_name(record: Record) -> str:
    """Of the mixer with the rank that it was run with."""
    return str(record.get("variant") or record["mixer"])


def row_order(mixer: str) -> tuple[tuple[float, str], list[int], str]:
    """The order of tables; behind each mixer those with another rank or other options, by their numbers."""
    base = mixer if is_hybrid(mixer) else re.split("[@+]", mixer)[0]
    rest = mixer.removeprefix(base)
    return table_order(base), [len(rest) > 0, *map(int, re.findall(r"\d+", rest))], rest


def rank_of(study: Results, mixer: str, measure: str) -> str:
    """The rank that the search gave a mixer, such as "@8"; empty where it is the mixer's own."""
    records = study.language if measure in LOSSES else [r for r in study.mad if r["task"] == measure]
    found = {own_name(record).removeprefix(mixer) for record in records if record["mixer"] == mixer}
    return "".join(sorted(name for name in found if name.startswith("@")))


def by_rank(study: Results, later: Sequence[Results] = ()) -> Results:
    """The study with its runs under names that say the rank, and the runs of later studies at the rank of the label."""
    mad, language = ([{**r, "mixer": own_name(r)} for r in half] for half in (study.mad, study.language))
    there = {(r["mixer"], r["setting"]) for r in mad}
    for other in later:
        mad += [r for r in other.mad if (r["mixer"], r["setting"]) not in there and r["mixer"] in study.mixers]
    return replace(study, mad=mad, language=language)


def at_own_rank(study: Results, later: Results) -> Results:
    """The study with a later one's runs in the place of its own of the same mixers on the same settings."""
    there = {(r["mixer"], r["setting"]) for r in later.mad}
    return replace(study, mad=[*(r for r in study.mad if (r["mixer"], r["setting"]) not in there), *later.mad])


def ranked_markdown(study: Results, later: Sequence[Results] = ()) -> str:
    """The grid of a study for a document, a row for every rank, and the runs of the search beside the parameters."""
    split, shown = by_rank(study, later), columns(study)
    rows = [new_row(split, mixer, shown) for mixer in sorted(split.mixers, key=row_order)]
    for whole in grid(study):
        own = [place for place, row in enumerate(rows) if row.mixer.partition("@")[0] == whole.mixer]
        for place in own if len(own) > 1 else ():  # parameters are means over the tasks, of which each row has some
            rows[place] = replace(rows[place], parameters=whole.parameters, share=whole.share)
        if len(own) > 1:
            rows.insert(own[-1] + 1, only_average(whole))
    return rows_markdown(rows, shown, study.search_runs)


def only_average(whole: Row) -> Row:
    """What a registered comparison has of a mixer whose rows are apart."""

    def kept(cell: Cell) -> Cell:
        return cell if cell.column.key == AVERAGE else Cell(cell.column, None, None)

    name = f"{whole.mixer}, ranks as searched"
    return replace(whole, mixer=name, title="", cells=[kept(cell) for cell in whole.cells])
