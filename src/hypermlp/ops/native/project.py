"""All projections of a layer in one call of the compiled code, for small widths: blocks of rows that stay in the cache."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from hypermlp.ops.native.bindings import SEVEN, addresses, call, entry_point, places, pointer, room_for, structure, whole
from hypermlp.ops.parameters import LayerParameters

WIDEST = 256  # from which the weights do not fit into the cache beside a block, and large products are faster


@functools.cache
def panel() -> int:
    """Columns that the kernel computes at once."""
    return entry_point("hm_panel")()


def fits(x: Tensor, p: LayerParameters) -> bool:
    """Whether x (B T C) and the weights of these projections may go by blocks."""
    if x.dtype is not torch.float32 or x.shape[2] > WIDEST or x.shape[2] % panel():
        return False
    return all(w is None or w.shape[0] % panel() == 0 for w in p.weights)


def projections(p: LayerParameters) -> LayerParameters:
    """Weights, biases and convolutions, contiguous."""
    return LayerParameters._make([None if t is None else whole(t) for t in p.projections()])


def arguments(x: Tensor, position: Tensor | None, p: LayerParameters) -> ctypes.Structure:
    """For contiguous tensors; position (B T) of int64."""
    B, T, C = x.shape
    width = [0 if w is None else w.shape[0] for w in p.weights]
    taps = (C, 0 if p.conv_k is None else p.conv_k.shape[1])
    shapes = (*((n, C) for n in width), *((n,) for n in width), taps, taps, *[()] * 8)
    a = structure("hm_project_args", B, T, C, taps[1])
    a.width[:] = width
    a.x, a.pos, a.parameters = pointer(x, (B, T, C)), pointer(position, (B, T), torch.int64), addresses(p, shapes)
    return a


def results(tensors: Sequence[Tensor | None], x: Tensor, a: ctypes.Structure) -> ctypes.Array[ctypes.c_void_p]:
    """Addresses of (B T out) for each projection."""
    return SEVEN(*(pointer(t, (*x.shape[:2], n)) for t, n in zip(tensors, a.width, strict=True)))


def forward(x: Tensor, position: Tensor | None, p: LayerParameters) -> tuple[Tensor, list[Tensor | None]]:
    """The joined product (B T out) of q, its gate and both controls, and all seven results (B T out); q's gate has none."""
    x, position, p = whole(x), places(position, x), projections(p)
    a = arguments(x, position, p)
    y = x.new_empty(*x.shape[:2], sum(a.width[:4]))
    out = [x.new_empty(*x.shape[:2], n) if n and k != 1 else None for k, n in enumerate(a.width)]
    a.y, a.out = pointer(y, y.shape), results(out, x, a)
    call("hm_project_forward", a)
    return y, out


def backward(
    d_out: Sequence[Tensor | None],
    y: Tensor,
    x: Tensor,
    position: Tensor | None,
    p: LayerParameters,
    wanted: LayerParameters,
) -> tuple[Tensor, LayerParameters]:
    """Gradients of x and of the wanted weights, biases and convolutions; d_out as forward gives it."""
    x, position, p, y = whole(x), places(position, x), projections(p), whole(y)
    d_out = [None if t is None else whole(t) for t in d_out]
    a = arguments(x, position, p)
    d_x, found = x.new_empty(x.shape), room_for(p, wanted)
    a.y, a.dout, a.dx = pointer(y, (*x.shape[:2], sum(a.width[:4]))), results(d_out, x, a), pointer(d_x, x.shape)
    a.gradients = addresses(found, [() if t is None else t.shape for t in found])
    call("hm_project_backward", a)
    return d_x, found
