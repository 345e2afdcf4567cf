"""A whole layer in one call of the compiled code: forward, back, and one token of decoding.

On few tokens every call counts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from hypermlp.ops.native.bindings import (
    STRUCTURES,
    addresses,
    call,
    pointer,
    room_for,
    row_pointer,
    structure,
    thread_pool,
    view,
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


def arguments(x: Tensor, p: LayerParameters, shape: LayerShape) -> ctypes.Structure:
    """For contiguous tensors."""
    (B, T, C), spec, sizes = x.shape, shape.spec, dimensions(p, shape)
    _, H, G, K, V, R1, R2, _ = sizes
    choices = (spec.kind == "relu", spec.norm != "none", shape.shortcut1, shape.shortcut2, spec.eps)
    a = structure("hm_layer_args", B, T, C, *sizes, *choices)
    a.parameters, a.x = addresses(p, shapes(C, sizes)), pointer(x, x.shape)
    a.kept_size = B * T * (4 * G * K + 2 * G * R1 + 2 * H * R2 + 3 * H * V + H)
    return a


def forward(x: Tensor, p: LayerParameters, shape: LayerShape) -> tuple[Tensor, Tensor]:
    """y (B T C) with contiguous parameters, and what backward needs of the way there."""
    x = whole(x)
    a = arguments(x, p, shape)
    y, kept = x.new_empty(x.shape), x.new_empty(a.kept_size)
    a.y, a.kept = pointer(y, x.shape), pointer(kept, (a.kept_size,))
    call("hm_layer_forward", a)
    return y, kept


def backward(
    d_y: Tensor, x: Tensor, kept: Tensor, p: LayerParameters, shape: LayerShape, wanted: LayerParameters
) -> tuple[Tensor, LayerParameters]:
    """Gradients of x and of the wanted parameters."""
    d_y, x = whole(d_y), whole(x)
    a = arguments(x, p, shape)
    if kept.numel() != a.kept_size:
        raise ValueError("the layer's parameters changed their shapes between forward and backward; run forward again")
    d_x, found = x.new_empty(x.shape), room_for(p, wanted)
    a.kept, a.dy, a.dx = pointer(kept, (a.kept_size,)), pointer(d_y, x.shape), pointer(d_x, x.shape)
    a.gradients = addresses(found, [() if t is None else t.shape for t in found])
    call("hm_layer_backward", a)
    return d_x, found


def step(x: Tensor, k: Tensor, v: Tensor, spans: Tensor, history: Tensor, p: LayerParameters, shape: LayerShape) -> Tensor:
    """One token for each row, x (B 1 C), through a whole layer with contiguous parameters.

    Its k and v are written to the last slot of each row's span of the cache k (B S G K) and v (B S H V). history (B W-1 C): the
    inputs before x. A layer may lack gates, convolutions and operators.
    """
    (B, _, C), S, sizes = x.shape, k.shape[1], dimensions(p, shape)
    W, H, G, K, V, R1, R2, L = sizes
    a, y, spec = STRUCTURES["hm_step_args"](), x.new_empty(B, 1, C), shape.spec
    m = a.mix
    m.B, m.T, m.S, m.H, m.G, m.K, m.V, m.R1, m.R2, m.L = B, 1, S, H, G, K, V, R1, R2, L
    m.act, m.norm, m.eps, m.shortcut1, m.shortcut2 = spec.kind == "relu", spec.norm != "none", spec.eps, *shape[3:]
    m.n_spans, m.spans = B, pointer(spans, (B, 5), torch.int64)
    m.nthreads, m.parallel = torch.get_num_threads(), thread_pool()
    m.k, m.v = view(k, (B, S, G, K)), view(v, (B, S, H, V))
    a.C, a.W, a.y, a.parameters = C, W, pointer(y, x.shape), addresses(p, shapes(C, sizes))
    a.x, a.x_row = row_pointer(x[:, 0], (B, C))
    if W:
        a.history, a.history_b = row_pointer(history.flatten(1), (B, (W - 1) * C))
    call("hm_step", a)
    return y
