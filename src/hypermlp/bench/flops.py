"""Operations that layers and models need, counted from their sizes: two for each multiply-add, only slots that exist.

Products with weights, convolutions, products of tokens with each other or with a state, and the decays of a state are counted;
what is done to single numbers (activations, norms, softmax) is not. States are counted as the recurrence is written, token by
token: that is what the method needs, however long the chunks of an implementation are. A training step is three times a
forward: each product has two gradients. What an implementation computes again is not counted.

Letters: T time, H heads, K and V widths of a head's keys and values, M slots, E inner width, N state width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from hypermlp.config import HyperGLUConfig
from hypermlp.mixers import HyperGLU, Mixer, SoftmaxAttention
from hypermlp.mixers.deltanet import DeltaNet
from hypermlp.mixers.differential import DifferentialAttention
from hypermlp.mixers.forgetting import ForgettingAttention
from hypermlp.mixers.gated_deltanet import GatedDeltaNet
from hypermlp.mixers.gla import GLA
from hypermlp.mixers.gsa import GSA
from hypermlp.mixers.hgrn import HGRN
from hypermlp.mixers.hgrn2 import HGRN2
from hypermlp.mixers.kda import KimiDeltaAttention
from hypermlp.mixers.linear import LinearAttention
from hypermlp.mixers.mamba import STATE, Mamba
from hypermlp.mixers.mamba2 import Mamba2
from hypermlp.mixers.parts import CausalConv, ShortConv
from hypermlp.mixers.path import PathAttention
from hypermlp.mixers.retnet import RetNet
from hypermlp.mixers.rwkv7 import RWKV7
from hypermlp.models.lm import Block, LanguageModel
from hypermlp.ops import path

TRAINING = 3  # forwards that a training step costs


class ForwardWork(NamedTuple):
    """Multiply-adds of a forward pass over one sequence."""

    weights: int  # by the layer's own parameters
    mixing: int  # between tokens, or between tokens and a state


def pairs(time: int, window: int | None = None) -> int:
    """Pairs of a row and a slot it sees."""
    if window is None or time <= window:
        return time * (time + 1) // 2
    return window * (window + 1) // 2 + (time - window) * window


def products(module: nn.Module) -> int:
    """Multiply-adds of one token with the linear maps and convolutions of a module."""
    kinds = (nn.Linear, ShortConv, CausalConv)
    return sum(m.weight.numel() for m in module.modules() if isinstance(m, kinds))


# ---- one function per mixer ----


def hyper_pair(config: HyperGLUConfig) -> int:
    """Multiply-adds of one row with one slot: scores, both mixings, readout."""
    assert config.qk_rank is not None
    assert config.vo_rank is not None
    r1 = 2 * config.routing_heads * config.op1_rank * config.use_op1
    r2 = 2 * config.n_head * config.op2_rank * config.use_op2
    return config.qk_rank + r1 + r2 + config.vo_rank


def hyper(layer: HyperGLU, T: int) -> ForwardWork:
    return ForwardWork(T * products(layer), pairs(T, layer.config.block_size) * hyper_pair(layer.config))


def softmax(layer: SoftmaxAttention, T: int) -> ForwardWork:
    return ForwardWork(T * products(layer), pairs(T) * (layer.qk_rank + layer.vo_rank))


def differential(layer: DifferentialAttention, T: int) -> ForwardWork:
    """Two maps in every head, each with scores and a readout of its own."""
    return ForwardWork(T * products(layer), pairs(T) * 2 * layer.n_head * (layer.head_key_width + layer.head_value_width))


def forgetting(layer: ForgettingAttention, T: int) -> ForwardWork:
    """The sum of the decays is one more channel of the keys."""
    return ForwardWork(T * products(layer), pairs(T) * layer.n_head * (layer.head_key_width + 1 + layer.head_value_width))


def path_attention(layer: PathAttention, T: int) -> ForwardWork:
    """In chunks, as ops/path.py does it: by the definition every pair would have a product of its own."""
    H, K, V = layer.n_head, layer.head_key_width, layer.head_value_width
    C = min(path.CHUNK, T)
    n = -(-T // C)
    chunk = 6 * C * C * K + C**3 + C * C * (C + K) // 2 + C * C * V  # products, the triangular system, the readout inside
    carried, size = 0, 1
    while 2 * size < n:
        whole = n // (2 * size)
        right = whole * size + max(0, n % (2 * size) - size)
        carried += (right + whole * size) * C * K * K + whole * K**3
        size *= 2
    borders = n * C * K * K if n > 2 else 0  # the chunks as matrices
    across = C * C * (n * (n - 1) // 2) * (K + V)
    return ForwardWork(T * products(layer), H * (n * chunk + borders + carried + across))


def linear(layer: LinearAttention, T: int) -> ForwardWork:
    """The feature maps serve every head."""
    features = products(layer.feature_q) + products(layer.feature_k)
    weights = products(layer) + (layer.n_head - 1) * features
    return ForwardWork(T * weights, T * state(layer.n_head, layer.head_key_width, layer.head_value_width, reads=1, writes=1))


def decayed(layer: RetNet | GLA | HGRN2, T: int) -> ForwardWork:
    """Read, write, decay."""
    return ForwardWork(
        T * products(layer), T * state(layer.n_head, layer.head_key_width, layer.head_value_width, 1, 1, decays=1)
    )


def deltanet(layer: DeltaNet, T: int) -> ForwardWork:
    """The state is read twice, by q and by k."""
    return ForwardWork(T * products(layer), T * state(layer.n_head, layer.width // layer.n_head, layer.head_value_width, 2, 1))


def gated_delta_rule(layer: GatedDeltaNet | KimiDeltaAttention, T: int) -> ForwardWork:
    return ForwardWork(
        T * products(layer), T * state(layer.n_head, layer.head_key_width, layer.head_value_width, 2, 1, decays=1)
    )


def rwkv7(layer: RWKV7, T: int) -> ForwardWork:
    """It removes along one vector and writes along another."""
    K = layer.width // layer.n_head
    return ForwardWork(T * products(layer), T * state(layer.n_head, K, layer.head_value_width, 2, 2, decays=1))


def gsa(layer: GSA, T: int) -> ForwardWork:
    """A state of keys and one of values."""
    H, M = layer.n_head, layer.slots
    mixing = state(H, layer.head_key_width, M, 1, 1, decays=1) + state(H, M, layer.head_value_width, 1, 1, decays=1)
    return ForwardWork(T * products(layer), T * mixing)


def mamba2(layer: Mamba2, T: int) -> ForwardWork:
    """The last head is computed in full, even where it is narrower."""
    return ForwardWork(
        T * products(layer), T * state(layer.n_head, layer.head_key_width, layer.head_value_width, 1, 1, decays=1)
    )


def mamba(layer: Mamba, T: int) -> ForwardWork:
    return ForwardWork(T * products(layer), T * state(1, STATE, layer.conv_width, 1, 1, decays=1))


def hgrn(layer: HGRN, T: int) -> ForwardWork:
    """The state is the output: it only decays and is added to."""
    return ForwardWork(T * products(layer), T * layer.inner)


def state(H: int, K: int, V: int, reads: int, writes: int, decays: int = 0) -> int:
    """Multiply-adds of one token with H states of K × V."""
    return H * K * V * (reads + writes + decays)


COUNTERS: dict[type[Mixer], Callable[[Any, int], ForwardWork]] = {
    HyperGLU: hyper,
    SoftmaxAttention: softmax,
    DifferentialAttention: differential,
    ForgettingAttention: forgetting,
    PathAttention: path_attention,
    LinearAttention: linear,
    RetNet: decayed,
    GLA: decayed,
    HGRN2: decayed,
    DeltaNet: deltanet,
    GatedDeltaNet: gated_delta_rule,
    KimiDeltaAttention: gated_delta_rule,
    RWKV7: rwkv7,
    GSA: gsa,
    Mamba: mamba,
    Mamba2: mamba2,
    HGRN: hgrn,
}


def work(layer: nn.Module, time: int) -> ForwardWork | None:
    """Of one of our mixers, or a class made from one; None: nobody has counted it."""
    for kind in type(layer).__mro__:
        if kind in COUNTERS:
            return COUNTERS[kind](layer, time)
    return None


def forward(layer: nn.Module, batch: int, time: int) -> int | None:
    """Operations of a forward pass of a mixer."""
    found = work(layer, time)
    return None if found is None else 2 * batch * sum(found)


# ---- whole models ----


class ModelWork(NamedTuple):
    """Operations of a forward pass of a language model, by part."""

    weights: int  # of the mixers
    mixing: int
    feed_forward: int
    head: int

    @property
    def forward(self) -> int:
        return sum(self)

    @property
    def training(self) -> int:
        return TRAINING * self.forward


def model(net: LanguageModel, batch: int, time: int) -> ModelWork:
    """A mixer that nobody has counted is a ValueError."""
    weights = mixing = ffn = 0
    for block in net.blocks:
        assert isinstance(block, Block)
        found = work(block.mixer, time)
        if found is None:
            raise ValueError(
                f"the operations of {type(block.mixer).__name__} are not counted; add a function to bench/flops.py"
            )
        weights, mixing, ffn = weights + found.weights, mixing + found.mixing, ffn + time * products(block.ffn)
    return ModelWork._make(2 * batch * macs for macs in (weights, mixing, ffn, time * net.head.weight.numel()))


# ---- what the paper's counter sees ----

AUTHORS_ROWS = 64  # of a block in their implementation, the size that their figure implies
UNSEEN = (ShortConv, CausalConv)  # a convolution is no matrix product


def seen(net: LanguageModel, batch: int, time: int, *, naive: bool = False) -> int:
    """What torch.profiler(with_flops=True) reports of a forward without the head, matrix products alone.

    It knows matrix products by name. Inside fused kernels there are none, so attention and recurrences cost nothing; where
    attention is written out (`naive`) all T × T pairs count, and the authors' layer has blocks of rows with all slots before
    their end.
    """
    total = 0
    for block in net.blocks:
        assert isinstance(block, Block)
        mixer = block.mixer
        found = work(mixer, time)
        assert found is not None
        total += found.weights - time * sum(m.weight.numel() for m in mixer.modules() if isinstance(m, UNSEEN))
        total += time * products(block.ffn)
        if isinstance(mixer, HyperGLU):
            blocks = -(-time // AUTHORS_ROWS)
            visible = sum(min(time, (i + 1) * AUTHORS_ROWS) * min(AUTHORS_ROWS, time - i * AUTHORS_ROWS) for i in range(blocks))
            total += visible * hyper_pair(mixer.config)
        elif naive and isinstance(mixer, SoftmaxAttention):
            total += time**2 * (mixer.qk_rank + mixer.vo_rank)
    return 2 * batch * total
