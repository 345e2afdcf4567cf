"""The right half of Table 1: small GPT-2 style language models, one for each mixer, on the same text in the same order.

As in the paper, a loss is measured on a sample of the training text again and again, the final loss is the mean of the last
five, and it counts after how many evaluations the loss fell below a threshold. The validation loss is kept beside it.
Models have learned position embeddings and equal parameters (models/budget.py), apart from labels with "!".
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from hypermlp.config import choose_from
from hypermlp.data.corpus import Corpus, SplitName, open_corpus, read_corpus
from hypermlp.data.packing import Batches
from hypermlp.experiments import runs
from hypermlp.experiments.runs import Desk, Folder, Progress, Record
from hypermlp.mixers import build_mixer, own
from hypermlp.models.budget import MatchedModel, match_models
from hypermlp.models.lm import LanguageModel, ModelConfig, count_parameters
from hypermlp.train.resumable import Recipe, Training, next_token_loss

LAST = 5  # evaluations whose mean is the final loss


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Every number that the runs of a study have in common."""

    corpus: str = "stdlib"  # or the folder of a prepared one
    width: int
    depth: int
    length: int  # context
    batch: int
    steps: int
    lr: float
    weight_decay: float = 0.1
    warmup: float = 0.05  # share of the steps
    evaluations: int = 80
    sample: int = 16  # batches of each split that an evaluation looks at

    def __post_init__(self) -> None:
        for name in ("width", "depth", "length", "batch", "steps", "evaluations", "sample"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least 1")
        if not self.lr > 0 or not 0 <= self.warmup < 1 or self.weight_decay < 0:
            raise ValueError(f"lr ({self.lr}) must be above 0, warmup ({self.warmup}) below 1, weight_decay at least 0")

    def config(self, vocabulary: int, mixer: str, size: int | None, inner: int) -> ModelConfig:
        return ModelConfig(
            vocabulary=vocabulary,
            width=self.width,
            depth=self.depth,
            length=self.length,
            mixer=mixer,
            size=size,
            inner=inner,
            style="gpt2",
        )


# paper: nanoGPT's own numbers, for OpenWebText2 prepared with a GPT-2 tokenizer. quick: to see it work.
SCALES: dict[str, dict[str, Any]] = {
    "paper": {"width": 768, "depth": 12, "length": 1024, "batch": 480, "steps": 40_000, "lr": 6e-4, "sample": 200},
    "laptop": {"width": 96, "depth": 2, "length": 128, "batch": 16, "steps": 600, "lr": 2e-3, "evaluations": 30, "sample": 8},
    "quick": {"width": 32, "depth": 1, "length": 64, "batch": 8, "steps": 40, "lr": 3e-3, "evaluations": 8, "sample": 4},
}


def make_plan(scale: str, **changes: Any) -> Plan:
    """The plan of a scale, with other numbers where they are given and not None."""
    choose_from("scale", scale, tuple(SCALES))
    return Plan(**SCALES[scale] | {name: value for name, value in changes.items() if value is not None})


@dataclass(frozen=True, kw_only=True)
class Job:
    """One model: its record depends on nothing else."""

    mixer: str
    seed: int
    plan: Plan
    inner: int
    size: int | None
    note: str = ""  # what is to be said about the model's budget

    @property
    def key(self) -> str:
        return f"language/{self.mixer}/seed={self.seed}"

    @property
    def identity(self) -> Record:
        return {"kind": "language", "mixer": self.mixer, "seed": self.seed}

    @property
    def cost(self) -> float:
        return float(self.plan.steps)


@lru_cache(maxsize=1)  # the same for all runs of a worker
def load_corpus(corpus: str) -> Corpus:
    return read_corpus() if corpus == "stdlib" else open_corpus(Path(corpus))


@lru_cache(maxsize=1)
def load_samples(plan: Plan) -> dict[str, tuple[tuple[Tensor, Tensor], ...]]:
    """The batches that evaluations look at, the same in all runs."""

    def sample(split: SplitName) -> tuple[tuple[Tensor, Tensor], ...]:
        batches = Batches(load_corpus(plan.corpus), split, context=plan.length, batch=plan.batch, seed=1_000_003)
        return tuple(batches.at(step)[:2] for step in range(plan.sample))

    return {"loss": sample("train"), "validation_loss": sample("validation")}


@torch.no_grad()
def losses(plan: Plan, model: nn.Module) -> dict[str, float]:
    """Mean loss of a token on both samples."""
    found = {}
    for name, batches in load_samples(plan).items():
        parts = [(float(next_token_loss(model(inputs), targets)), int((targets != -100).sum())) for inputs, targets in batches]
        found[name] = sum(loss * count for loss, count in parts) / sum(count for _, count in parts)
    return found


def train(job: Job, desk: Desk | None = None) -> Record:
    """Train one model. With a desk it tells there how far it is, and goes on where it was stopped."""
    plan, corpus = job.plan, load_corpus(job.plan.corpus)
    own.adopt([job.mixer])
    torch.manual_seed(job.seed)
    model = LanguageModel(plan.config(corpus.tokenizer.vocabulary, job.mixer, job.size, job.inner))
    batches = Batches(corpus, "train", context=plan.length, batch=plan.batch, seed=job.seed)
    recipe = Recipe(
        steps=plan.steps,
        lr=plan.lr,
        weight_decay=plan.weight_decay,
        evaluate_every=max(1, plan.steps // plan.evaluations),
        warmup=math.ceil(plan.warmup * plan.steps),
        cosine=True,
        clip=1.0,
    )
    training = Training(model, recipe, lambda step: batches.at(step)[:2], partial(losses, plan))
    if desk is not None and (state := desk.load()) is not None:
        training.load_state(state)
    while not training.finished:
        training.advance()
        if desk is not None:
            shown = {"loss": training.curve[-1]["loss"]} if training.curve else {}
            desk.tick(training.step, plan.steps, shown, training.state)
    final = None
    if training.stopped is None:
        last = training.curve[-LAST:]
        final = {name: fmean(point[name] for point in last) for name in ("loss", "validation_loss")}
    return {
        "parameters": count_parameters(model),
        "inner": job.inner,
        "size": job.size,
        "budget": job.note,
        "final": final,
        "stopped": training.stopped,
        "curve": training.curve,
        "seconds": training.seconds,
        "tokens_per_second": training.tokens / training.seconds,
    }


def study(
    out: Path,
    mixers: Sequence[str],
    plan: Plan,
    *,
    seeds: int = 1,
    workers: int | None = None,
    retry_failed: bool = False,
    tell: Callable[[Progress], None] = lambda progress: None,
    done: Callable[[Record], None] = lambda record: None,
) -> list[Record]:
    """Run what is missing in `out`, and return the records of all that was asked for (experiments/runs.py)."""
    check(mixers, seeds, plan)
    with Folder(out) as folder:
        jobs = plan_jobs(folder, mixers, plan, seeds)
        return runs.run(folder, jobs, train, workers=workers, retry_failed=retry_failed, tell=tell, done=done)


def check(mixers: Sequence[str], seeds: int, plan: Plan) -> None:
    """Bad names fail before anything starts."""
    if not mixers or len(set(mixers)) < len(mixers):
        raise ValueError(f"mixers ({', '.join(mixers)}) must be at least one, each named once")
    if seeds < 1:
        raise ValueError(f"seeds ({seeds}) must be at least 1")
    own.adopt(mixers)
    for mixer in mixers:
        build_mixer(mixer, 64, 64)
    load_samples(plan)


def plan_jobs(folder: Folder, mixers: Sequence[str], plan: Plan, seeds: int) -> list[Job]:
    """Write the plan into the folder, and list its runs. Mixers that came before take part in the budget."""
    known: dict[str, Any] = folder.plan.get("models", {})
    matched = match_all(list(dict.fromkeys([*known, *mixers])), plan)
    models = {name: {"inner": m.inner, "size": m.mixer.size} for name, m in matched.items()}
    changed = [name for name, model in known.items() if model != models[name]]
    if changed:
        raise ValueError(
            f"with {', '.join(mixers)} the largest model is larger than before, so {', '.join(changed)} would have to be "
            f"trained anew to match it; run all of them in another folder than {folder.path}"
        )
    folder.begin({"study": "language", **dataclasses.asdict(plan), "models": models, "own": own.adopt(mixers)})
    return [
        Job(
            mixer=name,
            seed=seed,
            plan=plan,
            inner=matched[name].inner,
            size=matched[name].mixer.size,
            note=matched[name].mixer.note,
        )
        for seed in range(seeds)
        for name in mixers
    ]


def match_all(mixers: Sequence[str], plan: Plan) -> dict[str, MatchedModel]:
    vocabulary = load_corpus(plan.corpus).tokenizer.vocabulary
    inner = plan.config(vocabulary, mixers[0], None, 1).replace(inner=None).inner
    assert inner is not None

    def build(mixer: str, size: int | None, inner: int) -> nn.Module:
        return LanguageModel(plan.config(vocabulary, mixer, size, inner))

    return match_models(mixers, plan.width, plan.length, build, inner)
