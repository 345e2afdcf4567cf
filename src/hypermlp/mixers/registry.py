"""The registry: name → how to build that mixer, and where it comes from. A new mixer is one file and one line here.

Labels of Table 1 (mixers/labels.py) name mixers too.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any, get_args

import torch

from hypermlp.checks import at_least_one, choose_from
from hypermlp.config import AttnKind, HyperGLUConfig, Init, InitScale
from hypermlp.mixers import hybrid, labels, lora, options
from hypermlp.mixers.base import Mixer
from hypermlp.mixers.deltanet import DeltaNet
from hypermlp.mixers.differential import DifferentialAttention
from hypermlp.mixers.forgetting import ForgettingAttention
from hypermlp.mixers.gated_deltanet import GatedDeltaNet
from hypermlp.mixers.gla import GLA
from hypermlp.mixers.gsa import GSA
from hypermlp.mixers.hgrn import HGRN
from hypermlp.mixers.hgrn2 import HGRN2
from hypermlp.mixers.hyper import HyperGLU, HyperMLP
from hypermlp.mixers.kda import KimiDeltaAttention
from hypermlp.mixers.linear import LinearAttention
from hypermlp.mixers.mamba import Mamba
from hypermlp.mixers.mamba2 import Mamba2
from hypermlp.mixers.path import PathAttention
from hypermlp.mixers.retnet import RetNet
from hypermlp.mixers.rwkv7 import RWKV7
from hypermlp.mixers.softmax import SoftmaxAttention


@dataclass(frozen=True)
class Entry:
    """One kind of mixer. Its parameter count grows with one size, which budgets adjust (models/budget.py).

    Args:
        build: makes one from width, longest context and size (None: as published); then from init, if that is a choice; and
            from the keyword n_head (None: as published), if heads are a choice.
        title: its name in tables.
        paper: who wrote about it.
        year: when.
        size: what the size is; empty: there is none.
        step: sizes are multiples of this where there are two heads.
        variant_of: the mixer of which it is one; groups of mixers leave variants out.
        init: whether its initialisation is a choice.
        heads: whether the number of its heads is a choice.
        options: what else NAME+option=value may change (mixers/options.py), as keywords of build.
    """

    build: Callable[..., Mixer]
    title: str
    paper: str
    year: int
    size: str = "value width"
    step: int = 2
    variant_of: str = ""
    init: bool = False
    heads: bool = False
    options: frozenset[str] = frozenset()

    def step_of(self, heads: int | None) -> int:
        """What sizes are multiples of."""
        return self.step if heads is None else max(1, self.step * heads // 2)


# Of HyperGLU and HyperMLP: all but what the model around them decides.
FIELDS = frozenset(field.name for field in dataclasses.fields(HyperGLUConfig)) - {
    *("n_embd", "block_size", "attn_kind", "init", "impl_default", "chunk_T")
}


def hyper(
    kind: AttnKind,
    width: int,
    length: int,
    size: int | None,
    init: Init = "paper",
    *,
    n_head: int | None = None,
    **changes: Any,
) -> HyperGLU:
    fields: dict[str, Any] = {"n_head": n_head or 2, "attn_kind": kind, "qk_rank": size, "init": init, **changes}
    return (HyperGLU if kind == "glu" else HyperMLP)(HyperGLUConfig(n_embd=width, block_size=length, **fields))


def relu(width: int, length: int, size: int | None, *, n_head: int | None = None, **changes: Any) -> HyperGLU:
    """HyperMLP without mixing, convolutions and gates: the label R, of any rank."""
    off = dict.fromkeys(("use_kv_conv", "use_qk_gate", "use_vo_gate", "use_op1", "use_op2"), False)
    return hyper("relu", width, length, size or width, n_head=n_head, **(off | changes))


def rival(
    kind: Callable[..., Mixer],
    title: str,
    paper: str,
    year: int,
    size: str = "value width",
    step: int = 2,
    variant_of: str = "",
    heads: bool = True,
    **fixed: bool,
) -> Entry:
    """The entry of a class that is made with its width, its heads if it has any, and its size."""
    field = "qk_rank" if size == "qk_rank" else "value_width"

    def build(width: int, length: int, size: int | None, *, n_head: int | None = None, **changes: Any) -> Mixer:
        return kind(width, **({field: size, **({} if n_head is None else {"n_head": n_head})} | fixed | changes))

    known = frozenset(inspect.signature(kind).parameters) - {"width", *fixed}
    return Entry(build, title, paper, year, size, step, variant_of, heads=heads, options=known)


MIXERS: dict[str, Entry] = {
    "hyperglu": Entry(
        partial(hyper, "glu"), "HyperGLU", "Lu and Yang", 2026, "qk_rank", 4, init=True, heads=True, options=FIELDS
    ),
    "hypermlp": Entry(
        partial(hyper, "relu"), "HyperMLP", "Lu and Yang", 2026, "qk_rank", init=True, heads=True, options=FIELDS
    ),
    "softmax": rival(SoftmaxAttention, "Softmax with RoPE", "Vaswani et al.", 2017, "qk_rank", 4),
    "gated_softmax": rival(SoftmaxAttention, "Gated softmax", "Qiu et al.", 2025, "qk_rank", 4, use_vo_gate=True),
    "relu": Entry(relu, "ReLU attention", "Wortsman et al.", 2023, "qk_rank", heads=True, options=FIELDS),
    "differential": rival(DifferentialAttention, "Differential", "Ye et al.", 2025),
    "forgetting": rival(ForgettingAttention, "Forgetting attention", "Lin et al.", 2025),
    "path": rival(PathAttention, "PaTH attention", "Yang et al.", 2025),
    "linear": rival(LinearAttention, "Linear attention", "Katharopoulos et al.", 2020),
    "retnet": rival(RetNet, "RetNet", "Sun et al.", 2023),
    "gla": rival(GLA, "Gated linear attention", "Yang et al.", 2024),
    "gsa": rival(GSA, "Gated slot attention", "Zhang et al.", 2024),
    "hgrn": rival(HGRN, "HGRN", "Qin et al.", 2023, "inner width", heads=False),
    "hgrn2": rival(HGRN2, "HGRN2", "Qin et al.", 2024),
    "deltanet": rival(DeltaNet, "DeltaNet", "Yang et al.", 2024),
    "gated_deltanet": rival(GatedDeltaNet, "Gated DeltaNet", "Yang et al.", 2025),
    "kda": rival(KimiDeltaAttention, "Kimi Delta Attention", "Kimi Team", 2025),
    "rwkv7": rival(RWKV7, "RWKV-7", "Peng et al.", 2025),
    "mamba": rival(Mamba, "Mamba", "Gu and Dao", 2023, "inner width", heads=False),
    "mamba2": rival(Mamba2, "Mamba-2", "Dao and Gu", 2024, "inner width"),
    "softmax_qknorm": rival(
        SoftmaxAttention, "Softmax, qk-norm", "Henry et al.", 2020, "qk_rank", 4, variant_of="softmax", use_qk_norm=True
    ),
    # Transitions with eigenvalues down to −1, as state tracking needs them
    "deltanet_neg": rival(DeltaNet, "DeltaNet, negative", "Grazzi et al.", 2025, variant_of="deltanet", negative=True),
    "gated_deltanet_neg": rival(
        GatedDeltaNet, "Gated DeltaNet, negative", "Grazzi et al.", 2025, variant_of="gated_deltanet", negative=True
    ),
    "rwkv7_neg": rival(RWKV7, "RWKV-7, negative", "Peng et al.", 2025, variant_of="rwkv7", negative=True),
}
DISTINCT = tuple(name for name, entry in MIXERS.items() if not entry.variant_of)
VARIANTS = tuple(name for name, entry in MIXERS.items() if entry.variant_of)


def build_mixer(
    name: str,
    width: int,
    length: int,
    size: int | None = None,
    *,
    heads: int | None = None,
    init: Init = "paper",
    init_scale: InitScale = "0.02",
) -> Mixer:
    """The mixer of a registered name or a label.

    Args:
        name: a key of MIXERS, or a label of Table 1's grammar (mixers/labels.py); either with options (mixers/options.py).
        width: of its inputs and outputs.
        length: the longest context, in tokens; lags of HyperGLU and HyperMLP.
        size: what its entry calls the size, such as the value width or qk_rank; None: as published.
        heads: how many; None: as published, which is two for all but Mamba-2. A mixer that has none refuses a number.
        init: how convolutions and lag factors of labels, HyperGLU and HyperMLP begin (docs/layer.md).
        init_scale: the scale of the weights of its linear layers.
    """
    choose_from("init_scale", init_scale, get_args(InitScale))
    choose_from("init", init, get_args(Init))
    if heads is not None:
        at_least_one("heads", heads)
    if hybrid.is_hybrid(name):
        raise ValueError(because_hybrid(name))
    plain_name, adapters = lora.split(name)
    mixer = build_plain(plain_name, width, length, size, heads, init).begin_at(init_scale)
    if adapters:
        if not isinstance(mixer, HyperGLU):
            raise ValueError(f"{name!r}: {', '.join(adapters)} adapts HyperGLU, HyperMLP and their labels only")
        lora.attach(mixer, adapters)
    return mixer


def build_plain(name: str, width: int, length: int, size: int | None, heads: int | None, init: Init) -> Mixer:
    """The mixer without adapters, at the scale 0.02."""
    base, changes = options.split(name)
    if base in MIXERS:
        entry = MIXERS[base]
        if heads is not None and not entry.heads:
            raise ValueError(f"heads ({heads}) must be left unset: {name} has no heads to choose")
        options.check(name, changes, entry.options)
        given = (width, length, size, init) if entry.init else (width, length, size)
        return entry.build(*given, **({"n_head": heads} if entry.heads else {}) | changes)
    if labels.is_meant(base):
        options.check(name, changes, () if base.startswith("S") else FIELDS)
        size, heads = changes.pop("qk_rank", size), changes.pop("n_head", heads)
        return labels.build(base, width, length, size, heads or 2, init=init, **changes)
    raise ValueError(unknown(base))


def unknown(name: str) -> str:
    """The message about an unknown name: the nearest one, by name or title, and all others."""
    if ":" in name:
        return (
            f"unknown mixer {name!r}: it is code of its own, which runs only if you name it: add --own {name} to the "
            f"command; in Python call hypermlp.mixers.own.adopt([{name!r}]) first"
        )
    spellings = {plain(text): key for key, entry in reversed(MIXERS.items()) for text in (entry.title, key)}
    near = get_close_matches(plain(name), spellings, n=1)
    meant = f"; did you mean {spellings[near[0]]!r}?" if near else ";"
    known = f"{'Known' if near else 'known'} are {', '.join(sorted(MIXERS))}"
    return f"unknown mixer {name!r}{meant} {known}, and the labels of Table 1, such as G-cg-q-12o"


def because_hybrid(name: str) -> str:
    """Why one layer cannot be made of this name: a part of it is no mixer, or they all are, and it is a model's."""
    for mixer in hybrid.pattern(name):
        if not is_known(mixer):
            return f"in {name!r}: {unknown(options.split(mixer)[0])}; options are written NAME+option=value"
    return f"{name!r} is a hybrid, the mixers of several layers; a single layer takes one of {', '.join(hybrid.pattern(name))}"


def new_layers(
    name: str,
    depth: int,
    width: int,
    length: int,
    size: hybrid.Size = None,
    *,
    init: Init = "paper",
    init_scale: InitScale = "0.02",
) -> Callable[[], Mixer]:
    """Makes the mixers of a model, one at a call, from the input on; of a hybrid in its order.

    Args:
        depth: how many layers the model has.
        size: of the mixers; of a hybrid for each of its pattern.
        name, width, length, init, init_scale: as in build_mixer.
    """
    own = hybrid.layers(name, depth, size)
    how: dict[str, Any] = {"init": init, "init_scale": init_scale}
    return (build_mixer(mixer, width, length, one, **how) for mixer, one in own).__next__


def plain(text: str) -> str:
    return "".join(letter for letter in text.lower() if letter.isalnum())


def is_known(name: str) -> bool:
    """Whether build_mixer takes this name; of a hybrid, the names in it."""
    try:
        with torch.device("meta"):
            for mixer in hybrid.pattern(name):
                build_mixer(mixer, 64, 64)
    except ValueError:
        return False
    return True
