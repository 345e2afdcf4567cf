"""`hypermlp bench model`: training steps of whole models of equal size, HyperGLU's and softmax attention's, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp.bench import cases
from hypermlp.bench.cases import Case
from hypermlp.bench.layer import Shape
from hypermlp.bench.timing import ratio, take_turns, threads
from hypermlp.mixers import new_layers
from hypermlp.mixers.hybrid import Size
from hypermlp.models.budget import MatchedModel, match_models
from hypermlp.models.lm import LanguageModel, ModelConfig, published_inner
from hypermlp.models.mad import MadLanguageModel


class ModelKind(NamedTuple):
    """A kind of model, as one mixer and its baseline are measured in it."""

    name: str  # "mad" or "language"
    shape: Shape
    depth: int
    vocabulary: int
    mixer: str
    baseline: str

    def build(self, mixer: str, size: Size, inner: int) -> nn.Module:
        _, length, width = self.shape
        if self.name == "mad":
            make_mixer = new_layers(mixer, self.depth, width, length, size)
            return MadLanguageModel(self.vocabulary, width, self.depth, inner, make_mixer)
        return LanguageModel(
            ModelConfig(
                vocabulary=self.vocabulary,
                width=width,
                depth=self.depth,
                length=length,
                mixer=mixer,
                size=size,
                inner=inner,
            )
        )

    def match(self) -> dict[str, MatchedModel]:
        """Sizes at which both models have equally many parameters; the smaller one's feed-forward is widened."""
        _, length, width = self.shape
        return match_models((self.mixer, self.baseline), width, length, self.build, published_inner(width))


def mad(shape: Shape) -> ModelKind:
    """As in MAD's baseline settings: two layers, 16 tokens in the vocabulary."""
    return ModelKind("mad", shape, 2, 16, "G-cg-q-12o", "S-pc")


def language(shape: Shape, depth: int, vocabulary: int) -> ModelKind:
    return ModelKind("language", shape, depth, vocabulary, "hyperglu", "softmax")


class Learner:
    """A model, its optimiser and a batch."""

    def __init__(self, kind: ModelKind, model: nn.Module) -> None:
        self.model = model
        self.optimiser = torch.optim.AdamW(model.parameters(), fused=True)  # as train/training.py does
        generator = torch.Generator().manual_seed(0)
        self.tokens: Tensor = torch.randint(kind.vocabulary, (kind.shape.batch, kind.shape.time + 1), generator=generator)

    def step(self) -> None:
        """Forward, loss, backward, clipped gradients, update."""
        logits = self.model(self.tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)


def run(
    kinds: Sequence[ModelKind],
    *,
    rounds: int = 5,
    thread_counts: Sequence[int] = (2, 1),
    tell: Callable[[str], None] = lambda text: None,
    done: Callable[[dict[str, Any]], None] = lambda row: None,
) -> list[dict[str, Any]]:
    """One row a kind and mixer, the baseline's second."""
    rows = []
    for kind in kinds:
        for row in run_kind(kind, rounds, thread_counts, tell):
            rows.append(row)
            done(row)
    return rows


def run_kind(kind: ModelKind, rounds: int, thread_counts: Sequence[int], tell: Callable[[str], None]) -> list[dict[str, Any]]:
    batch, length, width = kind.shape
    tell(f"{kind.name} model, {kind.shape}: checking the mixers against their reference")
    matched = kind.match()
    learners = {}
    for name, found in matched.items():
        cases.build(Case(name=name, batch=batch, time=length, width=width, size=found.mixer.layer_size)).check()
        torch.manual_seed(0)
        learners[name] = Learner(kind, kind.build(name, found.mixer.size, found.inner))
    rows: dict[str, dict[str, Any]] = {
        name: {
            "model": kind.name,
            "mixer": name,
            "baseline": kind.baseline,
            "shape": list(kind.shape),
            "depth": kind.depth,
            "vocabulary": kind.vocabulary,
            "parameters": found.parameters,
            "deviation": found.parameters / matched[kind.baseline].parameters - 1,
            "size": found.mixer.size,
            "inner": found.inner,
        }
        for name, found in matched.items()
    }
    for count in thread_counts:
        tell(f"{kind.name} model, {kind.shape}: {count} thread{'s' * (count > 1)}, {rounds} rounds")
        clock = time.process_time if count == 1 else time.perf_counter
        with threads(count):
            seconds = take_turns({name: learner.step for name, learner in learners.items()}, rounds, clock=clock)
        for name, spent in seconds.items():
            median = sorted(spent)[len(spent) // 2]
            rows[name][f"training_{count}t"] = {
                "seconds": median,
                "ratio": ratio(spent, seconds[kind.baseline])._asdict(),
                "tokens_per_second": batch * length / median,
                "rounds": spent,
            }
    return list(rows.values())
