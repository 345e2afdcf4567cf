"""HGRN (Qin et al. 2023): a gated recurrence of scalars, one per channel.

    h_t = f_t h_{t−1} + (1 − f_t) silu(i_t)        f_t = b + (1 − b) σ(W x_t)        o_t = h_t

Letters: B batch, T time, C width, E inner width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp.mixers.base import Cut, Tokens, head_width
from hypermlp.mixers.parts import RMSNorm, gated, init_linears, whole
from hypermlp.mixers.recurrent import MixResult, Past, RecurrentMixer
from hypermlp.ops.scan import scan


class HGRN(RecurrentMixer):
    """RMSNorm over all channels and a swish gate read it out; there are no heads. 4 C² parameters.

    Args:
        width: C, of inputs and outputs.
        value_width: the inner width; None: the layer's.
        lower_bound: b, the least that a forget gate keeps; the paper lets it grow with the layers.
    """

    counted_by_head = ("inner",)

    def __init__(self, width: int, *, value_width: int | None = None, lower_bound: float = 0.0) -> None:
        super().__init__()
        self.width, self.inner = width, head_width(width if value_width is None else value_width, 1)
        self.lower_bound = check_bound(lower_bound)
        self.i, self.f, self.gate = (nn.Linear(width, self.inner, bias=False) for _ in range(3))
        self.o = nn.Linear(self.inner, width, bias=False)
        init_linears(self)
        self.norm = RMSNorm(self.inner)

    def cuts(self) -> dict[str, Cut]:
        columns = ("i.weight", "f.weight", "gate.weight", "norm.weight")
        return {**dict.fromkeys(columns, Cut()), "o.weight": Cut(dim=1)}

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"h": (self.inner,)}

    def step(self, tokens: Tokens, past: Past) -> MixResult:
        x = tokens.x
        g, new = forget_gate(whole(self.f(x), self.inner), self.lower_bound)
        h, last = scan(
            g, F.silu(whole(self.i(x), self.inner)) * new, past.get("h"), begins=tokens.begins, padding=tokens.padding
        )
        return MixResult(self.o(gated(self.norm(h, self.group), self.gate(x))), {"h": last})


def forget_gate(f: Tensor, lower_bound: float) -> tuple[Tensor, Tensor]:
    """log of the gate b + (1 − b) σ(f), and one minus the gate, both without cancellation."""
    new = (1 - lower_bound) * torch.sigmoid(-f)
    return (torch.log1p(-new) if lower_bound > 0 else F.logsigmoid(f)), new


def check_bound(lower_bound: float) -> float:
    if not 0 <= lower_bound < 1:
        raise ValueError(f"lower_bound ({lower_bound}) must be at least 0 and below 1: it is the least that a gate keeps")
    return lower_bound
