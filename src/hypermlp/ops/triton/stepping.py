"""Launches of the decode kernels: one row per span, no gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from hypermlp.ops.registered import Inputs
from hypermlp.ops.triton import decode as kernels
from hypermlp.ops.triton.fallback import smaller_if_needed
from hypermlp.ops.triton.launch import empty, power_of_two, prepare, run
from hypermlp.ops.types import Spec

MOST_PARTS = 128  # that the slots of a sequence are split into
FEW = 16  # partial sums added at once


def is_step(inputs: Inputs) -> bool:
    """Whether every sequence has one new row at most. No number is read on the device for a batch of single tokens."""
    if inputs.q.shape[1] <= 1 or inputs.spans is None:
        return inputs.q.shape[1] == 1
    return bool((inputs.spans[:, 2] - inputs.spans[:, 1] <= 1).all())


@smaller_if_needed("decode")
def decode(inputs: Inputs, spec: Spec) -> Tensor:
    """o (B T H V) of the rows in the spans, each the only one of its span; zero elsewhere.

    What is launched depends on shapes alone: a CUDA graph may capture it, with spans on the device that change between replays.
    """
    call = prepare(inputs, spec, keep_type=True)
    (B, T, G, K), (H, V), S = call.q.shape, call.v.shape[2:], call.k.shape[1]
    dense, room = inputs.spans is None, min(S, spec.block_size)
    spans = call.q if inputs.spans is None else on_device(inputs.spans, call.q)
    used, s = call.tile("decode"), call.shape()
    tiles = -(-room // used.N)
    steps = max(1, -(-tiles // MOST_PARTS))
    parts, n = -(-tiles // steps), B if inputs.spans is None else len(spans)
    z, a = empty(call, n, G, room), empty(call, n, H, room)
    u, y2 = empty(call, n, G, parts, s["RP1"]), empty(call, n, H, parts, s["RP2"])
    square, share = empty(call, n, H, parts), empty(call, n, H, parts, V)
    o = (torch.empty if dense and room else torch.zeros)(B, T, H, V, dtype=inputs.q.dtype, device=call.q.device)
    BV = min(128, max(16, power_of_two(V)))
    grid, sizes = (parts, n, H), (spans, steps, S, T, spec.block_size, H, room)
    k_at, v_at = call.k.stride()[:2], call.v.stride()[:2]
    first = {"R": s["R1"], "RP": s["RP1"], "MIX": s["MIX1"], "KP": max(16, power_of_two(K)), "DENSE": dense}
    run(kernels.decode_z, grid, used, call, call.q, call.k, call.left1, z, u, *sizes, *k_at, **first)
    tensors: tuple[Tensor, ...] = (z, u, call.control1, call.right1, call.base1, call.left2, a, y2, square)
    run(kernels.decode_a, grid, used, call, *tensors, *sizes, DENSE=dense)
    tensors = (a, y2, call.control2, call.right2, call.base2, call.v, share)
    run(kernels.decode_w, grid, used, call, *tensors, *sizes, *v_at, BV=BV, DENSE=dense)
    run(
        kernels.decode_o, (-(-V // BV) if parts else 0, n, H), used._replace(N=FEW), call,
        share, square, o, spans, parts, S, T, spec.block_size, H, spec.eps, BV=BV, DENSE=dense,
    )  # fmt: skip
    return o


def on_device(spans: Tensor, like: Tensor) -> Tensor:
    """Spans beside the other tensors, copied in the order of the stream."""
    if like.is_cuda and not spans.is_cuda:
        spans = spans.pin_memory()
    return spans.to(like.device, torch.int64, non_blocking=True).contiguous()
