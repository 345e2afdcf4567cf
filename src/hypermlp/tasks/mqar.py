"""Multi-query associative recall (Arora et al. 2024), bit for bit what zoology's generators draw, and its forgetting variant.

A row shows k pairs of a key and its value, and asks for every key again, once, later; near places are likelier. The answer is
wanted at the place of the query, and the value never follows it. Here k = 2, keys 1-3, values 4-7, without noise:

inputs   3 5 1 7 1 0 3 0
targets  . . . . 7 . 5 .

With forgetting, some keys get another value before they are asked for: the last one counts. zoology fills the empty places with
noise from a stream that depends on the model; here that noise has a stream of its own, [seed, 1] of numpy's default generator,
and in the forgetting variant it has no keys, so that every row has one answer.

Letters: N rows, T time, k pairs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hypermlp.checks import at_least_one, choose_from, divisible
from hypermlp.config import IGNORED
from hypermlp.tasks.base import Ints, Part, Rows, Scale, Sizes, Task

POWER = 0.01  # of the law by which a query comes soon after the pairs
SEED = 123  # zoology's, of a data set


class Segment(NamedTuple):
    """Rows of one kind."""

    length: int
    pairs: int
    rows: int = 1  # of training, in proportion to the other segments
    updates: int = 0  # keys that get another value


def mqar_rows(
    vocab_size: int, rows: int, length: int, pairs: int, seed: int, *, updates: int = 0, noise: range | None = None
) -> tuple[Ints, Ints]:
    """Inputs and targets (N T) of one segment, zoology's for the same seed (without noise, which it does not seed).

    Args:
        vocab_size: keys are the tokens of its first half but 0, values those of the second.
        rows, length, pairs: N, T, k.
        seed: of the rows.
        updates: keys that get another value.
        noise: the tokens that fill the empty places; None leaves them 0.

    >>> inputs, targets = mqar_rows(vocab_size=8192, rows=16, length=64, pairs=4, seed=843828734)
    >>> inputs[0, :13].tolist()
    [739, 6995, 3514, 8163, 3106, 5240, 983, 5004, 3514, 0, 0, 0, 739]
    """
    at_least_one("rows", rows)
    divisible("length", length, 2, "2: keys and values come in pairs")
    if vocab_size <= length:
        raise ValueError(f"vocab_size ({vocab_size}) must be above the length ({length})")
    if 4 * pairs + 2 * updates > length or pairs < 1:
        raise ValueError(f"length ({length}) must hold {pairs} pairs, {updates} updates and {pairs} queries, two tokens each")
    if updates > pairs:
        raise ValueError(f"updates ({updates}) must be at most the number of pairs ({pairs})")
    random, half = np.random.RandomState(seed), vocab_size // 2
    keys = np.stack([1 + random.permutation(half - 1)[:pairs] for _ in range(rows)])
    values = np.stack([half + random.permutation(vocab_size - half)[:pairs] for _ in range(rows)])
    context = np.stack([keys, values], axis=2).reshape(rows, 2 * pairs)
    if updates:
        news = [[draw_other(random, half, vocab_size, values[i, j]) for j in range(updates)] for i in range(rows)]
        which = np.stack([random.permutation(pairs)[:updates] for _ in range(rows)])
        changed = np.stack([np.take_along_axis(keys, which, 1), np.array(news)], axis=2).reshape(rows, 2 * updates)
        context = np.concatenate([context, changed], axis=1)
        values = values.copy()
        np.put_along_axis(values, which, np.array(news), 1)
    begin = context.shape[1]
    space = (length - begin) // 2
    weights = POWER * np.arange(1, space + 1) ** (POWER - 1)
    weights /= weights.sum()
    slots = np.stack([random.choice(space, replace=False, p=weights, size=pairs) for _ in range(rows)])
    inputs = np.zeros((rows, length), dtype=np.int64)
    inputs[:, :begin] = context
    targets = np.full_like(inputs, IGNORED)
    np.put_along_axis(inputs, begin + 2 * slots, keys, 1)
    np.put_along_axis(targets, begin + 2 * slots, values, 1)
    if noise:
        drawn = np.random.default_rng([seed, 1]).integers(noise.start, noise.stop, size=inputs.shape)
        inputs = np.where(inputs == 0, drawn, inputs)
    return inputs, targets


def draw_other(random: np.random.RandomState, low: int, high: int, value: int) -> int:
    """One of low … high − 1 without `value`."""
    return int(random.choice(np.delete(np.arange(low, high), value - low)))


class Mix(NamedTuple):
    """What a model is trained and tested on: one model for all segments."""

    train: tuple[Segment, ...]
    test: tuple[Segment, ...]


def figure2(length: int, pairs: int) -> Mix:
    return Mix((Segment(length, pairs),), (Segment(length, pairs),))


BASED = Mix(
    (Segment(64, 4, 5), Segment(128, 8), Segment(256, 16), Segment(256, 32), Segment(256, 64)),
    tuple(Segment(*pair) for pair in ((64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128), (1024, 256))),
)
FORGETTING = Mix(
    tuple(Segment(*three, updates=4) for three in ((64, 4, 5), (128, 9, 1), (256, 16, 1), (256, 25, 1), (256, 36, 1))),
    tuple(
        Segment(length, pairs, updates=4)
        for length, pairs in ((64, 4), (64, 9), (128, 16), (256, 36), (512, 64), (1024, 144), (2048, 256))
    ),
)
MIXES: dict[str, Mix] = {
    "small": Mix(
        (Segment(32, 4), Segment(64, 8), Segment(64, 16), Segment(128, 32)),
        tuple(Segment(*pair) for pair in ((32, 4), (64, 8), (64, 16), (128, 32))),
    ),
    "small-forgetting": Mix(
        (Segment(32, 4, updates=4), Segment(64, 8, updates=8)),
        (Segment(32, 4), Segment(32, 4, updates=4), Segment(64, 8), Segment(64, 8, updates=8)),
    ),
    "tiny": Mix((Segment(32, 4),), (Segment(32, 4), Segment(32, 8))),
    "tiny-forgetting": Mix((Segment(32, 3, updates=2),), (Segment(32, 3), Segment(32, 3, updates=2))),
    # As published: Zoology's Figure 2, one model for each; and Based's Figure 2, one model for all, which zoology's plots show.
    "figure2-64": figure2(64, 4),
    "figure2-128": figure2(128, 8),
    "figure2-256": figure2(256, 16),
    "figure2-512": figure2(512, 64),
    "based": BASED,
    "forgetting": FORGETTING,
    "shown": Mix((Segment(20, 3),), (Segment(20, 3),)),
    "shown-forgetting": Mix((Segment(24, 3, updates=2),), (Segment(24, 3, updates=2),)),
}


@dataclass(frozen=True, kw_only=True)
class MqarSetting(Sizes):
    """num_train: rows of an epoch, shared by the mix's training segments; num_test: of each of its test segments."""

    task: str = "mqar"
    vocab_size: int = 512
    seq_len: int = 128  # of the longest training row; longer ones show what a layer does beyond
    num_train: int = 8192
    num_test: int = 512
    mix: str = "small"
    noise: bool = True

    def __post_init__(self) -> None:
        choose_from("mix", self.mix, tuple(MIXES))
        longest = max(segment.length for segment in MIXES[self.mix].train)
        if self.seq_len < longest:
            raise ValueError(f"seq_len ({self.seq_len}) must be at least {longest}, the longest training row of {self.mix}")

    @property
    def segments(self) -> Mix:
        return MIXES[self.mix]

    @property
    def noise_tokens(self) -> range | None:
        forgets = any(segment.updates for segment in self.segments.test)
        return range(self.vocab_size // 2 if forgets else 0, self.vocab_size) if self.noise else None


def segment_seeds(seed: int, train: int, test: int) -> tuple[list[int], list[int]]:
    """Seeds of training and test segments; zoology's for seed 0."""
    random = np.random.RandomState(SEED + seed)
    first = random.randint(0, 2**31, size=train)
    return first.tolist(), random.randint(2**31, 2**32, size=test, dtype=np.int64).tolist()


class Mqar(Task):
    """One model for rows of several lengths and numbers of pairs; every test segment is an evaluation set."""

    family = "mqar"
    slices = ("pairs",)
    fresh = True

    def __init__(self, baseline: MqarSetting, scales: Mapping[str, Scale]) -> None:
        self.name, self.baseline, self.scales = baseline.task, baseline, scales

    def training(self, setting: MqarSetting, seed: int, epoch: int) -> list[Rows]:
        """Epoch 0 of seed 0 has zoology's seeds; later epochs have new rows where the mix is one of our own."""
        segments = setting.segments.train
        if setting.mix in PUBLISHED:
            epoch = 0
        seeds, _ = segment_seeds(seed, len(segments), 1)
        if epoch:
            seeds = np.random.default_rng([SEED, seed, epoch]).integers(2**31, size=len(segments)).tolist()
        share = setting.num_train / sum(segment.rows for segment in segments)
        counts = [max(1, round(share * segment.rows)) for segment in segments]
        found = [self.rows(setting, s, count, number) for s, count, number in zip(segments, counts, seeds, strict=True)]
        return join_lengths(found)

    def evaluation(self, setting: MqarSetting, seed: int, part: Part) -> dict[str, list[Rows]]:
        segments = setting.segments.test
        _, seeds = segment_seeds(seed, len(setting.segments.train), len(segments))
        if part == "validation":
            seeds = np.random.default_rng([SEED, seed]).integers(2**31, 2**32, size=len(segments)).tolist()
        count = setting.num_test if part == "test" else max(1, setting.num_test // 2)
        return {name_of(s): [self.rows(setting, s, count, number)] for s, number in zip(segments, seeds, strict=True)}

    def rows(self, setting: MqarSetting, segment: Segment, count: int, seed: int) -> Rows:
        length, pairs, _, updates = segment
        found = mqar_rows(setting.vocab_size, count, length, pairs, seed, updates=updates, noise=setting.noise_tokens)
        return Rows(*found, {"pairs": np.full(count, pairs)})

    def solve(self, setting: MqarSetting, inputs: Ints) -> Ints:
        """A dictionary: a value that follows a key belongs to it, where noise may look like a pair the first one."""
        half, answers = setting.vocab_size // 2, np.zeros_like(inputs)
        misleading = setting.noise_tokens is not None and 1 in setting.noise_tokens
        for row, answer in zip(inputs.tolist(), answers, strict=True):
            memory: dict[int, int] = {}
            for place in range(0, len(row) - 1, 2):
                key, follower = row[place], row[place + 1]
                if key in memory:
                    answer[place] = memory[key]
                if 0 < key < half <= follower and not (misleading and key in memory):
                    memory[key] = follower
        return answers

    def guessers(self, setting: MqarSetting, train: Sequence[Rows]) -> dict[str, Callable[[Rows], Ints]]:
        shown: Callable[[Rows], Ints] = lambda rows: np.broadcast_to(rows.inputs[:, 1:2], rows.inputs.shape).copy()  # noqa: E731
        return {**super().guessers(setting, train), "a value of the row": shown}


PUBLISHED = ("based", "forgetting", *(name for name in MIXES if name.startswith("figure2")))


def name_of(segment: Segment) -> str:
    updated = f", {segment.updates} changed" if segment.updates else ""
    return f"{segment.pairs} pairs{updated} in {segment.length}"


def join_lengths(groups: Sequence[Rows]) -> list[Rows]:
    """Groups of the same length become one."""
    found: dict[int, list[Rows]] = {}
    for group in groups:
        found.setdefault(group.inputs.shape[1], []).append(group)
    return [
        Rows(
            np.concatenate([rows.inputs for rows in same]),
            np.concatenate([rows.targets for rows in same]),
            {name: np.concatenate([rows.facts[name] for rows in same]) for name in same[0].facts},
        )
        for same in found.values()
    ]


BASED_RATES = tuple(float(f"{10**power:.2g}") for power in (-3, -2.5, -2, -1.5))
SMALL = MqarSetting()
FORGETS = MqarSetting(task="mqar-forgetting", mix="small-forgetting", seq_len=64, noise=False)


def scales(small: MqarSetting, tiny: str, published: MqarSetting) -> dict[str, Scale]:
    def full(setting: MqarSetting, **changes: Any) -> Scale:
        return Scale(settings=(setting,), evaluations=32, **changes)

    quick = dataclasses.replace(small, mix=tiny, seq_len=32, vocab_size=64, num_train=2048, num_test=128)
    return {
        "quick": Scale(settings=(quick,), width=32, batch=32, steps=300, rates=(3e-3,), evaluations=6),
        "laptop": Scale(settings=(small,), width=64, batch=32, steps=800, rates=(1e-3, 3e-3, 1e-2), evaluations=8),
        "published": full(published, width=128, batch=256, steps=32 * 704, rates=BASED_RATES),
    }


def published(task: str, mix: str) -> MqarSetting:
    return MqarSetting(task=task, vocab_size=8192, seq_len=256, num_train=180_000, num_test=1000, mix=mix)


MQAR: dict[str, Task] = {
    "mqar": Mqar(SMALL, scales(SMALL, "tiny", published("mqar", "based"))),
    "mqar-forgetting": Mqar(FORGETS, scales(FORGETS, "tiny-forgetting", published("mqar-forgetting", "forgetting"))),
}
