"""What a task is: settings it can be tried at, the examples of each, and how answers are scored.

A task gives rows of input tokens and, at each of the same positions, the token to predict; IGNORED does not count. A new task
is one file with a subclass of Task, and one line in the registry (tasks/__init__.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hypermlp.checks import choose_from
from hypermlp.tasks.scores import evaluate

Ints = NDArray[np.int64]
Scale = Literal["baseline", "full"]
Backbone = Literal["language", "autoencoder"]  # models/mad.py


class Split(NamedTuple):
    inputs: Ints  # N T
    targets: Ints  # N T


class Data(NamedTuple):
    train: Split
    test: Split
    validation: Split  # scored like the test split; empty unless asked for


class Examples(NamedTuple):
    """A split as tensors."""

    inputs: Tensor  # N T
    targets: Tensor  # N T


class Setting(Protocol):
    """One task at one size: plain data, hashable."""

    @property
    def task(self) -> str: ...
    @property
    def key(self) -> str:
        """The task and what differs from its baseline, such as "in-context-recall/vocab_size=32"."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def seq_len(self) -> int: ...
    @property
    def num_train(self) -> int: ...
    @property
    def num_test(self) -> int: ...


class Task(ABC):
    """One task. `clean` means: as one would do it today; otherwise as its benchmark was published."""

    name: str
    baseline: Any  # its Setting
    axes: Mapping[str, tuple[Any, ...]]  # numbers of the setting that the full benchmark varies, each alone
    backbone: Backbone = "language"

    @abstractmethod
    def generate(self, setting: Any, seed: int, *, clean: bool) -> Data:
        """All examples of a setting, the same for the same arguments; a validation split only if `clean`."""

    def scored(self, setting: Any, targets: Ints, *, clean: bool) -> Ints:
        """The targets with IGNORED where nothing is to be scored."""
        return targets

    def scores(self, model: nn.Module, examples: Examples, batch: int, *, clean: bool) -> dict[str, float]:
        """At least "loss" and "accuracy", over all counted tokens; by the benchmark's own formulas unless `clean`."""
        found = evaluate(model, *examples, batch)
        if clean:
            return {"accuracy": found.accuracy, "loss": found.loss}
        return {"accuracy": found.macro_accuracy, "perplexity": found.perplexity, "loss": found.loss}

    def load(self, setting: Any, seed: int, *, clean: bool) -> tuple[Examples, Examples, Examples]:
        """Train, validation and test examples as tensors, with the targets that are scored."""
        data = self.generate(setting, seed, clean=clean)

        def tensors(split: Split) -> Examples:
            targets = self.scored(setting, split.targets, clean=clean)
            return Examples(torch.from_numpy(split.inputs), torch.from_numpy(targets))

        return tensors(data.train), tensors(data.validation), tensors(data.test)

    def settings(self, scale: Scale) -> list[Any]:
        """The baseline, and at full scale every change of one number that the benchmark makes to it."""
        choose_from("scale", scale, ("baseline", "full"))
        if scale == "baseline":
            return [self.baseline]
        changed = [self.vary(name, value) for name, values in self.axes.items() for value in values]
        return [self.baseline, *changed]

    @abstractmethod
    def vary(self, name: str, value: Any) -> Any:
        """The baseline with one number changed."""
