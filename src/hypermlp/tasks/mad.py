"""The six tasks of the MAD benchmark (Poli et al. 2024), bit for bit what its own generators draw.

Every task gives rows of input tokens and, at each of the same positions, the token to predict; -100 (`.` below) does not count.
The three recall tasks predict the next token, so their targets are the inputs moved by one: training counts every position,
testing only the values of keys that were shown before. The other three tasks answer in place.

in-context-recall, vocab_size = 8, seq_len = 16: keys 0-3, values 4-7

inputs          0 7 1 4 3 6 2 7 1 4 3 6 1 4 3
train targets   7 1 4 3 6 2 7 1 4 3 6 1 4 3 6
test targets    . . . . . . . . 4 . 6 . 4 . 6

One stream of random numbers feeds train, then test, then validation, so what comes later leaves what came before as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any, Literal, NamedTuple

import numpy as np
from torch import nn

from hypermlp.checks import choose_from
from hypermlp.config import IGNORED
from hypermlp.tasks.base import Examples, Ints, Material, Part, Rows, Sets, Task, tensors
from hypermlp.tasks.mad_settings import BENCHMARK, MADSetting, vocabulary
from hypermlp.tasks.scores import evaluate

SEED = 12345  # the benchmark's own
LOW = 2**32 - 1  # the lower half of a product


class Split(NamedTuple):
    inputs: Ints  # N T
    targets: Ints  # N T


class Data(NamedTuple):
    train: Split
    test: Split
    validation: Split  # scored like the test split; empty unless asked for


class RandomStreams:
    """The random streams of one data set, in the order in which the benchmark uses them up."""

    def __init__(self, seed: int, exact: bool) -> None:
        self.seed, self.exact = seed, exact
        self.rng = np.random.default_rng(seed)
        self.blanks = np.random.RandomState(seed)  # stands for numpy's global stream, without touching it
        bits = self.rng.bit_generator.ctypes
        self._next, self._state = bits.next_uint32, bits.state

    def below(self, n: int) -> int:
        """What rng.choice(n) draws and takes from the stream (Lemire's method, as numpy has it), many times faster."""
        if n == 1:
            return 0
        product = self._next(self._state) * n
        if product & LOW < n:
            while product & LOW < (LOW + 1) % n:
                product = self._next(self._state) * n
        return product >> 32


def sample_recall(setting: MADSetting, source: RandomStreams, count: int, test: bool) -> Split:
    """Pairs of a key and its value; a key that comes back brings its value back. Some pairs may be noise instead.

    noisy-recall, vocab_size = 12, seq_len = 20: keys 0-3, values 4-7, noise 8-11

    inputs          8 8 3 7 9 10 10 8 2 6 0 6 2 6 9 9 1 6 3
    test targets    . . . . . .  .  . . . . . 6 . . . . . 7
    """
    roles, below = vocabulary(setting), source.below
    keys, values, noise = roles["key"], roles["value"], roles.get("noise", range(0))
    slots = setting.seq_len // 2
    tokens, scored = [], []
    for _ in range(count):
        protected = below(slots)
        value_of: dict[int, int] = {}
        row: list[int] = []
        again: list[bool] = []  # whether a token is the value of a key that was shown before, and asked for
        for slot in range(slots - 1):
            if setting.frac_noise and slot != protected and source.rng.random() < setting.frac_noise:
                row += noise[below(len(noise))], noise[below(len(noise))]
                again += False, False
                continue
            key = keys[below(len(keys))]
            again += False, setting.multi_query and key in value_of
            if key not in value_of:
                value_of[key] = values[below(len(values))]
            row += key, value_of[key]
        if not value_of:
            raise ValueError(f"an example came out as noise alone; lower frac_noise ({setting.frac_noise}) or raise seq_len")
        query = list(value_of)[below(len(value_of))]
        row += *roles.get("copy", ()), query, value_of[query]
        tokens.append(row)
        scored.append([*again, *[False] * (len(row) - len(again) - 1), True])
    return next_token(tokens, scored, test)


def next_token(tokens: list[list[int]], scored: list[list[bool]], test: bool) -> Split:
    """Inputs and the tokens that follow them, of which a test counts the scored ones."""
    rows, mask = np.array(tokens, dtype=np.int64), np.array(scored)
    inputs, targets = rows[:, :-1].copy(), rows[:, 1:].copy()
    return Split(inputs, np.where(mask[:, 1:], targets, IGNORED) if test else targets)


def sample_fuzzy(setting: MADSetting, source: RandomStreams, count: int, test: bool) -> Split:
    """Recall with keys and values of one to three different tokens, padded on the left; tested keys are always three long.

    vocab_size = 9, seq_len = 40, k_motif = v_motif = 3: keys of 0-3, values of 4-7, pad 8, the bars are only drawn here

    inputs   8 8 8 8 8 8 8 | 1 3 2 4 7 6 | 2 1 3 5 4 6 | 0 3 2 6 | 2 3 0 7 | 1 2 3 5 7 | 2 3 1 6 | 1 2 3 5
    targets  . . . . . . .   . . . . . .   . . . . . .   . . . .   . . . .   . . . . .   . . . .   . . 5 7

    The benchmark draws now and then (2-3 % at length 128) a last key that was never shown: unless `exact`, such a row is
    drawn again.
    """
    roles = vocabulary(setting)
    pad, k, v = roles["pad"][0], setting.k_motif, setting.v_motif
    keys = Motifs(roles["key"], range(k, k + 1) if test else range(1, k + 1))
    values = Motifs(roles["value"], range(1, v + 1))
    tokens, scored = [], []
    for _ in range(count):
        row, again, shown = fuzzy_row(setting, source, keys, values)
        while not (shown or source.exact):
            row, again, shown = fuzzy_row(setting, source, keys, values)
        pads = setting.seq_len + 1 - len(row)
        tokens.append([pad] * pads + row)
        scored.append([False] * pads + again)
    return next_token(tokens, scored, test)


class Motifs:
    """All ordered choices of different words, by size.

    The benchmark shuffles them before every row. That takes numbers from the stream but leaves the distribution as it is, so
    only exact data need it; to shuffle their indices is as good, and much faster.
    """

    def __init__(self, words: range, sizes: range) -> None:
        self.sizes = sizes
        self.motifs = {size: list(permutations(words, size)) for size in sizes}
        self.order: dict[int, Sequence[int] | Ints] = {size: range(len(motifs)) for size, motifs in self.motifs.items()}

    def shuffle(self, rng: np.random.Generator) -> None:
        for size, motifs in self.motifs.items():
            self.order[size] = rng.permutation(len(motifs))

    def draw_size(self, source: RandomStreams) -> int:
        return self.sizes[source.below(len(self.sizes))]

    def draw(self, source: RandomStreams, size: int) -> tuple[int, ...]:
        motifs = self.motifs[size]
        return motifs[self.order[size][source.below(len(motifs))]]


def fuzzy_row(setting: MADSetting, source: RandomStreams, keys: Motifs, values: Motifs) -> tuple[list[int], list[bool], bool]:
    """One row without its padding, which of its tokens count, and whether the key asked for at the end was shown before."""
    if source.exact:
        keys.shuffle(source.rng)
        values.shuffle(source.rng)
    key_size, value_size = keys.draw_size(source), values.draw_size(source)
    probe = keys.draw(source, key_size)
    value_of = {probe: values.draw(source, value_size)}
    asked = key_size + value_size
    due = source.below(setting.seq_len - 2 * asked)  # from this length on the probe takes its place
    row: list[int] = []
    again: list[bool] = []
    seen = set()
    while len(row) < setting.seq_len - asked - setting.k_motif - setting.v_motif:
        key_size, value_size = keys.draw_size(source), values.draw_size(source)
        key = probe if len(row) >= due and probe not in seen else keys.draw(source, key_size)
        if key not in value_of:
            value_of[key] = values.draw(source, value_size)
        row += key + value_of[key]
        again += [False] * len(key) + [setting.multi_query and key in seen] * len(value_of[key])
        seen.add(key)
    copy = vocabulary(setting).get("copy", ())
    row += *copy, *probe, *value_of[probe]
    again += [False] * (len(copy) + len(probe)) + [True] * len(value_of[probe])
    return row, again, probe in seen


def sample_copying(setting: MADSetting, source: RandomStreams, count: int, test: bool) -> Split:
    """Data tokens among blanks, then a copy token: write the data down, in order, on the blanks behind it.

    vocab_size = 8, seq_len = 16, num_tokens_to_copy = 4: data 0-5, blank 6, copy 7

    inputs   6 4 6 6 6 6 1 6 6 4 1 7 6 6 6 6
    targets  . . . . . . . . . . . . 4 1 4 1
    """
    roles, n = vocabulary(setting), setting.num_tokens_to_copy
    blanks = setting.seq_len - 2 * n - 1
    data = source.rng.integers(len(roles["data"]), size=(count, n))  # N n
    before = np.sort(source.blanks.randint(n, size=(count, blanks)), axis=1)  # N blanks: the data token that follows each
    # A data token's place: the data tokens and the blanks in front of it.
    place = np.stack([j + (before <= j).sum(1) for j in range(n)], axis=1)  # N n
    inputs = np.full((count, setting.seq_len), roles["blank"][0])
    np.put_along_axis(inputs, place, data, axis=1)
    inputs[:, n + blanks] = roles["copy"][0]
    targets = np.full_like(inputs, IGNORED)
    targets[:, -n:] = data
    return Split(inputs, targets)


def sample_compression(setting: MADSetting, source: RandomStreams, count: int, test: bool) -> Split:
    """Tokens and a last one that stands for the whole: an auto-encoder is to rebuild every position from it.

    vocab_size = 8, seq_len = 10: data 0-6, compress 7

    inputs   4 1 5 2 1 5 4 4 6 7
    targets  4 1 5 2 1 5 4 4 6 7
    """
    roles = vocabulary(setting)
    data = source.rng.integers(len(roles["data"]), size=(count, setting.seq_len - 1))
    inputs = np.pad(data, ((0, 0), (0, 1)), constant_values=roles["compress"][0])
    return Split(inputs, inputs.copy())


def sample_memorization(setting: MADSetting, source: RandomStreams, count: int, test: bool) -> Split:
    """Keys whose values never stand in the input: one map, the same for all splits, is to be learnt by heart.

    vocab_size = 10, seq_len = 12, the map 2→8 0→7 3→4 1→6: insert 9

    inputs   2 9 1 9 0 9 2 9 1 9 3 9
    targets  . 8 . 6 . 7 . 8 . 6 . 4
    """
    roles, slots = vocabulary(setting), setting.seq_len // 2
    shuffle = np.random.default_rng(source.seed)
    shuffled = shuffle.permutation(roles["key"])
    value_of = np.empty_like(shuffled)
    value_of[shuffled] = shuffle.permutation(roles["value"])[: len(shuffled)]
    bounds = [slots] + [len(shuffled)] * slots  # the benchmark draws a slot it has no use for
    keys = shuffled[source.rng.integers(bounds, size=(count, slots + 1))[:, 1:]]  # N slots
    inputs = np.full((count, setting.seq_len), roles["insert"][0])
    inputs[:, ::2] = keys
    targets = np.full_like(inputs, IGNORED)
    targets[:, 1::2] = value_of[keys]
    return Split(inputs, targets)


SAMPLERS: dict[str, Callable[[MADSetting, RandomStreams, int, bool], Split]] = {
    "compression": sample_compression,
    "fuzzy-recall": sample_fuzzy,
    "in-context-recall": sample_recall,
    "memorization": sample_memorization,
    "noisy-recall": sample_recall,
    "selective-copying": sample_copying,
}


def generate(setting: MADSetting, seed: int = SEED, *, exact: bool = True, validation: int = 0) -> Data:
    """The data of a setting, always the same for the same arguments.

    `exact` gives the benchmark's own numbers; without it fuzzy recall, the one task this touches, is faster at a large
    vocabulary and never asks for a key that was not shown. `validation` adds a third split of so many examples.
    """
    source, sample = RandomStreams(seed, exact), SAMPLERS[setting.task]
    train = sample(setting, source, setting.num_train, False)
    test = sample(setting, source, setting.num_test, True)
    empty = Split(test.inputs[:0], test.targets[:0])
    return Data(train, test, sample(setting, source, validation, True) if validation else empty)


def clean_targets(setting: MADSetting, targets: Ints) -> Ints:
    """Targets without what is known beforehand: compression's last token is always the same, yet the benchmark scores it."""
    if setting.task != "compression":
        return targets
    clean = targets.copy()
    clean[:, -1] = IGNORED
    return clean


class MadTask(Task):
    """A task of the benchmark: its published settings, and its sampler.

    `clean` means: as one would do it today; otherwise as the benchmark was published.
    """

    family = "mad"

    def __init__(self, name: str) -> None:
        self.name, (self.baseline, self.axes) = name, BENCHMARK[name]

    def generate(self, setting: MADSetting, seed: int, *, clean: bool) -> Data:
        """All examples, with a validation split only if `clean`; seed 0 is the published data, unless `clean`."""
        return generate(setting, SEED + seed, exact=not clean, validation=setting.num_test if clean else 0)

    def load(self, setting: MADSetting, seed: int, *, clean: bool) -> tuple[Examples, Examples, Examples]:
        """Train, validation and test examples as tensors, with the targets that are scored."""
        data = self.generate(setting, seed, clean=clean)

        def counted(split: Split) -> Examples:
            return tensors(Rows(split.inputs, clean_targets(setting, split.targets) if clean else split.targets))

        return counted(data.train), counted(data.validation), counted(data.test)

    def open(self, setting: MADSetting, seed: int, *, clean: bool = True) -> Material:
        train, validation, test = self.load(setting, seed, clean=clean)
        return Material(lambda epoch: [train], {"validation": [validation]}, {"test": [test]})

    def training(self, setting: MADSetting, seed: int, epoch: int) -> list[Rows]:
        data = self.generate(setting, seed, clean=True).train
        return [Rows(data.inputs, clean_targets(setting, data.targets))]

    def evaluation(self, setting: MADSetting, seed: int, part: Part) -> dict[str, list[Rows]]:
        data = self.generate(setting, seed, clean=True)
        inputs, targets = data.test if part == "test" else data.validation
        return {"test": [Rows(inputs, clean_targets(setting, targets))]}

    def scores(
        self, model: nn.Module, sets: Sets, batch: int, setting: Any, *, clean: bool = True, slices: bool = False
    ) -> dict[str, Any]:
        """Over all counted tokens; by the benchmark's own formulas unless `clean`."""
        ((examples,),) = sets.values()
        found = evaluate(model, examples.inputs, examples.targets, batch)
        if clean:
            return {"accuracy": found.accuracy, "loss": found.loss}
        return {"accuracy": found.macro_accuracy, "perplexity": found.perplexity, "loss": found.loss}

    def settings(self, scale: Literal["baseline", "full"]) -> list[MADSetting]:
        """The baseline, and at full scale every change of one number that the benchmark makes to it."""
        choose_from("scale", scale, ("baseline", "full"))
        if scale == "baseline":
            return [self.baseline]
        changed = [self.vary(name, value) for name, values in self.axes.items() for value in values]
        return [self.baseline, *changed]

    def vary(self, name: str, value: Any) -> MADSetting:
        """The baseline with one number changed."""
        return dataclasses.replace(self.baseline, **{name: value})


MAD: dict[str, MadTask] = {name: MadTask(name) for name in BENCHMARK}
