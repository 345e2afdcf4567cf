"""A few rows of a task on the terminal, small enough to solve by eye."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from hypermlp.config import IGNORED
from hypermlp.report.shown import Shown, how_shown
from hypermlp.tasks.base import Task

COLOURS = {
    "key": "cyan",
    "value": "green",
    "data": "green",
    "answer": "yellow",
    "operator": "cyan",
    "noise": "red",
    "pad": "bright_black",
    "blank": "bright_black",
}
OTHER = "magenta"  # tokens with a meaning of their own, such as copy


def show(console: Console, task: Task, count: int, seed: int) -> None:
    """Print `count` test rows of a small version of the task: inputs, targets, and a mark under what counts."""
    look = how_shown(task)
    setting = dataclasses.replace(task.baseline, **look.small, num_test=count)
    console.print(Text(task.name, style="bold"), f"{look.asks} {look.note}".strip(), sep=": ", highlight=False)
    if look.sketch is not None:
        for sketched in look.sketch(task, setting, count, seed):
            console.print(sketched, highlight=False, markup=False)
        return
    console.print(legend(look, setting))
    for name, groups in task.evaluation(setting, seed, "test").items():
        pairs = [pair for group in groups for pair in zip(group.inputs.tolist(), group.targets.tolist(), strict=True)]
        if name != "test":
            console.print(f"\n{name}", style="dim", highlight=False)
        for row, target in pairs[:count]:
            console.print()
            for line in example(look, setting, row, target, console.width):
                console.print(line, no_wrap=True)
    size, full = (f"vocab_size {s.vocab_size}, seq_len {s.seq_len}" for s in (setting, task.baseline))
    whose = "the benchmark's baseline" if task.family == "mad" else "the baseline"
    console.print(f"\nHere {size}; {whose} has {full}.", highlight=False)


def legend(look: Shown, setting: Any) -> Text:
    parts = []
    for role, tokens in look.roles(setting).items():
        parts.append(Text(f"{role} {span([look.spell(setting, token) for token in tokens])}", style=COLOURS.get(role, OTHER)))
    return Text("   ").join([*parts, Text("· does not count")])


def span(names: Sequence[str]) -> str:
    """All of a few, or from the first to the last."""
    return " ".join(names) if len(names) < 4 or not is_range(names) else f"{names[0]}-{names[-1]}"


def is_range(names: Sequence[str]) -> bool:
    """Numbers or letters, one after the other."""
    return all(name.isdigit() for name in names) or all(len(name) == 1 and name.isalpha() for name in names)


def example(look: Shown, setting: Any, inputs: list[int], targets: list[int], width: int) -> list[Text]:
    """Three lines, or as many times three as the width needs."""
    named = {token: look.spell(setting, token) for token in (*inputs, *(target for target in targets if target != IGNORED))}
    cell = max(len(name) for name in (*named.values(), look.spell(setting, setting.vocab_size - 1))) + 1
    colour = {token: COLOURS.get(role, OTHER) for role, tokens in look.roles(setting).items() for token in tokens}
    step = max(1, (width - len("targets")) // cell)
    lines = []
    for start in range(0, len(inputs), step):
        asked, wanted, marks = Text("inputs "), Text("targets"), Text("       ")
        for token, target in zip(inputs[start : start + step], targets[start : start + step], strict=True):
            counts = target != IGNORED
            asked.append(f"{named[token]:>{cell}}", style=colour.get(token, OTHER))
            wanted.append(
                f"{named[target] if counts else '·':>{cell}}", style=f"bold {colour.get(target, OTHER)}" if counts else "dim"
            )
            marks.append(f"{'^' if counts else '':>{cell}}")
        lines += [asked, wanted, marks]
    return lines
