"""Mamba (Gu and Dao 2023): every channel has a small state; the token sets its decay and its input.

    h_t = e^{Δ_t A} h_{t−1} + Δ_t x_t B_t        y_t = C_tᵀ h_t + D x_t        Δ_t = softplus(W W' x_t + b)

Letters: B batch, T time, C width, E inner width, N state width.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from hypermlp.collectives import total
from hypermlp.config import TAPS
from hypermlp.mixers.base import Cut, Tokens, head_width
from hypermlp.mixers.parts import ShortConv, first_steps, init_linears, whole
from hypermlp.mixers.recurrent import MixResult, Past, RecurrentMixer
from hypermlp.ops import dispatch
from hypermlp.ops.scan import selective_scan

STATE = 16  # N


class StepSizes(nn.Linear):
    """W x + b, of which Δ is the softplus. Hosts that make all biases zero see the mark _no_reinit, as in Mamba's own code."""

    @torch.no_grad()
    def reset_parameters(self) -> None:
        bound = self.in_features**-0.5
        self.weight.uniform_(-bound, bound)
        self.bias.copy_(first_steps(self.out_features))
        self.bias._no_reinit = True  # type: ignore[attr-defined]


class Mamba(RecurrentMixer):
    """A short convolution in front of the recurrence and a swish gate behind it. About 6 C² parameters; there are no heads.

    Args:
        width: C, of inputs and outputs.
        value_width: the inner width; None: twice the width.
    """

    taps = TAPS
    counted_by_head = ("conv_width",)

    def __init__(self, width: int, *, value_width: int | None = None) -> None:
        super().__init__()
        self.width, self.conv_width = width, head_width(2 * width if value_width is None else value_width, 1)
        inner, self.rank = self.conv_width, math.ceil(width / 16)
        self.into = nn.Linear(width, 2 * inner, bias=False)
        self.select = nn.Linear(inner, self.rank + 2 * STATE, bias=False)
        self.delta, self.o = StepSizes(self.rank, inner), nn.Linear(inner, width, bias=False)
        init_linears(self)
        self.conv = ShortConv(inner, self.taps, bias=True)
        self.delta.reset_parameters()
        self.A_log = nn.Parameter(torch.arange(1.0, STATE + 1).log().repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))

    def cuts(self) -> dict[str, Cut]:
        channels = ("delta.weight", "delta.bias", "conv.weight", "conv.bias", "A_log", "D")
        rows = {"into.weight": Cut(blocks=(1, 1)), "select.weight": Cut(dim=1), "o.weight": Cut(dim=1)}
        return {**dict.fromkeys(channels, Cut()), **rows}

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"h": (STATE, self.conv_width)}

    def step(self, tokens: Tokens, past: Past) -> MixResult:
        conv_inputs, gate = whole(self.into(tokens.x), 2 * self.conv_width).chunk(2, dim=-1)
        x = self.conv(conv_inputs, tokens, past.history)
        selected = total(self.select(x), self.group)  # of all channels
        low, B, C = whole(selected, self.rank + 2 * STATE).split([self.rank, STATE, STATE], dim=-1)
        delta, A = F.softplus(whole(self.delta(low), self.conv_width)), -self.A_log.exp()
        impl = dispatch.resolve("auto", x)
        borders = {"begins": tokens.begins, "padding": tokens.padding}
        y, last = selective_scan(x, delta, A, B, C, past.get("h"), **borders, impl=impl)
        return MixResult(self.o((y + self.D * x) * F.silu(gate)), {"h": last}, conv_inputs)
