"""The registry: name → how to build that mixer, and where it comes from. A new mixer is one file and one line here.

Labels of Table 1 (mixers/labels.py) name mixers too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import get_args

import torch

from hypermlp.checks import choose_from
from hypermlp.config import AttnKind, HyperGLUConfig, Init
from hypermlp.mixers import labels
from hypermlp.mixers.base import Mixer
from hypermlp.mixers.deltanet import DeltaNet
from hypermlp.mixers.differential import DifferentialAttention
from hypermlp.mixers.gated_deltanet import GatedDeltaNet
from hypermlp.mixers.gla import GLA
from hypermlp.mixers.gsa import GSA
from hypermlp.mixers.hgrn import HGRN
from hypermlp.mixers.hgrn2 import HGRN2
from hypermlp.mixers.hyper import HyperGLU, HyperMLP
from hypermlp.mixers.linear import LinearAttention
from hypermlp.mixers.mamba import Mamba
from hypermlp.mixers.mamba2 import Mamba2
from hypermlp.mixers.path import PathAttention
from hypermlp.mixers.retnet import RetNet
from hypermlp.mixers.rwkv7 import RWKV7
from hypermlp.mixers.softmax import SoftmaxAttention


@dataclass(frozen=True)
class Entry:
    """One kind of mixer. Its parameter count grows with one size, which budgets adjust (models/budget.py)."""

    build: Callable[..., Mixer]  # of width, longest context, size (None: as published); and of init, if that is a choice
    title: str
    paper: str
    year: int
    size: str = "value width"  # what the size is; empty: there is none
    step: int = 2  # sizes are multiples of this
    variant_of: str = ""  # the mixer of which it is one; groups of mixers leave variants out
    init: bool = False  # whether its initialisation is a choice


def hyper(kind: AttnKind, width: int, length: int, size: int | None, init: Init = "paper") -> HyperGLU:
    config = HyperGLUConfig(n_embd=width, n_head=2, block_size=length, attn_kind=kind, qk_rank=size, init=init)
    return (HyperGLU if kind == "glu" else HyperMLP)(config)


def relu(width: int, length: int, size: int | None) -> HyperGLU:
    """HyperMLP without mixing, convolutions and gates: the label R, of any rank."""
    config = HyperGLUConfig(
        n_embd=width,
        n_head=2,
        block_size=length,
        attn_kind="relu",
        qk_rank=size or width,
        use_kv_conv=False,
        use_qk_gate=False,
        use_vo_gate=False,
        use_op1=False,
        use_op2=False,
    )
    return HyperMLP(config)


MIXERS: dict[str, Entry] = {
    "hyperglu": Entry(partial(hyper, "glu"), "HyperGLU", "Lu and Yang", 2026, "qk_rank", 4, init=True),
    "hypermlp": Entry(partial(hyper, "relu"), "HyperMLP", "Lu and Yang", 2026, "qk_rank", init=True),
    "softmax": Entry(lambda d, n, s: SoftmaxAttention(d, qk_rank=s), "Softmax with RoPE", "Vaswani et al.", 2017, "qk_rank", 4),
    "relu": Entry(relu, "ReLU attention", "Wortsman et al.", 2023, "qk_rank"),
    "differential": Entry(lambda d, n, s: DifferentialAttention(d, value_width=s), "Differential", "Ye et al.", 2025),
    "path": Entry(lambda d, n, s: PathAttention(d, value_width=s), "PaTH attention", "Yang et al.", 2025),
    "linear": Entry(lambda d, n, s: LinearAttention(d, value_width=s), "Linear attention", "Katharopoulos et al.", 2020),
    "retnet": Entry(lambda d, n, s: RetNet(d, value_width=s), "RetNet", "Sun et al.", 2023),
    "gla": Entry(lambda d, n, s: GLA(d, value_width=s), "Gated linear attention", "Yang et al.", 2024),
    "gsa": Entry(lambda d, n, s: GSA(d, value_width=s), "Gated slot attention", "Zhang et al.", 2024),
    "hgrn": Entry(lambda d, n, s: HGRN(d, value_width=s), "HGRN", "Qin et al.", 2023, "inner width"),
    "hgrn2": Entry(lambda d, n, s: HGRN2(d, value_width=s), "HGRN2", "Qin et al.", 2024),
    "deltanet": Entry(lambda d, n, s: DeltaNet(d, value_width=s), "DeltaNet", "Yang et al.", 2024),
    "gated_deltanet": Entry(lambda d, n, s: GatedDeltaNet(d, value_width=s), "Gated DeltaNet", "Yang et al.", 2025),
    "rwkv7": Entry(lambda d, n, s: RWKV7(d, value_width=s), "RWKV-7", "Peng et al.", 2025),
    "mamba": Entry(lambda d, n, s: Mamba(d, value_width=s), "Mamba", "Gu and Dao", 2023, "inner width"),
    "mamba2": Entry(lambda d, n, s: Mamba2(d, value_width=s), "Mamba-2", "Dao and Gu", 2024, "inner width"),
    # Transitions with eigenvalues down to −1, as state tracking needs them
    "deltanet_neg": Entry(
        lambda d, n, s: DeltaNet(d, value_width=s, negative=True),
        *("DeltaNet, negative", "Grazzi et al.", 2025),
        variant_of="deltanet",
    ),
    "gated_deltanet_neg": Entry(
        lambda d, n, s: GatedDeltaNet(d, value_width=s, negative=True),
        *("Gated DeltaNet, negative", "Grazzi et al.", 2025),
        variant_of="gated_deltanet",
    ),
    "rwkv7_neg": Entry(
        lambda d, n, s: RWKV7(d, value_width=s, negative=True),
        *("RWKV-7, negative", "Peng et al.", 2025),
        variant_of="rwkv7",
    ),
}
DISTINCT = tuple(name for name, entry in MIXERS.items() if not entry.variant_of)
VARIANTS = tuple(name for name, entry in MIXERS.items() if entry.variant_of)


def build_mixer(name: str, width: int, length: int, size: int | None = None, *, init: Init = "paper") -> Mixer:
    """The mixer of a registered name or a label, of this width, for contexts of up to `length` tokens.

    "@8" behind a name is another allocation of the ranks: temporal mixing of rank 8, and q and k wider in proportion.

    init: how convolutions and lag factors of labels, HyperGLU and HyperMLP begin (docs/layer.md); rivals begin as published.
    """
    choose_from("init", init, get_args(Init))
    if "@" in name:
        return reallocate(name, width, length, size, init)
    if name in MIXERS:
        entry = MIXERS[name]
        return entry.build(width, length, size, init) if entry.init else entry.build(width, length, size)
    if ":" not in name and name[:1] in ("S", "R", "G"):
        return labels.build(name, width, length, size, init=init)
    own = "; it is somebody's own code, which runs only where a command or a call names it" if ":" in name else ""
    raise ValueError(
        f"unknown mixer {name!r}; known are {', '.join(sorted(MIXERS))}, and the labels of Table 1, such as G-cg-q-12o{own}"
    )


def is_known(name: str) -> bool:
    """Whether build_mixer takes this name."""
    try:
        with torch.device("meta"):
            build_mixer(name, 64, 64)
    except ValueError:
        return False
    return True


def reallocate(name: str, width: int, length: int, size: int | None, init: Init) -> HyperGLU:
    """NAME@RANK: what temporal mixing gives up from its own rank, q and k get (at most the full width)."""
    base, _, rank = name.partition("@")
    if not rank.isdigit() or int(rank) < 1 or not has_free_ranks(base):
        raise ValueError(f"{name!r}: NAME@RANK is for labels with q and temporal mixing and for HyperGLU, such as G-cg-q-12o@8")
    with torch.device("meta"):
        plain = build_mixer(base, width, length, size, init=init)
    assert isinstance(plain, HyperGLU)
    config = plain.config
    assert config.qk_rank is not None
    step = 4 if config.attn_kind == "glu" else 2
    step *= 2 if config.use_rope else 1
    wider = min(width, -(-config.qk_rank * config.op1_rank // (int(rank) * step)) * step)
    qk_rank = config.qk_rank if size is not None else wider
    return type(plain)(replace(config, op1_rank=int(rank), op2_rank=int(rank), qk_rank=qk_rank))


def has_free_ranks(name: str) -> bool:
    """Whether a mixer shares a budget between temporal mixing and q and k."""
    if name in MIXERS:
        return MIXERS[name].build in (MIXERS["hyperglu"].build, MIXERS["hypermlp"].build)
    if ":" in name or name[:1] not in ("R", "G"):
        return False
    label = labels.Label.parse(name)
    return label.compress_qk and (label.mix1 or label.mix2)
