"""A model on one text: what every layer took in, and all that its heads can be recomputed from, row by row.

A row of the hidden layer costs a few products once q, k, the mixing factors and the controls are known, so a page (or anybody)
needs only these, O(T) numbers per layer, and no T × T table:

    kind "hyper"         q, k, s1, A1, B1, D1, s2, A2, B2, D2
    kind "softmax"       q, k                  (q is divided by √K)
    kind "differential"  q, k of both maps, strength λ
    kind "path"          q, k, the reflections' w and beta
    every kind           v, and g: a token's value adds v · g of the head's output, per unit of its weight

Letters: T tokens, C width, H heads, G routing heads, K and V widths of a head, R mixing rank, P lags or places with parameters.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hypermlp.analysis.memory import DifferentialTrace, HyperTrace, PathTrace, can_trace, trace
from hypermlp.analysis.trace import Trace
from hypermlp.mixers.base import Mixer
from hypermlp.mixers.hyper import HyperGLU
from hypermlp.ops import Mixing

FEW_ROWS = 256  # rows of a hidden layer that are held at once


@dataclass(frozen=True)
class Captured:
    """A model and one text that went through it, all in float64."""

    mixers: list[Mixer]  # from the first layer to the last
    inputs: list[Tensor]  # of each mixer, 1 T C
    logits: Tensor  # 1 T vocabulary

    def traces(self) -> list[Trace | None]:
        """What every mixer made of its input; None for one that keeps a state instead of slots."""
        found = zip(self.mixers, self.inputs, strict=True)
        return [trace(mixer, x) if can_trace(mixer) else None for mixer, x in found]


def exact_copy(model: nn.Module) -> nn.Module:
    """The model in float64, for inference."""
    copied = copy.deepcopy(model).double().eval()
    for mixer in copied.modules():
        if isinstance(mixer, HyperGLU):
            mixer.config = mixer.config.replace(impl_default="chunked")  # what computes float64; not worth a notice
    return copied


@torch.no_grad()
def capture(model: nn.Module, tokens: Tensor) -> Captured:
    """Run tokens (1 T) through the model if it is in float64, else through such a copy of it."""
    exact = model if next(model.parameters()).dtype == torch.float64 else exact_copy(model)
    seen: dict[Mixer, Tensor] = {}

    def keep(mixer: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        assert isinstance(mixer, Mixer)
        seen[mixer] = arguments[0]

    hooks = [module.register_forward_pre_hook(keep) for module in exact.modules() if isinstance(module, Mixer)]
    try:
        logits = exact(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    if not seen:
        raise ValueError(f"{type(model).__name__} has no mixer of this package to look into")
    return Captured(list(seen), list(seen.values()), logits)


@torch.no_grad()
def recipe(opened: Trace) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a layer is, in plain values, and the arrays that its rows are computed from; for one sequence without a cache."""
    T, H = opened.q.shape[1], opened.n_head
    about: dict[str, Any] = {"heads": H, "causal": True, "window": None, "mixes": [False, False]}
    arrays = {"q": opened.q[0], "k": opened.k[0], "v": opened.v[0]}
    if isinstance(opened, HyperTrace):
        spec = opened.spec
        about |= {"kind": "hyper", "glu": spec.kind == "glu", "norm": spec.norm != "none", "eps": spec.eps}
        about |= {"causal": spec.causal, "places": spec.aligner == "identity", "window": spec.block_size}
        about["mixes"] = [opened.routing is not None, opened.reading is not None]
        for number, mixing in enumerate((opened.routing, opened.reading), 1):
            if mixing is not None:
                arrays |= {f"{name}{number}": values for name, values in factors(mixing, min(T, spec.block_size)).items()}
    elif isinstance(opened, PathTrace):
        about["kind"] = "path"
        arrays |= {"turn": opened.turn_w[0], "beta": opened.turn_beta[0]}
    elif isinstance(opened, DifferentialTrace):
        about |= {"kind": "differential", "strength": float(opened.strength)}
    else:
        about["kind"] = "softmax"
    found = [readout_directions(opened, head) for head in range(H)]
    arrays |= {"g": torch.stack([g for g, _ in found], dim=1), "size": torch.stack([size for _, size in found], dim=1)}
    return about, arrays


def factors(mixing: Mixing, lags: int) -> dict[str, Tensor]:
    """A, B (G P R), D (G P) of the newest lags, newest last, and s (T G R)."""
    D = mixing.baseline()
    D = mixing.A.new_zeros(mixing.A.shape[:2]) if D is None else D
    return {"A": mixing.A[:, -lags:], "B": mixing.B[:, -lags:], "D": D[:, -lags:], "s": mixing.control[0]}


def readout_directions(opened: Trace, head: int) -> tuple[Tensor, Tensor]:
    """g (T V), with which w_c v_c · g is the share of token c in the head's output, and the output's length (T)."""
    T, V = opened.q.shape[1], opened.v.shape[-1]
    W = opened.read_out(torch.eye(V, dtype=opened.v.dtype, device=opened.v.device), head)  # V C
    directions, sizes = [], []
    for first in range(0, T, FEW_ROWS):
        rows = torch.arange(first, min(first + FEW_ROWS, T), device=W.device)
        found = opened.rows(rows, head)
        w = found.w.new_zeros(len(rows), opened.k.shape[1])
        w.scatter_add_(1, found.slot.clamp(min=0), found.w)  # what does not exist has weight 0
        o = w @ opened.v[0, :, head]
        m2 = opened.readout_gate(0, rows, head, o)
        y = (o * m2) @ W
        size = y.square().sum(-1, keepdim=True)
        directions.append(m2 * (y @ W.mT) / torch.where(size > 0, size, 1))
        sizes.append(size[:, 0].sqrt())
    return torch.cat(directions), torch.cat(sizes)
