"""ListOps (Nangia and Bowman 2018) as the Long Range Arena draws it, with a seed: nested operations on digits.

    [MAX 4 3 [MIN 2 3 ] 1 0 ]  →  4        MAX, MIN, MED (the median, rounded down), SM (the sum modulo 10)

A causal model answers at a last token, `?`. The Arena's own rows cannot be drawn again: its stream is not seeded, and the order
of a Python set decides which row is in which split. Here rows are distinct, in the order in which one seeded stream draws them.

Whoever knows only the root's operator is right in a third of the rows: the minimum of many digits is small, the maximum large.
Scores near that baseline show nothing else (the Arena's transformers have 36 %).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from hypermlp.config import IGNORED
from hypermlp.tasks.base import Ints, Part, Rows, Scale, Sizes, Task

MIN, MAX, MED, SM, CLOSE, ASK = range(10, 16)  # digits are 0-9
NAMES = {MIN: "[MIN", MAX: "[MAX", MED: "[MED", SM: "[SM", CLOSE: "]", ASK: "?"}
NESTED = 0.25  # chance that an argument is a list


class Tree(NamedTuple):
    tokens: list[int]
    value: int
    depth: int  # lists within lists; a digit has 0


def draw_tree(stream: random.Random, max_depth: int, max_args: int, depth: int = 1) -> Tree:
    """A digit, or an operator of 2 to max_args arguments, which is drawn after them; the root is at depth 1."""
    if depth >= max_depth or stream.random() > NESTED:
        digit = stream.choice(range(10))
        return Tree([digit], digit, 0)
    arguments = [draw_tree(stream, max_depth, max_args, depth + 1) for _ in range(stream.randint(2, max_args))]
    operator = stream.choice((MIN, MAX, MED, SM))
    tokens = [operator, *(token for argument in arguments for token in argument.tokens), CLOSE]
    values = [argument.value for argument in arguments]
    return Tree(tokens, operate(operator, values), 1 + max(argument.depth for argument in arguments))


def operate(operator: int, values: Sequence[int]) -> int:
    if operator == MED:
        return int(np.median(values))
    return sum(values) % 10 if operator == SM else min(values) if operator == MIN else max(values)


@dataclass(frozen=True, kw_only=True)
class ListOpsSetting(Sizes):
    """Rows have more than `shortest` and fewer than seq_len tokens, beside the question."""

    task: str = "listops"
    vocab_size: int = 16
    seq_len: int = 200
    num_train: int = 40_000
    num_test: int = 2000
    max_depth: int = 5
    max_args: int = 10
    shortest: int = 20

    def __post_init__(self) -> None:
        if not 1 <= self.shortest < self.seq_len - 1 or self.max_depth < 2 or self.max_args < 2:
            raise ValueError(
                f"rows of {self.shortest} to {self.seq_len} tokens, depth {self.max_depth} and {self.max_args} arguments "
                "cannot be drawn: lengths must increase, depth and arguments be at least 2"
            )


@lru_cache(maxsize=2)
def draw_rows(setting: ListOpsSetting, seed: int) -> list[Tree]:
    """Distinct trees, first those of training, then of validation and test."""
    stream, count = random.Random(seed), setting.num_train + max(1, setting.num_test // 2) + setting.num_test
    found: dict[tuple[int, ...], Tree] = {}
    while len(found) < count:
        tree = draw_tree(stream, setting.max_depth, setting.max_args)
        if setting.shortest < len(tree.tokens) < setting.seq_len:
            found.setdefault(tuple(tree.tokens), tree)
    return list(found.values())


class ListOps(Task):
    """One answer per row, at its end."""

    name = family = "listops"
    baseline = ListOpsSetting()
    slices = ("depth",)

    def training(self, setting: ListOpsSetting, seed: int, epoch: int) -> list[Rows]:
        return as_rows(draw_rows(setting, seed)[: setting.num_train])

    def evaluation(self, setting: ListOpsSetting, seed: int, part: Part) -> dict[str, list[Rows]]:
        rows = draw_rows(setting, seed)
        return {"test": as_rows(rows[-setting.num_test :] if part == "test" else rows[setting.num_train : -setting.num_test])}

    def solve(self, setting: ListOpsSetting, inputs: Ints) -> Ints:
        """A stack."""
        answers = np.zeros_like(inputs)
        for row, answer in zip(inputs.tolist(), answers, strict=True):
            stack: list[list[int]] = [[]]
            for token in row[:-1]:
                if token == CLOSE:
                    operator, *values = stack.pop()
                    stack[-1].append(operate(operator, values))
                elif token >= MIN:
                    stack.append([token])
                else:
                    stack[-1].append(token)
            answer[-1] = stack[0][0]
        return answers

    def guessers(self, setting: ListOpsSetting, train: Sequence[Rows]) -> dict[str, Callable[[Rows], Ints]]:
        counts = np.zeros((setting.vocab_size, 10), dtype=np.int64)
        for rows in train:
            np.add.at(counts, (rows.inputs[:, 0], rows.targets[:, -1]), 1)
        best = counts.argmax(1)
        root: Callable[[Rows], Ints] = lambda rows: np.repeat(best[rows.inputs[:, :1]], rows.inputs.shape[1], axis=1)  # noqa: E731
        return {**super().guessers(setting, train), "root operator": root}


def as_rows(trees: Sequence[Tree]) -> list[Rows]:
    """Rows with the question behind them, those of one length together, the shortest first."""
    groups: dict[int, list[Tree]] = {}
    for tree in trees:
        groups.setdefault(len(tree.tokens), []).append(tree)
    found = []
    for _, same in sorted(groups.items()):
        inputs = np.array([[*tree.tokens, ASK] for tree in same])
        targets = np.full_like(inputs, IGNORED)
        targets[:, -1] = [tree.value for tree in same]
        found.append(Rows(inputs, targets, {"depth": np.array([tree.depth for tree in same])}))
    return found


ListOps.scales = {
    "quick": Scale(
        settings=(ListOpsSetting(seq_len=40, shortest=5, max_depth=3, max_args=4, num_train=2000, num_test=400),),
        width=32,
        batch=32,
        steps=200,
        rates=(3e-3,),
        evaluations=4,
    ),
    "laptop": Scale(settings=(ListOpsSetting(num_train=16_000, num_test=1000),), steps=1000, rates=(1e-3, 3e-3), evaluations=8),
    "published": Scale(
        settings=(ListOpsSetting(seq_len=2000, shortest=500, max_depth=10, num_train=96_000),),
        width=512,
        depth=4,
        batch=32,
        steps=5000,
        rates=(3e-4, 1e-3),
        evaluations=10,
    ),
}
LISTOPS: dict[str, Task] = {"listops": ListOps()}
