"""Launches of the decode kernels: one row per span, no gradients."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from hypermlp.ops.registered import Inputs
from hypermlp.ops.triton import decode as kernels
from hypermlp.ops.triton.blocks import Ints, on
from hypermlp.ops.triton.fallback import smaller_if_needed
from hypermlp.ops.triton.launch import power_of_two, prepare, run
from hypermlp.ops.types import Spec

MOST_PARTS = 128  # that the slots of a sequence are split into
FEW = 16  # partial sums added at once


def is_step(spans: Ints) -> bool:
    """Whether every sequence has one new row."""
    return len(spans) > 0 and bool((spans[:, 2] - spans[:, 1] == 1).all())


@functools.lru_cache(maxsize=8)
def step_table(spans: bytes, L: int, device: str, far: bool) -> tuple[Tensor, int]:
    """Batch entry, row, first slot and number of slots of each sequence (n 4); the largest number."""
    b, row, _, _, end = np.frombuffer(spans, np.int64).reshape(-1, 5).T
    begin = np.frombuffer(spans, np.int64).reshape(-1, 5)[:, 3]
    count = np.minimum(end - begin, L)
    return on(device, np.stack([b, row, end - count, count], 1), far), int(count.max())


@smaller_if_needed("decode")
def decode(inputs: Inputs, spec: Spec) -> Tensor:
    """o (B T H V) of the rows in the spans, each the only one of its span; zero elsewhere."""
    call = prepare(inputs, spec, keep_type=True)
    (B, T, G, K), (H, V) = call.q.shape, call.v.shape[2:]
    table, room = step_table(call.spans.tobytes(), spec.block_size, call.device, call.far)
    used, s = call.tile("decode"), call.shape()
    tiles = -(-room // used.N)
    steps = -(-tiles // MOST_PARTS)
    parts, n = -(-tiles // steps), len(table)

    def single(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=call.q.device)

    z, u, y2 = single(n, G, room), single(n, G, parts, s["RP1"]), single(n, H, parts, s["RP2"])
    square, share = single(n, H, parts), single(n, H, parts, V)
    o = (torch.empty if call.whole and T == 1 else torch.zeros)(B, T, H, V, dtype=inputs.q.dtype, device=call.q.device)
    BV = min(128, max(16, power_of_two(V)))
    grid, sizes = (parts, n, H), (table, steps, T, spec.block_size, H, room)
    k_at, v_at = call.k.stride()[:2], call.v.stride()[:2]
    first = {"R": s["R1"], "RP": s["RP1"], "MIX": s["MIX1"], "KP": max(16, power_of_two(K))}
    run(kernels.decode_z, grid, used, call, call.q, call.k, call.left1, z, u, *sizes, *k_at, **first)
    tensors: tuple[Tensor, ...] = (z, u, call.control1, call.right1, call.base1, call.left2, y2, square)
    run(kernels.decode_a, grid, used, call, *tensors, *sizes)
    tensors = (z, y2, call.control2, call.right2, call.base2, call.v, share)
    run(kernels.decode_w, grid, used, call, *tensors, *sizes, *v_at, BV=BV)
    run(
        kernels.decode_o, (-(-V // BV), n, H), used._replace(N=FEW), call,
        share, square, o, table, parts, T, H, spec.eps, BV=BV,
    )  # fmt: skip
    return o
