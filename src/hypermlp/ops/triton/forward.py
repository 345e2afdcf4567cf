"""The forward kernels: u = z A1; then y2 = a B2 and ρ; then w, and o = w v / ρ by products.row_product.

Each walks over the slots of a block of M rows once and computes z, h and a again rather than keep them. w goes through a
scratch that holds a chunk of rows and heads: stored with row i shifted by i + 1 it is in time order, and the wide product w v
needs neither the skew nor the registers of what came before. Grid: (row blocks, heads, splits): where row blocks are few, the
slots of a block are split, `per` tiles each, and sums over slots become partial sums that the host adds up in order. The table
of row blocks (blocks.py) makes plain batches, packed documents and caches alike.

Letters: see skew.py. A trailing g is of the gate, s of the scale head; ReLU has the gate alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hypermlp.ops.triton.skew import (
    cast,
    controlled,
    load_rows,
    low_rank,
    mm,
    per_lag,
    piece_scores,
    scores,
    softplus,
    store_rows,
    to_lags,
)


@triton.jit
def row_block(entry, M: tl.constexpr):
    """Batch entry, rows and which of them exist, first slot, position of the first row, slots of the sequence."""
    t = tl.load(entry + 1) + tl.arange(0, M)
    return tl.load(entry).to(tl.int64), t, t < tl.load(entry + 2), tl.load(entry + 3), tl.load(entry + 4), tl.load(entry + 5)


@triton.jit
def scratch_block(entry, M: tl.constexpr):
    """Rows of a block's scratch (M 1): row i begins i times its length further on."""
    return tl.multiple_of(tl.load(entry + 6), 16) + tl.arange(0, M)[:, None] * tl.multiple_of(tl.load(entry + 7), 16)


@triton.jit
def split_tiles(Q, per, LATE: tl.constexpr):
    """First and end of the time tiles that a program walks over; the lag tiles of the first LATE belong to its neighbour."""
    first = tl.program_id(2) * per
    return first, tl.where(first < Q, tl.minimum(Q, first + per) + LATE, first)


@triton.jit
def lag_tile(L, Q, n, begin, LATE: tl.constexpr, N: tl.constexpr):
    """Places of the lags that time tile n completes, and which of them are this program's."""
    p = L - (Q - n + LATE) * N + tl.arange(0, N)
    return p, (p >= 0) & (n + 0 * p >= begin + LATE)  # as a row: Triton 3.9 interprets a number beside a row as integers


@triton.jit
def chunk_head(first, count, H):
    """Of a chunk's heads first .. first + count, and for routing the scales H further on: the program's."""
    local = tl.program_id(1)
    return first + local + tl.where(local < count, 0, H - count)


@triton.jit
def queries(q, t, rows, H, K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, GLU: tl.constexpr):
    """The pieces of a row block's queries, of gate and scale; the first alone where K is computed in a loop."""
    apart = (2 * H if GLU else H) * K
    g1 = load_rows(q, t, rows, apart, K, 0, K1)
    g2, s1, s2 = g1, g1, g1
    if K2 > 0:
        g2 = load_rows(q, t, rows, apart, K, K1, K2)
    if GLU and K1 + K2 >= K:
        s1 = load_rows(q + H * K, t, rows, apart, K, 0, K1)
        s2 = s1
        if K2 > 0:
            s2 = load_rows(q + H * K, t, rows, apart, K, K1, K2)
    return g1, g2, s1, s2


@triton.jit
def both_scores(
    qg1, qg2, qs1, qs2, q, t, rows, H, kg, ks, c, S, k_t,
    K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, GLU: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """A time tile of the scores of gate and scale; in a loop over pieces of K1 where the queries are not at hand."""
    ok = (c >= 0) & (c < S)
    if K1 + K2 >= K:
        zg = scores(qg1, qg2, kg, c, ok, k_t, K, K1, K2, PREC)
        zs = zg
        if GLU:
            zs = scores(qs1, qs2, ks, c, ok, k_t, K, K1, K2, PREC)
    else:
        apart = (2 * H if GLU else H) * K
        zg = piece_scores(q, t, rows, apart, kg, c, ok, k_t, K, K1, M, N, PREC)
        zs = zg
        if GLU:
            zs = piece_scores(q + H * K, t, rows, apart, ks, c, ok, k_t, K, K1, M, N, PREC)
    return zg, zs


@triton.jit
def hidden(
    z, us, B1, D1, p, ok, exists, R: tl.constexpr, RP: tl.constexpr, MIX: tl.constexpr, BASE: tl.constexpr, PREC: tl.constexpr
):
    """h = z R1 of a lag tile, given u ⊙ s."""
    h = z
    if MIX:
        h = low_rank(us, B1, p, ok, R, RP, PREC)
        if BASE:
            h += z * per_lag(D1, p, ok)
    return tl.where(exists, h, 0.0)


@triton.jit(do_not_specialize=["per", "parts", "T"])
def forward_u(
    q, k, A1, u, table, order, per, parts, T, L, H, k_b, k_t,
    K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, GLU: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, PACK: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """u (splits B T G R); `parts` numbers lie between two splits."""
    b, t, rows, c0, at, S = row_block(table + tl.load(order + tl.program_id(0)) * 8, M)
    h = tl.program_id(1)
    G = 2 * H if GLU else H
    j = tl.arange(0, N)
    LATE: tl.constexpr = 1 if M <= N else 2  # time tiles until a lag tile is complete
    DT: tl.constexpr = k.dtype.element_ty
    CARRY: tl.constexpr = tl.int32 if GLU and PACK else tl.float32
    Q = tl.cdiv(tl.minimum(L, at + M), N)
    qb = q + (b * T * G + h) * K
    qg1, qg2, qs1, qs2 = queries(qb, t, rows, H, K, K1, K2, GLU)
    kg = k + b * k_b + c0.to(tl.int64) * k_t + h * K
    ks = kg + H * K
    Ag, As = A1 + h * L * R, A1 + (h + H) * L * R
    ug, us = tl.zeros([M, RP], tl.float32), tl.zeros([M, RP], tl.float32)
    g1, g2 = tl.zeros([M, N], CARRY), tl.zeros([M, N], CARRY)
    s1, s2 = tl.zeros([M, N], CARRY), tl.zeros([M, N], CARRY)
    begin, end = split_tiles(Q, per, LATE)
    for n in range(begin, end):
        c = at + 1 - (Q - n) * N + j
        zg, zs = both_scores(qg1, qg2, qs1, qs2, qb, t, rows, H, kg, ks, c, S, k_t, K, K1, K2, GLU, M, N, PREC)
        zg, zs, g1, g2, s1, s2 = to_lags(zg, zs, g1, g2, s1, s2, M, N, GLU, PACK)
        p, ok = lag_tile(L, Q, n, begin, LATE, N)
        zg = tl.where(ok[None, :], zg, 0.0)
        ug = mm(cast(zg, DT), load_rows(Ag, p, ok, R, R, 0, RP), ug, PREC)
        if GLU:
            zs = tl.where(ok[None, :], zs, 0.0)
            us = mm(cast(zs, DT), load_rows(As, p, ok, R, R, 0, RP), us, PREC)
    out = u + tl.program_id(2).to(tl.int64) * parts + (b * T * G + h) * R
    store_rows(out, t, rows, G * R, R, 0, ug, RP)
    if GLU:
        store_rows(out + H * R, t, rows, G * R, R, 0, us, RP)


@triton.jit(do_not_specialize=["per", "parts", "T", "first", "count"])
def forward_w(
    q, k, B1, D1, s1, u, A2, B2, D2, s2, y2, rho, to_w, table, order, per, parts, cells, T, L, H, first, count, k_b, k_t, eps,
    K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
    R1: tl.constexpr, RP1: tl.constexpr, R2: tl.constexpr, RP2: tl.constexpr, GLU: tl.constexpr, NORM: tl.constexpr,
    MIX1: tl.constexpr, BASE1: tl.constexpr, MIX2: tl.constexpr, BASE2: tl.constexpr, READ: tl.constexpr,
    SPLIT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PACK: tl.constexpr, PREC: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """READ false: y2 (splits B T H R) if there is R2, and ρ (B T H), or with SPLIT shares of ρ² − eps (splits B T H).

    READ true: w into the scratch. `parts` rows and heads lie between two splits.
    """
    entry = table + tl.load(order + tl.program_id(0)) * 8
    b, t, rows, c0, at, S = row_block(entry, M)
    h = chunk_head(first, count, H)
    G = 2 * H if GLU else H
    i, j = tl.arange(0, M)[:, None], tl.arange(0, N)
    LATE: tl.constexpr = 1 if M <= N else 2
    DT: tl.constexpr = k.dtype.element_ty
    CARRY: tl.constexpr = tl.int32 if GLU and PACK else tl.float32
    Q = tl.cdiv(tl.minimum(L, at + M), N)
    qb = q + (b * T * G + h) * K
    qg1, qg2, qs1, qs2 = queries(qb, t, rows, H, K, K1, K2, GLU)
    kg = k + b * k_b + c0.to(tl.int64) * k_t + h * K
    ks = kg + H * K
    usg, uss, ys = qg1, qg1, qg1
    if MIX1:
        own = (b * T * G + h) * R1
        usg = controlled(u + own, s1 + own, t, rows, G * R1, R1, RP1, DT)
        if GLU:
            uss = controlled(u + own + H * R1, s1 + own + H * R1, t, rows, G * R1, R1, RP1, DT)
    row = b * T * H + h  # of per-row vectors
    share = row + tl.program_id(2).to(tl.int64) * parts
    if READ and MIX2:
        ys = controlled(y2 + row * R2, s2 + row * R2, t, rows, H * R2, R2, RP2, DT)
    g1, g2 = tl.zeros([M, N], CARRY), tl.zeros([M, N], CARRY)
    c1, c2 = tl.zeros([M, N], CARRY), tl.zeros([M, N], CARRY)
    square = tl.zeros([M], tl.float32)
    y = tl.zeros([M, RP2], tl.float32)
    memory = to_w + tl.program_id(1).to(tl.int64) * cells + scratch_block(entry, M)
    begin, end = split_tiles(Q, per, LATE)
    for n in range(begin, end):
        c = at + 1 - (Q - n) * N + j
        zg, zs = both_scores(qg1, qg2, qs1, qs2, qb, t, rows, H, kg, ks, c, S, k_t, K, K1, K2, GLU, M, N, PREC)
        zg, zs, g1, g2, c1, c2 = to_lags(zg, zs, g1, g2, c1, c2, M, N, GLU, PACK)
        p, ok = lag_tile(L, Q, n, begin, LATE, N)
        exists = ((at + 1 - (Q - n + LATE) * N + j[None, :] + i) >= 0) & ok[None, :]
        hg = hidden(zg, usg, B1 + h * L * R1, D1 + h * L, p, ok, exists, R1, RP1, MIX1, BASE1, PREC)
        a = tl.maximum(hg, 0.0)
        if GLU:
            hs = hidden(zs, uss, B1 + (h + H) * L * R1, D1 + (h + H) * L, p, ok, exists, R1, RP1, MIX1, BASE1, PREC)
            a *= softplus(hs, not PACK, PTX)
        if NORM and not READ:
            square += tl.sum(hg * hg, 1)
        if READ:
            w = a
            if MIX2:
                w = low_rank(ys, A2 + h * L * R2, p, ok, R2, RP2, PREC)
                if BASE2:
                    w += a * per_lag(D2 + h * L, p, ok)
            tl.store(memory + ((n - LATE) * N + j)[None, :] + (i + 1), cast(w, DT), mask=exists & rows[:, None])
        elif MIX2:
            y = mm(cast(a, DT), load_rows(B2 + h * L * R2, p, ok, R2, R2, 0, RP2), y, PREC)
    if not READ:
        if not SPLIT:
            square = tl.sqrt(square + eps) if NORM else square + 1.0
        tl.store(rho + share + t * H, square, mask=rows)
    if MIX2 and not READ:
        store_rows(y2 + share * R2, t, rows, H * R2, R2, 0, y, RP2)
