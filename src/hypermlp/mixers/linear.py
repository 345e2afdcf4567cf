"""Linear attention (Katharopoulos et al. 2020) with a learnt feature map: a state that is only added to.

    S_t = S_{t−1} + φ_k(k_t) v_tᵀ        o_t = S_tᵀ φ_q(q_t) / √K

Letters: B batch, T time, C width, H heads, K and V widths of a head.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from hypermlp.mixers.base import Cut, Tokens
from hypermlp.mixers.parts import RMSNorm, heads, init_linears
from hypermlp.mixers.recurrent import MatrixMixer, MixResult, Past
from hypermlp.ops.recurrence import Steps


class LinearAttention(MatrixMixer):
    """φ(x) = (W₁x + b₁) ⊙ (W₂x + b₂), shared by all heads, unnormalised; RMSNorm per head. 4 C² parameters and 4 K²
    of the feature maps."""

    def __init__(self, width: int, n_head: int = 2, *, value_width: int | None = None) -> None:
        super().__init__()
        inner = self.set_heads(width, n_head, value_width)
        self.q, self.k = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.v, self.o = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)
        init_linears(self)
        self.feature_q, self.feature_k = Feature(self.head_key_width), Feature(self.head_key_width)
        self.norm = RMSNorm(self.head_value_width)

    def scaled(self) -> Iterator[nn.Linear]:
        """Features keep torch's initialisation."""
        kept = {*self.feature_q.modules(), *self.feature_k.modules()}
        return (module for module in super().scaled() if module not in kept)

    def cuts(self) -> dict[str, Cut]:
        return {**dict.fromkeys(("q.weight", "k.weight", "v.weight"), Cut()), "o.weight": Cut(dim=1)}

    def step(self, tokens: Tokens, past: Past) -> MixResult:
        q, k = (heads(layer(tokens.x), self.n_head, self.head_key_width) for layer in (self.q, self.k))
        v = heads(self.v(tokens.x), self.n_head, self.head_value_width)
        steps = Steps(self.feature_q(q) * self.head_key_width**-0.5, self.feature_k(k), v)
        o, states = self.recur(steps, tokens, past)
        return MixResult(self.o(self.norm(o).flatten(2)), states)


class Feature(nn.Module):
    """x ↦ (W₁x + b₁) ⊙ (W₂x + b₂). It keeps torch's initialisation: products of small weights would begin next to zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) * self.right(x)
