"""Kimi Delta Attention (Kimi Team, 2025): the gated delta rule, with a decay for every channel of the keys.

    S_t = D_t S_{t−1} + β_t k_t (v_t − (D_t S_{t−1})ᵀ k_t)ᵀ        D_t = Diag(e^{g_t})        o_t = S_tᵀ q_t / √K

Letters: B batch, T time, C width, H heads, K and V widths of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from hypermlp.config import TAPS
from hypermlp.mixers.base import Cut, Tokens
from hypermlp.mixers.parts import RMSNorm, ShortConv, first_steps, heads, init_linears, unit, whole
from hypermlp.mixers.recurrent import MatrixMixer, MixResult, Past
from hypermlp.ops.recurrence import Steps


class KimiDeltaAttention(MatrixMixer):
    """q, k and v of the whole width; decays and the sigmoid gate on the readout go through a bottleneck of one head's width.

    Args:
        width: of inputs and outputs.
        n_head: how many heads.
        value_width: of all heads together (None: the layer's width).
    """

    taps = TAPS
    counted_by_head = ("n_head", "value_width", "conv_width")

    def __init__(self, width: int, n_head: int = 2, *, value_width: int | None = None) -> None:
        super().__init__()
        self.value_width = value_width = self.set_heads(width, n_head, value_width)
        narrow = self.head_value_width
        self.conv_width = 2 * width + value_width
        self.qkv = nn.Linear(width, self.conv_width, bias=False)
        self.decay_in, self.decay_out = nn.Linear(width, narrow, bias=False), nn.Linear(narrow, width, bias=False)
        self.gate_in, self.gate_out = nn.Linear(width, narrow, bias=False), nn.Linear(narrow, value_width)
        self.beta = nn.Linear(width, n_head, bias=False)
        self.A_log, self.dt_bias = nn.Parameter(torch.empty(n_head, 1)), nn.Parameter(torch.empty(width))
        self.conv = ShortConv(self.conv_width, TAPS)
        self.norm = RMSNorm(narrow)
        self.o = nn.Linear(value_width, width, bias=False)
        init_linears(self)
        with torch.no_grad():
            self.A_log.uniform_(1, 16).log_()
            self.dt_bias.copy_(first_steps(width))

    def cuts(self) -> dict[str, Cut]:
        joined = Cut(blocks=(self.width, self.width, self.value_width))
        found = {"qkv.weight": joined, "conv.weight": joined, "o.weight": Cut(dim=1)}
        return {
            **found,
            **dict.fromkeys(("decay_out.weight", "gate_out.weight", "gate_out.bias", "beta.weight", "A_log", "dt_bias"), Cut()),
        }

    def step(self, tokens: Tokens, past: Past) -> MixResult:
        x, H, K, V = tokens.x, self.n_head, self.head_key_width, self.head_value_width
        inputs = whole(self.qkv(x), self.conv_width)
        mixed = self.conv(inputs, tokens, past.history)
        q, k, v = (t.unflatten(-1, (H, -1)) for t in mixed.split([H * K, H * K, H * V], -1))
        q, k = unit(q) * K**-0.5, unit(k)
        beta = torch.sigmoid(heads(self.beta(x), H, 1))  # B T H 1
        rate = whole(self.decay_out(self.decay_in(x)), H * K) + self.dt_bias
        g = self.A_log.exp() * heads(F.logsigmoid(-rate), H, K)  # B T H K; −softplus, whose gradient does not compile
        o, states = self.recur(Steps(q, beta * k, v, g, a=-g.exp() * k, beta=beta), tokens, past)
        gate = torch.sigmoid(whole(self.gate_out(self.gate_in(x)), H * V))
        return MixResult(self.o(self.norm(o).flatten(2) * gate), states, inputs)
