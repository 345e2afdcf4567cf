"""Training that can stop after any step and go on later with the same bits: studies of many small models are made of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one model is trained. AdamW with torch's betas; the decay falls on all parameters."""

    steps: int
    lr: float
    weight_decay: float
    evaluate_every: int  # steps
    warmup: int = 0  # steps
    cosine: bool = False  # down to 0 after the warm-up; otherwise the rate stays
    clip: float | None = None  # largest norm of the gradient
    solved: float | None = None  # stop after an evaluation with a higher accuracy

    def rate(self, step: int) -> float:
        """The learning rate of the update number `step`, from 0."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        if not self.cosine:
            return self.lr
        return self.lr * 0.5 * (1 + math.cos(math.pi * (step - self.warmup) / max(1, self.steps - self.warmup)))


class Examples:
    """Batches of a fixed set, by step: every epoch has its own order, which depends on nothing but seed and epoch."""

    def __init__(self, inputs: Tensor, targets: Tensor, *, batch: int, seed: int) -> None:
        self.inputs, self.targets, self.batch, self.seed = inputs, targets, batch, seed
        self.epoch = math.ceil(len(inputs) / batch)  # steps
        self._order: tuple[int, Tensor] = (-1, torch.empty(0))

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        epoch, place = divmod(step, self.epoch)
        if self._order[0] != epoch:
            generator = torch.Generator().manual_seed(1_000_003 * self.seed + epoch)
            self._order = epoch, torch.randperm(len(self.inputs), generator=generator)
        rows = self._order[1][place * self.batch : (place + 1) * self.batch]
        return self.inputs[rows], self.targets[rows]


class Training:
    """A model on its way. Call advance() until `finished`; what is between is in state(), apart from the arguments.

    batches: the inputs and targets of a step. evaluate: gives at least "loss", and "accuracy" if the recipe has `solved`; what
    it gives goes into the curve.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        batches: Callable[[int], tuple[Tensor, Tensor]],
        evaluate: Callable[[nn.Module], dict[str, float]],
    ) -> None:
        self.model, self.recipe, self.batches, self.evaluate = model, recipe, batches, evaluate
        self.optimiser = torch.optim.AdamW(model.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay)
        self.step = 0
        self.tokens = 0
        self.seconds = 0.0  # in updates, without evaluations
        self.losses: list[float] = []  # since the last evaluation
        self.curve: list[dict[str, float]] = []
        self.stopped: str | None = None  # why it ended before its time

    @property
    def finished(self) -> bool:
        return self.step >= self.recipe.steps or self.stopped is not None

    def advance(self) -> None:
        """One update, and an evaluation where one is due."""
        begin = time.perf_counter()
        loss = self.update()
        self.seconds += time.perf_counter() - begin
        if not math.isfinite(loss):
            self.stopped = f"the loss of step {self.step + 1} is not finite"
            return
        self.losses.append(loss)
        self.step += 1
        if self.step % self.recipe.evaluate_every == 0 or self.step == self.recipe.steps:
            self.look()

    def update(self) -> float:
        """The loss before the update; one that is not finite leaves the model alone."""
        inputs, targets = self.batches(self.step)
        loss = next_token_loss(self.model(inputs), targets)
        self.tokens += inputs.numel()
        if loss.isfinite():
            self.optimiser.param_groups[0]["lr"] = self.recipe.rate(self.step)
            self.optimiser.zero_grad(set_to_none=True)
            loss.backward()
            if self.recipe.clip is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
            self.optimiser.step()
        return float(loss.detach())

    def look(self) -> None:
        scores = self.evaluate(self.model)
        self.curve.append({"step": self.step, "train_loss": sum(self.losses) / len(self.losses), **scores})
        self.losses = []
        if not math.isfinite(scores["loss"]):
            self.stopped = f"the evaluation after step {self.step} is not finite"
        elif self.recipe.solved is not None and scores["accuracy"] > self.recipe.solved:
            self.stopped = f"solved after step {self.step}"

    PROGRESS = ("step", "tokens", "seconds", "losses", "curve", "stopped")

    def state(self) -> dict[str, Any]:
        progress = {name: getattr(self, name) for name in self.PROGRESS}
        return {"model": self.model.state_dict(), "optimiser": self.optimiser.state_dict(), **progress}

    def load_state(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])
        for name in self.PROGRESS:
            setattr(self, name, state[name])


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy (nats) of logits (B T vocabulary) over the counted targets (B T, −100 is not)."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
