"""Gated linear attention (Yang et al. 2024): every row of the state decays at a rate set by the token.

    S_t = Diag(e^{g_t}) S_{t−1} + k_t v_tᵀ        g_t = log σ(W₂ W₁ x_t + b) / 16        o_t = S_tᵀ q_t / √K

Letters: B batch, T time, C width, H heads, K and V widths of a head.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from hypermlp.checks import divisible
from hypermlp.mixers.base import Cut, Tokens
from hypermlp.mixers.parts import RMSNorm, gated, heads, init_linears
from hypermlp.mixers.recurrent import MatrixMixer, MixResult, Past
from hypermlp.ops.recurrence import Steps

DECAY_RANK = 16
SLOWNESS = 16  # what the log of the decay is divided by, so that the state decays slowly at first


class GLA(MatrixMixer):
    """q and k of half the width, values and a swish gate of the whole, RMSNorm per head. About 4 C² parameters."""

    def __init__(self, width: int, n_head: int = 2, *, value_width: int | None = None) -> None:
        super().__init__()
        divisible("width", width, 2 * n_head, f"2 * n_head ({n_head})")
        inner = self.set_heads(width, n_head, value_width)
        self.head_key_width //= 2
        self.q, self.k = nn.Linear(width, width // 2, bias=False), nn.Linear(width, width // 2, bias=False)
        self.v, self.gate = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.decay_in, self.decay_out = nn.Linear(width, DECAY_RANK, bias=False), nn.Linear(DECAY_RANK, width // 2)
        self.o = nn.Linear(inner, width, bias=False)
        init_linears(self)
        self.norm = RMSNorm(self.head_value_width)

    def cuts(self) -> dict[str, Cut]:
        return {
            **dict.fromkeys(("q.weight", "k.weight", "v.weight", "gate.weight", "decay_out.weight", "decay_out.bias"), Cut()),
            "o.weight": Cut(dim=1),
        }

    def step(self, tokens: Tokens, past: Past) -> MixResult:
        x = tokens.x
        q, k = (heads(layer(x), self.n_head, self.head_key_width) for layer in (self.q, self.k))
        v = heads(self.v(x), self.n_head, self.head_value_width)
        g = heads(F.logsigmoid(self.decay_out(self.decay_in(x))) / SLOWNESS, self.n_head, self.head_key_width)
        steps = Steps(q * self.head_key_width**-0.5, k, v, g)
        o, states = self.recur(steps, tokens, past)
        return MixResult(self.o(gated(self.norm(o).flatten(2), self.gate(x))), states)
