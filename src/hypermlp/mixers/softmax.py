"""Softmax attention on torch's fused kernel: the rival that every claim is measured against.

Letters: B batch, T time, C width, H heads, V width of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp.mixers.base import Mixer, check_input, gather_tokens

INIT_STD = 0.02


class SoftmaxAttention(Mixer):
    """Causal multi-head attention, 4 C² parameters, without position information of its own."""

    def __init__(self, width: int, n_head: int) -> None:
        super().__init__()
        if width % n_head:
            raise ValueError(f"width ({width}) must be divisible by n_head ({n_head})")
        self.width, self.n_head = width, n_head
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        for module in (self.q, self.k, self.v, self.o):
            nn.init.normal_(module.weight, 0, INIT_STD)

    def forward(self, x: Tensor, *, attention_mask: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        check_input(x, self.q.weight, attention_mask, cu_seqlens)
        tokens = gather_tokens(x, attention_mask, cu_seqlens)
        q, k, v = (m(tokens.x).unflatten(-1, (self.n_head, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        if cu_seqlens is None:
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # B H T V
        else:
            document = (tokens.position == 0).cumsum(1)  # 1 T
            place = torch.arange(x.shape[1], device=x.device)
            visible = (document[:, :, None] == document[:, None]) & (place[:, None] >= place)
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None])
        return tokens.restore(self.o(o.transpose(1, 2).flatten(2)))
