"""The right half of Table 1: small GPT-2 style language models, one per mixer, on the same text in the same order.

As in the paper, a loss is measured on a sample of the training text again and again, the final loss is the mean of the last
five, and it counts after how many evaluations the loss fell below a threshold. The validation loss is kept beside it.
Models have learned position embeddings and equal parameters (models/budget.py), apart from labels with "!".
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, Self

import torch
from torch import nn

from hypermlp.batch import Batch
from hypermlp.checks import choose_from
from hypermlp.config import IGNORED, InitScale
from hypermlp.data.corpus import Corpus, SplitName, open_corpus, read_corpus
from hypermlp.data.packing import Batches
from hypermlp.files import Record
from hypermlp.mixers import own
from hypermlp.mixers.hybrid import Size
from hypermlp.models.budget import MatchedModel, match_models
from hypermlp.models.lm import LanguageModel, ModelConfig, Style, count_parameters, published_inner, token_loss
from hypermlp.paper.configs import PAPER
from hypermlp.runs.configs import PADDING
from hypermlp.studies.study import Study, check_given
from hypermlp.studies.worker import RunContext, Work, run_to_the_end
from hypermlp.train.fit import Fit
from hypermlp.train.optimisation import Decayed, Recipe

LAST = 5  # evaluations whose mean is the final loss


@dataclass(frozen=True, kw_only=True)
class LanguageStudy(Study):
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
    micro: int | None = None  # rows that are computed at once, and of a batch of an evaluation; None: the whole batch
    vocabulary: int | None = None  # None: the tokenizer's
    decay: int | None = None  # the step at which the cosine ends; None: the last
    final: float = 0.0  # of lr, where the cosine ends
    betas: tuple[float, float] = (0.9, 0.999)
    decayed: Decayed = "all"
    style: Style = "gpt2"

    kind: ClassVar[str] = "language"
    measure: ClassVar[str] = "validation_loss"
    rate_field: ClassVar[str] = "lr"
    flat: ClassVar[bool] = True
    added_later: ClassVar[tuple[str, ...]] = (
        *Study.added_later,
        "micro",
        "vocabulary",
        "decay",
        "final",
        "betas",
        "decayed",
        "style",
    )

    def __post_init__(self) -> None:
        for name in ("width", "depth", "length", "batch", "steps", "evaluations", "sample"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least 1")
        if not self.lr > 0 or not 0 <= self.warmup < 1 or self.weight_decay < 0:
            raise ValueError(f"lr ({self.lr}) must be above 0, warmup ({self.warmup}) below 1, weight_decay at least 0")

    @property
    def work(self) -> Work:
        return train

    @property
    def recipe(self) -> Recipe:
        return Recipe(
            steps=self.steps,
            lr=self.lr,
            warmup=math.ceil(self.warmup * self.steps),
            decay=self.decay,
            final=self.final,
            weight_decay=self.weight_decay,
            decayed=self.decayed,
            betas=self.betas,
            clip=1.0,
            precision=self.precision,
        )

    def config(self, mixer: str, size: Size, inner: int) -> ModelConfig:
        needed = load_corpus(self.corpus).tokenizer.vocabulary
        fits = self.vocabulary is not None and needed <= self.vocabulary < needed + PADDING
        return ModelConfig(
            vocabulary=self.vocabulary if fits and self.vocabulary else needed,
            width=self.width,
            depth=self.depth,
            length=self.length,
            mixer=mixer,
            size=size,
            init=self.init,
            init_scale=self.init_scale,
            inner=inner,
            style=self.style,
        )

    def check(self, mixers: Sequence[str], seeds: int) -> None:
        super().check(mixers, seeds)
        if self.given is not None:
            check_given(self.search, set(mixers), self.given.keys(), self.given.values())
        load_samples(self)

    def settings(self) -> Mapping[str, Any]:
        return {"": None}

    def match(self, setting: Any, mixers: Sequence[str]) -> dict[str, MatchedModel]:
        def build(mixer: str, size: Size, inner: int) -> nn.Module:
            return LanguageModel(self.config(mixer, size, inner))

        return match_models(mixers, self.width, self.length, build, published_inner(self.width, self.style))

    def at(self, rate: float, scale: InitScale) -> Self:
        return dataclasses.replace(self, lr=rate, init_scale=scale)

    def shape(self, setting: Any) -> tuple[int, int]:
        return self.width, self.length

    def jobs(self, setting: Any, mixer: str, model: MatchedModel, seed: int) -> list[Any]:
        size, note = model.mixer.size, model.mixer.note
        study = self if self.given is None else dataclasses.replace(self, lr=self.given[mixer])
        return [LanguageJob(mixer=mixer, seed=seed, study=study, inner=model.inner, size=size, note=note)]


def nanogpt() -> dict[str, Any]:
    """The paper's NanoGPT experiment, in the numbers of its one definition (paper/configs.py)."""
    config = PAPER["nanogpt-owt2"]
    model, how = config.model, config.train
    return {
        "width": model.width,
        "depth": model.depth,
        "length": model.length,
        "vocabulary": model.vocabulary,
        "batch": how.batch,
        "micro": how.micro,
        "steps": how.steps,
        "lr": how.lr,
        "weight_decay": how.weight_decay,
        "warmup": how.warmup / how.steps,
        "evaluations": how.steps // how.evaluate_every,
        "sample": how.evaluate_batches,
        "decay": how.decay,
        "final": how.final,
        "betas": how.betas,
        "decayed": how.decayed,
        "style": model.style,
        "precision": how.precision,
    }


# paper: for OpenWebText2 prepared with a GPT-2 tokenizer. quick: to see it work.
SCALES: dict[str, dict[str, Any]] = {
    "paper": nanogpt(),
    "laptop": {
        "width": 96,
        "depth": 2,
        "length": 128,
        "batch": 16,
        "steps": 600,
        "lr": 2e-3,
        "evaluations": 30,
        "sample": 8,
        "init": "decays",
    },
    "quick": {
        "width": 32,
        "depth": 1,
        "length": 64,
        "batch": 8,
        "steps": 40,
        "lr": 3e-3,
        "evaluations": 8,
        "sample": 4,
        "init": "decays",
    },
}


def language_study(scale: str, *, corpus: str | None = None, init: str | None = None) -> LanguageStudy:
    """The study of a scale, on Python's own source or a prepared corpus; init: instead of the scale's."""
    choose_from("scale", scale, tuple(SCALES))
    given = {"corpus": corpus, "init": init}
    return LanguageStudy(**SCALES[scale] | {name: value for name, value in given.items() if value is not None})


# ---- one run ----


@dataclass(frozen=True, kw_only=True)
class LanguageJob:
    """One model: its record depends on nothing else."""

    mixer: str
    seed: int
    study: LanguageStudy
    inner: int
    size: Size
    note: str = ""  # on the model's budget

    @property
    def key(self) -> str:
        rate = f",lr={self.study.lr:g}" if self.study.search is not None else ""  # otherwise the plan has it
        scale = "" if self.study.init_scale == "0.02" else f",scale={self.study.init_scale}"
        return f"language/{self.mixer}/seed={self.seed}{rate}{scale}"

    @property
    def identity(self) -> Record:
        study = self.study
        return {
            "kind": "language",
            "mixer": self.mixer,
            "seed": self.seed,
            "lr": study.lr,
            "init_scale": study.init_scale,
        }

    @property
    def cost(self) -> float:
        return float(self.study.steps)


@lru_cache(maxsize=1)  # the same for all runs of a worker
def load_corpus(corpus: str) -> Corpus:
    return read_corpus() if corpus == "stdlib" else open_corpus(Path(corpus))


@lru_cache(maxsize=1)
def load_samples(study: LanguageStudy) -> dict[str, list[Batch]]:
    """The batches that evaluations look at, the same in all runs."""
    rows = study.micro or study.batch

    def sample(split: SplitName) -> list[Batch]:
        batches = Batches(load_corpus(study.corpus), split, context=study.length, batch=rows, seed=1_000_003)
        return [one for step in range(study.sample) for one in batches.passes(step)]

    return {"loss": sample("train"), "validation_loss": sample("validation")}


@torch.no_grad()
def losses(study: LanguageStudy, model: nn.Module) -> dict[str, float]:
    """Mean loss of a token on both samples."""
    device = next(model.parameters()).device
    found = {}
    for name, batches in load_samples(study).items():
        total = counted = 0.0
        for inputs, targets, _ in batches:
            count = int((targets != IGNORED).sum())
            total += count * float(token_loss(model(inputs.to(device)).float(), targets.to(device)))
            counted += count
        found[name] = total / counted
    return found


def train(job: LanguageJob, context: RunContext | None = None) -> Record:
    """Train one model. With a context it reports how far it is, and resumes where it was stopped."""
    study = job.study
    own.adopt([job.mixer])
    torch.manual_seed(job.seed)
    model = LanguageModel(study.config(job.mixer, job.size, job.inner))
    rows: dict[str, Any] = {"context": study.length, "batch": study.batch, "micro": study.micro}
    batches = Batches(load_corpus(study.corpus), "train", **rows, seed=job.seed)
    run = Fit(
        model if context is None else model.to(context.device),
        study.recipe,
        batches.passes,
        partial(losses, study),
        evaluate_every=max(1, study.steps // study.evaluations),
        world=None if context is None else context.world,
    )
    run_to_the_end(run, context, lambda run: {"loss": run.curve[-1]["loss"]} if run.curve else {})
    final = None
    if run.stopped is None:
        last = run.curve[-LAST:]
        final = {name: fmean(point[name] for point in last) for name in ("loss", "validation_loss")}
    return {
        "parameters": count_parameters(model),
        "inner": job.inner,
        "size": job.size,
        "budget": job.note,
        "final": final,
        "stopped": run.stopped,
        "curve": run.curve,
        "seconds": run.seconds,
        "tokens_per_second": run.tokens / run.seconds,
    }
