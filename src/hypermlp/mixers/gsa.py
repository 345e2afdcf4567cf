"""Gated slot attention (Zhang et al. 2024): softmax attention over M slots that are overwritten gradually.

    K_t = K_{t−1} Diag(e^{g_t}) + k_t s_tᵀ        V_t = Diag(e^{g_t}) V_{t−1} + s_t v_tᵀ        s_t = 1 − e^{g_t}
    o_t = V_tᵀ softmax(K_tᵀ q_t)

Letters: B batch, T time, C width, H heads, K and V widths of a head, M slots.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from hypermlp.mixers.base import Cut, Tokens
from hypermlp.mixers.parts import RMSNorm, heads, init_linears
from hypermlp.mixers.recurrent import MixResult, Past, RecurrentMixer
from hypermlp.ops.slots import slot_attention

MOST_SLOTS = 64
SLOWNESS = 8


class GSA(RecurrentMixer):
    """min(64, K) slots; silu of q, k, v and of the readout, RMSNorm over all heads together. About 4 C² parameters.

    Args:
        width, n_head, value_width: as in DeltaNet.
        slowness: what the log of the decay is divided by.
    """

    def __init__(self, width: int, n_head: int = 2, *, value_width: int | None = None, slowness: float = SLOWNESS) -> None:
        super().__init__()
        self.slowness = slowness
        inner = self.set_heads(width, n_head, value_width)
        self.slots = min(MOST_SLOTS, self.head_key_width)
        self.q, self.k = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.v, self.f = nn.Linear(width, inner, bias=False), nn.Linear(width, n_head * self.slots, bias=False)
        self.o = nn.Linear(inner, width, bias=False)
        init_linears(self)
        self.norm = RMSNorm(inner)

    def cuts(self) -> dict[str, Cut]:
        columns = ("q.weight", "k.weight", "v.weight", "f.weight", "norm.weight")
        return {**dict.fromkeys(columns, Cut()), "o.weight": Cut(dim=1)}

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"K": (self.n_head, self.head_key_width, self.slots), "V": (self.n_head, self.slots, self.head_value_width)}

    def step(self, tokens: Tokens, past: Past) -> MixResult:
        x, borders = tokens.x, {"begins": tokens.begins, "padding": tokens.padding}
        q, k = (heads(F.silu(layer(x)), self.n_head, self.head_key_width) for layer in (self.q, self.k))
        v = heads(F.silu(self.v(x)), self.n_head, self.head_value_width)
        g = heads(F.logsigmoid(self.f(x)) / self.slowness, self.n_head, self.slots)  # B T H M
        s = -torch.expm1(g)
        o, keys, values = slot_attention(q, k, v, s, g, past.get("K"), past.get("V"), **borders)
        return MixResult(self.o(self.norm(F.silu(o.flatten(2)), self.group)), {"K": keys, "V": values})
