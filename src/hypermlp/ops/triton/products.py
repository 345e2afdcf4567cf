"""Plain causal products over a scratch in time order: rows × slots times slots × width, and its transpose.

The scratch of a row block is M rows. Its first row, at position p, has slot p − `reach` in column 0. What was not written is
replaced by zero after loading, so that loads stay wide; ALIGNED tells that positions and slots begin at multiples of 16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hypermlp.ops.triton.forward import chunk_head, row_block, scratch_block
from hypermlp.ops.triton.skew import load_rows, mm, store_rows


@triton.jit(do_not_specialize=["per", "blocks", "T", "first", "count"])
def row_product(
    from_x, y, out, rho, shares, table, order, per, blocks, cells, T, L, H, heads, first, count, y_b, y_t,
    W: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, DIVIDE: tl.constexpr, SPLIT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, SLOTS: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """out (B T heads W) = x y, divided by ρ (B T heads) if DIVIDE. Grid (row blocks, chunk's heads, splits · pieces of W).

    SPLIT: shares (splits blocks M chunk's heads W) instead, each of `per` tiles of SLOTS; row_sum adds them up.
    """
    PIECES: tl.constexpr = 1 if W2 > 0 else (W + W1 - 1) // W1
    number = tl.load(order + tl.program_id(0))
    entry = table + number * 8
    b, t, rows, c0, at, S = row_block(entry, M)
    local, h = tl.program_id(1), chunk_head(first, count, H)
    split, piece = tl.program_id(2) // PIECES, tl.program_id(2) % PIECES * W1
    i, j = tl.arange(0, M)[:, None], tl.arange(0, SLOTS)
    reach = tl.cdiv(tl.minimum(L, at + M), N) * N
    memory = from_x + local.to(tl.int64) * cells + scratch_block(entry, M)
    yb = y + b * y_b + c0.to(tl.int64) * y_t + h * W
    d1 = tl.zeros([M, W1], tl.float32)
    d2 = tl.zeros([M, W2 if W2 > 0 else W1], tl.float32)
    begin = split * per * SLOTS
    for column in range(begin, tl.minimum(reach + M, begin + per * SLOTS), SLOTS):
        c = at - reach + column + j
        lag = at + i - c[None, :]
        inside = (c >= 0)[None, :] & (lag >= 0) & (lag < L)
        x = tl.load(memory + (column + j)[None, :], mask=rows[:, None], other=0.0)
        x = tl.where(inside, x, 0.0)
        ok = (c >= 0) & (c < S)
        d1 = mm(x, load_rows(yb, c, ok, y_t, W, piece, W1), d1, PREC)
        if W2 > 0:
            d2 = mm(x, load_rows(yb, c, ok, y_t, W, piece + W1, W2), d2, PREC)
    if SPLIT:
        to, stride = shares + local * W, tl.num_programs(1) * W
        t = (split * blocks + number).to(tl.int64) * M + tl.arange(0, M)
    else:
        to, stride = out + (b * T * heads + h) * W, heads * W
        if DIVIDE:
            norm = tl.load(rho + (b * T + t) * heads + h, mask=rows, other=1.0)[:, None]
            d1, d2 = d1 / norm, d2 / norm
    store_rows(to, t, rows, stride, W, piece, d1, W1)
    if W2 > 0:
        store_rows(to, t, rows, stride, W, piece + W1, d2, W2)


@triton.jit(do_not_specialize=["blocks", "splits", "T", "first", "count"])
def row_sum(
    shares, out, rho, table, splits, blocks, T, H, heads, first, count,
    W: tl.constexpr, WP: tl.constexpr, DIVIDE: tl.constexpr, M: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """out (B T heads W): shares of row_product added up in order. Grid (row blocks · M / PART, chunk's heads)."""
    n, local = tl.program_id(0) // (M // PART), tl.program_id(1)
    entry, h = table + n * 8, chunk_head(first, count, H)
    i = tl.program_id(0) % (M // PART) * PART + tl.arange(0, PART)
    b, t = tl.load(entry).to(tl.int64), tl.load(entry + 1) + i
    rows = t < tl.load(entry + 2)
    d = tl.zeros([PART, WP], tl.float32)
    for split in range(0, splits):
        row = (split * blocks + n).to(tl.int64) * M + i
        d += load_rows(shares + local * W, row, rows, tl.num_programs(1) * W, W, 0, WP)
    if DIVIDE:
        d = d / tl.load(rho + (b * T + t) * heads + h, mask=rows, other=1.0)[:, None]
    store_rows(out + (b * T * heads + h) * W, t, rows, heads * W, W, 0, d, WP)


@triton.jit(do_not_specialize=["T", "first", "count"])
def slot_product(
    from_x, y, out, table, slots, cells, T, L, H, heads, first, count, out_b, out_t,
    W: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, ADD: tl.constexpr, ALIGNED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, SLOTS: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """out (B S heads W) = xᵀ y, added to what is there if ADD. Grid (slot blocks, chunk's heads, pieces of W)."""
    part = slots + tl.program_id(0) * 6
    local, h, piece = tl.program_id(1), chunk_head(first, count, H), tl.program_id(2) * W1
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
        memory = from_x + local.to(tl.int64) * cells + scratch_block(entry, M)
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
