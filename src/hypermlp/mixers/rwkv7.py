"""RWKV-7's time mixing (Peng et al. 2025): a generalised delta rule whose decay, removal and writing strength are all vectors.

    S_t = Diag(e^{w_t}) S_{t−1} − (κ_t ⊙ α_t) (κ_tᵀ S_{t−1}) + k_t v_tᵀ        o_t = S_tᵀ r_t

Every layer is its own first layer: the published model also blends the first layer's values into those of later ones, which a
mixer that sees its own input alone cannot do.

Letters: B batch, T time, C width, H heads, K key width, V value width.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

from hypermlp.mixers.base import Cut, Tokens
from hypermlp.mixers.parts import NORM_EPS, heads, init_linears, unit, whole
from hypermlp.mixers.recurrent import MatrixMixer, MixResult, Past
from hypermlp.ops import plain
from hypermlp.ops.recurrence import Steps

DECAY_LIMIT = 0.6065306597126334  # e^{−1/2}: no channel forgets faster than e to minus this
# The inputs that mix in the previous token, and the power of the channel index in their initialisation.
SHIFTS = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}


class Decays(nn.Linear):
    """W x + b, from which the decays w are made: at first memories from long to short. Hosts that make all biases zero see the
    mark _no_reinit."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.spread_bias()

    @torch.no_grad()
    def spread_bias(self) -> None:
        place = torch.arange(self.out_features) / max(1, self.out_features - 1)
        self.bias.copy_(-6.5 + 5 * place**0.85)
        self.bias._no_reinit = True  # type: ignore[attr-defined]


class RWKV7(MatrixMixer):
    """Six mixtures of a token with the previous one give r, w, k, v, α and the gate; w, α and the gate have low rank.

    Args:
        width, n_head: as in DeltaNet.
        value_width: of all heads together; None: the layer's width; 4 C² parameters and the low ranks.
        negative: the α that removes is in (0, 1 + e^w), so that transitions may have any eigenvalue in (−1, 1); otherwise it is
            in (0, 1), like the one that writes, and eigenvalues are above e^w − 1.
    """

    taps = 2  # the previous token
    counted_by_head = ("n_head", "value_width")

    def __init__(self, width: int, n_head: int = 2, *, value_width: int | None = None, negative: bool = False) -> None:
        super().__init__()
        self.negative, self.conv_width = negative, width
        self.value_width = value_width = self.set_heads(width, n_head, value_width)
        self.shift = nn.Parameter(torch.empty(len(SHIFTS), width))
        self.r, self.k = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.v, self.o = nn.Linear(width, value_width, bias=False), nn.Linear(value_width, width, bias=False)
        rank = 8 * max(1, round(2.5 * width**0.5 / 8))
        decays = Decays(rank, width)
        self.w = nn.Sequential(nn.Linear(width, rank, bias=False), nn.Tanh(), decays)
        self.a = nn.Sequential(nn.Linear(width, rank, bias=False), nn.Linear(rank, width))
        self.g = nn.Sequential(
            nn.Linear(width, 2 * rank, bias=False), nn.Sigmoid(), nn.Linear(2 * rank, value_width, bias=False)
        )
        self.remove_scale, self.write_scale = nn.Parameter(torch.full((width,), 0.85)), nn.Parameter(torch.ones(width))
        self.bonus = nn.Parameter(torch.zeros(n_head, self.head_key_width))
        self.norm = nn.GroupNorm(n_head, value_width, eps=NORM_EPS * self.head_value_width)
        init_linears(self)
        with torch.no_grad():
            place = torch.arange(width) / max(1, width - 1)
            self.shift.copy_(torch.stack([1 - place**power for power in SHIFTS.values()]))
            decays.spread_bias()

    def cuts(self) -> dict[str, Cut]:
        linears = ("r.weight", "k.weight", "v.weight", "w.2.weight", "w.2.bias", "a.1.weight", "a.1.bias", "g.2.weight")
        others = ("remove_scale", "write_scale", "bonus", "norm.weight", "norm.bias")
        return {**dict.fromkeys((*linears, *others), Cut()), "o.weight": Cut(dim=1)}

    def part(self, count: int) -> Self:
        part = super().part(count)
        part.norm.num_groups, part.norm.num_channels = part.n_head, part.value_width
        return part

    def step(self, tokens: Tokens, past: Past) -> MixResult:
        x = tokens.x
        change = previous(tokens, past.history) - x
        mixed = {name: x + change * shift for name, shift in zip(SHIFTS, self.shift, strict=True)}
        H, K = self.n_head, self.head_key_width
        w = -DECAY_LIMIT * torch.sigmoid(whole(self.w(mixed["w"]), H * K))
        alpha = torch.sigmoid(whole(self.a(mixed["a"]), H * K))
        k = whole(self.k(mixed["k"]), H * K)
        kappa = unit(heads(k * self.remove_scale, H, K))
        k = k * (1 + (alpha - 1) * self.write_scale)
        alpha = alpha * (1 + w.exp()) if self.negative else alpha
        r, k, w, alpha = (heads(t, H, K) for t in (self.r(mixed["r"]), k, w, alpha))
        v = heads(self.v(mixed["v"]), H, self.head_value_width)
        steps = Steps(r, k, v, w, -kappa, kappa * alpha)
        o, states = self.recur(steps, tokens, past)
        o = self.norm(o.flatten(0, 1).flatten(1)).view_as(o) + (r * k * self.bonus).sum(-1, keepdim=True) * v
        return MixResult(self.o(o.flatten(2) * whole(self.g(mixed["g"]), self.value_width)), states)


def previous(tokens: Tokens, history: Tensor | None) -> Tensor:
    """The previous token of each (B T C); zero before the first."""
    x = tokens.x
    before = x.new_zeros(x.shape[0], 1, x.shape[2]) if history is None else history.to(x.dtype)
    return plain.tap(torch.cat([before, x], 1)[:, :-1], tokens.position if tokens.packed else None, 1)
