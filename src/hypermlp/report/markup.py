"""Pieces of pages, made by the templates beside this file: whatever is no piece itself is escaped there."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from hypermlp.verdicts.claims import CONTRADICTED, NOT_RUN, NOTHING_TO_SEE, SUPPORTED, UNDECIDED, Verdict
from hypermlp.verdicts.estimates import NONE
from hypermlp.verdicts.results import plain_name

HERE = Path(__file__).parent
SIGNS = {SUPPORTED: "✓", CONTRADICTED: "✗", UNDECIDED: "?", NOT_RUN: "…", NOTHING_TO_SEE: "="}
LABELS = re.compile(r"\b[SRG](?:-[a-z0-9]+)+!?")


def prose(text: str) -> Markup:
    """Text with labels that no line break divides."""
    if isinstance(text, Markup):
        return text
    label = Markup('<span class="label">{}</span>').format
    found, parts = LABELS.findall(text), LABELS.split(text)
    return Markup("").join(part for i, own in enumerate(parts) for part in (own, *map(label, found[i : i + 1])))


TEMPLATES = Environment(
    loader=FileSystemLoader(HERE / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters["prose"] = prose
TEMPLATES.globals["signs"] = SIGNS
pieces: Any = TEMPLATES.get_template("pieces.html").module
TEMPLATES.globals["pieces"] = pieces


def render(template: str, **values: Any) -> Markup:
    return Markup(TEMPLATES.get_template(template).render(values))


def document(title: str, lead: str, sections: Sequence[tuple[str, Markup]], note: str = "") -> str:
    """A page about one thing, complete in itself: its lead says in a sentence what was found."""
    css, script = (Markup((HERE / name).read_text(encoding="utf-8")) for name in ("page.css", "page.js"))
    return render("page.html", title=title, lead=lead, sections=sections, note=note, css=css, script=script)


# ---- cells ----


@dataclass(frozen=True)
class TableCell:
    text: str
    value: float | str | None = None  # what the column is sorted by
    below: Sequence[str] = ()  # small, line by line
    kind: str = ""  # class in page.css
    head: bool = False
    strength: float | None = None  # of the cell's colour
    bar: float | None = None  # its length, of the longest


def cell(text: str, value: float | str | None = None, *, small: str = "", **looks: Any) -> TableCell:
    return TableCell(text, value, [line for line in small.split("\n") if line], **looks)


def words(text: str) -> TableCell:
    return TableCell(text, kind="words")


def name_cell(mixer: str) -> TableCell:
    """A label, and below it the name that a reader may know."""
    title = plain_name(mixer)
    return cell(mixer, mixer, small="" if title == mixer else title, head=True)


def verdict_cell(verdict: Verdict | None, text: str) -> TableCell:
    return TableCell(text if verdict is None else pieces.verdict(verdict.word, text), kind="words")


# ---- pieces ----


def table(
    heads: Sequence[str], rows: Sequence[Sequence[TableCell]], *, sorts: bool = False, left: Sequence[str] = ()
) -> Markup:
    """left: heads of columns of words."""
    return pieces.table(heads, rows, sorts, left)


def paragraph(text: str, kind: str = "") -> Markup:
    return pieces.paragraph(text, kind)


def heading(text: str) -> Markup:
    return pieces.heading(text)


def facts(values: dict[str, str]) -> Markup:
    return pieces.facts(values)


def details(title: str, html: Markup, **looks: Any) -> Markup:
    return pieces.details(title, html, **looks)


def charts(figures: Sequence[Markup], wide: bool = False, pair: bool = False) -> Markup:
    """Side by side; wide: one large one below the other; pair: two that fill the page."""
    return pieces.charts(figures, "wide" if wide else "pair" if pair else "") if figures else Markup()


def plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def spread(values: Sequence[float], show: Callable[[float], str]) -> str:
    """One number, or the smallest and the largest."""
    if not values:
        return NONE
    ends = dict.fromkeys([show(min(values)), show(max(values))])
    return " to ".join(ends)
