"""Sequence mixers behind one contract (base.py): the paper's layer, its rivals, and the registry of all by name."""

from hypermlp.mixers.base import Mixer
from hypermlp.mixers.hyper import HyperGLU, HyperMLP
from hypermlp.mixers.registry import DISTINCT, MIXERS, VARIANTS, Entry, build_mixer, is_known, new_layers
from hypermlp.mixers.softmax import SoftmaxAttention

__all__ = [
    "DISTINCT",
    "MIXERS",
    "VARIANTS",
    "Entry",
    "HyperGLU",
    "HyperMLP",
    "Mixer",
    "SoftmaxAttention",
    "build_mixer",
    "is_known",
    "new_layers",
]
