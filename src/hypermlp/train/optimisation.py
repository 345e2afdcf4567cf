"""How parameters are updated: the one schedule of the learning rate, and the one rule for what weight decay applies to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

Decayed = Literal["matrices", "all"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Linear warm-up to `lr`, then a cosine down to `final` · lr, which stays.

    >>> [round(Schedule(steps=4, lr=1.0, warmup=2, final=0.0).rate(step), 2) for step in range(4)]
    [0.5, 1.0, 1.0, 0.5]
    """

    steps: int
    lr: float
    warmup: int = 0  # steps
    decay: int | None = None  # the step at which the cosine ends; None: the last
    final: float = 0.1  # 1: the rate stays at `lr`

    def rate(self, step: int) -> float:
        """The learning rate of the update that follows `step` others."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        end = self.steps if self.decay is None else self.decay
        done = min(1.0, (step - self.warmup) / max(1, end - self.warmup))
        return self.lr * (self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * done)))


def parameter_groups(model: nn.Module, weight_decay: float, *, decayed: Decayed = "matrices") -> list[dict[str, Any]]:
    """Parameter groups for a torch optimiser: first the parameters that decay, then the others.

    Args:
        model: whose parameters are grouped, each once, in the order of `model.parameters()`.
        weight_decay: of the first group; the second has 0.
        decayed: "matrices": the weights of linear layers, without a head tied to an embedding. Not embeddings, norms, biases,
            convolutions, decay rates of recurrent mixers or lag parameters of HyperGLU. "all": every parameter.

    >>> [len(group["params"]) for group in parameter_groups(nn.Linear(2, 3), 0.1)]
    [1, 1]
    """
    parameters = list(model.parameters())
    chosen: set[Any] = set(parameters)
    if decayed == "matrices":
        chosen = set(linear_weights(model))
    return [
        {"params": [p for p in parameters if p in chosen], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p not in chosen], "weight_decay": 0.0},
    ]


def muon_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that an optimiser for matrices, such as Muon, may take: weights of linear layers inside the model.

    Not embeddings, the head (a linear layer as wide as an embedding has rows), norms, biases, convolutions, and not A, B and
    diag of HyperGLU: they are vectors per lag, which do not act as a matrix from features to features. AdamW takes the others:

        muon = muon_parameters(model)
        others = [p for p in model.parameters() if all(p is not q for q in muon)]
    """
    vocabularies = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
    return [weight for weight in linear_weights(model) if weight.shape[0] not in vocabularies]


def linear_weights(model: nn.Module) -> list[nn.Parameter]:
    """The weights of linear layers, each once, without a head tied to an embedding."""
    embeddings = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    weights: list[Any] = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    return [weight for weight in dict.fromkeys(weights) if weight not in embeddings]
