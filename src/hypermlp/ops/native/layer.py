"""A whole layer in one call of the compiled code, forward and back.

On few tokens every call counts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hypermlp.ops.native.bindings import (
    STRUCTURES,
    addresses,
    call,
    hm_parameters,
    pointer,
    room_for,
    structure,
    whole,
)
from hypermlp.ops.parameters import LayerParameters, LayerShape, placement

MOST_TOKENS = 512  # from which the calls are a small part, and nodes that free their tensors one by one need less memory


def dimensions(p: LayerParameters, shape: LayerShape) -> tuple[int, ...]:
    """W H G K V R1 R2 L."""
    H, G = shape.heads, shape.routing_heads
    rank1, rank2 = (0 if A is None else A.shape[2] for A in (p.A1, p.A2))
    taps = 0 if p.conv_k is None else p.conv_k.shape[1]
    return taps, H, G, p.q.shape[0] // G, p.v.shape[0] // H, rank1, rank2, shape.spec.block_size


def shapes(C: int, sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """What every parameter of a layer of these dimensions must be."""
    W, H, G, K, V, R1, R2, L = sizes
    q, s1, s2, o = G * K, G * R1, H * R2, H * V
    factors1, factors2 = (G, L, R1), (H, L, R2)
    return (
        *((q, C), (q, C), (s1, C), (s2, C), (q, C), (o, C), (o, C)),
        *((q,), (q,), (s1,), (s2,), (q,), (o,), (o,)),
        *((C, W), (C, W), factors1, factors1, (G, L), factors2, factors2, (H, L), (C, o), (C,)),
    )


def operator_arguments(p: LayerParameters, shape: LayerShape) -> ctypes.Structure:
    """hm_args as far as a layer fixes it."""
    spec, (_, *sizes) = shape.spec, dimensions(p, shape)
    choices = (spec.kind == "relu", spec.norm != "none", shape.shortcut1, shape.shortcut2, spec.eps)
    return structure("hm_args", 0, 0, 0, *sizes, *choices)


class WholeCall:
    """hm_layer_args: sizes, choices and parameters of a layer, laid out once; a call adds its tensors."""

    def __init__(self, p: LayerParameters, shape: LayerShape) -> None:
        m, sizes, C = operator_arguments(p, shape), dimensions(p, shape), p.o.shape[0]
        self.arguments = STRUCTURES["hm_layer_args"](mix=m, C=C, W=sizes[0], parameters=addresses(p, shapes(C, sizes)))
        self.kept = 4 * m.G * m.K + 2 * m.G * m.R1 + 2 * m.H * m.R2 + 3 * m.H * m.V + m.H  # numbers for each token
        self.parameters, self.shape = p, shape
        self.places = placement(t for t in p if t is not None)

    def reads(self, p: LayerParameters) -> bool:
        """Whether these parameters are, and lie, as those that it was made for."""
        return self.places == placement(t for t in p if t is not None)

    def begin(self, x: Tensor) -> Any:
        """The arguments of a call on x (B T C)."""
        a = STRUCTURES["hm_layer_args"].from_buffer_copy(self.arguments)
        m, (B, T) = a.mix, x.shape[:2]
        m.B, m.T, m.S, m.nthreads = B, T, T, torch.get_num_threads()
        a.x, a.kept_size = pointer(x, (B, T, self.arguments.C)), B * T * self.kept
        return a

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """y (B T C), and what backward needs of the way there."""
        x = whole(x)
        a = self.begin(x)
        y, kept = x.new_empty(x.shape), x.new_empty(a.kept_size)
        a.y, a.kept = y.data_ptr(), kept.data_ptr()
        call("hm_layer_forward", a)
        return y, kept

    def backward(self, d_y: Tensor, x: Tensor, kept: Tensor, wanted: LayerParameters) -> tuple[Tensor, LayerParameters]:
        """Gradients of x and of the wanted parameters."""
        d_y, x = whole(d_y), whole(x)
        a = self.begin(x)
        d_x, found = x.new_empty(x.shape), room_for(self.parameters, wanted)
        a.kept, a.dy, a.dx = pointer(kept, (a.kept_size,)), pointer(d_y, x.shape), d_x.data_ptr()
        a.gradients = hm_parameters([None if t is None else t.data_ptr() for t in found])
        call("hm_layer_backward", a)
        return d_x, found
