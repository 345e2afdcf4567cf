"""HGRN2 (Qin et al. 2024): HGRN with a matrix-valued state; one minus the forget gate is the key.

    S_t = Diag(f_t) S_{t−1} + (1 − f_t) i_tᵀ        f_t = b + (1 − b) σ(W x_t)        o_t = S_tᵀ silu(q_t) / √K

Letters: B batch, T time, C width, H heads, K and V widths of a head.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from hypermlp.mixers.base import Cut, Tokens
from hypermlp.mixers.hgrn import check_bound, forget_gate
from hypermlp.mixers.parts import RMSNorm, heads, init_linears
from hypermlp.mixers.recurrent import MatrixMixer, MixResult, Past
from hypermlp.ops.recurrence import Steps


class HGRN2(MatrixMixer):
    """RMSNorm over all heads together. 4 C² parameters. lower_bound as in HGRN."""

    def __init__(self, width: int, n_head: int = 2, *, value_width: int | None = None, lower_bound: float = 0.0) -> None:
        super().__init__()
        inner = self.set_heads(width, n_head, value_width)
        self.lower_bound = check_bound(lower_bound)
        self.q, self.f = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.i, self.o = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)
        init_linears(self)
        self.norm = RMSNorm(inner)

    def cuts(self) -> dict[str, Cut]:
        columns = ("q.weight", "f.weight", "i.weight", "norm.weight")
        return {**dict.fromkeys(columns, Cut()), "o.weight": Cut(dim=1)}

    def step(self, tokens: Tokens, past: Past) -> MixResult:
        x = tokens.x
        H, K = self.n_head, self.head_key_width
        g, k = (heads(t, H, K) for t in forget_gate(self.f(x), self.lower_bound))
        q = heads(F.silu(self.q(x)) * K**-0.5, H, K)
        steps = Steps(q, k, heads(self.i(x), H, self.head_value_width), g)
        o, states = self.recur(steps, tokens, past)
        return MixResult(self.o(self.norm(o.flatten(2), self.group)), states)
