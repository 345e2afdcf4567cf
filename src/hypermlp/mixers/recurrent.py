"""What the mixers with a recurrent state share: their way through padding, packing and the cache; short convolutions; norms.

Letters: B batch, T time, C width, H heads, K key width, V value width, W taps.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp.cache import Cache, Keeps
from hypermlp.config import divisible
from hypermlp.mixers.base import Mixer, Tokens
from hypermlp.mixers.hyper import INIT_STD
from hypermlp.ops import pointwise

NORM_EPS = 1e-5


class Past(NamedTuple):
    """What came before the tokens at hand; empty at the beginning of a sequence, and always when training."""

    states: dict[str, Tensor]  # name → B …
    history: Tensor | None  # B W−1 …: the last things that the convolutions took

    def get(self, name: str) -> Tensor | None:
        return self.states.get(name)


class Step(NamedTuple):
    """What a recurrent mixer makes of some tokens."""

    y: Tensor  # B T C
    states: dict[str, Tensor]  # after the last token of each row
    conv_inputs: Tensor | None = None  # B T …: what its convolutions took, if it has any


class RecurrentMixer(Mixer):
    """A mixer whose memory is a state of fixed size. Subclasses name the state's shape and take steps."""

    taps: int = 1  # how far its convolutions (or token shifts) look, the token itself included
    conv_width: int = 0  # over how many channels

    @abstractmethod
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """name → shape for one row of the batch."""

    @abstractmethod
    def step(self, tokens: Tokens, past: Past) -> Step:
        """Go on from `past`. tokens.begins and tokens.padding say where documents begin and what is no token."""

    def mix(self, tokens: Tokens, cache: Cache | None) -> Tensor:
        if cache is None:
            return self.step(tokens, Past({}, None)).y
        made = self.step(tokens, Past(cache.states, cache.history() if self.taps > 1 else None))
        cache.advance(made.states, tokens.x if made.conv_inputs is None else made.conv_inputs, tokens.counts())
        return made.y

    def keeps(self) -> Keeps:
        return Keeps(states=self.state_shapes(), taps=self.taps, width=self.conv_width)


class ShortConv(nn.Module):
    """Depthwise causal convolution along time followed by SiLU; weight (C W), newest tap last."""

    def __init__(self, width: int, taps: int = 4, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, taps))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None
        nn.init.uniform_(self.weight, -(taps**-0.5), taps**-0.5)  # as torch's Conv1d begins

    def forward(self, x: Tensor, tokens: Tokens, history: Tensor | None) -> Tensor:
        y = pointwise.plain_conv(x, self.weight, tokens.position if tokens.packed else None, history)
        return F.silu(y if self.bias is None else y + self.bias)


class RMSNorm(nn.Module):
    """x / rms(x) ⊙ weight along the last dimension. (nn.RMSNorm warns where autocast brings x in another type.)"""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, eps=NORM_EPS) * self.weight


def heads(x: Tensor, n_head: int) -> Tensor:
    """B T H*K → B T H K."""
    return x.unflatten(-1, (n_head, -1))


def unit(x: Tensor) -> Tensor:
    """x / ‖x‖ along the last dimension, safe at zero."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def value_heads(value_width: int, n_head: int) -> int:
    """The value width of one head."""
    if value_width < 1:
        raise ValueError(f"value_width ({value_width}) must be a whole number of at least 1")
    divisible("value_width", value_width, n_head, f"n_head ({n_head})")
    return value_width // n_head


def init_linears(mixer: nn.Module) -> None:
    """Weights of all linear layers from N(0, 0.02²), biases zero."""
    for module in mixer.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, 0, INIT_STD)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
