"""The cost of a study, on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from hypermlp.report.table1 import TITLES
from hypermlp.report.terminal import Column, say, show_table
from hypermlp.studies.cost import StudyCost


def show_costs(console: Console, costs: Sequence[StudyCost], workers: int) -> None:
    """Milliseconds of a step, and core hours, by mixer and setting; the sum over so many cores."""
    settings = list(dict.fromkeys(cost.setting for cost in costs))
    heads = [Column("mixer"), *(Column(title(setting)) for setting in settings), Column("core hours")]
    rows = []
    for base in sorted({cost.base for cost in costs}):  # those who are adapted by others come last
        kind = [cost for cost in costs if cost.base == base]
        found = {(cost.mixer, cost.setting): cost for cost in kind}
        for mixer in dict.fromkeys(cost.mixer for cost in kind):
            own = [found.get((mixer, setting)) for setting in settings]
            hours = sum(cost.seconds for cost in own if cost is not None) / 3600
            times = ("" if cost is None else f"{1000 * cost.per_step:.0f}" for cost in own)
            rows.append([f"{mixer}, before" if base else mixer, *times, f"{hours:.2f}"])
        first = [next(cost for cost in kind if cost.setting == setting) for setting in settings]
        for name, values in (
            ("steps", [f"{cost.steps}" for cost in first]),
            ("whole runs each", [f"{c.runs:.2f}" for c in first]),
        ):
            rows.append([f"{name}, before" if base else name, *values, ""])
    sums = [sum(cost.seconds for cost in costs if cost.setting == setting) / 3600 for setting in settings]
    total = sum(sums)
    rows.append(["core hours", *(f"{hours:.1f}" for hours in sums), f"{total:.1f}"])
    show_table(console, "milliseconds of a step", heads, rows)
    text = f"About {total:.1f} core hours, {total / workers:.1f} hours with {workers} workers"
    say(console, f"{text}; widened grids and ties add time, runs that end early save some.")


def title(setting: str) -> str:
    task = setting.partition("/")[0]
    return TITLES.get(task, task) if setting else "Language"
