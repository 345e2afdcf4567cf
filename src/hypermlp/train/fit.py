"""Small models trained to the end of a recipe and scored on the way: what studies are made of."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hypermlp.batch import Batch
from hypermlp.eval_mode import evaluating
from hypermlp.train.distributed import World
from hypermlp.train.optimisation import Recipe
from hypermlp.train.training import NotFinite, Training, count

SOLVED = "solved"  # how the reason of a run that ended by success begins


class TrainingRows(Protocol):
    """Rows of one length (hypermlp.tasks: Examples)."""

    @property
    def inputs(self) -> Tensor: ...  # N T
    @property
    def targets(self) -> Tensor: ...  # N T


class EpochSampler:
    """Batches by step, with rows of one length each: every epoch has its own order, which depends on seed and epoch alone.

    Args:
        rows: epoch → its rows, those of one length in one entry, as many of each length in every epoch.
        batch: rows of a batch; the last one of a length has what is left.
        seed: of the order.
    """

    def __init__(self, rows: Callable[[int], Sequence[TrainingRows]], *, batch: int, seed: int) -> None:
        self.rows, self.batch, self.seed = rows, batch, seed
        self.epoch = sum(math.ceil(len(group.inputs) / batch) for group in rows(0))  # steps
        self._order: tuple[int, list[tuple[TrainingRows, Tensor]]] = (-1, [])

    def __call__(self, step: int) -> Sequence[Batch]:
        epoch, place = divmod(step, self.epoch)
        if self._order[0] != epoch:
            self._order = epoch, self.shuffle(epoch)
        group, rows = self._order[1][place]
        return [Batch(group.inputs[rows], group.targets[rows])]

    def shuffle(self, epoch: int) -> list[tuple[TrainingRows, Tensor]]:
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + epoch)
        groups = self.rows(epoch)
        batches = []
        for group in groups:
            order = torch.randperm(len(group.inputs), generator=generator)
            batches += [(group, some) for some in order.split(self.batch)]
        if len(batches) != self.epoch:
            raise ValueError(
                f"epoch {epoch} has {len(batches)} batches and the first one {self.epoch}; an epoch must have as many rows of "
                "each length as every other"
            )
        return batches if len(groups) == 1 else [batches[i] for i in torch.randperm(len(batches), generator=generator)]


class Fit:
    """A model and its learning curve. Call advance() until `finished`; what lies between is in state().

    Args:
        model: on the device of `world`.
        recipe: how it is updated.
        batches: the passes of the update that follows so many others.
        evaluate: returns at least "loss", and "accuracy" if `solved` is given; what it returns goes into the curve.
        evaluate_every: steps between evaluations; there is one after the last step too.
        solved: stop after an evaluation with a higher accuracy ("worst", the lowest of several sets, where there is one).
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        batches: Callable[[int], Sequence[Batch]],
        evaluate: Callable[[nn.Module], dict[str, float]],
        *,
        evaluate_every: int,
        solved: float | None = None,
        world: World | None = None,
    ) -> None:
        self.training = Training(model, recipe, world)
        self.batches, self.evaluate, self.evaluate_every, self.solved = batches, evaluate, evaluate_every, solved
        self.tokens = 0
        self.seconds = 0.0  # in updates, without evaluations
        self.losses: list[float] = []  # since the last evaluation
        self.curve: list[dict[str, float]] = []
        self.stopped: str | None = None  # why it ended before its time

    @property
    def model(self) -> nn.Module:
        return self.training.model

    @property
    def step(self) -> int:
        return self.training.step

    @property
    def steps(self) -> int:
        return self.training.recipe.steps

    @property
    def finished(self) -> bool:
        return self.step >= self.steps or self.stopped is not None

    @property
    def blew_up(self) -> bool:
        """Whether it ended because a loss was not finite."""
        return self.stopped is not None and not self.stopped.startswith(SOLVED)

    def advance(self) -> None:
        """One update, and an evaluation where one is due."""
        begin = time.perf_counter()
        passes = self.batches(self.step)
        self.tokens += count(passes)[1]
        try:
            self.losses.append(self.training.update(passes).loss)
        except NotFinite as error:
            self.stopped = error.reason
            return
        finally:
            self.seconds += time.perf_counter() - begin
        if self.step % self.evaluate_every == 0 or self.step == self.steps:
            self.look()

    def look(self) -> None:
        """Evaluate; the scores become a point of the curve."""
        scores = self.scores(self.evaluate)
        self.curve.append({"step": self.step, "train_loss": sum(self.losses) / len(self.losses), **scores})
        self.losses = []
        if not math.isfinite(scores["loss"]):
            self.stopped = f"the evaluation after step {self.step} is not finite"
        elif self.solved is not None and scores.get("worst", scores["accuracy"]) > self.solved:
            self.stopped = f"{SOLVED} after step {self.step}"

    def scores(self, evaluate: Callable[[nn.Module], dict[str, float]]) -> dict[str, float]:
        """What `evaluate` finds, in eval mode and the precision of training."""
        with evaluating(self.model), self.training.precision():
            return evaluate(self.model)

    PROGRESS = ("tokens", "seconds", "losses", "curve", "stopped")

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors in use, and the rest as plain data."""
        return self.training.state(), {"step": self.step, **{name: getattr(self, name) for name in self.PROGRESS}}

    def resume(self, progress: dict[str, Any]) -> None:
        """Continue where this state was taken, with its tensors filled in."""
        self.training.resume(progress["step"])
        for name in self.PROGRESS:
            setattr(self, name, progress[name])
