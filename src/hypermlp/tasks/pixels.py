"""Pictures as sequences: scikit-learn's 1797 handwritten digits of 8 × 8 pixels with 17 shades, row by row.

    pixels        64 pixels and a question: which digit is it?
    pixels-next   every pixel from those before it, in bits per pixel

The pictures are the test part of UCI's optical digits, and have no official split: a seed draws 1097 to train on, 200 to
validate and 500 to test, each class in proportion. Small data: look at several seeds. A mixer that adds up what it sees solves
the first; it is a check rather than a contest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from hypermlp.config import IGNORED
from hypermlp.tasks.base import Ints, Part, Rows, Scale, Sizes, Task, tensors
from hypermlp.tasks.scores import Answers

ASK, CLASSES = 17, range(18, 28)  # behind 17 shades
VALIDATION, TEST = 200, 500


@lru_cache(maxsize=1)
def load_pictures() -> tuple[Ints, Ints]:
    """Pixels (N 64), 0 to 16, and digits (N)."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ValueError(
            "the pictures ship inside scikit-learn, which is not installed; pip install 'hypermlp[tasks]'"
        ) from error
    found = load_digits()
    return found.data.astype(np.int64), found.target.astype(np.int64)


@lru_cache(maxsize=4)
def split_pictures(seed: int) -> dict[str, Ints]:
    """Part → indices, each class in proportion: pictures are shuffled and then dealt out class by class."""
    _, digits = load_pictures()
    order = np.random.default_rng(seed).permutation(len(digits))
    order = order[np.argsort(digits[order], kind="stable")]
    place = np.arange(len(order)) * TEST % len(order) < TEST  # spread evenly over the classes
    rest = order[~place]
    held = np.arange(len(rest)) * VALIDATION % len(rest) < VALIDATION
    return {"train": rest[~held], "validation": rest[held], "test": order[place]}


def spread(which: Ints, count: int) -> Ints:
    """So many of them, at equal distances: they come class by class."""
    return which[np.arange(min(count, len(which))) * len(which) // max(1, min(count, len(which)))]


@dataclass(frozen=True, kw_only=True)
class PixelSetting(Sizes):
    task: str = "pixels"
    vocab_size: int = 28
    seq_len: int = 65
    num_train: int = 1097
    num_test: int = 500
    permuted: bool = False  # all pictures with their pixels in one other order


def read_pictures(setting: PixelSetting, which: Ints) -> tuple[Ints, Ints]:
    """Pixels (n 64) and digits (n) of these pictures."""
    pixels, digits = load_pictures()
    order = np.random.default_rng(64).permutation(64) if setting.permuted else np.arange(64)
    return pixels[which][:, order], digits[which]


class Pixels(Task):
    """Which digit is it?"""

    name = family = "pixels"
    baseline: Any = PixelSetting()

    def training(self, setting: PixelSetting, seed: int, epoch: int) -> list[Rows]:
        return [self.rows(setting, spread(split_pictures(seed)["train"], setting.num_train))]

    def evaluation(self, setting: PixelSetting, seed: int, part: Part) -> dict[str, list[Rows]]:
        return {"test": [self.rows(setting, spread(split_pictures(seed)[part], setting.num_test))]}

    def rows(self, setting: PixelSetting, which: Ints) -> Rows:
        pixels, digits = read_pictures(setting, which)
        inputs = np.pad(pixels, ((0, 0), (0, 1)), constant_values=ASK)
        targets = np.full_like(inputs, IGNORED)
        targets[:, -1] = CLASSES[0] + digits
        return Rows(inputs, targets)

    def guessers(self, setting: PixelSetting, train: Sequence[Rows]) -> dict[str, Callable[[Rows], Ints]]:
        known, answers = train[0].inputs[:, :64], train[0].targets[:, -1]

        def nearest(rows: Rows) -> Ints:
            apart = ((rows.inputs[:, None, :64] - known) ** 2).sum(2)
            return np.repeat(answers[apart.argmin(1)][:, None], rows.inputs.shape[1], axis=1)

        return {**super().guessers(setting, train), "nearest neighbour": nearest}


@dataclass(frozen=True, kw_only=True)
class NextPixelSetting(PixelSetting):
    task: str = "pixels-next"
    vocab_size: int = 18
    seq_len: int = 64


class NextPixel(Pixels):
    """Every pixel from those before it."""

    name = "pixels-next"
    baseline = NextPixelSetting()
    measure: ClassVar[str] = "bits"

    def rows(self, setting: PixelSetting, which: Ints) -> Rows:
        pixels, _ = read_pictures(setting, which)
        return Rows(np.pad(pixels[:, :-1], ((0, 0), (1, 0)), constant_values=ASK), pixels)

    def judge(self, logits: Tensor, targets: Tensor, facts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = super().judge(logits, targets, facts)
        return {**found, "bits": found["loss"] / math.log(2)}

    def baselines(self, setting: Any, seed: int) -> dict[str, dict[str, Any]]:
        """Shades by place, and by place and the pixel before: frequencies in training, each shade counted once more."""
        (train,) = self.training(setting, seed, 0)
        (test,) = self.evaluation(setting, seed, "test")["test"]
        places = np.broadcast_to(np.arange(64), test.inputs.shape)
        by_place = np.ones((64, 1, setting.vocab_size))
        by_pair = np.ones((64, setting.vocab_size, setting.vocab_size))
        for inputs, targets in zip(train.inputs, train.targets, strict=True):
            np.add.at(by_place[:, 0], (np.arange(64), targets), 1)
            np.add.at(by_pair, (np.arange(64), inputs, targets), 1)
        tables = {"shades by place": by_place[places, 0], "shades by place and pixel before": by_pair[places, test.inputs]}
        found = {}
        for name, counts in tables.items():
            logits = Tensor(np.log(counts / counts.sum(-1, keepdims=True))).flatten(0, 1)
            answers = Answers.judged(tensors(test), logits, self.judge)
            found[name] = self.summary({"test": answers}, setting, slices=True)
        return found

    def guessers(self, setting: PixelSetting, train: Sequence[Rows]) -> dict[str, Callable[[Rows], Ints]]:
        return {}


def scales(setting: Any, solved: float | None) -> dict[str, Scale]:
    return {
        "quick": Scale(settings=(setting,), width=32, batch=32, steps=150, rates=(3e-3,), evaluations=3, solved=solved),
        "laptop": Scale(settings=(setting,), batch=32, steps=800, rates=(1e-3, 3e-3), evaluations=8, solved=solved),
    }


PIXELS: dict[str, Task] = {"pixels": Pixels(), "pixels-next": NextPixel()}
for task, best in (("pixels", 0.995), ("pixels-next", None)):
    PIXELS[task].scales = scales(PIXELS[task].baseline, best)
