"""What the paper numbers: kind, number, title and citations of its statements, and how they are read off its text.

NUMBERED is numbered.json, which was made with `extract` from the text of arXiv 2602.12601 and then compared with it entry by
entry: 69 statements and three examples. The text itself is not shipped.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

KINDS = ("Theorem", "Lemma", "Proposition", "Corollary", "Definition", "Remark", "Assumption")
NUMBER = r"(?:[A-Z]|\d+)\.\d+"
BEGIN = re.compile(rf"^\**({'|'.join(KINDS)}) ({NUMBER})\** \(|^\**(Example) (\d+): ", re.MULTILINE)
CITED = re.compile(rf"(?:(?:{'|'.join(KINDS)}|Prop\.)s?|see|derivation is in) ({NUMBER})(?:–({NUMBER}))?")
SECTION = re.compile(r"^(?:[A-Z]|\d+)\.(?:\d+\.)* [A-Z]", re.MULTILINE)
PROOF = re.compile(r"^Proof", re.MULTILINE)


@dataclass(frozen=True)
class Numbered:
    """One numbered statement of the paper."""

    number: str  # "C.10", "example 1"
    kind: str
    title: str  # as printed, mathematics in LaTeX
    cites: tuple[str, ...]  # numbers that the statement or its proof names

    @property
    def checkable(self) -> bool:
        """Definitions and assumptions claim nothing."""
        return self.kind not in ("Definition", "Assumption")


def extract(text: str) -> list[Numbered]:
    """The numbered statements of a paper's text, in its order: those that begin a line and carry a title.

    >>> [(s.kind, s.number, s.title) for s in extract("Lemma C.1 (ReLU (a gate)). For any z.\\nLemma C.1 says so.")]
    [('Lemma', 'C.1', 'ReLU (a gate)')]
    """
    begins = list(BEGIN.finditer(text))
    found = []
    for i, begin in enumerate(begins):
        body = text[begin.end() : begins[i + 1].start() if i + 1 < len(begins) else len(text)]
        if begin[3]:
            number, kind, title = f"example {begin[4]}", begin[3], body.split(". ")[0]
        else:
            number, kind, title = begin[2], begin[1], closed(body)
        cites = dict.fromkeys(c for pair in CITED.findall(own_part(body)) for c in pair if c and c != number)
        found.append(Numbered(number, kind, " ".join(title.split()), tuple(cites)))
    return found


def closed(text: str) -> str:
    """What comes before the parenthesis that closes one opened before the text."""
    depth = 1
    for i, letter in enumerate(text):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if not depth:
            return text[:i]
    raise ValueError(f"a title is not closed: {text[:60]!r}")


def own_part(body: str) -> str:
    """A statement and its proof: up to the end of the proof, else to the end of its paragraphs before the next section."""
    proof = PROOF.search(body)
    ends = [m.start() for m in re.finditer(r"\\square|□", body)]
    end = next((e for e in ends if proof and e > proof.start()), None)
    if end is None:
        section = SECTION.search(body)
        paragraph = re.search(r"\n\n(?:[A-Z][\w-]+[^.\n]{0,70}\. [A-Z])", body)
        end = min((m.start() for m in (section, paragraph) if m), default=len(body))
    return body[:end]


def load() -> list[Numbered]:
    entries = json.loads((Path(__file__).parent / "numbered.json").read_text(encoding="utf-8"))
    return [Numbered(e["number"], e["kind"], e["title"], tuple(e["cites"])) for e in entries]


NUMBERED = {entry.number: entry for entry in load()}
