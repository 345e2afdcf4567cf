"""The registry: name → how to build that mixer, and where it comes from. A new mixer is one file and one line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hypermlp.config import HyperGLUConfig
from hypermlp.mixers.base import Mixer
from hypermlp.mixers.hyper import HyperGLU, HyperMLP
from hypermlp.mixers.softmax import SoftmaxAttention

__all__ = ["MIXERS", "Entry", "HyperGLU", "HyperMLP", "Mixer", "SoftmaxAttention", "build_mixer"]


@dataclass(frozen=True)
class Entry:
    """One kind of mixer. Its parameter count grows with one size, which budgets turn (models/budget.py)."""

    build: Callable[[int, int, int | None], Mixer]  # width, longest context, size (None: as published)
    title: str
    paper: str
    year: int
    size: str = "value width"  # what the size is
    step: int = 2  # sizes are multiples of this


def hyper_config(width: int, length: int, size: int | None) -> HyperGLUConfig:
    return HyperGLUConfig(n_embd=width, n_head=2, block_size=length, qk_rank=size)


MIXERS: dict[str, Entry] = {
    "hyperglu": Entry(lambda d, n, s: HyperGLU(hyper_config(d, n, s)), "HyperGLU", "Lu and Yang", 2026, "qk_rank", 4),
    "hypermlp": Entry(lambda d, n, s: HyperMLP(hyper_config(d, n, s)), "HyperMLP", "Lu and Yang", 2026, "qk_rank"),
    "softmax": Entry(lambda d, n, s: SoftmaxAttention(d, n_head=2), "Softmax attention with RoPE", "Vaswani et al.", 2017),
}


def build_mixer(name: str, width: int, length: int, size: int | None = None) -> Mixer:
    """The mixer `name` of this width for contexts of up to `length` tokens."""
    if name not in MIXERS:
        raise ValueError(f"unknown mixer {name!r}; known are {', '.join(sorted(MIXERS))}")
    return MIXERS[name].build(width, length, size)
