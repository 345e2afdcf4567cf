"""Plain causal products over a scratch in time order: rows × slots times slots × width, and its transpose.

The scratch of a row block is M rows. Its first row, at position p, has slot p − `reach` in column 0. What was not written is
replaced by zero after loading, so that loads stay wide; ALIGNED tells that positions and slots begin at multiples of 16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hypermlp.ops.triton.forward import row_block, scratch_block
from hypermlp.ops.triton.skew import load_rows, mm, store_rows


@triton.jit(do_not_specialize=["T"])
def row_product(
    from_x, y, out, rho, table, order, cells, T, L, heads, y_b, y_t,
    W: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, DIVIDE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, SLOTS: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """out (B T heads W) = x y, divided by ρ (B T heads) if DIVIDE. Grid (row blocks, heads, pieces of W)."""
    entry = table + tl.load(order + tl.program_id(0)) * 8
    b, t, rows, c0, at, S = row_block(entry, M)
    h, piece = tl.program_id(1), tl.program_id(2) * W1
    i, j = tl.arange(0, M)[:, None], tl.arange(0, SLOTS)
    reach = tl.cdiv(tl.minimum(L, at + M), N) * N
    memory = from_x + h.to(tl.int64) * cells + scratch_block(entry, M)
    yb = y + b * y_b + c0.to(tl.int64) * y_t + h * W
    d1 = tl.zeros([M, W1], tl.float32)
    d2 = tl.zeros([M, W2 if W2 > 0 else W1], tl.float32)
    for first in range(0, reach + M, SLOTS):
        c = at - reach + first + j
        lag = at + i - c[None, :]
        inside = (c >= 0)[None, :] & (lag >= 0) & (lag < L)
        x = tl.load(memory + (first + j)[None, :], mask=rows[:, None], other=0.0)
        x = tl.where(inside, x, 0.0)
        ok = (c >= 0) & (c < S)
        d1 = mm(x, load_rows(yb, c, ok, y_t, W, piece, W1), d1, PREC)
        if W2 > 0:
            d2 = mm(x, load_rows(yb, c, ok, y_t, W, piece + W1, W2), d2, PREC)
    if DIVIDE:
        norm = tl.load(rho + (b * T + t) * heads + h, mask=rows, other=1.0)[:, None]
        d1, d2 = d1 / norm, d2 / norm
    to = out + (b * T * heads + h) * W
    store_rows(to, t, rows, heads * W, W, piece, d1, W1)
    if W2 > 0:
        store_rows(to, t, rows, heads * W, W, piece + W1, d2, W2)


@triton.jit(do_not_specialize=["T"])
def slot_product(
    from_x, y, out, table, slots, cells, T, L, heads, out_b, out_t,
    W: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, ADD: tl.constexpr, ALIGNED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, SLOTS: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """out (B S heads W) = xᵀ y, added to what is there if ADD. Grid (slot blocks, heads, pieces of W)."""
    part = slots + tl.program_id(0) * 6
    h, piece = tl.program_id(1), tl.program_id(2) * W1
    b = tl.load(part).to(tl.int64)
    j = tl.arange(0, SLOTS)
    c = tl.load(part + 2)
    if ALIGNED:
        c = tl.multiple_of(c, 16)
    c += j
    d1 = tl.zeros([SLOTS, W1], tl.float32)
    d2 = tl.zeros([SLOTS, W2 if W2 > 0 else W1], tl.float32)
    for n in range(tl.load(part + 4), tl.load(part + 5)):
        entry = table + n * 8
        _, t, rows, _, at, _ = row_block(entry, M)
        if ALIGNED:
            at = tl.multiple_of(at, 16)
        lag = at + tl.arange(0, M)[:, None] - c[None, :]
        reach = tl.cdiv(tl.minimum(L, at + M), N) * N
        memory = from_x + h.to(tl.int64) * cells + scratch_block(entry, M)
        x = tl.load(memory + (c - at + reach)[None, :], mask=rows[:, None], other=0.0)
        x = tl.trans(tl.where((lag >= 0) & (lag < L), x, 0.0))
        yb = y + (b * T * heads + h) * W
        d1 = mm(x, load_rows(yb, t, rows, heads * W, W, piece, W1), d1, PREC)
        if W2 > 0:
            d2 = mm(x, load_rows(yb, t, rows, heads * W, W, piece + W1, W2), d2, PREC)
    ok = c < tl.load(part + 3)
    to = out + b * out_b + tl.load(part + 1).to(tl.int64) * out_t + h * W
    if ADD:
        d1 += load_rows(to, c, ok, out_t, W, piece, W1)
        if W2 > 0:
            d2 += load_rows(to, c, ok, out_t, W, piece + W1, W2)
    store_rows(to, c, ok, out_t, W, piece, d1, W1)
    if W2 > 0:
        store_rows(to, c, ok, out_t, W, piece + W1, d2, W2)
