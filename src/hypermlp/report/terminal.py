"""The terminal: one kind of console for every command, and tables in which nothing is cut.

Paths, names and error messages come from outside and may hold what rich takes for markup ("[/run]"). A console made here prints
every text as it stands; whoever wants a style passes a rich Text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from hypermlp.notice import broken

GAP = 2  # between columns, one of them the box's own


def new_console(**options: Any) -> Console:
    """The only way to a console: no markup, no emoji codes, no highlighting of what looks like a number or a path."""
    return Console(markup=False, emoji=False, highlight=False, **options)


def say(console: Console, text: str, style: str = "") -> None:
    """One paragraph; a terminal's lines are broken between words alone, and a pipe gets it whole."""
    console.print(Text(broken(text, console.width) if console.is_terminal else text, style), soft_wrap=True)


@contextmanager
def status(console: Console, text: str) -> Iterator[Callable[[str], None]]:
    """A line that changes while something runs; without a terminal, one line for every change."""
    with console.status(Text(text)) as shown:

        def tell(words: str) -> None:
            shown.update(Text(words))
            if not console.is_terminal:
                say(console, words)

        yield tell


# ---- tables ----


@dataclass(frozen=True)
class Column:
    title: str
    left: bool = False  # aligned: words; numbers stand at the right
    wraps: bool = False  # between words
    starts: bool = False  # a block of its own begins here where one line is too short for all columns


Cell = str | Text


def show_table(console: Console, title: str, columns: Sequence[Column], rows: Sequence[Sequence[Cell]], keys: int = 1) -> None:
    console.print(tabulate(console.width, title, columns, rows, keys))


def tabulate(width: int, title: str, columns: Sequence[Column], rows: Sequence[Sequence[Cell]], keys: int = 1) -> Group:
    """A table at most `width` wide: where it is wider, blocks of columns below each other, each with the first `keys`."""
    sizes = [column_size(column, [row[i] for row in rows]) for i, column in enumerate(columns)]
    room = width - sum(least + GAP for least, _ in sizes[1:keys]) - max((least + GAP for least, _ in sizes[keys:]), default=0)
    sizes[0] = (min(sizes[0][0], max(room, 1)), sizes[0][1])  # a long path as a name goes over lines; numbers stay whole
    parts: list[RenderableType] = [Text(title, "italic")] if title else []
    for block in blocks(width, columns, [least for least, _ in sizes], keys):
        table = Table(box=box.SIMPLE_HEAD, padding=(0, GAP - 1, 0, 0), pad_edge=False, show_edge=False)
        spare = width - sum(sizes[i][0] + GAP for i in block) + GAP
        for i in block:
            column, (least, most) = columns[i], sizes[i]
            own = max(1, min(most, least + max(0, spare), width))
            spare -= own - least
            side = "left" if column.left or i == 0 else "right"
            table.add_column(Text(column.title), justify=side, width=own, overflow="fold")  # type: ignore[arg-type]
        for row in rows:
            table.add_row(*(row[i] for i in block))
        parts += [table, Text()]
    return Tabulated(title, columns, rows, parts)


class Tabulated(Group):
    """A table as it is printed, which remembers what is in it."""

    def __init__(
        self, title: str, columns: Sequence[Column], rows: Sequence[Sequence[Cell]], parts: Sequence[RenderableType]
    ) -> None:
        super().__init__(*parts)
        self.title, self.columns, self.rows = title, columns, rows


def column_size(column: Column, cells: Sequence[Cell]) -> tuple[int, int]:
    """The narrowest width in which nothing is cut, and the widest that is of use."""
    lines = [line for cell in cells for line in str(cell).split("\n")]
    longest = max(map(len, lines), default=0)
    title = longest_word(column.title)
    if not column.wraps:
        return max(title, longest), max(title, longest)
    return max([title, *map(longest_word, lines)]), max(len(column.title), longest)


def longest_word(text: str) -> int:
    return max(map(len, re.split(r"\s", text)))


def blocks(width: int, columns: Sequence[Column], least: Sequence[int], keys: int) -> list[list[int]]:
    """Which columns stand together."""
    first = list(range(keys))

    def fits(block: Sequence[int]) -> bool:
        return sum(least[i] + GAP for i in block) - GAP <= width

    rest = list(range(keys, len(columns)))
    if fits([*first, *rest]):
        return [[*first, *rest]]
    found: list[list[int]] = [[]]
    for i in rest:
        if found[-1] and (columns[i].starts or not fits([*first, *found[-1], i])):
            found.append([])
        found[-1].append(i)
    return [[*first, *block] for block in found]
