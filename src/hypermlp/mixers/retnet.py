"""RetNet (Sun et al. 2023): linear attention with a fixed decay rate per head.

    S_t = γ_h S_{t−1} + k_t v_tᵀ        γ_h = 1 − 2^(−5−h)        o_t = S_tᵀ q_t / √K

Letters: B batch, T time, C width, H heads, K and V widths of a head.
"""

from __future__ import annotations

import torch
from torch import nn

from hypermlp.checks import divisible
from hypermlp.config import ROPE_BASE
from hypermlp.mixers import rotary
from hypermlp.mixers.base import Cut, Tokens
from hypermlp.mixers.parts import RMSNorm, gated, heads, init_linears
from hypermlp.mixers.recurrent import MatrixMixer, MixResult, Past
from hypermlp.ops.recurrence import Steps
from hypermlp.ops.types import compute_dtype


class RetNet(MatrixMixer):
    """Rotary q and k, values and a swish gate of twice the width, RMSNorm per head. 8 C² parameters.

    Rotary pairs are neighbouring coordinates (rotary.py); pairing coordinates half a head apart is the same with the rows of q
    and k in another order.
    """

    def __init__(self, width: int, n_head: int = 2, *, value_width: int | None = None) -> None:
        super().__init__()
        divisible("width", width, 2 * n_head, f"2 * n_head ({n_head})")
        inner = self.set_heads(width, n_head, 2 * width if value_width is None else value_width)
        self.q, self.k = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.v, self.gate = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.o = nn.Linear(inner, width, bias=False)
        init_linears(self)
        self.norm = RMSNorm(self.head_value_width)

    def cuts(self) -> dict[str, Cut]:
        columns = ("q.weight", "k.weight", "v.weight", "gate.weight")
        return {**dict.fromkeys(columns, Cut()), "o.weight": Cut(dim=1)}

    def step(self, tokens: Tokens, past: Past) -> MixResult:
        x = tokens.x
        q, k = (heads(layer(x), self.n_head, self.head_key_width) for layer in (self.q, self.k))
        v = heads(self.v(x), self.n_head, self.head_value_width)
        angle = rotary.angles(tokens.position, self.head_key_width, ROPE_BASE).repeat_interleave(2, dim=-1)
        q, k = rotary.rotate(q * self.head_key_width**-0.5, angle), rotary.rotate(k, angle)
        first = 0 if self.group is None else self.group.rank() * self.n_head
        head = torch.arange(first, first + self.n_head, device=x.device, dtype=compute_dtype(x.dtype))
        g = torch.log1p(-torch.exp2(-5 - head)).expand(*x.shape[:2], -1)  # B T H
        o, states = self.recur(Steps(q, k, v, g), tokens, past)
        return MixResult(self.o(gated(self.norm(o).flatten(2), self.gate(x))), states)
