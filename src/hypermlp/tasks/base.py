"""What a task is: settings it can be tried at, rows to train on, sets to evaluate on, and how answers are scored.

A task gives rows of input tokens and, at each of the same positions, the token to predict; IGNORED does not count. Rows of
different lengths stay apart, so that no mixer sees padding. A new task is one file with a subclass of Task, and one line in the
registry (tasks/__init__.py). How a task is shown is no part of it (report/shown.py).

Letters: N rows, T time, M scored tokens, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hypermlp.checks import choose_from
from hypermlp.config import IGNORED
from hypermlp.tasks.scores import Answers, answer, summarise

Ints = NDArray[np.int64]
Part = Literal["validation", "test"]
Unit = Literal["token", "row"]  # what counts: every scored token, or a row with all of them right
SCALES = ("quick", "laptop", "published")
NOTHING: Mapping[str, Any] = MappingProxyType({})


class Rows(NamedTuple):
    """Rows of one length."""

    inputs: Ints  # N T
    targets: Ints  # N T
    facts: Mapping[str, Ints] = NOTHING  # what is known about each row (N) or token (N T), such as its number of pairs


class Examples(NamedTuple):
    """Rows of one length, as tensors."""

    inputs: Tensor  # N T
    targets: Tensor  # N T
    facts: Mapping[str, Tensor] = NOTHING


Sets = dict[str, list[Examples]]  # name of an evaluation set → its rows, those of one length in one entry


class Material(NamedTuple):
    """All that a run of a setting needs."""

    train: Callable[[int], list[Examples]]  # epoch → its rows, those of one length in one entry
    validation: Sets
    test: Sets


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


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A Setting to derive from: the defaults of its fields are the baseline, and its key says what differs from them."""

    task: str
    vocab_size: int
    seq_len: int  # of the longest row that a model must take
    num_train: int  # rows of an epoch
    num_test: int  # rows of every evaluation set; half as many for validation

    @property
    def key(self) -> str:
        changed = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default and f.name != "task"]
        values = ",".join(f"{name}={getattr(self, name)}" for name in changed)
        return f"{self.task}/{values}" if values else self.task


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How a task is run at one scale."""

    settings: tuple[Any, ...]
    width: int = 64
    depth: int = 2
    batch: int = 32
    steps: int = 1000
    rates: tuple[float, ...] = (1e-3, 3e-3)
    decays: tuple[float, ...] = (0.1,)
    evaluations: int = 12  # on the validation sets, per run
    solved: float | None = 0.99  # a run ends once every validation set is above it


class Task(ABC):
    """One task.

    A subclass says what there is to train on (`training`) and to be scored on (`evaluation`); all else has a default.
    """

    name: str
    family: str = "own"  # tasks that are listed and run together
    baseline: Any  # its Setting
    scales: Mapping[str, Scale] = NOTHING
    unit: Unit = "token"
    slices: tuple[str, ...] = ()  # facts by which scores are broken down
    fresh: bool = False  # every epoch has rows of its own
    measure: ClassVar[str] = "accuracy"  # the score that tables show

    # What it is made of

    @abstractmethod
    def training(self, setting: Any, seed: int, epoch: int) -> list[Rows]:
        """The rows to train on, the same for the same arguments.

        Args:
            setting: one of this task's.
            seed: of the rows.
            epoch: which has as many rows of each length as every other. If not `fresh`, only 0 is asked for.
        """

    @abstractmethod
    def evaluation(self, setting: Any, seed: int, part: Part) -> dict[str, list[Rows]]:
        """The evaluation sets by name, the same for the same arguments. Validation and test sets have different rows."""

    def solve(self, setting: Any, inputs: Ints) -> Ints:
        """The targets (N T), found from the inputs alone by one who knows the rules; anything where nothing is scored."""
        raise NotImplementedError(f"{self.name} has no oracle")

    def guessers(self, setting: Any, train: Sequence[Rows]) -> dict[str, Callable[[Rows], Ints]]:
        """Trivial answers to beat: name → a function from rows to guesses (N T). By default the most frequent answer."""
        counted = np.concatenate([group.targets[group.targets != IGNORED] for group in train])
        values, counts = np.unique(counted, return_counts=True)
        most = int(values[counts.argmax()])
        return {"most frequent": lambda rows: np.full_like(rows.targets, most)}

    def headline(self, setting: Any) -> tuple[str, ...]:
        """The evaluation sets whose mean is the score of a run; empty: all."""
        return ()

    def as_trained(self, setting: Any) -> tuple[str, ...]:
        """The evaluation sets whose mean loss is that of a run, which chooses learning rates; empty: the headline's.

        On rows beyond the training length the lowest loss is that of a model which has learned nothing and is sure of nothing.
        """
        return ()

    # Scoring

    def right(self, guesses: Tensor, targets: Tensor, facts: Mapping[str, Tensor]) -> Tensor:
        """Which of the guesses (M) count as right."""
        return guesses == targets

    def judge(self, logits: Tensor, targets: Tensor, facts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Measures at every scored token (M), from logits (M V): "accuracy", "loss" and what else there is."""
        loss = nn.functional.cross_entropy(logits, targets, reduction="none")
        return {"accuracy": self.right(logits.argmax(-1), targets, facts), "loss": loss}

    def curves(self, answers: Answers) -> dict[str, dict[str, float]]:
        """Curves over a set beside its slices: name → label → number."""
        return {}

    def label(self, fact: str, value: int) -> str:
        """How a slice is called."""
        return str(value)

    def scores(
        self, model: nn.Module, sets: Sets, batch: int, setting: Any, *, clean: bool = True, slices: bool = False
    ) -> dict[str, Any]:
        """The measures as means over the headline's sets, and "loss" over those as trained; "worst": the lowest accuracy.

        Args:
            model: from tokens (N T) to logits (N T V).
            sets: what it is scored on (Material).
            batch: rows at a time, on which nothing depends.
            setting: of which these are the sets.
            clean: see `open`.
            slices: add "sets", the scores of each on its own.
        """
        found = {name: answer(model, rows, batch, self.judge) for name, rows in sets.items()}
        return self.summary(found, setting, slices=slices)

    def summary(self, found: Mapping[str, Answers], setting: Any, *, slices: bool) -> dict[str, Any]:
        each = {name: summarise(answers, self.unit, self.slices, self.label) for name, answers in found.items()}
        chosen = [each[name] for name in self.headline(setting) or each]
        measures = [name for name, value in chosen[0].items() if isinstance(value, float)]
        means: dict[str, Any] = {name: float(np.mean([one[name] for one in chosen])) for name in measures}
        if (trained := self.as_trained(setting)) and "loss" in measures:
            means["loss"] = float(np.mean([each[name]["loss"] for name in trained]))
        if "accuracy" in measures:
            means["worst"] = min(one["accuracy"] for one in each.values())
        if slices:
            for name, answers in found.items():
                each[name]["slices"] |= self.curves(answers)
            means["sets"] = each
        return means

    def baselines(self, setting: Any, seed: int) -> dict[str, dict[str, Any]]:
        """The scores of the trivial answers on the test sets, computed from the data."""
        tests = self.evaluation(setting, seed, "test")
        found = {}
        for name, guess in self.guessers(setting, self.training(setting, seed, 0)).items():
            answers = {key: self.score_guesses(rows, guess) for key, rows in tests.items()}
            found[name] = self.summary(answers, setting, slices=True)
        return found

    def score_guesses(self, groups: Sequence[Rows], guess: Callable[[Rows], Ints]) -> Answers:
        def judge(guesses: Tensor, targets: Tensor, facts: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {"accuracy": self.right(guesses, targets, facts)}

        def answers(rows: Rows) -> Answers:
            return Answers.judged(tensors(rows), torch.from_numpy(guess(rows)[rows.targets != IGNORED]), judge)

        return Answers.join([answers(rows) for rows in groups])

    # What studies and commands ask for

    def open(self, setting: Any, seed: int, *, clean: bool = True) -> Material:
        """What a run trains and is scored on.

        Args:
            setting: one of this task's.
            seed: of the rows.
            clean: without the flaws that a benchmark was published with, where it has any.
        """

        @lru_cache(maxsize=1)
        def train(epoch: int) -> list[Examples]:
            return read(self.training(setting, seed, epoch), "training")

        def sets(part: Part) -> Sets:
            return {name: read(rows, f"{part} set {name}") for name, rows in self.evaluation(setting, seed, part).items()}

        def read(groups: list[Rows], what: str) -> list[Examples]:
            self.check(setting, groups, what)
            return [tensors(group) for group in groups]

        return Material(
            (lambda epoch: train(epoch)) if self.fresh else (lambda epoch: train(0)), sets("validation"), sets("test")
        )

    def check(self, setting: Any, groups: Sequence[Rows], what: str) -> None:
        """Rows that no model could read, or that nothing is scored of, are refused."""
        for rows in groups:
            for name, tokens in (("inputs", rows.inputs), ("targets", rows.targets[rows.targets != IGNORED])):
                if tokens.size and not 0 <= tokens.min() <= tokens.max() < setting.vocab_size:
                    raise ValueError(
                        f"{self.name}, {what}: {name} {tokens.min()} to {tokens.max()} must be at least 0 and below vocab_size "
                        f"({setting.vocab_size})"
                    )
        if not any((rows.targets != IGNORED).any() for rows in groups):
            raise ValueError(f"{self.name}, {what}: every target is {IGNORED}, so there is nothing to score")

    def scale(self, name: str) -> Scale:
        choose_from("scale", name, SCALES)
        if name == "published" and name not in self.scales:
            raise ValueError(f"{self.name} has no published sizes; use laptop, with other width=, depth=, steps= or fields")
        return self.scales.get(name) or Scale(settings=(self.baseline,))

    def tokens(self, setting: Any, rows: Any) -> int:
        """How many tokens a mixer sees of one of these rows."""
        return int(rows.inputs.shape[1])


def tensors(rows: Rows) -> Examples:
    facts = {name: torch.from_numpy(values) for name, values in rows.facts.items()}
    return Examples(torch.from_numpy(rows.inputs), torch.from_numpy(rows.targets), facts)


def by_length(rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Rows]:
    """Pairs of inputs and targets, those of one length together, the shortest first, in their order within a length."""
    groups: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(len(row[0]), []).append(i)
    found = []
    for length in sorted(groups):
        inputs, targets = (np.array([rows[i][part] for i in groups[length]], dtype=np.int64) for part in (0, 1))
        found.append(Rows(inputs, targets))
    return found
