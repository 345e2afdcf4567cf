"""Writes the tables of docs/what-does-this-head-read.md: what the heads of the two models read that come with the package.

python docs/make_reading.py          the tables of one text and of one example of copying, in seconds
python docs/make_reading.py --over   first what the language model's heads do over held-out text: results/reading.json, a minute
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hypermlp.analysis.capture import capture, exact_copy
from hypermlp.analysis.trace import Trace
from hypermlp.cli.analysis import WINDOWS
from hypermlp.files import read_json, write_json
from hypermlp.models.bundled import COPYING, LANGUAGE, bundled_models
from hypermlp.provenance import provenance
from hypermlp.report.analyse import head_row, noise_row, show_analyse
from hypermlp.report.explore import Subject, open_subject, open_task
from hypermlp.report.markdown import fill, markdown_table
from hypermlp.report.terminal import new_console

ROOT = Path(__file__).parent.parent
GUIDE, RECORD = ROOT / "docs" / "what-does-this-head-read.md", ROOT / "results" / "reading.json"
TEXT = "class Basket: def add(self, apples): self.apples += apples; return self.ap"
READER = (0, 1)  # layer and head of the copying model that moves from answer to answer
MOST = 3  # tokens of a row that the tables name


def blocks() -> dict[str, str]:
    """What the guide prints, by the names of its blocks."""
    record = read_json(RECORD)
    return {"row": row_table(), "over": f"{over_table(record)}\n\n{over_sentence(record)}", "answers": answers_table()}


def row_table() -> str:
    """Every head of the language model at the last token of the text."""
    subject = open_subject(Path(LANGUAGE), TEXT)
    last = len(subject.tokens) - 1
    rows = []
    for layer, opened in enumerate(traces(subject)):
        for head in range(opened.n_head):
            rows.append([f"{layer + 1}, {head + 1}", *counts(opened, last, head), most_read(subject, opened, last, head)])
    return markdown_table(["layer, head", *COUNTS, "reads most (tokens back)"], rows)


def answers_table() -> str:
    """One head of the copying model at each of its answers."""
    subject = open_task(Path(COPYING), 0)
    layer, head = READER
    opened = traces(subject)[layer]
    rows = []
    for token, target in enumerate(subject.targets):
        if target is not None:
            read = most_read(subject, opened, token, head, places=True)
            rows.append([str(token), subject.spell(target), *counts(opened, token, head), read])
    return markdown_table(["token", "answer", *COUNTS, "reads most (its place)"], rows)


def traces(subject: Subject) -> list[Trace]:
    found = capture(exact_copy(subject.model), torch.tensor([subject.tokens])).traces()
    return [opened for opened in found if opened is not None]


COUNTS = ("pool", "active", "without mixing", "switched on", "switched off")


def counts(opened: Trace, token: int, head: int) -> list[str]:
    mixed, plain = opened.memory(token, head), opened.memory(token, head, mixing=False)
    sets = (mixed.active, plain.active, mixed.active & ~plain.active, plain.active & ~mixed.active)
    return [str(len(mixed.z)), *(str(int(own.sum())) for own in sets)]


def most_read(subject: Subject, opened: Trace, token: int, head: int, *, places: bool = False) -> str:
    """The tokens with the largest shares of the head's output."""
    shares = opened.memory(token, head).token_shares
    told = []
    for place in shares.argsort(descending=True)[:MOST].tolist():
        where = place if places else token - place
        told.append(f"`{subject.pieces[place].replace(' ', '␣')}` ({where}) {100 * float(shares[place]):.0f} %")
    return ", ".join(told)


def over_sentence(record: dict[str, Any]) -> str:
    least, most = record["ranks"]
    return (
        f"That is over {record['tokens']:,} tokens. Of the {record['of']} directions that A Diag(s) Bᵀ has, the operators use "
        f"between {least:.1f} and {most:.1f} (effective rank)."
    )


def over_table(record: dict[str, Any]) -> str:
    heads = ["layer, head", "active", "without mixing", "switched on", "switched off", "mean lag read"]
    heads += ["noise active", "without mixing", "readout weight on noise"]
    return markdown_table(heads, record["heads"])


def record_over() -> None:
    """The command `hypermlp explore --model hypermlp:language --over stdlib`, and the columns that the guide shows of it."""
    with tempfile.TemporaryDirectory() as out:
        found = show_analyse(new_console(), Path(LANGUAGE), "stdlib", out=Path(out), windows=WINDOWS)
    rows = [line(head_row(own), noise_row(own)) for own in found.heads]
    ranks = [op.rank for op in found.operators]
    made = provenance() | {"command": "python docs/make_reading.py --over"}
    told = {"provenance": made, "sha256": bundled_models()[LANGUAGE]["sha256"], "tokens": found.tokens}
    write_json(RECORD, {**told, "heads": rows, "ranks": [min(ranks), max(ranks)], "of": found.operators[0].full_rank})


def line(own: Sequence[str], noise: Sequence[str]) -> list[str]:
    layer, head, active, plain, on, off, _, reach = own
    return [f"{layer}, {head}", active, plain, on, off, reach, noise[2], noise[3], noise[6]]


if __name__ == "__main__":
    if "--over" in sys.argv:
        record_over()
    GUIDE.write_text(fill(GUIDE.read_text(), blocks()))
