"""In-context languages (RegBench, Akyürek et al. 2024): words of a random automaton, which is another one in every row.

An automaton has states and at most three letters out of each; a word is a walk from its start, where all letters of a state are
equally likely. A row is several words of one automaton. The model predicts the next letter; it is right if that is a legal one
in this state, and the distance of its distribution from the exact one is measured. With words "ba", "bcb" and "b…":

inputs   b a | b c b |
targets  a . b c b . b

The published generator numbers states as a library does and orders automata as a Python set has them, so its rows cannot be
reproduced; here automata are numbered breadth-first, duplicates are drawn again, and those of test rows are never trained on.
Published rows have 10 to 19 words and are padded; here rows are filled with words to one length.

Letters: N rows, T time, M scored tokens, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hypermlp.config import IGNORED
from hypermlp.tasks.base import Ints, Part, Rows, Scale, Sizes, Task

LETTERS = 18
PAD, BAR = 0, LETTERS + 1  # letters are 1 … 18
MOST_EDGES = 3
Automaton = tuple[tuple[tuple[int, int], ...], ...]  # state → its (letter, next state), by letter; 0 is the start


@dataclass(frozen=True, kw_only=True)
class RegbenchSetting(Sizes):
    """num_train, num_test: automata, one row each. Rows are cut to seq_len tokens."""

    task: str = "regbench"
    vocab_size: int = LETTERS + 2
    seq_len: int = 96
    num_train: int = 2000
    num_test: int = 200
    nodes: int = 8  # most states; the fewest are 4
    words: int = 8  # told apart in the scores; later ones, while there is room in a row, count as the last of them
    longest: int = 20  # letters of a word

    def __post_init__(self) -> None:
        for name, least in {"nodes": 4, "words": 1, "longest": 1, "seq_len": 2}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least {least}")


def draw_automaton(random: np.random.Generator, nodes: int) -> Automaton:
    """Between 4 and `nodes` states, between 4 and 18 letters; per state one to three letters to other states."""
    states = int(random.integers(4, nodes + 1))
    letters = 1 + random.choice(LETTERS, int(random.integers(4, LETTERS + 1)), replace=False)
    edges = []
    for state in range(states):
        count = int(random.integers(1, MOST_EDGES + 1))
        chosen = random.choice(letters, count, replace=False)
        others = random.choice(np.delete(np.arange(states), state), count, replace=False)
        edges.append(sorted(zip(chosen.tolist(), others.tolist(), strict=True)))
    return minimise(edges)


def minimise(edges: Sequence[Sequence[tuple[int, int]]]) -> Automaton:
    """The same language with the fewest states, numbered breadth-first from the start; all states accept."""
    block = [0] * len(edges)
    while True:
        looks = [(block[state], tuple((letter, block[to]) for letter, to in out)) for state, out in enumerate(edges)]
        numbers = {look: i for i, look in enumerate(dict.fromkeys(looks))}
        finer = [numbers[look] for look in looks]
        if len(numbers) == len(set(block)):
            break
        block = finer
    first = {number: state for state, number in reversed(list(enumerate(block)))}
    order, place = [block[0]], {block[0]: 0}
    for number in order:
        for _, to in edges[first[number]]:
            if block[to] not in place:
                place[block[to]] = len(order)
                order.append(block[to])
    return tuple(tuple((letter, place[block[to]]) for letter, to in edges[first[number]]) for number in order)


def draw_automata(setting: RegbenchSetting, seed: int, parts: Sequence[int]) -> list[list[Automaton]]:
    """Lists of so many automata, all different."""
    random = np.random.default_rng([seed, 0])
    seen: set[Automaton] = set()
    found: list[list[Automaton]] = []
    for count in parts:
        part: list[Automaton] = []
        while len(part) < count:
            automaton = draw_automaton(random, setting.nodes)
            if automaton not in seen:
                seen.add(automaton)
                part.append(automaton)
        found.append(part)
    return found


def write_row(
    automaton: Automaton, setting: RegbenchSetting, random: np.random.Generator
) -> tuple[list[int], list[int], list[int]]:
    """Letters and bars; for each, as bits, which letters are legal there (0 at a bar), and the number of its word, from 1."""
    row: list[int] = []
    legal: list[int] = []
    word: list[int] = []
    count = 0
    while len(row) < setting.seq_len + 1:
        count += 1
        state = 0
        for _ in range(int(random.integers(1, setting.longest + 1))):
            out = automaton[state]
            letter, after = out[int(random.integers(len(out)))]
            row.append(letter)
            legal.append(sum(1 << one for one, _ in out))
            word.append(count)
            state = after
        row.append(BAR)
        legal.append(0)
        word.append(count)
    return row, legal, word


def write_rows(automata: Sequence[Automaton], setting: RegbenchSetting, seed: Sequence[int]) -> Rows:
    """One row of seq_len tokens of each automaton, as many words as fill it; letters of words beyond `words` count as its."""
    random = np.random.default_rng(list(seed))
    length = setting.seq_len
    made = [write_row(automaton, setting, random) for automaton in automata]
    tokens, legal, word = (np.array([row[part][: length + 1] for row in made], dtype=np.int64) for part in range(3))
    targets = np.where(tokens[:, 1:] == BAR, IGNORED, tokens[:, 1:])
    number = np.minimum(word[:, 1:], setting.words)
    return Rows(tokens[:, :-1].copy(), targets, {"legal": legal[:, 1:].copy(), "word": number})


class Regbench(Task):
    """Next letters of words of an automaton that only the row tells of."""

    name = family = "regbench"
    baseline = RegbenchSetting()
    scales: Mapping[str, Scale] = {}
    slices = ("word",)
    fresh = True

    def automata(self, setting: RegbenchSetting, seed: int) -> list[list[Automaton]]:
        """Of the test, the validation and the training rows."""
        half = max(1, setting.num_test // 2)
        return draw_automata(setting, seed, (setting.num_test, half, setting.num_train))

    def training(self, setting: RegbenchSetting, seed: int, epoch: int) -> list[Rows]:
        """The same automata in every epoch, with new words."""
        return [write_rows(self.automata(setting, seed)[2], setting, (seed, 1, epoch))]

    def evaluation(self, setting: RegbenchSetting, seed: int, part: Part) -> dict[str, list[Rows]]:
        test, validation, _ = self.automata(dataclasses.replace(setting, num_train=0), seed)
        return {"new automata": [write_rows(test if part == "test" else validation, setting, (seed, 2 + (part == "test")))]}

    def right(self, guesses: Tensor, targets: Tensor, facts: Mapping[str, Tensor]) -> Tensor:
        """A legal letter, whether or not it is the one that came."""
        return (facts["legal"] >> guesses) & 1 == 1

    def judge(self, logits: Tensor, targets: Tensor, facts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """distance: total variation from the exact distribution, uniform over the legal letters."""
        return {**super().judge(logits, targets, facts), "distance": distance(logits.softmax(-1), facts["legal"])}

    def baselines(self, setting: RegbenchSetting, seed: int) -> dict[str, dict[str, Any]]:
        """In-context n-grams, with their distance."""
        found = super().baselines(setting, seed)
        (rows,) = self.evaluation(setting, seed, "test")["new automata"]
        at = rows.targets != IGNORED
        for order in (1, 2, 3):
            shares = torch.from_numpy(ngram_shares(rows.inputs, order)[at])
            found[f"{order}-gram"]["distance"] = float(distance(shares, torch.from_numpy(rows.facts["legal"][at])).mean())
        return found

    def guessers(self, setting: RegbenchSetting, train: Sequence[Rows]) -> dict[str, Callable[[Rows], Ints]]:
        def ngram(order: int) -> Callable[[Rows], Ints]:
            return lambda rows: ngram_shares(rows.inputs, order).argmax(-1)

        return {**super().guessers(setting, train), **{f"{order}-gram": ngram(order) for order in (1, 2, 3)}}


def distance(shares: Tensor, legal: Tensor) -> Tensor:
    """Total variation (M) between distributions (M V) and the uniform ones over legal letters (M, as bits)."""
    exact = ((legal[:, None] >> torch.arange(shares.shape[1])) & 1).to(shares.dtype)
    return (shares - exact / exact.sum(1, keepdim=True).clamp(min=1)).abs().sum(1) / 2


def ngram_shares(inputs: Ints, order: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """What a back-off n-gram that has read the row up to each token expects next (N T V).

    Counts of the longest context that came before, at most order − 1 tokens and none across a bar; else of a shorter one.
    """
    shares = np.zeros((*inputs.shape, LETTERS + 2))
    for row, found in zip(inputs.tolist(), shares, strict=True):
        counts: dict[tuple[int, ...], np.ndarray[Any, np.dtype[np.float64]]] = {}
        word: list[int] = [BAR]  # the bar before the first word stands for its beginning
        for place, token in enumerate(row):
            for size in range(min(order, len(word) + 1)):
                context = tuple(word[len(word) - size :])
                if token != BAR:
                    counts.setdefault(context, np.zeros(LETTERS + 2))[token] += 1
            word = [BAR] if token == BAR else [*word, token][-order:]
            for size in range(min(order - 1, len(word)), -1, -1):
                known = counts.get(tuple(word[len(word) - size :]))
                if known is not None:
                    found[place] = known / known.sum()
                    break
    return shares


REGBENCH = Regbench()
PUBLISHED = RegbenchSetting(seq_len=512, num_train=5000, num_test=250, nodes=12, words=19, longest=49)
Regbench.scales = {
    "quick": Scale(
        settings=(RegbenchSetting(seq_len=64, num_train=400, num_test=50, nodes=5, longest=8),),
        width=32,
        steps=200,
        rates=(3e-3,),
        evaluations=5,
    ),
    "laptop": Scale(
        settings=(RegbenchSetting(),), width=64, batch=32, steps=350, rates=(1e-3, 3e-3, 1e-2), evaluations=8, solved=0.995
    ),
    "published": Scale(
        settings=(PUBLISHED,), width=128, batch=32, steps=200 * 157, rates=(2.5e-4, 5e-4, 1e-3), evaluations=50, solved=None
    ),
}
