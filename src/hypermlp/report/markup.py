"""Pieces of HTML: everything that comes as text is escaped here."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from html import escape

from hypermlp.report.findings import CONFIRMED, REFUTED, UNKNOWN
from hypermlp.report.study import title_of
from hypermlp.report.table1 import NONE

LABELS = re.compile(r"\b[SRG](-[a-z0-9]+)+!?")


def cell(text: str, value: float | str | None = None, *, small: str = "", style: str = "") -> str:
    """A cell; `value` is what the column is sorted by."""
    data = "" if value is None else f' data-v="{escape(str(value))}"'
    below = f"<small>{escape(small)}</small>" if small else ""
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
    return f'<div class="scroll"><table{kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def paragraph(text: str, kind: str = "") -> str:
    return f"<p{f' class={kind}' if kind else ''}>{prose(text)}</p>"


def verdict(status: str) -> str:
    sign = {CONFIRMED: "✓ ", REFUTED: "✗ ", UNKNOWN: "? "}[status]
    return f'<span class="verdict {status.replace(" ", "-")}">{sign}{status}</span>'


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
