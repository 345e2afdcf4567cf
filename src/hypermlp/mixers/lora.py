"""LoRA on the projections of HyperGLU and HyperMLP, for the paper's question where an adapter belongs (appendix H.6).

    G-cg-q-12o+lora_vo=4    adapters of rank 4 on v and o
    G-cg-q-12o+lora_qk=4    adapters of rank 4 on q and k

A layer begins as it would without them. PEFT adapts models that are to be kept; this is for studies, which name mixers by text.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp.mixers import hybrid, options

TARGETS = {"lora_vo": ("v", "o"), "lora_qk": ("q", "k")}  # option → the projections that it adapts


class AdaptedLinear(nn.Linear):
    """x (W + up down)ᵀ + b, with down (rank, in) and up (out, rank), which begins as zeros."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None)
        self.weight, self.bias = linear.weight, linear.bias
        self.down = nn.Parameter(linear.weight.new_empty(rank, linear.in_features))
        self.up = nn.Parameter(linear.weight.new_empty(linear.out_features, rank))
        self.reset_adapter()

    @torch.no_grad()
    def reset_adapter(self, generator: torch.Generator | None = None) -> None:
        self.down.normal_(0, self.in_features**-0.5, generator=generator)
        self.up.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(F.linear(x, self.down), self.up)


def split(name: str) -> tuple[str, dict[str, int]]:
    """The name of a mixer without its adapters, and the rank of each.

    >>> split("G-cg-q-12o+registers=4+lora_vo=2")
    ('G-cg-q-12o+registers=4', {'lora_vo': 2})
    """
    if hybrid.is_hybrid(name):
        parts = [split(mixer) for mixer in hybrid.pattern(name)]
        return hybrid.spell([base for base, _ in parts]), {option: n for _, own in parts for option, n in own.items()}
    base, found = options.split(name)
    ranks = {option: rank for option, rank in found.items() if option in TARGETS}
    for option, rank in ranks.items():
        if type(rank) is not int or rank < 1:
            raise ValueError(f"{name!r}: {option} ({rank}) must be a rank, a whole number of at least 1")
    if not ranks:
        return name, {}
    kept = [part for part in name.split("+")[1:] if part.partition("=")[0] not in TARGETS]
    return "+".join([base, *kept]), ranks


def attach(layer: nn.Module, ranks: dict[str, int]) -> None:
    """Put adapters around the projections of a layer."""
    for option, rank in ranks.items():
        for name in TARGETS[option]:
            setattr(layer, name, AdaptedLinear(layer.get_submodule(name), rank))  # type: ignore[arg-type]


def freeze(model: nn.Module) -> None:
    """Let adapters alone be trained; a model that has none is left as it is."""
    adapted = [module for module in model.modules() if isinstance(module, AdaptedLinear)]
    if adapted:
        model.requires_grad_(False)
        for module in adapted:
            module.down.requires_grad_()
            module.up.requires_grad_()
