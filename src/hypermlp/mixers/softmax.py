"""Softmax attention on torch's fused kernel: the rival that every claim is measured against.

Letters: B batch, T time, C width, H heads, V width of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp.cache import Cache
from hypermlp.config import divisible
from hypermlp.mixers import rotary
from hypermlp.mixers.base import Mixer, Tokens, check_input, gather_tokens, visible_slots
from hypermlp.mixers.projections import join_linears

INIT_STD = 0.02


class SoftmaxAttention(Mixer):
    """Causal multi-head attention with rotary embedding: 4 C² parameters."""

    def __init__(self, width: int, n_head: int, *, use_rope: bool = True, rope_base: float = 10000.0) -> None:
        super().__init__()
        divisible("width", width, 2 * n_head if use_rope else n_head, f"{'2 * ' if use_rope else ''}n_head ({n_head})")
        self.width, self.n_head, self.use_rope, self.rope_base = width, n_head, use_rope, rope_base
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        for module in (self.q, self.k, self.v, self.o):
            nn.init.normal_(module.weight, 0, INIT_STD)

    def forward(
        self,
        x: Tensor,
        *,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        check_input(x, self.width, next(self.parameters()), attention_mask, cu_seqlens, cache)
        if cache is None:
            return self._forward(gather_tokens(x, attention_mask, cu_seqlens), None)
        cache.check(x, self._slot_shapes(), window=None, taps=1)
        with torch.no_grad():
            return self._forward(gather_tokens(x, attention_mask, None, cache), cache)

    def _forward(self, tokens: Tokens, cache: Cache | None) -> Tensor:
        modules = (self.q, self.k, self.v)
        joined = join_linears(tokens.x, modules)
        made = [m(tokens.x) for m in modules] if joined is None else joined.split(self.width, dim=-1)
        q, k, v = (part.unflatten(-1, (self.n_head, -1)) for part in made)  # B T H V
        if self.use_rope:
            angle = rotary.angles(tokens.position, q.shape[-1], self.rope_base).repeat_interleave(2, dim=-1)
            q, k = rotary.rotate(q, angle), rotary.rotate(k, angle)
        visible, spans = None, None
        if cache is not None:
            slots, spans = cache.append({"k": k, "v": v}, tokens.x, tokens.counts())
            k, v = slots["k"].to(q.dtype), slots["v"].to(q.dtype)
        elif tokens.packed:
            spans = tokens.spans
        T, S = q.shape[1], k.shape[1]
        if spans is not None or 1 < T < S:
            visible = visible_slots(q, S, spans)[:, None]
        o = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=visible, is_causal=visible is None and T == S
        )  # B H T V
        return tokens.restore(self.o(o.transpose(1, 2).flatten(2)))

    def new_cache(
        self,
        batch_size: int,
        max_len: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Cache:
        return Cache.new(
            batch_size,
            self._slot_shapes(),
            width=self.width,
            window=None,
            taps=1,
            rewind=0,
            max_len=max_len,
            dtype=dtype or next(self.parameters()).dtype,
            device=torch.device(device or next(self.parameters()).device),
        )

    def _slot_shapes(self) -> dict[str, tuple[int, ...]]:
        head = (self.n_head, self.width // self.n_head)
        return {"k": head, "v": head}
