"""All projections of a layer in one call of the compiled code, for small widths: blocks of rows that stay in the cache.

The projections are, in order: q, its gate, both controls, k, v, the readout's gate; see ops.layer.Projections.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from hypermlp.ops.native.bindings import POINTERS, PROJECTIONS, ProjectArguments, call, entry_point, pointer, thread_pool, whole

WIDEST = 256  # from which the weights do not fit into the cache beside a block, and large products are faster

Optional = Sequence[Tensor | None]


@functools.cache
def panel() -> int:
    """Columns that the kernel computes at once."""
    return entry_point("hm_panel")()


def fits(x: Tensor, weights: Optional) -> bool:
    """Whether x (B T C) and these weights (out C) may go by blocks."""
    if x.dtype is not torch.float32:
        return False
    return x.shape[2] <= WIDEST and x.shape[2] % panel() == 0 and all(w is None or w.shape[0] % panel() == 0 for w in weights)


def arguments(x: Tensor, position: Tensor | None, weights: Optional, biases: Optional, convs: Optional) -> ProjectArguments:
    """For contiguous tensors; position (B T) of int64."""
    a = ProjectArguments(*x.shape, 0 if convs[0] is None else convs[0].shape[1])
    a.width[:] = [0 if w is None else w.shape[0] for w in weights]
    a.nthreads, a.parallel = torch.get_num_threads(), thread_pool()
    a.x, a.pos, a.conv_k, a.conv_v = pointer(x), pointer(position, torch.int64), *map(pointer, convs)
    a.w, a.bias = POINTERS(*map(pointer, weights)), POINTERS(*map(pointer, biases))
    return a


def plain(tensors: Optional) -> list[Tensor | None]:
    return [None if t is None else whole(t) for t in tensors]


def places(position: Tensor | None, x: Tensor) -> Tensor | None:
    return None if position is None else position.expand(x.shape[:2]).to(torch.int64).contiguous()


def project_forward(
    x: Tensor, position: Tensor | None, weights: Optional, biases: Optional, convs: Optional
) -> tuple[Tensor, list[Tensor | None]]:
    """The joined product (B T out) of the first four, and all results (B T out); that of q's gate is None."""
    x, position, weights, biases, convs = whole(x), places(position, x), plain(weights), plain(biases), plain(convs)
    a = arguments(x, position, weights, biases, convs)
    y = x.new_empty(*x.shape[:2], sum(a.width[:4]))
    out = [x.new_empty(*x.shape[:2], n) if n and k != 1 else None for k, n in enumerate(a.width)]
    a.y, a.out = pointer(y), POINTERS(*map(pointer, out))
    call("hm_project_forward", a)
    return y, out


def project_backward(
    d_out: Optional,
    y: Tensor,
    x: Tensor,
    position: Tensor | None,
    weights: Optional,
    convs: Optional,
    wanted: Sequence[bool],
    wanted_biases: Sequence[bool],
) -> tuple[Tensor, list[Tensor | None], list[Tensor | None], list[Tensor | None]]:
    """Gradients of x, of the wanted weights and biases and of the convolutions' weights; d_out as project_forward gives it."""
    x, position, weights, convs, d_out = whole(x), places(position, x), plain(weights), plain(convs), plain(d_out)
    a = arguments(x, position, weights, [None] * PROJECTIONS, convs)
    y, d_x = whole(y), x.new_empty(x.shape)
    d_weights = [x.new_empty(w.shape) if want and w is not None else None for w, want in zip(weights, wanted, strict=True)]
    d_biases = [x.new_empty(n) if want else None for n, want in zip(a.width, wanted_biases, strict=True)]
    d_convs = [None if w is None else x.new_empty(w.shape) for w in convs]
    a.y, a.dout, a.dx = pointer(y), POINTERS(*map(pointer, d_out)), pointer(d_x)
    a.dw, a.dbias = POINTERS(*map(pointer, d_weights)), POINTERS(*map(pointer, d_biases))
    a.dconv_k, a.dconv_v = map(pointer, d_convs)
    call("hm_project_backward", a)
    return d_x, d_weights, d_biases, d_convs
