"""A whole layer in one call of the compiled code, forward and back.

On few tokens every call counts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import Tensor

from hypermlp.ops.native.bindings import (
    STRUCTURES,
    addresses,
    call,
    pointer,
    room_for,
    structure,
    whole,
)
from hypermlp.ops.parameters import LayerParameters, LayerShape

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


def layer_arguments(x: Tensor, p: LayerParameters, shape: LayerShape) -> ctypes.Structure:
    """For x (B T C) and contiguous parameters: sizes, choices, threads and parameters."""
    (B, T, C), spec, (W, *sizes) = x.shape, shape.spec, dimensions(p, shape)
    choices = (spec.kind == "relu", spec.norm != "none", shape.shortcut1, shape.shortcut2, spec.eps)
    m = structure("hm_args", B, T, T, *sizes, *choices)
    a = STRUCTURES["hm_layer_args"](mix=m, C=C, W=W, parameters=addresses(p, shapes(C, (W, *sizes))))
    a.x, a.kept_size = pointer(x, x.shape), m.B * m.T * (4 * m.G * m.K + 2 * m.G * m.R1 + 2 * m.H * m.R2 + 3 * m.H * m.V + m.H)
    return a


def forward(x: Tensor, p: LayerParameters, shape: LayerShape) -> tuple[Tensor, Tensor]:
    """y (B T C) with contiguous parameters, and what backward needs of the way there."""
    x = whole(x)
    a = layer_arguments(x, p, shape)
    y, kept = x.new_empty(x.shape), x.new_empty(a.kept_size)
    a.y, a.kept = pointer(y, x.shape), pointer(kept, (a.kept_size,))
    call("hm_layer_forward", a)
    return y, kept


def backward(
    d_y: Tensor, x: Tensor, kept: Tensor, p: LayerParameters, shape: LayerShape, wanted: LayerParameters
) -> tuple[Tensor, LayerParameters]:
    """Gradients of x and of the wanted parameters."""
    d_y, x = whole(d_y), whole(x)
    a = layer_arguments(x, p, shape)
    if kept.numel() != a.kept_size:
        raise ValueError("the layer's parameters changed their shapes between forward and backward; run forward again")
    d_x, found = x.new_empty(x.shape), room_for(p, wanted)
    a.kept, a.dy, a.dx = pointer(kept, (a.kept_size,)), pointer(d_y, x.shape), pointer(d_x, x.shape)
    a.gradients = addresses(found, [() if t is None else t.shape for t in found])
    call("hm_layer_backward", a)
    return d_x, found
