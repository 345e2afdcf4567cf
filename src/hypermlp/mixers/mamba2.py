"""Mamba-2 (Dao and Gu 2024): Mamba with one decay rate per head, which makes it linear attention with a scalar gate.

    S_t = e^{Δ_t A} S_{t−1} + B_t (Δ_t x_t)ᵀ        y_t = S_tᵀ C_t + D x_t        Δ_t = softplus(W x_t + b)

Letters: B batch, T time, C width, E inner width, H heads, P width of a head, N state width.
"""

from __future__ import annotations

from typing import Self

import torch
import torch.nn.functional as F
from torch import nn

from hypermlp.checks import divisible
from hypermlp.config import TAPS
from hypermlp.mixers.base import Cut, Tokens, head_width
from hypermlp.mixers.parts import RMSNorm, ShortConv, first_steps, heads, init_linears, whole
from hypermlp.mixers.recurrent import MatrixMixer, MixResult, Past
from hypermlp.ops.recurrence import Steps

HEAD_WIDTH, MOST_STATE = 64, 128


class Mamba2(MatrixMixer):
    """Heads that share B and C of width N = min(128, C), RMSNorm of the gated readout. About 6 C² parameters.

    Args:
        width: C, of inputs and outputs.
        n_head: None: heads of width 64, of which the last may be narrower; at least two, narrower if need be.
        value_width: the inner width; None: twice the width.
    """

    taps = TAPS
    counted_by_head = ("n_head", "inner")

    def __init__(self, width: int, n_head: int | None = None, *, value_width: int | None = None) -> None:
        super().__init__()
        self.width, self.inner = width, 2 * width if value_width is None else value_width
        self.head_value_width = min(HEAD_WIDTH, head_width(self.inner, 2)) if n_head is None else head_width(self.inner, n_head)
        self.n_head, self.head_key_width = -(-self.inner // self.head_value_width), min(MOST_STATE, width)
        self.conv_width = self.inner + 2 * self.head_key_width
        self.into = nn.Linear(width, self.inner + self.conv_width + self.n_head, bias=False)
        self.o = nn.Linear(self.inner, width, bias=False)
        init_linears(self)
        self.conv = ShortConv(self.conv_width, self.taps, bias=True)
        self.delta_bias = nn.Parameter(first_steps(self.n_head))
        self.A_log = nn.Parameter(torch.empty(self.n_head).uniform_(1, 16).log())
        self.D = nn.Parameter(torch.ones(self.n_head))
        self.norm = RMSNorm(self.inner)

    def cuts(self) -> dict[str, Cut]:
        N, convolved = self.head_key_width, Cut(blocks=(self.inner, self.head_key_width, self.head_key_width), shared=(1, 2))
        into = Cut(blocks=(self.inner, self.inner, N, N, self.n_head), shared=(2, 3))
        heads = ("delta_bias", "A_log", "D", "norm.weight")
        found = {"into.weight": into, "conv.weight": convolved, "conv.bias": convolved, "o.weight": Cut(dim=1)}
        return {**dict.fromkeys(heads, Cut()), **found}

    def part(self, count: int) -> Self:
        divisible("value_width", self.inner, self.head_value_width, f"the width of a head, so that all {self.n_head} are alike")
        part = super().part(count)
        part.conv_width = part.inner + 2 * self.head_key_width
        return part

    def step(self, tokens: Tokens, past: Past) -> MixResult:
        made = whole(self.into(tokens.x), self.inner + self.conv_width + self.n_head)
        gate, conv_inputs, delta = made.split([self.inner, self.conv_width, self.n_head], dim=-1)
        mixed = self.conv(conv_inputs, tokens, past.history)
        x, B, C = mixed.split([self.inner, self.head_key_width, self.head_key_width], dim=-1)
        H, P = self.n_head, self.head_value_width
        x = heads(F.pad(x, (0, H * P - self.inner)), H, P)  # B T H P
        delta = F.softplus(delta + self.delta_bias)  # B T H
        q, k = (t[:, :, None].expand(-1, -1, self.n_head, -1) for t in (C, B))
        steps = Steps(q, k, delta[..., None] * x, -delta * self.A_log.exp())
        o, states = self.recur(steps, tokens, past)
        y = (o + self.D[:, None] * x).flatten(2)[..., : self.inner]
        return MixResult(self.o(self.norm(y * F.silu(gate), self.group)), states, conv_inputs)
