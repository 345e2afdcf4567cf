"""DeltaNet (Yang et al. 2024): a fast-weight memory that corrects the value stored under a key instead of adding to it.

    S_t = S_{t−1} + β_t k_t (v_t − S_{t−1}ᵀ k_t)ᵀ        o_t = S_tᵀ q_t / √K

Letters: B batch, T time, C width, H heads, K key width, V value width.
"""

from __future__ import annotations

from torch import nn

from hypermlp.config import TAPS
from hypermlp.mixers.base import Cut, Tokens
from hypermlp.mixers.parts import RMSNorm, ShortConv, heads, init_linears, unit, whole, write_strength
from hypermlp.mixers.recurrent import MatrixMixer, MixResult, Past
from hypermlp.ops.recurrence import Steps


class DeltaNet(MatrixMixer):
    """q, k and v through a short convolution, q and k of unit length, the state's readout normalised in each head.

    Args:
        width: C, of inputs and outputs.
        n_head: heads, each with a state of its own.
        value_width: of all heads together; None: the layer's width, and so 4 C² parameters.
        negative: β in (0, 2), so that I − β k kᵀ may reflect the state (Grazzi et al. 2025); otherwise in (0, 1).
    """

    taps = TAPS
    counted_by_head = ("n_head", "value_width", "conv_width")

    def __init__(self, width: int, n_head: int = 2, *, value_width: int | None = None, negative: bool = False) -> None:
        super().__init__()
        self.negative = negative
        self.value_width = value_width = self.set_heads(width, n_head, value_width)
        self.conv_width = 2 * width + value_width
        self.qkv = nn.Linear(width, self.conv_width, bias=False)
        self.beta = nn.Linear(width, n_head, bias=False)
        self.conv = ShortConv(self.conv_width, TAPS)
        self.norm = RMSNorm(self.head_value_width)
        self.o = nn.Linear(value_width, width, bias=False)
        init_linears(self)

    def cuts(self) -> dict[str, Cut]:
        joined = Cut(blocks=(self.width, self.width, self.value_width))
        found = {"qkv.weight": joined, "conv.weight": joined, "o.weight": Cut(dim=1)}
        return {**found, **dict.fromkeys(("beta.weight",), Cut())}

    def step(self, tokens: Tokens, past: Past) -> MixResult:
        inputs = whole(self.qkv(tokens.x), self.conv_width)
        mixed = self.conv(inputs, tokens, past.history)
        key_width = self.n_head * self.head_key_width
        q, k, v = (t.unflatten(-1, (self.n_head, -1)) for t in mixed.split([key_width, key_width, self.value_width], -1))
        q, k = unit(q) * q.shape[-1] ** -0.5, unit(k)
        beta = write_strength(heads(self.beta(tokens.x), self.n_head, 1), self.negative)  # B T H 1
        steps = Steps(q, beta * k, v, a=-k, beta=beta)
        o, states = self.recur(steps, tokens, past)
        return MixResult(self.o(self.norm(o).flatten(2)), states, inputs)
