"""Differential attention (Ye et al., 2025): the difference of two softmax maps, so that what they share cancels.

Letters: B batch, T time, S slots, C width, H heads, K width of one map's keys, V value width of a head.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp.cache import Cache, CacheSpec
from hypermlp.checks import divisible
from hypermlp.config import ROPE_BASE
from hypermlp.mixers import rotary
from hypermlp.mixers.base import Cut, Mixer, Tokens
from hypermlp.mixers.parts import NORM_EPS, heads, init_linears
from hypermlp.mixers.softmax import attend, attend_packed

LAMBDA_STD = 0.1


class DifferentialAttention(Mixer):
    """o = (softmax(q₁ k₁ᵀ / √K) − λ softmax(q₂ k₂ᵀ / √K)) v in every head, with rotary embedding; 4 C² parameters.

    λ = exp(λq₁ · λk₁) − exp(λq₂ · λk₂) + λ_init is one number for all heads. Each head is normalised by itself and scaled by
    1 − λ_init, whatever λ has become.

    Args:
        width, n_head: as in SoftmaxAttention.
        value_width: width of the values over all heads; None: the layer's, twice that of one map's keys.
        layer: its place in the model, from 1, with which λ_init grows.
    """

    def __init__(self, width: int, n_head: int = 2, *, value_width: int | None = None, layer: int = 1) -> None:
        super().__init__()
        if layer < 1:
            raise ValueError(f"layer ({layer}) must be at least 1: layers are counted from 1")
        divisible("width", width, 4 * n_head, f"4 * n_head ({n_head}), for two maps of rotating pairs in every head")
        value_width = self.set_heads(width, n_head, value_width)
        self.head_key_width //= 2  # of each map
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * (layer - 1))
        self.q, self.k = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.v, self.o = nn.Linear(width, value_width, bias=False), nn.Linear(value_width, width, bias=False)
        self.lambda_q = nn.Parameter(torch.empty(2, self.head_key_width))
        self.lambda_k = nn.Parameter(torch.empty(2, self.head_key_width))
        self.norm = nn.Parameter(torch.ones(self.head_value_width))
        init_linears(self)
        for vector in (self.lambda_q, self.lambda_k):
            nn.init.normal_(vector, 0, LAMBDA_STD)

    def cuts(self) -> dict[str, Cut]:
        maps = Cut(blocks=(1, 1))  # the first maps of all heads, then the second
        return {"q.weight": maps, "k.weight": maps, "v.weight": Cut(), "o.weight": Cut(dim=1)}

    def mix(self, tokens: Tokens, cache: Cache | None) -> Tensor:
        q, k, v = self.project(tokens)
        spans = tokens.spans if tokens.packed else None
        if cache is not None:
            slots, spans = cache.append({"k": k, "v": v}, tokens.x, tokens.counts())
            k, v = slots["k"].to(q.dtype), slots["v"].to(q.dtype)
        maps = zip(q.chunk(2, dim=2), k.chunk(2, dim=2), strict=True)  # the first map of every head, then the second
        if tokens.packed:
            assert spans is not None
            first, second = (attend_packed(q, k, v, spans) for q, k in maps)
        else:
            first, second = (attend(q, k, v, spans) for q, k in maps)  # B T H V
        return self.o(self._normalise(first - self.strength().to(first.dtype) * second).flatten(2))

    def project(self, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor]:
        """q and k of both maps (B T 2H K), the first maps of all heads before the second, and v (B T H V)."""
        x, H = tokens.x, self.n_head
        K = self.head_key_width
        q, k, v = heads(self.q(x), 2 * H, K), heads(self.k(x), 2 * H, K), heads(self.v(x), H, self.head_value_width)
        angle = rotary.angles(tokens.position, K, ROPE_BASE).repeat_interleave(2, dim=-1)
        return rotary.rotate(q, angle), rotary.rotate(k, angle), v

    def strength(self) -> Tensor:
        """λ, how much of the second map is taken away."""
        first, second = (self.lambda_q * self.lambda_k).sum(-1).exp()
        return first - second + self.lambda_init

    def _normalise(self, o: Tensor) -> Tensor:
        return F.rms_norm(o, o.shape[-1:], self.norm.to(o.dtype), NORM_EPS) * (1 - self.lambda_init)

    def cache_spec(self) -> CacheSpec:
        return CacheSpec(slots={"k": (2 * self.n_head, self.head_key_width), "v": (self.n_head, self.head_value_width)})
