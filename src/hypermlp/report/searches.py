"""How much each mixer of a study was searched, for documents: the runs of its search, and what rank its mixing was given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypermlp.files import Record
from hypermlp.report.markdown import markdown_table
from hypermlp.studies.search import FINAL, PHASE
from hypermlp.verdicts.results import Results

TRIAL = ("mixer", "setting", "seed", "lr", "init_scale")  # what tells runs of a search apart, as Results.search_runs has it


def searches_markdown(study: Results, longer: Results) -> str:
    """A row per mixer, of a study and of one that trained longer; a run that went on from rung to rung is one."""
    searched = {True: [r for r in study.searched if "task" in r], False: [r for r in study.searched if "task" not in r]}
    halves: dict[str, Sequence[Record]] = {
        "MAD": [*study.mad, *searched[True]],
        "language": [*study.language, *searched[False]],
        "compression, longer": [*longer.mad, *longer.searched],
    }
    found: dict[str, dict[str, str]] = {}
    for title, records in halves.items():
        runs = {tuple(r.get(name) for name in TRIAL) for r in records if r.get("phase") == PHASE}
        counts = dict.fromkeys((r["mixer"].partition("@")[0] for r in records), 0) | Counter(
            str(mixer).partition("@")[0] for mixer, *_ in runs
        )
        ranks: dict[str, set[str]] = {}
        for record in records:
            mixer, _, _ = record["mixer"].partition("@")
            _, at, rank = (record.get("variant") or "").partition("@")
            if record.get("phase") == FINAL and at:
                ranks.setdefault(mixer, set()).add(f"{record.get('task', 'language')} @{rank}")
        for mixer, count in counts.items():
            other = f" ({', '.join(sorted(ranks[mixer]))})" if mixer in ranks else ""
            found.setdefault(mixer, {})[title] = f"{count}{other}"
    rows = [[mixer, *(cells.get(title, "–") for title in halves)] for mixer, cells in found.items()]
    return markdown_table(["mixer", *halves], rows)
