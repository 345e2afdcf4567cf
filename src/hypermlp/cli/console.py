"""The console of a command: a terminal's, or one that keeps tables and prints them as JSON."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console, Group

from hypermlp.report.terminal import Tabulated, new_console

tables: list[dict[str, Any]] | None = None  # of the command that runs; None: they are printed for people


def open_console(**options: Any) -> Console:
    """The console of the command that runs."""
    return new_console(**options) if tables is None else Keeping(file=sys.stderr, markup=False, emoji=False, highlight=False)


@contextlib.contextmanager
def tables_as_json() -> Iterator[None]:
    """Tables that are printed within come out as JSON on stdout at the end, also where the command fails."""
    global tables
    tables = []
    try:
        yield
    finally:
        print(json.dumps(tables, indent=2, ensure_ascii=False))
        tables = None


class Keeping(Console):
    """Keeps tables instead of printing them."""

    def print(self, *objects: Any, **options: Any) -> None:
        assert tables is not None
        rest: list[Any] = []
        for one in objects:
            found, others = parted(one)
            tables.extend(found)
            rest += others
        if rest or not objects:
            super().print(*rest, **options)


def parted(shown: Any) -> tuple[list[dict[str, Any]], list[Any]]:
    """The tables within what is to be printed, and the rest of it."""
    if isinstance(shown, Tabulated):
        return [as_data(shown)], []
    if not isinstance(shown, Group):
        return [], [shown]
    parts = [parted(one) for one in shown.renderables]
    return [table for found, _ in parts for table in found], [one for _, rest in parts for one in rest]


def as_data(table: Tabulated) -> dict[str, Any]:
    """Title and rows of a table; cells by their column, and numbers as numbers."""
    names: list[str] = []
    for column in table.columns:
        count = sum(name == column.title or name.startswith(f"{column.title} (") for name in names)
        names.append(f"{column.title} ({count + 1})" if count else column.title)
    rows = [{name: value_of(str(cell)) for name, cell in zip(names, row, strict=True)} for row in table.rows]
    return {"title": table.title, "rows": rows}


def value_of(text: str) -> str | float | int | None:
    """A cell as it stands; a number where it is one, None where there is nothing.

    >>> [value_of(text) for text in ("12,345", "0.5", "–", "12.3 ± 0.4", "gla")]
    [12345, 0.5, None, '12.3 ± 0.4', 'gla']
    """
    plain = text.strip()
    if plain in ("", "–"):
        return None
    digits = plain.replace(",", "") if re.fullmatch(r"-?\d{1,3}(,\d{3})+", plain) else plain.replace("−", "-")
    if re.fullmatch(r"[+-]?\d+", digits):
        return int(digits)
    return float(digits) if re.fullmatch(r"[+-]?(\d+\.\d*|\.?\d+)([eE][+-]?\d+)?", digits) else plain
