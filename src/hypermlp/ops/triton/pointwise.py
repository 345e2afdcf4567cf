"""What surrounds the operator, in one pass over the sequence each: both convolutions, the gates of joined projections, a gate.

Letters: B batch, T time, C width, W taps. Sums are in float32; the gradients of the taps are partial sums per block of time,
added in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hypermlp.ops.triton import device
from hypermlp.ops.triton.skew import cast
from hypermlp.ops.triton.tiles import Tile

ROWS, COLUMNS = 32, 64  # of a tile of the sequence
LONG_ROWS = 128  # rows that one partial sum of the taps' gradients covers
FLAT = 1024


@triton.jit
def inputs_before(x, history, t, c, j, T, C, HISTORY: tl.constexpr, W: tl.constexpr):
    """x[t − j], or what lies before the sequence."""
    at = t - j
    value = tl.load(x + at[:, None] * C + c[None, :], mask=((at >= 0) & (at < T))[:, None] & (c < C)[None, :], other=0.0).to(
        tl.float32
    )
    if HISTORY:
        before = (at < 0) & (t < T)
        old = tl.load(history + (at + W - 1)[:, None] * C + c[None, :], mask=before[:, None] & (c < C)[None, :], other=0.0)
        value += old.to(tl.float32)
    return value


@triton.jit(do_not_specialize=["T", "p_b"])
def convs_forward_kernel(
    x, wk, wv, position, history, yk, yv, T, C, p_b,
    W: tl.constexpr, POSITION: tl.constexpr, HISTORY: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(2).to(tl.int64)
    t, c = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M), tl.program_id(1) * N + tl.arange(0, N)
    k, v = tl.zeros([M, N], tl.float32), tl.zeros([M, N], tl.float32)
    place = t
    if POSITION:
        place = tl.load(position + b * p_b + t, mask=t < T, other=0)
    for j in tl.static_range(W):
        value = inputs_before(x + b * T * C, history + b * (W - 1) * C, t, c, j, T, C, HISTORY, W)
        if POSITION:
            value = tl.where((place >= j)[:, None], value, 0.0)
        k += value * tl.load(wk + c * W + (W - 1 - j), mask=c < C, other=0.0).to(tl.float32)[None, :]
        v += value * tl.load(wv + c * W + (W - 1 - j), mask=c < C, other=0.0).to(tl.float32)[None, :]
    at = b * T * C + t[:, None] * C + c[None, :]
    keep = (t < T)[:, None] & (c < C)[None, :]
    tl.store(yk + at, cast(k, yk.dtype.element_ty), mask=keep)
    tl.store(yv + at, cast(v, yv.dtype.element_ty), mask=keep)


@triton.jit
def gradient_after(d, position, t, c, j, T, C, POSITION: tl.constexpr):
    """The gradient that reaches a token's input from the output j places later."""
    at = t + j
    ok = at < T
    if POSITION:
        ok = ok & (tl.load(position + at, mask=ok, other=0) >= j)
    return tl.load(d + at[:, None] * C + c[None, :], mask=ok[:, None] & (c < C)[None, :], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["T", "p_b"])
def convs_backward_kernel(
    dyk, dyv, x, wk, wv, position, dx, dw, T, C, p_b,
    W: tl.constexpr, POSITION: tl.constexpr, M: tl.constexpr, N: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """dx (B T C) and shares of the taps' gradients dw (B blocks 2 W C)."""
    b = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * N + tl.arange(0, N)
    first = b * T * C
    block = (b * tl.num_programs(0) + tl.program_id(0)) * 2 * W
    for j in tl.static_range(W):
        sk, sv = tl.zeros([N], tl.float32), tl.zeros([N], tl.float32)
        for step in range(0, STEPS):
            t = (tl.program_id(0).to(tl.int64) * STEPS + step) * M + tl.arange(0, M)
            value = tl.load(x + first + t[:, None] * C + c[None, :], mask=(t < T)[:, None] & (c < C)[None, :], other=0.0)
            sk += tl.sum(gradient_after(dyk + first, position + b * p_b, t, c, j, T, C, POSITION) * value.to(tl.float32), 0)
            sv += tl.sum(gradient_after(dyv + first, position + b * p_b, t, c, j, T, C, POSITION) * value.to(tl.float32), 0)
        tl.store(dw + (block + W - 1 - j) * C + c, sk, mask=c < C)
        tl.store(dw + (block + 2 * W - 1 - j) * C + c, sv, mask=c < C)
    for step in range(0, STEPS):
        t = (tl.program_id(0).to(tl.int64) * STEPS + step) * M + tl.arange(0, M)
        total = tl.zeros([M, N], tl.float32)
        for j in tl.static_range(W):
            k = tl.load(wk + c * W + (W - 1 - j), mask=c < C, other=0.0).to(tl.float32)[None, :]
            v = tl.load(wv + c * W + (W - 1 - j), mask=c < C, other=0.0).to(tl.float32)[None, :]
            total += k * gradient_after(dyk + first, position + b * p_b, t, c, j, T, C, POSITION)
            total += v * gradient_after(dyv + first, position + b * p_b, t, c, j, T, C, POSITION)
        keep = (t < T)[:, None] & (c < C)[None, :]
        tl.store(dx + first + t[:, None] * C + c[None, :], cast(total, dx.dtype.element_ty), mask=keep)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(-1.4426950408889634 * x))


@triton.jit
def gates_tile(y, rows, Q, S1, S2, M: tl.constexpr, N: tl.constexpr):
    """Of [q | m1 | s1 | s2]: rows and columns of a tile, which exist, where they lie, which are q's; the gates, and q or 1."""
    t = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    c = tl.program_id(1) * N + tl.arange(0, N)
    ok = (t < rows)[:, None] & (c < Q + S1 + S2)[None, :]
    at = t[:, None] * (2 * Q + S1 + S2) + c[None, :]
    first = ok & (c < Q)[None, :]
    gate = sigmoid(tl.load(y + at + Q, mask=ok, other=0.0).to(tl.float32))
    return t, c, ok, at, first, gate, tl.load(y + at, mask=first, other=1.0).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def gates_forward_kernel(y, q, s1, s2, rows, Q, S1, S2, M: tl.constexpr, N: tl.constexpr):
    """[q | m1 | s1 | s2] to q ⊙ σ(m1), σ(s1) and σ(s2): column c of the results has its gate in column c + Q."""
    t, c, ok, _, first, gate, x = gates_tile(y, rows, Q, S1, S2, M, N)
    DT: tl.constexpr = y.dtype.element_ty
    tl.store(q + t[:, None] * Q + c[None, :], cast(x * gate, DT), mask=first)
    c -= Q
    tl.store(s1 + t[:, None] * S1 + c[None, :], cast(gate, DT), mask=ok & ((c >= 0) & (c < S1))[None, :])
    c -= S1
    tl.store(s2 + t[:, None] * S2 + c[None, :], cast(gate, DT), mask=ok & (c >= 0)[None, :])


@triton.jit(do_not_specialize=["rows"])
def gates_backward_kernel(dq, ds1, ds2, y, dy, rows, Q, S1, S2, M: tl.constexpr, N: tl.constexpr):
    t, c, ok, at, first, gate, x = gates_tile(y, rows, Q, S1, S2, M, N)
    d = tl.load(dq + t[:, None] * Q + c[None, :], mask=first, other=0.0).to(tl.float32)
    tl.store(dy + at, cast(d * gate, dy.dtype.element_ty), mask=first)
    c -= Q
    d += tl.load(ds1 + t[:, None] * S1 + c[None, :], mask=ok & ((c >= 0) & (c < S1))[None, :], other=0.0).to(tl.float32)
    c -= S1
    d += tl.load(ds2 + t[:, None] * S2 + c[None, :], mask=ok & (c >= 0)[None, :], other=0.0).to(tl.float32)
    tl.store(dy + at + Q, cast(d * x * gate * (1.0 - gate), dy.dtype.element_ty), mask=ok)


@triton.jit
def gate_forward_kernel(x, g, y, count, N: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    ok = at < count
    value = tl.load(x + at, mask=ok, other=0.0).to(tl.float32) * sigmoid(tl.load(g + at, mask=ok, other=0.0).to(tl.float32))
    tl.store(y + at, cast(value, y.dtype.element_ty), mask=ok)


@triton.jit
def gate_backward_kernel(dy, x, g, dx, dg, count, N: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    ok = at < count
    gate = sigmoid(tl.load(g + at, mask=ok, other=0.0).to(tl.float32))
    d = tl.load(dy + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(dx + at, cast(d * gate, dx.dtype.element_ty), mask=ok)
    d *= tl.load(x + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(dg + at, cast(d * gate * (1.0 - gate), dg.dtype.element_ty), mask=ok)


# Launches; see ops.pointwise for what they compute.


def cover(size: int, tile: int) -> int:
    return -(-size // tile)


def start(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    used = Tile(constants.get("M", 1), constants["N"], 4, 1, kernel.__name__)
    device.current.start(kernel, grid, arguments, constants, used)


def convs_forward(x: Tensor, wk: Tensor, wv: Tensor, position: Tensor | None, history: Tensor | None) -> tuple[Tensor, Tensor]:
    (B, T, C), W = x.shape, wk.shape[1]
    dtype = torch.promote_types(x.dtype, wk.dtype)
    x, wk, wv = x.contiguous(), wk.contiguous(), wv.contiguous()
    yk, yv = x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape, dtype=dtype)
    place, p_b = placed(position, x)
    before = x if history is None else history.contiguous()
    grid = (cover(T, ROWS), cover(C, COLUMNS), B)
    if x.numel():
        constants = {"W": W, "POSITION": position is not None, "HISTORY": history is not None, "M": ROWS, "N": COLUMNS}
        start(convs_forward_kernel, grid, x, wk, wv, place, before, yk, yv, T, C, p_b, **constants)
    return yk, yv


def placed(position: Tensor | None, x: Tensor) -> tuple[Tensor, int]:
    """The tokens' places as rows of T and how far these are apart; x where there are none."""
    if position is None:
        return x, 0
    place = position.to(x.device, torch.int32).contiguous()
    return place, place.shape[1] if place.shape[0] > 1 else 0


def convs_backward(
    d_yk: Tensor, d_yv: Tensor, x: Tensor, wk: Tensor, wv: Tensor, position: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    (B, T, C), W = x.shape, wk.shape[1]
    x, d_yk, d_yv = x.contiguous(), d_yk.contiguous(), d_yv.contiguous()
    d_x = x.new_empty(x.shape)
    steps = LONG_ROWS // ROWS
    grid = (cover(T, LONG_ROWS), cover(C, COLUMNS), B)
    shares = x.new_empty(B * grid[0], 2, W, C, dtype=torch.float32)
    place, p_b = placed(position, x)
    if x.numel():
        constants = {"W": W, "POSITION": position is not None, "M": ROWS, "N": COLUMNS, "STEPS": steps}
        tensors = (d_yk, d_yv, x, wk.contiguous(), wv.contiguous(), place, d_x, shares)
        start(convs_backward_kernel, grid, *tensors, T, C, p_b, **constants)
    d_w = shares.sum(0)
    return d_x, d_w[0].T.to(wk.dtype).contiguous(), d_w[1].T.to(wv.dtype).contiguous()


def gate_forward(x: Tensor, g: Tensor) -> Tensor:
    x, g = x.contiguous(), g.contiguous()
    y = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, g.dtype))
    if x.numel():
        start(gate_forward_kernel, (cover(x.numel(), FLAT),), x, g, y, x.numel(), N=FLAT)
    return y


def gate_backward(d_y: Tensor, x: Tensor, g: Tensor, *, overwrite: bool = False) -> tuple[Tensor, Tensor]:
    d_y, x, g = d_y.contiguous(), x.contiguous(), g.contiguous()
    d_x, d_g = d_y if overwrite else torch.empty_like(x), torch.empty_like(g)
    if x.numel():
        start(gate_backward_kernel, (cover(x.numel(), FLAT),), d_y, x, g, d_x, d_g, x.numel(), N=FLAT)
    return d_x, d_g


def gates_forward(y: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    y, (Q, _, S1, S2) = y.contiguous(), sizes
    rows = y.shape[0] * y.shape[1]
    q, s1, s2 = (y.new_empty(*y.shape[:2], width) for width in (Q, S1, S2))
    if y.numel():
        grid = (cover(rows, ROWS), cover(Q + S1 + S2, COLUMNS))
        start(gates_forward_kernel, grid, y, q, s1, s2, rows, Q, S1, S2, M=ROWS, N=COLUMNS)
    return q, s1, s2


def gates_backward(d_q: Tensor, d_s1: Tensor, d_s2: Tensor, y: Tensor, sizes: Sequence[int]) -> Tensor:
    y, (Q, _, S1, S2) = y.contiguous(), sizes
    rows, d_y = y.shape[0] * y.shape[1], y.new_empty(y.shape)
    if y.numel():
        grid = (cover(rows, ROWS), cover(Q + S1 + S2, COLUMNS))
        tensors = (d_q.contiguous(), d_s1.contiguous(), d_s2.contiguous(), y, d_y)
        start(gates_backward_kernel, grid, *tensors, rows, Q, S1, S2, M=ROWS, N=COLUMNS)
    return d_y
