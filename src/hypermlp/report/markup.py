"""Pieces of HTML: everything that comes as text is escaped here."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from html import escape

from hypermlp.report.claims import CONTRADICTED, INCONCLUSIVE, LEVEL, NOT_BEHIND, SUPPORTED, UNFINISHED
from hypermlp.report.estimates import NONE
from hypermlp.report.study import CEILING, FLOOR, title_of

WIDE = 5  # columns that fit on most screens
LABELS = re.compile(r"\b[SRG](-[a-z0-9]+)+!?")


def cell(text: str, value: float | str | None = None, *, small: str = "", style: str = "") -> str:
    """A cell; `value` is what the column is sorted by, `small` stands below, line by line."""
    data = "" if value is None else f' data-v="{escape(str(value))}"'
    below = "".join(f"<small>{escape(line)}</small>" for line in small.split("\n") if line)
    return f"<td{data}{style}>{escape(text)}{below}</td>"


def words(text: str) -> str:
    return f'<td class="words">{prose(text)}</td>'


def prose(text: str) -> str:
    """Escaped, with labels that no line break divides."""
    return LABELS.sub(r'<span class="label">\g<0></span>', escape(text))


def name_cell(mixer: str) -> str:
    title = title_of(mixer)
    below = f"<small>{escape(title)}</small>" if title else ""
    return f'<th scope="row" data-v="{escape(mixer)}">{escape(mixer)}{below}</th>'


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, sorts: bool = False, left: Sequence[str] = ()) -> str:
    """Heads are text, cells are HTML; `left`: heads of columns of words."""
    kind = ' class="sorts"' if sorts else ""
    head = "".join(f'<th scope="col"{" class=words" if text in left else ""}>{escape(text)}</th>' for text in heads)
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    hint = '<p class="hint">The table scrolls sideways →</p>' if len(heads) > WIDE else ""
    inner = f"<table{kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'{hint}<div class="scroll" tabindex="0" role="region" aria-label="table">{inner}</div>'


def paragraph(text: str, kind: str = "") -> str:
    return f"<p{f' class={kind}' if kind else ''}>{prose(text)}</p>"


SIGNS = {
    SUPPORTED: "✓",
    CONTRADICTED: "✗",
    LEVEL: "=",
    NOT_BEHIND: "≥",
    INCONCLUSIVE: "?",
    UNFINISHED: "…",
    CEILING: "⊤",
    FLOOR: "⊥",
}


def verdict(status: str, text: str = "") -> str:
    """A status with its sign and colour; `text`: in other words."""
    return f'<span class="verdict {status.replace(" ", "-")}">{SIGNS[status]} {escape(text or status)}</span>'


def facts(values: dict[str, str]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{prose(value)}</dd>" for name, value in values.items()) + "</dl>"


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
