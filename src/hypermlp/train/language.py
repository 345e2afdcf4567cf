"""Training of a language model, in one process or many: its configuration, and the loop with checkpoints and metrics."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

from hypermlp.checks import choose_from, divisible
from hypermlp.models.lm import LanguageModel
from hypermlp.train.checkpoint import Checkpoints
from hypermlp.train.distributed import Parallel, World, distribute, unwrapped
from hypermlp.train.metrics import Metrics
from hypermlp.train.optimisation import Schedule
from hypermlp.train.training import Pass, Precision, Recipe, Step, Training, evaluating


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
    parallel: Parallel = "fsdp"  # how several processes share the work
    checkpointing: bool = False  # recompute blocks in the backward pass: less memory, a third more work
    evaluate_every: int = 100
    evaluate_batches: int = 20  # of an evaluation, each of `batch` sequences, over all processes
    sample: int = 200  # tokens of text to write at an evaluation
    save_every: int = 100
    keep: int = 2  # checkpoints
    asynchronous: bool = False  # keep training while a checkpoint is written from a copy in memory
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

    @property
    def recipe(self) -> Recipe:
        return Recipe(
            schedule=Schedule(steps=self.steps, lr=self.lr, warmup=self.warmup, decay=self.decay, final=self.final),
            weight_decay=self.weight_decay,
            betas=self.betas,
            clip=self.clip,
            precision=self.precision,
            seed=self.seed,
        )

    def passes(self, world: int) -> int:
        """How many times each process runs the model for an update."""
        divisible("train.batch", self.batch, self.micro * world, f"train.micro × processes ({self.micro} × {world})")
        return self.batch // (self.micro * world)


def new_training(model: LanguageModel, config: TrainConfig, world: World | None = None) -> Training:
    """The model spread over the processes of `world`, ready for its first update."""
    world = world or World()
    model.checkpointing = config.checkpointing
    return Training(distribute(model, config.parallel, config.precision == "bfloat16", world), config.recipe, world)


def language_model(training: Training) -> LanguageModel:
    model = unwrapped(training.model)
    assert isinstance(model, LanguageModel)
    return model


def train(
    training: Training,
    config: TrainConfig,
    batch: Callable[[int], Sequence[Pass]],
    checkpoints: Checkpoints,
    metrics: Metrics | None,
    *,
    validation: Sequence[Pass] = (),
    sample: Callable[[LanguageModel], str] | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> Iterator[Step]:
    """Train to the last step, or until any process is `stopping`; leaves a checkpoint there.

    batch: this process's share of the batch of the update that follows so many others.
    metrics: of the first process.
    """
    world = training.world
    saved = training.step
    while training.step < config.steps and not any(world.sum(stopping())):
        done = training.update(batch(training.step))
        last = done.step == config.steps
        if validation and (last or done.step % config.evaluate_every == 0):
            with evaluating(training.model):
                text = sample(language_model(training)) if sample is not None else None
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
