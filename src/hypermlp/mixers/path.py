"""PaTH attention (Yang et al., 2025): softmax attention whose positions are products of data-dependent reflections.

The mathematics is in ops/path.py. Letters: B batch, T time, C width, H heads, K and V widths of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hypermlp.cache import Cache, CacheSpec
from hypermlp.mixers.base import Cut, Mixer, Tokens
from hypermlp.mixers.parts import ShortConv, heads, init_linears, unit, whole
from hypermlp.ops.path import CHUNK, PathInputs, meet, path_attention
from hypermlp.ops.types import compute_dtype

RANK = 32  # through which the directions w are made
TAPS = 3  # of their convolution


class PathAttention(Mixer):
    """Attention whose keys are turned by every token that comes after them; no rotary embedding. About 4 C² parameters.

    Each token reflects along w = L2(SiLU(conv₃(W₂ W₁ x))) in every head, with strength β = 2 σ(W x + b).

    Args:
        width, n_head: as in SoftmaxAttention.
        value_width: width of the values over all heads; None: the layer's.
    """

    def __init__(self, width: int, n_head: int = 2, *, value_width: int | None = None) -> None:
        super().__init__()
        value_width = self.set_heads(width, n_head, value_width)
        self.q, self.k = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.v, self.o = nn.Linear(width, value_width, bias=False), nn.Linear(value_width, width, bias=False)
        self.w_down, self.w_up = nn.Linear(width, RANK, bias=False), nn.Linear(RANK, width, bias=False)
        self.conv = ShortConv(width, TAPS)
        self.beta = nn.Linear(width, n_head)
        init_linears(self)

    def cuts(self) -> dict[str, Cut]:
        columns = ("q.weight", "k.weight", "v.weight", "w_up.weight", "conv.weight", "beta.weight", "beta.bias")
        return {**dict.fromkeys(columns, Cut()), "o.weight": Cut(dim=1)}

    def mix(self, tokens: Tokens, cache: Cache | None) -> Tensor:
        if cache is not None:
            return self._continue(tokens, cache)
        inputs = self.path_inputs(tokens, self.w_up(self.w_down(tokens.x)), None)
        o = path_attention(inputs, tokens.spans if tokens.packed else None, tokens.begins)
        return self.o(o.flatten(2))

    def path_inputs(self, tokens: Tokens, conv_inputs: Tensor, history: Tensor | None) -> PathInputs:
        """Queries, keys, values and reflections; conv_inputs (B T C) are what the directions are made from."""
        x, H = tokens.x, self.n_head
        exact = compute_dtype(x.dtype)
        K, V = self.head_key_width, self.head_value_width
        w = unit(heads(self.conv(whole(conv_inputs, H * K), tokens, history), H, K).to(exact))
        beta = 2 * torch.sigmoid(whole(self.beta(x), H).to(exact))
        if tokens.padding is not None:
            beta = beta.masked_fill(tokens.padding[..., None], 0)
        return PathInputs(heads(self.q(x), H, K), heads(self.k(x), H, K), heads(self.v(x), H, V), w, beta)

    def _continue(self, tokens: Tokens, cache: Cache) -> Tensor:
        """Each new chunk attends to the cached keys as they are, then rotates them."""
        conv_inputs = self.w_up(self.w_down(tokens.x))
        inputs, counts, o = self.path_inputs(tokens, conv_inputs, cache.history()), tokens.counts(), []
        for first in range(0, max(tokens.x.shape[1], 1), CHUNK):
            part = PathInputs._make(t[:, first : first + CHUNK] for t in inputs)
            longest = max(cache.seen, default=0)
            held = {name: slots[:, :longest] for name, slots in cache.slots.items()}
            read, turned, k = meet(part, held["k"], held["v"], cache.lengths.to(part.q.device))
            held["k"].copy_(turned)
            real = [min(max(n - first, 0), part.q.shape[1]) for n in counts]
            cache.append({"k": k, "v": part.v}, conv_inputs[:, first : first + CHUNK], real)
            o.append(read)
        return self.o(torch.cat(o, dim=1).flatten(2))

    def cache_spec(self) -> CacheSpec:
        """Keys are held as turned by every token since, and rewritten with each."""
        slots = {"k": (self.n_head, self.head_key_width), "v": (self.n_head, self.head_value_width)}
        return CacheSpec(slots=slots, taps=TAPS, width=self.n_head * self.head_key_width, rewritten=True)
