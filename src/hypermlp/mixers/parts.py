"""Parts that mixers are made of: convolutions, norms, heads, initialisation.

Letters: B batch, T time, C width, H heads, K width of a head, W taps.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hypermlp.collectives import total
from hypermlp.config import INIT_STD, TAPS, Init
from hypermlp.mixers.base import Tokens
from hypermlp.mixers.initial import init_weight
from hypermlp.mixers.modules import known
from hypermlp.ops import plain
from hypermlp.ops.types import compute_dtype

NORM_EPS = 1e-5
SHORTEST, LONGEST = 1e-3, 0.1  # steps Δ that a layer begins with


@known
class CausalConv(nn.Module):
    """Parameters of a depthwise causal convolution along time, newest tap last; ops.pointwise.convs applies both at once."""

    def __init__(self, width: int, taps: int, init: Init = "paper") -> None:
        super().__init__()
        self.init = init
        self.weight = nn.Parameter(torch.empty(width, taps))

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """N(0, 0.02²) for "paper"; for "decays" uniform within ±1/√taps, as torch's depthwise Conv1d begins."""
        if self.init == "paper":
            self.weight.normal_(0, INIT_STD, generator=generator)
        else:
            bound = self.weight.shape[1] ** -0.5
            self.weight.uniform_(-bound, bound, generator=generator)

    def forward(self) -> Tensor:
        """The weight, read in a forward so that hooks which bring offloaded parameters run."""
        return self.weight


class ShortConv(nn.Module):
    """Depthwise causal convolution along time followed by SiLU; weight (C W), newest tap last."""

    def __init__(self, width: int, taps: int = TAPS, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, taps))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As torch's Conv1d begins, but without a bias."""
        bound = self.weight.shape[1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, tokens: Tokens, history: Tensor | None) -> Tensor:
        y = plain.conv(x, self.weight, tokens.position if tokens.packed else None, history)
        return F.silu(y if self.bias is None else y + self.bias)


class RMSNorm(nn.Module):
    """x / rms(x) ⊙ weight along the last dimension. (nn.RMSNorm warns where autocast brings x in another type.)"""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, group: ProcessGroup | None = None) -> Tensor:
        """group: of the processes that have the channels between them; None: they are all here."""
        if group is None:
            return F.rms_norm(x, self.weight.shape, eps=NORM_EPS) * self.weight
        exact = x.to(compute_dtype(x.dtype))
        squares = total(exact.square().sum(-1, keepdim=True), group) / (x.shape[-1] * group.size())
        return (exact * torch.rsqrt(squares + NORM_EPS)).to(x.dtype) * self.weight


def whole(x: Tensor, width: int) -> Tensor:
    """x (… width), as a projection gives it; another width is refused, since half of it would still divide into heads."""
    if x.shape[-1] != width:
        raise ValueError(
            f"a projection gives {x.shape[-1]} numbers per token, and this layer was made for {width}: make a layer of the "
            "width that is meant, and leave its projections out of pruning and tensor parallel plans (fully_shard divides them)"
        )
    return x


def heads(x: Tensor, n_head: int, width: int) -> Tensor:
    """B T H*K → B T H K, for K = width."""
    return whole(x, n_head * width).unflatten(-1, (n_head, width))


def gated(y: Tensor, gate: Tensor) -> Tensor:
    """y ⊙ silu(gate)."""
    return y * F.silu(whole(gate, y.shape[-1]))


def unit(x: Tensor) -> Tensor:
    """x / ‖x‖ along the last dimension, safe at zero."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def write_strength(logits: Tensor, negative: bool) -> Tensor:
    """β of a delta rule: in (0, 1), or with negative eigenvalues of I − β k kᵀ in (0, 2)."""
    return 2 * torch.sigmoid(logits) if negative else torch.sigmoid(logits)


def init_linears(mixer: nn.Module) -> None:
    """Weights of all linear layers from N(0, 0.02²), biases zero."""
    for module in mixer.modules():
        if isinstance(module, nn.Linear):
            init_weight(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def decay_bank(length: int, rank: int) -> Tensor:
    """Decaying exponentials of the lag (L R), one per column, of norm 1; lag ℓ is at index L−1−ℓ.

    Their spans, the lags at which they have fallen to 1/e, are spaced evenly in the logarithm from 1 to `length`.
    """
    span = length ** (torch.arange(rank) / (rank - 1) if rank > 1 else torch.tensor([0.5]))
    lag = torch.arange(length - 1, -1, -1)[:, None]
    return F.normalize(torch.exp(-lag / span), dim=0)


def first_steps(count: int) -> Tensor:
    """Biases whose softplus is spread evenly, in the logarithm, over the steps that a layer begins with."""
    steps = torch.empty(count).uniform_(math.log(SHORTEST), math.log(LONGEST)).exp()
    return steps + torch.log(-torch.expm1(-steps))
