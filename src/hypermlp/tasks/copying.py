"""Copying and looking up at lengths beyond those of training: copy, phone book, induction, needles, chains of variables.

Every generator is a function of a random generator, a number of rows and a size, and can be used alone. A model is trained on
one range of sizes and tested there and at 2, 4 and 8 times the size. HyperGLU and HyperMLP have parameters for block_size lags,
so a longer row can be run in three ways, and results say which:

    window        block_size is that of training; longer rows see a sliding window of it, and what lies further is forgotten
    hold, decay,  the trained model in a longer block_size: its further lags repeat the last trained one, fall to zero, or are
    fresh         untrained (mixers/lags.py)
    offsets       a task of its own, such as copy-offsets: rows are trained behind blanks, so that every lag has been trained

Letters: N rows, T time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hypermlp.checks import at_least_one
from hypermlp.config import IGNORED
from hypermlp.tasks.base import Ints, Part, Rows, Scale, Sizes, Task, Unit

Random = np.random.Generator

# ---- copy: BOS s | s END, the second s is asked for ----

LETTERS, BOS, BAR, END = 26, 26, 27, 28


def copy_rows(random: Random, count: int, letters: int) -> Rows:
    """A string and its copy.

    letters = 3: inputs $ c a b | c a b, targets . . . . c a b END
    """
    at_least_one("letters", letters)
    string = random.integers(LETTERS, size=(count, letters))
    begin, bar, end = (np.full((count, 1), token) for token in (BOS, BAR, END))
    inputs = np.concatenate([begin, string, bar, string], axis=1)
    targets = np.full_like(inputs, IGNORED)
    targets[:, letters + 1 :] = np.concatenate([string, end], axis=1)
    return Rows(inputs, targets)


def solve_copy(inputs: Ints) -> Ints:
    letters = inputs.shape[1] // 2 - 1
    answers = np.full_like(inputs, END)
    answers[:, letters + 1 : -1] = inputs[:, 1 : letters + 1]
    return answers


# ---- phone book: names of two symbols, numbers of five digits ----

NAMES, DIGITS, ASK = 32, 5, 74  # first names 0-31, last names 32-63, digits 64-73


def phone_rows(random: Random, count: int, entries: int) -> Rows:
    """Entries `first last d d d d d`, each name once, then a name again: its number is asked for, digit by digit.

    A first or last name alone does not tell entries apart.
    """
    if not 1 <= entries <= NAMES**2:
        raise ValueError(f"entries ({entries}) must be at least 1 and at most {NAMES**2}, the number of different names")
    codes = random.random((count, NAMES**2)).argsort(1)[:, :entries]
    names = np.stack([codes // NAMES, NAMES + codes % NAMES], axis=2)  # N entries 2
    book = np.concatenate([names, 2 * NAMES + random.integers(10, size=(count, entries, DIGITS))], axis=2)
    asked = book[np.arange(count), random.integers(entries, size=count)]  # N 7
    ask = np.full((count, 1), ASK)
    inputs = np.concatenate([book.reshape(count, -1), ask, asked[:, :-1]], axis=1)
    targets = np.full_like(inputs, IGNORED)
    targets[:, -DIGITS:] = asked[:, -DIGITS:]
    return Rows(inputs, targets)


def solve_phone(inputs: Ints) -> Ints:
    """A dictionary of names."""
    answers = np.zeros_like(inputs)
    width = 2 + DIGITS
    for row, answer in zip(inputs, answers, strict=True):
        at = int(np.flatnonzero(row == ASK)[0])
        book = {tuple(row[i : i + 2]): row[i + 2 : i + width] for i in range(0, at, width)}
        answer[-DIGITS:] = book[tuple(row[at + 1 : at + 3])]
    return answers


# ---- induction: what followed the special token when it came first ----

ALPHABET, SPECIAL = 16, 16


def induction_rows(random: Random, count: int, tokens: int) -> Rows:
    """Random tokens with the special one somewhere among them and at the end: its follower is asked for, once.

    Only the last token is scored, which is harder to learn than to predict every token.
    """
    if tokens < 3:
        raise ValueError(f"tokens ({tokens}) must be at least 3: the special token, what follows it, and the question")
    inputs = random.integers(ALPHABET, size=(count, tokens))
    place = random.integers(tokens - 2, size=count)
    inputs[np.arange(count), place] = inputs[:, -1] = SPECIAL
    targets = np.full_like(inputs, IGNORED)
    targets[:, -1] = inputs[np.arange(count), place + 1]
    return Rows(inputs, targets, {"depth": 4 * place // (tokens - 2)})


def solve_induction(inputs: Ints) -> Ints:
    answers = np.zeros_like(inputs)
    first = (inputs == SPECIAL).argmax(1)
    answers[:, -1] = inputs[np.arange(len(inputs)), first + 1]
    return answers


# ---- needles: pairs of a key and a value among noise ----

KEYS, VALUES, NOISE, QUERY = 32, 32, 16, 80  # keys 0-31, values 32-63, noise 64-79
NEEDLES, ASKED = (1, 4, 16), 4  # how many there are, and how often one of them is asked for


def needle_rows(random: Random, count: int, tokens: int) -> Rows:
    """1, 4 or 16 pairs among noise, then four times one of the keys, whose value is asked for at its place."""
    slots = tokens // 2 - ASKED
    if slots < 1:
        raise ValueError(f"tokens ({tokens}) must be at least {2 * ASKED + 2}: a pair and four questions")
    most = min(max(NEEDLES), slots)
    needles = random.choice([n for n in NEEDLES if n <= most], size=count)
    keys = random.random((count, KEYS)).argsort(1)[:, :most]
    values = KEYS + random.integers(VALUES, size=(count, most))
    places = random.random((count, slots)).argsort(1)[:, :most]  # N most: slots of two tokens
    inputs = KEYS + VALUES + random.integers(NOISE, size=(count, tokens))
    there = np.arange(most) < needles[:, None]
    rows = np.broadcast_to(np.arange(count)[:, None], there.shape)[there]
    inputs[rows, 2 * places[there]], inputs[rows, 2 * places[there] + 1] = keys[there], values[there]
    asked = np.arange(count)[:, None], (random.random((count, ASKED)) * needles[:, None]).astype(np.int64)
    inputs[:, -2 * ASKED :: 2], inputs[:, 1 - 2 * ASKED :: 2] = QUERY, keys[asked]
    targets, depth = np.full_like(inputs, IGNORED), np.zeros_like(inputs)
    targets[:, 1 - 2 * ASKED :: 2], depth[:, 1 - 2 * ASKED :: 2] = values[asked], 4 * places[asked] // slots
    return Rows(inputs, targets, {"needles": needles, "depth": depth})


def solve_needle(inputs: Ints) -> Ints:
    answers = np.zeros_like(inputs)
    for row, answer in zip(inputs, answers, strict=True):
        for ask in range(len(row) - 2 * ASKED + 1, len(row), 2):
            answer[ask] = row[int((row == row[ask]).argmax()) + 1]
    return answers


# ---- variables: chains of assignments among noise ----

VARIABLES, CONSTANTS, EQUALS, WHAT = 32, 16, 64, 65  # variables 0-31, values 32-47, noise 48-63
CHAINS, HOPS = 3, 4


def variable_rows(random: Random, count: int, tokens: int) -> Rows:
    """Three chains `a = 7`, `b = a`, `c = b` of 1 to 4 assignments among noise, mixed; then the end of each is asked for: c?"""
    slots = (tokens - 2 * CHAINS) // 3
    most = min(HOPS, slots // CHAINS)
    if most < 1:
        raise ValueError(f"tokens ({tokens}) must be at least {5 * CHAINS}: three assignments and three questions")
    hops = random.integers(1, most + 1, size=count)
    names = random.random((count, VARIABLES)).argsort(1)[:, : CHAINS * most].reshape(count, CHAINS, most)
    values = VARIABLES + random.random((count, CONSTANTS)).argsort(1)[:, :CHAINS]
    inputs = VARIABLES + CONSTANTS + random.integers(16, size=(count, tokens))
    for row, own, value, h in zip(inputs, names, values, hops, strict=True):
        chain = random.permutation(np.repeat(np.arange(CHAINS), h))  # which chain each statement belongs to
        places = 3 * np.sort(random.permutation(slots)[: len(chain)])
        done = np.zeros(CHAINS, dtype=np.int64)
        for c, at in zip(chain, places, strict=True):
            source = own[c, done[c] - 1] if done[c] else value[c]
            row[at : at + 3] = own[c, done[c]], EQUALS, source
            done[c] += 1
        row[-2 * CHAINS :: 2], row[1 - 2 * CHAINS :: 2] = WHAT, own[:, h - 1]
    targets = np.full_like(inputs, IGNORED)
    targets[:, 1 - 2 * CHAINS :: 2] = values
    return Rows(inputs, targets, {"hops": hops})


def solve_variable(inputs: Ints) -> Ints:
    answers = np.zeros_like(inputs)
    for row, answer in zip(inputs.tolist(), answers, strict=True):
        held: dict[int, int] = {}
        for at, token in enumerate(row):
            if token == EQUALS:
                held[row[at - 1]] = held.get(row[at + 1], row[at + 1])
            elif token == WHAT:
                answer[at + 1] = held[row[at + 1]]
    return answers


# ---- the tasks ----


class Kind(NamedTuple):
    """One generator and what belongs to it."""

    draw: Callable[[Random, int, int], Rows]
    solve: Callable[[Ints], Ints]
    vocabulary: int  # without the blank, which is one more
    sizes: tuple[int, int]  # of training, the least and the largest
    length: Callable[[int], int]  # tokens of a row of a size
    unit: Unit
    slices: tuple[str, ...]
    what: str  # a size counts these
    answers: range = range(0)  # tokens of which every answer is one, where they stand in the row


def same(tokens: int) -> int:
    return tokens


KINDS: dict[str, Kind] = {
    "copy": Kind(
        draw=copy_rows,
        solve=solve_copy,
        vocabulary=29,
        sizes=(4, 16),
        length=lambda n: 2 * n + 2,
        unit="row",
        slices=(),
        what="letters",
    ),
    "phone-book": Kind(
        draw=phone_rows,
        solve=solve_phone,
        vocabulary=75,
        sizes=(4, 8),
        length=lambda n: 7 * n + 7,
        unit="row",
        slices=(),
        what="entries",
    ),
    "induction": Kind(
        draw=induction_rows,
        solve=solve_induction,
        vocabulary=17,
        sizes=(64, 64),
        length=same,
        unit="token",
        slices=("depth",),
        what="tokens",
    ),
    "needle": Kind(
        draw=needle_rows,
        solve=solve_needle,
        vocabulary=81,
        sizes=(64, 64),
        length=same,
        unit="token",
        slices=("needles", "depth"),
        what="tokens",
        answers=range(KEYS, KEYS + VALUES),
    ),
    "variables": Kind(
        draw=variable_rows,
        solve=solve_variable,
        vocabulary=66,
        sizes=(64, 64),
        length=same,
        unit="token",
        slices=("hops",),
        what="tokens",
        answers=range(VARIABLES, VARIABLES + CONSTANTS),
    ),
}
OFFSETS = "-offsets"  # how the names of tasks end that train every lag
TIMES = (1, 2, 4, 8)  # sizes of the tests, relative to the largest of training
GROUPS = 8  # lengths of an epoch with offsets


@dataclass(frozen=True, kw_only=True)
class CopyingSetting(Sizes):
    """Where a number is 0, the task's own stands. seq_len: the lags of HyperGLU, by default the longest training row's."""

    task: str = "copy"
    vocab_size: int = 0
    seq_len: int = 0
    largest: int = 0  # size of training
    num_train: int = 4096
    num_test: int = 256
    reach: int = 0  # test at up to so many times the size: 8, with offsets 4

    def __post_init__(self) -> None:
        kind = KINDS[self.task.removesuffix(OFFSETS)]
        object.__setattr__(self, "reach", self.reach or (4 if self.offsets else 8))
        if self.reach not in TIMES:
            raise ValueError(f"reach ({self.reach}) must be one of {TIMES}")
        object.__setattr__(self, "vocab_size", self.vocab_size or kind.vocabulary + 1)
        object.__setattr__(self, "largest", self.largest or kind.sizes[1])
        longest = kind.length(self.largest * (self.reach if self.offsets else 1))
        object.__setattr__(self, "seq_len", self.seq_len or longest)
        if self.seq_len < longest:
            raise ValueError(f"seq_len ({self.seq_len}) must be at least {longest}, the longest training row")

    @property
    def offsets(self) -> bool:
        """Rows are trained behind a random number of blanks, up to the length of the longest test."""
        return self.task.endswith(OFFSETS)

    @property
    def key(self) -> str:
        usual = CopyingSetting(task=self.task)
        names = ("largest", "reach", "seq_len", "num_train", "num_test")
        changed = [f"{name}={getattr(self, name)}" for name in names if getattr(self, name) != getattr(usual, name)]
        return "/".join([self.task, *([",".join(changed)] if changed else [])])


class Copying(Task):
    """One of KINDS; the score is that at the size of training, and longer sets stand beside it."""

    fresh = True

    def __init__(self, name: str) -> None:
        self.name, self.kind = name, KINDS[name.removesuffix(OFFSETS)]
        self.family = "copying" + (OFFSETS if name.endswith(OFFSETS) else "")
        self.unit, self.slices = self.kind.unit, self.kind.slices
        self.baseline, self.scales = CopyingSetting(task=name), scales(name)

    def training(self, setting: CopyingSetting, seed: int, epoch: int) -> list[Rows]:
        random = np.random.default_rng([seed, 0, epoch])
        least, largest = min(self.kind.sizes[0], setting.largest), setting.largest
        ranged = self.kind.sizes[0] < self.kind.sizes[1]
        sizes = np.arange(least, largest + 1) if ranged else np.full(GROUPS if setting.offsets else 1, largest)
        groups = [self.kind.draw(random, max(1, setting.num_train // len(sizes)), int(size)) for size in sizes]
        if setting.offsets:
            blank = self.kind.vocabulary
            groups = [behind(rows, blank, int(random.integers(setting.seq_len - rows.inputs.shape[1] + 1))) for rows in groups]
        return groups

    def evaluation(self, setting: CopyingSetting, seed: int, part: Part) -> dict[str, list[Rows]]:
        """Validation has the size of training alone, by which rates are chosen and runs end."""
        number, count = (1, max(1, setting.num_test // 2)) if part == "validation" else (2, setting.num_test)
        times = [1] if part == "validation" else [n for n in TIMES if n <= setting.reach]
        sizes = [n * setting.largest for n in times]
        return {
            f"{size} {self.kind.what}": [self.kind.draw(np.random.default_rng([seed, number, size]), count, size)]
            for size in sizes
        }

    def headline(self, setting: CopyingSetting) -> tuple[str, ...]:
        return (f"{setting.largest} {self.kind.what}",)

    def solve(self, setting: CopyingSetting, inputs: Ints) -> Ints:
        return self.kind.solve(inputs)

    def guessers(self, setting: CopyingSetting, train: Sequence[Rows]) -> dict[str, Callable[[Rows], Ints]]:
        found = super().guessers(setting, train)
        if self.kind.answers:
            found["the last value shown"] = lambda rows: last_of(rows.inputs, np.asarray(self.kind.answers))
        return found

    def label(self, fact: str, value: int) -> str:
        return ("first", "second", "third", "last")[value] + " quarter" if fact == "depth" else str(value)


def behind(rows: Rows, blank: int, offset: int) -> Rows:
    """The rows with `offset` blanks in front."""
    front = ((0, 0), (offset, 0))
    inputs = np.pad(rows.inputs, front, constant_values=blank)
    facts = {name: fact if fact.ndim == 1 else np.pad(fact, front) for name, fact in rows.facts.items()}
    return Rows(inputs, np.pad(rows.targets, front, constant_values=IGNORED), facts)


def last_of(inputs: Ints, values: Ints) -> Ints:
    """In every row (N T) the last of these tokens."""
    place = np.where(np.isin(inputs, values), np.arange(inputs.shape[1]), -1).max(1)
    return np.broadcast_to(np.take_along_axis(inputs, place[:, None], 1), inputs.shape)


def scales(name: str) -> dict[str, Scale]:
    tiny = CopyingSetting(
        task=name, largest=max(8, KINDS[name.removesuffix(OFFSETS)].sizes[1] // 2), reach=4, num_train=1024, num_test=64
    )
    return {
        "quick": Scale(settings=(tiny,), width=32, batch=32, steps=200, rates=(3e-3,), evaluations=4),
        "laptop": Scale(
            settings=(CopyingSetting(task=name),), width=64, batch=32, steps=1000, rates=(1e-3, 3e-3), evaluations=8
        ),
    }


COPYING: dict[str, Task] = {name + ending: Copying(name + ending) for ending in ("", OFFSETS) for name in KINDS}
