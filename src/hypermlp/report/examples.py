"""A few rows of a MAD task on the terminal, small enough to solve by eye."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Console
from rich.text import Text

from hypermlp.checks import choose_from
from hypermlp.config import IGNORED
from hypermlp.tasks import TASKS
from hypermlp.tasks.mad import generate
from hypermlp.tasks.mad_settings import Setting, vocabulary

COLOURS = {
    "key": "cyan",
    "value": "green",
    "data": "green",
    "noise": "red",
    "pad": "bright_black",
    "blank": "bright_black",
    "copy": "magenta",
    "insert": "magenta",
    "compress": "magenta",
}
SIZES: dict[str, dict[str, Any]] = {
    "compression": {"vocab_size": 8, "seq_len": 10},
    "fuzzy-recall": {"vocab_size": 9, "seq_len": 36},
    "in-context-recall": {"vocab_size": 8, "seq_len": 24},
    "memorization": {"vocab_size": 10, "seq_len": 12},
    "noisy-recall": {"vocab_size": 12, "seq_len": 24, "noise_vocab_size": 4, "frac_noise": 0.4},
    "selective-copying": {"vocab_size": 8, "seq_len": 20, "num_tokens_to_copy": 5},
}
EVERY = "Test rows; in training every next token counts."
QUESTIONS = {
    "compression": "Rebuild every token of the row from the state at its last position.",
    "fuzzy-recall": f"A key of several tokens comes back: which value followed it before? {EVERY}",
    "in-context-recall": f"A key comes back: which value followed it before? {EVERY}",
    "memorization": "Which value belongs to the key before? The map is the same in all rows and never shown.",
    "noisy-recall": f"A key comes back after pairs of noise: which value followed it before? {EVERY}",
    "selective-copying": "Behind the copy token, write down the data tokens in order, without the blanks.",
}


def show(console: Console, task: str, count: int, seed: int) -> None:
    """Print `count` test rows of a small version of the task: inputs, targets, and a mark under what counts."""
    choose_from("task", task, tuple(TASKS))
    baseline = TASKS[task].baseline
    setting = dataclasses.replace(baseline, **SIZES[task], num_train=1, num_test=count)
    console.print(Text(task, style="bold"), QUESTIONS[task], sep=": ", highlight=False)
    console.print(legend(setting))
    inputs, targets = generate(setting, seed).test
    for row, target in zip(inputs.tolist(), targets.tolist(), strict=True):
        console.print()
        for line in example(setting, row, target, console.width):
            console.print(line, no_wrap=True)
    size, full = (f"vocab_size {s.vocab_size}, seq_len {s.seq_len}" for s in (setting, baseline))
    console.print(f"\nHere {size}; the benchmark's baseline has {full}.", highlight=False)


def legend(setting: Setting) -> Text:
    roles = vocabulary(setting).items()
    parts = [Text(f"{role} {span(tokens)}", style=COLOURS[role]) for role, tokens in roles]
    return Text("   ").join([*parts, Text("· does not count")])


def span(tokens: range) -> str:
    return str(tokens[0]) if len(tokens) == 1 else f"{tokens[0]}-{tokens[-1]}"


def example(setting: Setting, inputs: list[int], targets: list[int], width: int) -> list[Text]:
    """Three lines, or as many times three as the width needs."""
    cell = len(str(setting.vocab_size - 1)) + 1
    colour = {token: COLOURS[role] for role, tokens in vocabulary(setting).items() for token in tokens}
    step = max(1, (width - len("targets")) // cell)
    lines = []
    for start in range(0, len(inputs), step):
        asked, wanted, marks = Text("inputs "), Text("targets"), Text("       ")
        for token, target in zip(inputs[start : start + step], targets[start : start + step], strict=True):
            counts = target != IGNORED
            asked.append(f"{token:>{cell}}", style=colour[token])
            wanted.append(f"{target if counts else '·':>{cell}}", style=f"bold {colour[target]}" if counts else "dim")
            marks.append(f"{'^' if counts else '':>{cell}}")
        lines += [asked, wanted, marks]
    return lines
