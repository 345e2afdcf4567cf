"""Forgetting attention (Lin et al., 2025): softmax attention whose logits decay at a rate set by every token in between.

    o_i = Σ_j softmax_j(q_i · k_j / √K + g_{j+1} + … + g_i) v_j        g = log σ(W_f x + b_f), one per head

Letters: B batch, T time, S slots, C width, H heads, K and V widths of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp.cache import Cache, CacheSpec
from hypermlp.mixers.base import Cut, Mixer, Tokens
from hypermlp.mixers.parts import heads, init_linears
from hypermlp.mixers.softmax import attend, attend_packed
from hypermlp.ops.types import compute_dtype, no_autocast


class ForgettingAttention(Mixer):
    """Causal multi-head attention that knows order by its decays alone, without rotary embedding; 4 C² parameters.

    Args:
        width: of inputs and outputs.
        n_head: how many heads.
        value_width: of all heads together (None: the layer's width).
    """

    def __init__(self, width: int, n_head: int = 2, *, value_width: int | None = None) -> None:
        super().__init__()
        value_width = self.set_heads(width, n_head, value_width)
        self.q, self.k = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.v, self.o = nn.Linear(width, value_width, bias=False), nn.Linear(value_width, width, bias=False)
        self.forget = nn.Linear(width, n_head)
        init_linears(self)

    def cuts(self) -> dict[str, Cut]:
        return {
            **dict.fromkeys(("q.weight", "k.weight", "v.weight", "forget.weight", "forget.bias"), Cut()),
            "o.weight": Cut(dim=1),
        }

    def mix(self, tokens: Tokens, cache: Cache | None) -> Tensor:
        q, slots = self.project(tokens)
        spans = tokens.spans if tokens.packed else None
        if cache is not None:
            slots, spans = cache.append(slots, tokens.x, tokens.counts())
        with no_autocast(q):
            # A row's own sum of g shifts all its logits alike, so the sum up to each slot is all that matters. It is one
            # more channel of the keys; in half precision it would lose what lies between two tokens.
            exact = compute_dtype(q.dtype)
            decay = slots["g"].to(exact).cumsum(1)  # B S H 1
            scale = (q.shape[-1] + 1) ** 0.5  # which attend divides by
            q_wide = F.pad(q.to(exact) * (scale * q.shape[-1] ** -0.5), (0, 1), value=scale)
            k_wide = torch.cat([slots["k"].to(exact), -decay], dim=-1)
            v = slots["v"].to(exact)
            if tokens.packed:
                assert spans is not None
                o = attend_packed(q_wide, k_wide, v, spans)
            else:
                o = attend(q_wide, k_wide, v, spans)
        return self.o(o.flatten(2).to(q.dtype))

    def project(self, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        """q (B T H K), and what a slot holds: k (B T H K), v (B T H V), g (B T H 1)."""
        x, H = tokens.x, self.n_head
        q, k = (heads(layer(x), H, self.head_key_width) for layer in (self.q, self.k))
        return q, {"k": k, "v": heads(self.v(x), H, self.head_value_width), "g": F.logsigmoid(heads(self.forget(x), H, 1))}

    def cache_spec(self) -> CacheSpec:
        H = self.n_head
        return CacheSpec(slots={"k": (H, self.head_key_width), "v": (H, self.head_value_width), "g": (H, 1)}, rewind=32)
