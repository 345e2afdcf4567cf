"""The registry: name → how to build that mixer at its default sizes. A new mixer is one file and one line here."""

from __future__ import annotations

from collections.abc import Callable

from hypermlp.config import HyperGLUConfig
from hypermlp.mixers.base import Mixer
from hypermlp.mixers.hyper import HyperGLU, HyperMLP
from hypermlp.mixers.softmax import SoftmaxAttention

__all__ = ["MIXERS", "HyperGLU", "HyperMLP", "Mixer", "SoftmaxAttention", "build_mixer"]

# Each takes the width and the longest context; two heads as in the paper's experiments.
MIXERS: dict[str, Callable[[int, int], Mixer]] = {
    "hyperglu": lambda width, length: HyperGLU(HyperGLUConfig(n_embd=width, n_head=2, block_size=length)),
    "hypermlp": lambda width, length: HyperMLP(HyperGLUConfig(n_embd=width, n_head=2, block_size=length)),
    "softmax": lambda width, length: SoftmaxAttention(width, n_head=2),
}


def build_mixer(name: str, width: int, length: int) -> Mixer:
    """The mixer `name` of this width for contexts of up to `length` tokens."""
    if name not in MIXERS:
        raise ValueError(f"unknown mixer {name!r}; known are {', '.join(sorted(MIXERS))}")
    return MIXERS[name](width, length)
