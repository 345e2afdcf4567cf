"""Gated DeltaNet (Yang et al. 2025): the delta rule on a memory that also decays, at a rate set by the input.

    S_t = e^{g_t} S_{t−1} + β_t k_t (v_t − e^{g_t} S_{t−1}ᵀ k_t)ᵀ        o_t = S_tᵀ q_t / √K

Letters: B batch, T time, C width, H heads, K key width, V value width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from hypermlp.checks import divisible
from hypermlp.config import TAPS
from hypermlp.mixers.base import Cut, Tokens, head_width
from hypermlp.mixers.parts import (
    RMSNorm,
    ShortConv,
    first_steps,
    gated,
    heads,
    init_linears,
    unit,
    whole,
    write_strength,
)
from hypermlp.mixers.recurrent import MatrixMixer, MixResult, Past
from hypermlp.ops.recurrence import Steps


class GatedDeltaNet(MatrixMixer):
    """DeltaNet with a decay in each head, narrower keys, wider values and a gate on the readout.

    Args:
        width, n_head, negative: as in DeltaNet.
        value_width: of all heads together; None: twice the keys' width; 6 C² parameters.
        key_width: of all heads together; None: 3/4 of the layer's.
    """

    taps = TAPS
    counted_by_head = ("n_head", "key_width", "value_width", "conv_width")

    def __init__(
        self,
        width: int,
        n_head: int = 2,
        *,
        value_width: int | None = None,
        negative: bool = False,
        key_width: int | None = None,
    ) -> None:
        super().__init__()
        self.negative = negative
        key_width = n_head * max(1, round(0.75 * width / n_head)) if key_width is None else key_width
        divisible("key_width", key_width, n_head, f"n_head ({n_head})")
        value_width = 2 * key_width if value_width is None else value_width
        self.head_key_width, self.head_value_width = key_width // n_head, head_width(value_width, n_head)
        self.width, self.n_head, self.key_width, self.value_width = width, n_head, key_width, value_width
        self.conv_width = 2 * key_width + value_width
        self.qkv = nn.Linear(width, self.conv_width, bias=False)
        self.gate = nn.Linear(width, value_width, bias=False)
        self.beta = nn.Linear(width, n_head, bias=False)
        self.decay = nn.Linear(width, n_head, bias=False)
        self.A_log, self.dt_bias = nn.Parameter(torch.empty(n_head)), nn.Parameter(torch.empty(n_head))
        self.conv = ShortConv(self.conv_width, TAPS)
        self.norm = RMSNorm(self.head_value_width)
        self.o = nn.Linear(value_width, width, bias=False)
        init_linears(self)
        with torch.no_grad():
            self.A_log.uniform_(1e-4, 16).log_()
            self.dt_bias.copy_(first_steps(n_head))

    def cuts(self) -> dict[str, Cut]:
        joined = Cut(blocks=(self.key_width, self.key_width, self.value_width))
        found = {"qkv.weight": joined, "conv.weight": joined, "o.weight": Cut(dim=1)}
        return {**found, **dict.fromkeys(("gate.weight", "beta.weight", "decay.weight", "A_log", "dt_bias"), Cut())}

    def step(self, tokens: Tokens, past: Past) -> MixResult:
        x = tokens.x
        inputs = whole(self.qkv(x), self.conv_width)
        mixed = self.conv(inputs, tokens, past.history)
        parts = mixed.split([self.key_width, self.key_width, self.value_width], -1)
        q, k, v = (t.unflatten(-1, (self.n_head, -1)) for t in parts)
        q, k = unit(q) * q.shape[-1] ** -0.5, unit(k)
        beta = write_strength(heads(self.beta(x), self.n_head, 1), self.negative)  # B T H 1
        decay = whole(self.decay(x), self.n_head)
        g = self.A_log.exp() * F.logsigmoid(-decay - self.dt_bias)  # B T H; −softplus, whose gradient does not compile
        steps = Steps(q, beta * k, v, g, a=-g.exp()[..., None] * k, beta=beta)
        o, states = self.recur(steps, tokens, past)
        return MixResult(self.o(gated(self.norm(o).flatten(2), self.gate(x))), states, inputs)
