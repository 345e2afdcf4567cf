"""Softmax attention on torch's fused kernel: the rival that every claim is measured against.

Letters: B batch, T time, C width, H heads, V width of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp.config import divisible
from hypermlp.mixers import rotary
from hypermlp.mixers.base import Mixer, check_input, gather_tokens

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

    def forward(self, x: Tensor, *, attention_mask: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        check_input(x, self.q.weight, attention_mask, cu_seqlens)
        tokens = gather_tokens(x, attention_mask, cu_seqlens)
        q, k, v = (m(tokens.x).unflatten(-1, (self.n_head, -1)) for m in (self.q, self.k, self.v))  # B T H V
        if self.use_rope:
            angle = rotary.angles(tokens.position, q.shape[-1], self.rope_base).repeat_interleave(2, dim=-1)
            q, k = rotary.rotate(q, angle), rotary.rotate(k, angle)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if cu_seqlens is None:
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # B H T V
        else:
            document = (tokens.position == 0).cumsum(1)  # 1 T
            place = torch.arange(x.shape[1], device=x.device)
            visible = (document[:, :, None] == document[:, None]) & (place[:, None] >= place)
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None])
        return tokens.restore(self.o(o.transpose(1, 2).flatten(2)))
