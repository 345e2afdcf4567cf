"""A layer's parameters and what is fixed about it: one object for the projections, the whole layer and the step of decoding.

Letters as in ops/types.py; C width, W taps.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hypermlp.ops.types import Spec


class LayerParameters(NamedTuple):
    """What a layer learns, or gradients of it, or whether they are wanted; None where the layer has no such part.

    The order is that of hm_parameters in native/arguments.h: seven weights (out C), their biases (out), and the rest.
    """

    q: Any
    gate_qk: Any
    control1: Any
    control2: Any
    k: Any
    v: Any
    gate_vo: Any
    q_bias: Any
    gate_qk_bias: Any
    control1_bias: Any
    control2_bias: Any
    k_bias: Any
    v_bias: Any
    gate_vo_bias: Any
    conv_k: Any  # C W
    conv_v: Any
    A1: Any  # G L R1
    B1: Any
    diag1: Any  # G L
    A2: Any  # H L R2
    B2: Any
    diag2: Any  # H L
    o: Any  # C H·V
    o_bias: Any

    def projections(self) -> LayerParameters:
        """Those between x and the operator alone."""
        return LayerParameters._make((*self[:16], *(None,) * 8))

    @property
    def weights(self) -> tuple[Tensor | None, ...]:
        """Of the seven projections."""
        return self[:7]

    @property
    def others(self) -> tuple[Tensor | None, ...]:
        """Convolutions and mixings: what no linear layer has."""
        return self[14:22]

    @property
    def sizes(self) -> list[int]:
        """Widths of q, its gate and both controls, which are one product."""
        return [len(w) for w in self[:4] if w is not None]

    def joined(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of q, its gate and both controls in one product, for a layer that has all of them."""
        return join(self[:4], self[7:11])


def join(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of one product instead of several; no bias where none has one."""
    if all(b is None for b in biases):
        return torch.cat(list(weights)), None
    filled = [w.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)]
    return torch.cat(list(weights)), torch.cat(filled)


DTYPE = operator.attrgetter("dtype")


def placement(tensors: Iterable[Tensor]) -> list[Any]:
    """Where tensors lie, and how: two that are equal are read alike, whatever numbers are there now."""
    found = list(tensors)
    lying = [*map(Tensor.data_ptr, found), *map(Tensor.stride, found), *map(Tensor.is_neg, found)]
    return [*lying, *map(Tensor.size, found), *map(DTYPE, found)]


class LinearWeights(NamedTuple):
    """y = x wᵀ + bias, with codes of 8 bits times a scale for each output instead of weights where there is a scale."""

    weight: Tensor  # out in
    scale: Tensor | None  # out
    bias: Tensor | None  # out


class LayerShape(NamedTuple):
    """What is fixed about a layer."""

    spec: Spec
    heads: int
    routing_heads: int
    shortcut1: bool
    shortcut2: bool
