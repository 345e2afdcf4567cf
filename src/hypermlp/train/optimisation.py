"""How parameters are updated: the one recipe, with the schedule of the learning rate, and the one rule for what decays."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from torch import nn

from hypermlp.checks import choose_from

Precision = Literal["float32", "bfloat16"]
Decayed = Literal["matrices", "two-dimensional", "all"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a model is updated: AdamW with a linear warm-up to `lr`, then a cosine down to `final` · lr, which stays.

    >>> recipe = Recipe(steps=4, lr=1.0, warmup=2, final=0.0)
    >>> [round(recipe.rate(step), 2) for step in range(4)]
    [0.5, 1.0, 1.0, 0.5]
    """

    steps: int
    lr: float  # at its peak
    warmup: int = 0  # steps
    decay: int | None = None  # the step at which the cosine ends; None: the last
    final: float = 0.1  # of lr, where the cosine ends; 1: the rate stays at lr
    weight_decay: float = 0.1
    decayed: Decayed = "matrices"  # what weight decay applies to (parameter_groups)
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float | None = 1.0  # largest norm of the gradient
    precision: Precision = "float32"  # of computing; weights and optimiser are float32
    seed: int = 0  # of random numbers within an update; of a training run also of weights and the order of data

    section: ClassVar[str] = ""  # what stands before the names of fields in messages

    def __post_init__(self) -> None:
        self.at_least(1, "steps")
        self.at_least(0, "warmup", "weight_decay", "final", "seed")
        for name in ("lr", "clip") if self.clip is not None else ("lr",):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{self.told(name)} must be positive and finite")
        object.__setattr__(self, "betas", tuple(self.betas))
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"{self.told('betas')} must be two numbers of at least 0 and below 1")
        if self.decay is not None and self.decay <= self.warmup:
            raise ValueError(f"{self.told('decay')} must be greater than {self.told('warmup')}")
        choose_from(f"{self.section}decayed", self.decayed, get_args(Decayed))
        choose_from(f"{self.section}precision", self.precision, get_args(Precision))

    def told(self, name: str) -> str:
        """A field and its value, as messages have them."""
        return f"{self.section}{name} ({getattr(self, name)})"

    def at_least(self, least: int, *names: str) -> None:
        """Raise where one of these fields is less."""
        for name in names:
            if not getattr(self, name) >= least:
                raise ValueError(f"{self.told(name)} must be at least {least}")

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
            convolutions, decay rates of recurrent mixers or lag parameters of HyperGLU. "two-dimensional": what has at least
            two dimensions, nanoGPT's rule: embeddings, factors and diagonals too, but no norms, biases and other vectors.
            "all": every parameter.

    >>> [len(group["params"]) for group in parameter_groups(nn.Linear(2, 3), 0.1)]
    [1, 1]
    """
    parameters = list(model.parameters())
    chosen: set[Any] = set(parameters)
    if decayed == "matrices":
        chosen = set(linear_weights(model))
    elif decayed == "two-dimensional":
        chosen = {p for p in parameters if p.dim() >= 2}
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
