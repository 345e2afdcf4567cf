"""Training of a language model, in one process or many, that can stop after any step and go on later.

Learning rate, data and random numbers are functions of the step, so model and optimiser are all there is to save. The loss of
an update is the mean over the counted targets of its whole batch, however that is divided into passes and processes.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hypermlp.config import choose_from, divisible
from hypermlp.errors import RunError
from hypermlp.models.lm import LanguageModel
from hypermlp.models.saved import weights
from hypermlp.train.checkpoint import Checkpoints
from hypermlp.train.distributed import Parallel, World, plain, quiet, settle, spread
from hypermlp.train.metrics import Metrics
from hypermlp.train.optimisation import Schedule, parameter_groups

Precision = Literal["float32", "bfloat16"]
Pass = tuple[Tensor, Tensor, Tensor | None]  # inputs, targets (B T; −100 does not count), and cu_seqlens of packed documents
MOMENTS = ("exp_avg", "exp_avg_sq")  # what AdamW keeps of every parameter


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a language model is trained; plain data."""

    steps: int
    batch: int  # sequences of an update, over all processes
    micro: int  # sequences that a process computes at once; the rest of its share is accumulated
    lr: float  # at its peak
    warmup: int  # steps
    decay: int | None = None  # the step at which the cosine ends; None: the last
    final: float = 0.1  # of lr, where the cosine ends
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = 1.0  # largest norm of the gradient
    precision: Precision = "float32"  # of computing; weights and optimiser are float32
    parallel: Parallel = "fsdp"  # what several processes do
    checkpointing: bool = False  # recompute blocks in the backward pass: less memory, a third more work
    evaluate_every: int = 100
    evaluate_batches: int = 20  # passes of an evaluation, in each process
    sample: int = 200  # tokens of text to write at an evaluation
    save_every: int = 100
    keep: int = 2  # checkpoints
    asynchronous: bool = False  # train on while a checkpoint is written, from a copy in memory
    seed: int = 0  # of weights and the order of the data

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "micro", "evaluate_every", "evaluate_batches", "save_every", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"train.{name} ({getattr(self, name)}) must be at least 1")
        for name in ("warmup", "sample", "weight_decay", "final", "seed"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"train.{name} ({getattr(self, name)}) must be at least 0")
        for name in ("lr", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"train.{name} ({getattr(self, name)}) must be positive and finite")
        object.__setattr__(self, "betas", tuple(self.betas))
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"train.betas ({self.betas}) must be two numbers of at least 0 and below 1")
        if self.decay is not None and self.decay <= self.warmup:
            raise ValueError(f"train.decay ({self.decay}) must be greater than train.warmup ({self.warmup})")
        choose_from("train.precision", self.precision, get_args(Precision))
        choose_from("train.parallel", self.parallel, get_args(Parallel))
        divisible("train.batch", self.batch, self.micro, f"train.micro ({self.micro})")

    def rate(self, step: int) -> float:
        """The learning rate of the update that follows `step` others."""
        return Schedule(steps=self.steps, lr=self.lr, warmup=self.warmup, decay=self.decay, final=self.final).rate(step)

    def passes(self, world: int) -> int:
        """How many times each process runs the model for an update."""
        divisible("train.batch", self.batch, self.micro * world, f"train.micro × processes ({self.micro} × {world})")
        return self.batch // (self.micro * world)


@dataclass(frozen=True, kw_only=True)
class Step:
    """An update, and the evaluation after it where there was one."""

    step: int  # updates so far
    tokens: int  # seen so far
    loss: float  # before the update
    lr: float
    grad_norm: float  # before clipping
    tokens_per_second: float
    validation: float | None = None  # loss
    sample: str | None = None

    def record(self) -> dict[str, Any]:
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


class Training:
    """A model, its optimiser, and how many updates they have had."""

    def __init__(self, model: LanguageModel, config: TrainConfig, world: World | None = None) -> None:
        self.config, self.world, self.step = config, world or World(), 0
        half = config.precision == "bfloat16"
        model.checkpointing = config.checkpointing
        self.model = spread(model, config.parallel, half, self.world)
        self.autocast = half and not (self.world.size > 1 and config.parallel == "fsdp")
        self.optimiser = torch.optim.AdamW(parameter_groups(self.model, config.weight_decay), lr=config.lr, betas=config.betas)
        for p in self.model.parameters():  # as its first step would do, so that there is always the same to save
            self.optimiser.state[p] = {"step": torch.tensor(0.0), **{name: torch.zeros_like(p) for name in MOMENTS}}

    def update(self, passes: Sequence[Pass]) -> Step:
        """One update from this process's share of the batch."""
        begin = time.perf_counter()
        torch.manual_seed(((self.config.seed * 1_000_003 + self.step) * 65_537 + self.world.rank) % 2**63)
        counted, seen = self.world.sum(*count(passes))
        parts = []
        for i, one in enumerate(passes):
            with quiet(self.model) if i + 1 < len(passes) else nullcontext():
                part = self.total_loss(one) / max(counted, 1)
                (part * self.world.size).backward()  # gradients are averaged over processes, and should be summed
            parts.append(part.detach())
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        (loss,) = self.world.sum(float(torch.stack(parts).sum()))
        if not math.isfinite(loss) or not norm.isfinite():
            raise RunError(
                f"the loss ({loss}) or the gradient (norm {float(norm)}) of step {self.step + 1} is not finite; "
                "start anew with a lower train.lr or a longer train.warmup"
            )
        rate = self.config.rate(self.step)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.step += 1
        return Step(
            step=self.step,
            tokens=self.step * int(seen),
            loss=loss,
            lr=rate,
            grad_norm=float(norm),
            tokens_per_second=seen / (time.perf_counter() - begin),
        )

    def total_loss(self, one: Pass) -> Tensor:
        """Summed over the counted targets."""
        inputs, targets, bounds = one
        device = self.world.device
        with torch.autocast(device.type, torch.bfloat16, enabled=self.autocast):
            logits = self.model(inputs.to(device), cu_seqlens=None if bounds is None else bounds.to(device))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.to(device).flatten(), reduction="sum")

    @torch.no_grad()
    def evaluate(self, passes: Sequence[Pass]) -> float:
        """Mean loss over the counted targets of all processes."""
        total = sum(float(self.total_loss(one)) for one in passes)
        total, counted = self.world.sum(total, count(passes)[0])
        return total / max(counted, 1)

    def state(self) -> dict[str, Tensor]:
        """All that a checkpoint needs beside the step; the tensors are those in use."""
        settle(self.model)
        found = {f"model.{name}": tensor for name, tensor in weights(plain(self.model)).items()}
        for name, p in plain(self.model).named_parameters():
            found |= {f"optimiser.{name}.{moment}": self.optimiser.state[p][moment] for moment in MOMENTS}
        return found

    def resume(self, step: int) -> None:
        """Go on after `step`, with the state of that step filled in."""
        self.step = step
        for state in self.optimiser.state.values():
            state["step"].fill_(step)


def count(passes: Sequence[Pass]) -> tuple[int, int]:
    """Targets that count, and all tokens."""
    counted = sum(int((targets != -100).sum()) for _, targets, _ in passes)
    return counted, sum(inputs.numel() for inputs, _, _ in passes)


def train(
    training: Training,
    batch: Callable[[int], Sequence[Pass]],
    checkpoints: Checkpoints,
    metrics: Metrics | None,
    *,
    validation: Sequence[Pass] = (),
    sample: Callable[[LanguageModel], str] | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> Iterator[Step]:
    """Train to the last step, or until any process is `stopping`; a checkpoint is left of where that is.

    batch: this process's share of the batch of the update that follows so many others.
    metrics: of the first process.
    """
    config, world = training.config, training.world
    saved = training.step
    while training.step < config.steps and not any(world.sum(stopping())):
        done = training.update(batch(training.step))
        last = done.step == config.steps
        if validation and (last or done.step % config.evaluate_every == 0):
            text = sample(plain(training.model)) if sample is not None else None
            done = dataclasses.replace(done, validation=training.evaluate(validation), sample=text)
        if metrics is not None:
            metrics.append(done.record())
        if not last and done.step % config.save_every == 0:
            save(training, checkpoints, metrics, wait=not config.asynchronous)
            saved = done.step
        yield done
    if training.step != saved or training.step == 0:
        save(training, checkpoints, metrics, wait=True)
    checkpoints.finish()


def save(training: Training, checkpoints: Checkpoints, metrics: Metrics | None, *, wait: bool) -> None:
    if metrics is not None:
        metrics.sync()
    checkpoints.save(training.step, training.state(), wait=wait)
