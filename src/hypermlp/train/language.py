"""Training of a language model, in one process or many: its configuration, and the loop with checkpoints and metrics."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

from hypermlp import notice
from hypermlp.batch import Batch
from hypermlp.checks import choose_from, divisible
from hypermlp.eval_mode import evaluating
from hypermlp.models.lm import LanguageModel
from hypermlp.train.checkpoint import Checkpoints
from hypermlp.train.distributed import Parallel, World, distribute, unwrapped
from hypermlp.train.metrics import Metrics
from hypermlp.train.optimisation import Recipe
from hypermlp.train.training import Step, Training


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Recipe):
    """How a language model is trained; plain data.

    Recipe and batch decide what a run computes. All other fields say how it is computed, watched and kept, and may change when
    it is resumed.
    """

    batch: int  # sequences of an update, over all processes
    micro: int  # sequences that a process computes at once; the rest of its share is accumulated
    parallel: Parallel = "fsdp"  # how several processes share the work
    mesh: str = ""  # with fsdp: what they share, such as "dp=2,tp=2" (batch and parameters, heads); empty: dp alone
    checkpointing: bool = False  # recompute blocks in the backward pass: less memory, a third more work
    evaluate_every: int = 100
    evaluate_batches: int = 20  # of an evaluation, each of `batch` sequences, over all processes
    sample: int = 200  # tokens of text to write at an evaluation
    save_every: int = 100
    keep: int = 2  # checkpoints
    asynchronous: bool = False  # keep training while a checkpoint is written from a copy in memory

    section: ClassVar[str] = "train."

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(1, "batch", "micro", "evaluate_every", "evaluate_batches", "save_every", "keep")
        self.at_least(0, "sample")
        choose_from("train.parallel", self.parallel, get_args(Parallel))
        self.share(1)

    def share(self, processes: int) -> int:
        """Sequences of an update that each of so many processes computes."""
        divisible("train.batch", self.batch, self.micro * processes, f"train.micro × processes ({self.micro} × {processes})")
        return self.batch // processes

    def to_dict(self) -> dict[str, Any]:
        """Its fields; without those that are as in files from before they were a choice."""
        usual = {("decayed", "matrices"), ("mesh", "")}
        return {name: value for name, value in dataclasses.asdict(self).items() if (name, value) not in usual}


def new_training(model: LanguageModel, config: TrainConfig, world: World | None = None) -> Training:
    """The model spread over the processes of `world`, ready for its first update."""
    world = (world or World()).arranged(config.mesh)
    model.checkpointing = config.checkpointing
    return Training(distribute(model, config.parallel, config.precision == "bfloat16", world), config, world)


def language_model(training: Training) -> LanguageModel:
    model = unwrapped(training.model)
    assert isinstance(model, LanguageModel)
    return model


def train(
    training: Training,
    config: TrainConfig,
    batch: Callable[[int], Sequence[Batch]],
    checkpoints: Checkpoints,
    metrics: Metrics | None,
    *,
    validation: Sequence[Batch] = (),
    sample: Callable[[LanguageModel], str] | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> Iterator[Step]:
    """Train to the last step, or until any process is `stopping`; leaves a checkpoint there.

    Args:
        training: at the step from which it goes on.
        config: how far, and how often it is evaluated and saved.
        batch: this process's share of the batch of the update that follows so many others.
        checkpoints: where they go.
        metrics: of the first process; None for the others.
        validation: this process's share of what the model is evaluated on.
        sample: writes text with the model, at every evaluation.
        stopping: asked before every update.
    """
    world = training.world
    if sample is not None and world.along("cp") > 1:
        if world.main:
            notice.once("no text is sampled during training: processes that share sequences (cp) cannot decode")
        sample = None
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
    """Write a checkpoint, once the lines of its steps are on the disk."""
    if metrics is not None:
        metrics.sync()
    checkpoints.save(training.step, training.state(), wait=wait)
