"""A few rows of a task on the terminal, small enough to solve by eye."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from hypermlp.config import IGNORED
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
    setting = dataclasses.replace(task.shown, num_test=count)
    console.print(Text(task.name, style="bold"), task.question, sep=": ", highlight=False)
    if lines := task.sketch(setting, count, seed):
        for sketched in lines:
            console.print(sketched, highlight=False, markup=False)
        return
    console.print(legend(task, setting))
    for name, groups in task.evaluation(setting, seed, "test").items():
        shown = [pair for group in groups for pair in zip(group.inputs.tolist(), group.targets.tolist(), strict=True)]
        if name != "test":
            console.print(f"\n{name}", style="dim", highlight=False)
        for row, target in shown[:count]:
            console.print()
            for line in example(task, setting, row, target, console.width):
                console.print(line, no_wrap=True)
    size, full = (f"vocab_size {s.vocab_size}, seq_len {s.seq_len}" for s in (setting, task.baseline))
    whose = "the benchmark's baseline" if task.family == "mad" else "the baseline"
    console.print(f"\nHere {size}; {whose} has {full}.", highlight=False)


def legend(task: Task, setting: Any) -> Text:
    roles = task.roles(setting).items()
    parts = []
    for role, tokens in roles:
        parts.append(Text(f"{role} {span([task.spell(setting, token) for token in tokens])}", style=COLOURS.get(role, OTHER)))
    return Text("   ").join([*parts, Text("· does not count")])


def span(names: Sequence[str]) -> str:
    """All of a few, or from the first to the last."""
    return " ".join(names) if len(names) < 4 or not is_range(names) else f"{names[0]}-{names[-1]}"


def is_range(names: Sequence[str]) -> bool:
    """Numbers or letters, one after the other."""
    return all(name.isdigit() for name in names) or all(len(name) == 1 and name.isalpha() for name in names)


def example(task: Task, setting: Any, inputs: list[int], targets: list[int], width: int) -> list[Text]:
    """Three lines, or as many times three as the width needs."""
    named = {token: task.spell(setting, token) for token in (*inputs, *(target for target in targets if target != IGNORED))}
    cell = max(len(name) for name in (*named.values(), task.spell(setting, setting.vocab_size - 1))) + 1
    colour = {token: COLOURS.get(role, OTHER) for role, tokens in task.roles(setting).items() for token in tokens}
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
