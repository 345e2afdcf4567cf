"""HyperGLU and softmax attention, equal in parameters, learn selective copying side by side."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from hypermlp.data.copying import selective_copying
from hypermlp.models.lm import LanguageModel, ModelConfig, count_parameters, match_inner_width
from hypermlp.train.loop import Trainer, accuracy

WIDTH, DEPTH, LENGTH, N_CONTENT, VOCABULARY = 64, 2, 64, 16, 16
BATCH, LR, TEST_SIZE = 32, 2e-3, 256
MIXERS = ("hyperglu", "softmax")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Where the contestants stand after `step` updates each."""

    step: int
    accuracy: dict[str, float]  # on held-out sequences
    loss: dict[str, float]  # mean since the last evaluation
    seconds: dict[str, float]  # spent in training steps so far


def contestants(seed: int) -> dict[str, LanguageModel]:
    """Two-layer models; the rival's feed-forward is widened until the parameter counts agree."""

    def build(name: str, inner: int) -> LanguageModel:
        torch.manual_seed(seed)
        return LanguageModel(
            ModelConfig(vocabulary=VOCABULARY, width=WIDTH, depth=DEPTH, length=LENGTH, mixer=name, inner=inner, tied=False)
        )

    models = {"hyperglu": build("hyperglu", 2 * WIDTH)}
    target = count_parameters(models["hyperglu"])
    for name in MIXERS[1:]:
        models[name] = build(name, match_inner_width(target, partial(build, name), 2 * WIDTH))
    return models


def run(models: dict[str, LanguageModel], *, steps: int, seed: int, evaluations: int = 12) -> Iterator[Evaluation | int]:
    """Train all models on the same batches; yields the step after each update, and an Evaluation now and then."""
    generator = torch.Generator().manual_seed(seed)
    test = selective_copying(TEST_SIZE, LENGTH, N_CONTENT, VOCABULARY, torch.Generator().manual_seed(seed + 1_000_003))
    trainers = {name: Trainer(model, steps=steps, lr=LR, weight_decay=0.01) for name, model in models.items()}
    seconds = dict.fromkeys(models, 0.0)
    losses: dict[str, list[float]] = {name: [] for name in models}
    every = max(1, steps // evaluations)
    for step in range(1, steps + 1):
        batch = selective_copying(BATCH, LENGTH, N_CONTENT, VOCABULARY, generator)
        for name, trainer in trainers.items():
            begin = time.perf_counter()
            losses[name].append(trainer.step(*batch))
            seconds[name] += time.perf_counter() - begin
        if step % every == 0 or step == steps:
            yield Evaluation(
                step=step,
                accuracy={name: accuracy(model, *test) for name, model in models.items()},
                loss={name: sum(values) / len(values) for name, values in losses.items()},
                seconds=dict(seconds),
            )
            losses = {name: [] for name in models}
        yield step
