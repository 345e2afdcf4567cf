"""The backward kernels. Everything of size rows × slots is computed once, into a scratch that holds a chunk of the rows.

    backward_rows        dõ = do / ρ and dn = −(dõ·o) / ρ, per row
    backward_dw          dw = dõ vᵀ and g2 = dw A2; writes dw
    backward_h           z, h and a again; da, dh, w; g1 = dh B1; writes z, dh, a and w
    backward_control     after each of these two: shares of g added up, ds = g ⊙ (y A) and g ⊙ s
    backward_parameters  of y ↦ y ⊙ D + ((y A) ⊙ s) Bᵀ: dA = yᵀ(g ⊙ s), dB = dyᵀ(y A ⊙ s), dD = Σ y ⊙ dy
    backward_dz          dz = dh R1ᵀ; writes dz over z
    products             dq = dz k, dk = dzᵀ q, dv = wᵀ dõ

Grids as in forward.py: (row blocks, heads, splits). The scratch of a row block is M rows. In lag order a lag has the same
column in every row; row i stored i + 1 columns further right is time order, which w and dz are in for the products, and no
kernel turns anything back. Sums belong to one program each, or to shares that are added up in a fixed order: no atomics, the
same bits in every run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hypermlp.ops.triton.forward import (
    both_scores,
    chunk_head,
    hidden,
    lag_tile,
    queries,
    row_block,
    scratch_block,
    split_tiles,
)
from hypermlp.ops.triton.skew import (
    cast,
    lag_select,
    load_rows,
    low_rank,
    mm,
    per_lag,
    piece_scores,
    rotate,
    softplus_sigmoid,
    store_rows,
    to_lags,
    wide_scores,
)


@triton.jit(do_not_specialize=["count"])
def backward_rows(d_o, o, rho, dr, dn, count, V: tl.constexpr, VP: tl.constexpr, NORM: tl.constexpr, M: tl.constexpr):
    """dõ (B T H V) and dn (B T H), which is zero without a norm."""
    row = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    ok = row < count
    norm = tl.load(rho + row, mask=ok, other=1.0)
    d = load_rows(d_o, row, ok, V, V, 0, VP).to(tl.float32) / norm[:, None]
    store_rows(dr, row, ok, V, V, 0, d, VP)
    turn = norm * 0.0
    if NORM:
        turn = -tl.sum(d * load_rows(o, row, ok, V, V, 0, VP).to(tl.float32), 1) / norm
    tl.store(dn + row, turn, mask=ok)


@triton.jit
def store_shares(shares, entry_number, x, local, heads, blocks, M: tl.constexpr, RP: tl.constexpr):
    """A block's sums over a split of its slots, to (splits blocks M heads RP)."""
    row = (tl.program_id(2) * blocks + entry_number).to(tl.int64) * M + tl.arange(0, M)
    store_rows(shares + local * RP, row, row >= 0, heads * RP, RP, 0, x, RP)


@triton.jit(do_not_specialize=["blocks", "splits", "T", "first", "count"])
def backward_control(
    shares, u, s, ds, gs, table, splits, blocks, T, H, heads, first, count,
    R: tl.constexpr, RP: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """ds = u ⊙ g and gs = g ⊙ s (B T heads R) of a chunk, g the sum of all splits' shares. Grid (row blocks, chunk's heads)."""
    n, local = tl.program_id(0), tl.program_id(1)
    b, t, rows, _, _, _ = row_block(table + n * 8, M)
    h = chunk_head(first, count, H)
    i = n.to(tl.int64) * M + tl.arange(0, M)
    g = tl.zeros([M, RP], tl.float32)
    for split in range(0, splits):
        of = shares + ((split * blocks).to(tl.int64) * M * tl.num_programs(1) + local) * RP
        g += load_rows(of, i, rows, tl.num_programs(1) * RP, RP, 0, RP)
    own, stride = (b * T * heads + h) * R, heads * R
    store_rows(ds + own, t, rows, stride, R, 0, g * load_rows(u + own, t, rows, stride, R, 0, RP), RP)
    store_rows(gs + own, t, rows, stride, R, 0, g * load_rows(s + own, t, rows, stride, R, 0, RP).to(tl.float32), RP)


@triton.jit(do_not_specialize=["per", "blocks", "T", "first", "count"])
def backward_dw(
    dr, v, A2, shares, to_dw, table, order, per, blocks, cells, T, L, H, first, count, v_b, v_t,
    V: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr, R2: tl.constexpr, RP2: tl.constexpr, MIX2: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    number = tl.load(order + tl.program_id(0))
    entry = table + number * 8
    b, t, rows, c0, at, S = row_block(entry, M)
    local, h = tl.program_id(1), chunk_head(first, count, H)
    j = tl.arange(0, N)
    LATE: tl.constexpr = 1 if M <= N else 2
    DT: tl.constexpr = v.dtype.element_ty
    Q = tl.cdiv(tl.minimum(L, at + M), N)
    row = b * T * H + h
    vb = v + b * v_b + c0.to(tl.int64) * v_t + h * V
    db = dr + row * V
    HELD: tl.constexpr = NV <= 3
    x0 = load_rows(db, t, rows, H * V, V, 0, BV)
    x1, x2 = x0, x0
    if HELD and NV > 1:
        x1 = load_rows(db, t, rows, H * V, V, BV, BV)
    if HELD and NV > 2:
        x2 = load_rows(db, t, rows, H * V, V, 2 * BV, BV)
    memory = to_dw + local.to(tl.int64) * cells + scratch_block(entry, M)
    d1, d2 = tl.zeros([M, N], DT), tl.zeros([M, N], DT)
    g = tl.zeros([M, RP2], tl.float32)
    begin, end = split_tiles(Q, per, LATE)
    for n in range(begin, end):
        c = at + 1 - (Q - n) * N + j
        seen = (c >= 0) & (c < S)
        if HELD:
            now = wide_scores(x0, x1, x2, vb, c, seen, v_t, V, BV, NV, PREC)
        else:
            now = piece_scores(db, t, rows, H * V, vb, c, seen, v_t, V, BV, M, N, PREC)
        now = rotate(cast(now, DT), M, N)
        dw = lag_select(d2, d1, now, M, N)
        d2, d1 = d1, now
        p, ok = lag_tile(L, Q, n, begin, LATE, N)
        dw = tl.where(ok[None, :], dw, 0.0)
        if MIX2:
            g = mm(dw, load_rows(A2 + h * L * R2, p, ok, R2, R2, 0, RP2), g, PREC)
        column = (n - LATE) * N + j
        tl.store(memory + column[None, :], dw, mask=rows[:, None] & (column >= begin * N)[None, :])
    if MIX2:
        store_shares(shares, number, g, local, count, blocks, M, RP2)


@triton.jit(do_not_specialize=["per", "blocks", "T", "first", "count"])
def backward_h(
    q, k, B1, D1, us1, A2, B2, D2, gs2, ys2, dn, shares, from_dw, to_z, to_dh, to_a, to_w,
    table, order, per, blocks, cells, T, L, H, first, count, k_b, k_t,
    K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
    R1: tl.constexpr, RP1: tl.constexpr, R2: tl.constexpr, RP2: tl.constexpr,
    GLU: tl.constexpr, MIX1: tl.constexpr, BASE1: tl.constexpr, MIX2: tl.constexpr, BASE2: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, PACK: tl.constexpr, PREC: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """With R1 z and dh go to the scratch in lag order; without it dh is dz and goes to z's place in time order."""
    number = tl.load(order + tl.program_id(0))
    entry = table + number * 8
    b, t, rows, c0, at, S = row_block(entry, M)
    local, h = tl.program_id(1), chunk_head(first, count, H)
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
    row = b * T * H + h
    usg, uss, gs, ys = qg1, qg1, qg1, qg1
    if MIX1:
        us = us1 + (b * T * G + h) * R1
        usg = load_rows(us, t, rows, G * R1, R1, 0, RP1)
        if GLU:
            uss = load_rows(us + H * R1, t, rows, G * R1, R1, 0, RP1)
    if MIX2:
        gs = load_rows(gs2 + row * R2, t, rows, H * R2, R2, 0, RP2)
        ys = load_rows(ys2 + row * R2, t, rows, H * R2, R2, 0, RP2)
    turn = tl.load(dn + row + t * H, mask=rows, other=0.0)[:, None]
    block = scratch_block(entry, M)
    own = local.to(tl.int64) * cells
    scale = (local + count).to(tl.int64) * cells
    g1, g2 = tl.zeros([M, N], CARRY), tl.zeros([M, N], CARRY)
    c1, c2 = tl.zeros([M, N], CARRY), tl.zeros([M, N], CARRY)
    gg, gt = tl.zeros([M, RP1], tl.float32), tl.zeros([M, RP1], tl.float32)
    begin, end = split_tiles(Q, per, LATE)
    for n in range(begin, end):
        c = at + 1 - (Q - n) * N + j
        zg, zs = both_scores(qg1, qg2, qs1, qs2, qb, t, rows, H, kg, ks, c, S, k_t, K, K1, K2, GLU, M, N, PREC)
        zg, zs, g1, g2, c1, c2 = to_lags(zg, zs, g1, g2, c1, c2, M, N, GLU, PACK)
        p, ok = lag_tile(L, Q, n, begin, LATE, N)
        exists = ((at + 1 - (Q - n + LATE) * N + j[None, :] + i) >= 0) & ok[None, :]
        column = ((n - LATE) * N + j)[None, :]
        inside = rows[:, None] & (column >= begin * N)
        lag = block + column
        hg = hidden(zg, usg, B1 + h * L * R1, D1 + h * L, p, ok, exists, R1, RP1, MIX1, BASE1, PREC)
        dw = tl.load(from_dw + own + lag, mask=inside, other=0.0).to(tl.float32)
        da = dw
        if MIX2:
            da = low_rank(gs, B2 + h * L * R2, p, ok, R2, RP2, PREC)
            if BASE2:
                da += dw * per_lag(D2 + h * L, p, ok)
        a = tl.maximum(hg, 0.0)
        dhg = tl.where(hg > 0, da, 0.0)
        if GLU:
            hs = hidden(zs, uss, B1 + (h + H) * L * R1, D1 + (h + H) * L, p, ok, exists, R1, RP1, MIX1, BASE1, PREC)
            positive, slope = softplus_sigmoid(hs, not PACK, PTX)
            dhs = cast(dhg * a * slope, DT)
            dhg *= positive
            a *= positive
        dhg = cast(dhg + turn * hg, DT)
        w = a
        if MIX2:
            w = low_rank(ys, A2 + h * L * R2, p, ok, R2, RP2, PREC)
            if BASE2:
                w += a * per_lag(D2 + h * L, p, ok)
            tl.store(to_a + own + lag, cast(a, DT), mask=inside)
        tl.store(to_w + own + lag + (i + 1), cast(w, DT), mask=inside & exists)
        if MIX1:
            zg = tl.where(exists, zg, 0.0)
            tl.store(to_z + own + lag, cast(zg, DT), mask=inside)
            tl.store(to_dh + own + lag, dhg, mask=inside)
            gg = mm(dhg, load_rows(B1 + h * L * R1, p, ok, R1, R1, 0, RP1), gg, PREC)
            if GLU:
                zs = tl.where(exists, zs, 0.0)
                tl.store(to_z + scale + lag, cast(zs, DT), mask=inside)
                tl.store(to_dh + scale + lag, dhs, mask=inside)
                gt = mm(dhs, load_rows(B1 + (h + H) * L * R1, p, ok, R1, R1, 0, RP1), gt, PREC)
        else:
            tl.store(to_z + own + lag + (i + 1), dhg, mask=inside & exists)
            if GLU:
                tl.store(to_z + scale + lag + (i + 1), dhs, mask=inside & exists)
    if MIX1:
        routes = 2 * count if GLU else count
        store_shares(shares, number, gg, local, routes, blocks, M, RP1)
        if GLU:
            store_shares(shares, number, gt, local + count, routes, blocks, M, RP1)


@triton.jit(do_not_specialize=["T", "first", "count"])
def backward_parameters(
    from_y, from_dy, us, gs, dA, dB, dD, table, order, tallies, apart, cells, T, L, H, heads, first, count,
    R: tl.constexpr, RP: tl.constexpr, BASE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, LAGS: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Shares dA, dB (heads L R) and dD (heads L) of every splits-th row block, `apart` numbers between two splits.

    Grid (lags, chunk's heads, splits).
    """
    far, local, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    h = chunk_head(first, count, H)
    j = tl.arange(0, LAGS)
    p = L - (far + 1) * LAGS + j
    ok = p >= 0
    da, db = tl.zeros([LAGS, RP], tl.float32), tl.zeros([LAGS, RP], tl.float32)
    dd = tl.zeros([LAGS], tl.float32)
    for n in range(split, tl.load(tallies + far), tl.num_programs(2)):
        entry = table + tl.load(order + n) * 8
        b, t, rows, _, at, _ = row_block(entry, M)
        column = tl.cdiv(tl.minimum(L, at + M), N) * N - (far + 1) * LAGS + j
        lag = local.to(tl.int64) * cells + scratch_block(entry, M) + column[None, :]
        inside = rows[:, None] & ((column >= 0) & ok)[None, :]
        y = tl.load(from_y + lag, mask=inside, other=0.0)
        dy = tl.load(from_dy + lag, mask=inside, other=0.0)
        own = (b * T * heads + h) * R
        da = mm(tl.trans(y), load_rows(gs + own, t, rows, heads * R, R, 0, RP), da, PREC)
        db = mm(tl.trans(dy), load_rows(us + own, t, rows, heads * R, R, 0, RP), db, PREC)
        if BASE:
            dd += tl.sum(y.to(tl.float32) * dy.to(tl.float32), 0)
    to = split.to(tl.int64) * apart
    dA, dB, dD = dA + to + h * L * R, dB + to + h * L * R, dD + to + h * L
    da += load_rows(dA, p, ok, R, R, 0, RP)
    db += load_rows(dB, p, ok, R, R, 0, RP)
    store_rows(dA, p, ok, R, R, 0, da, RP)
    store_rows(dB, p, ok, R, R, 0, db, RP)
    if BASE:
        tl.store(dD + p, dd + tl.load(dD + p, mask=ok, other=0.0), mask=ok)


@triton.jit(do_not_specialize=["per", "T", "first", "count"])
def backward_dz(
    from_dh, A1, D1, gs1, to_dz, table, order, per, cells, T, L, H, heads, first, count,
    R: tl.constexpr, RP: tl.constexpr, BASE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Grid (row blocks, routing heads, splits)."""
    entry = table + tl.load(order + tl.program_id(0)) * 8
    b, t, rows, _, at, _ = row_block(entry, M)
    h = chunk_head(first, count, H)
    i, j = tl.arange(0, M)[:, None], tl.arange(0, N)
    Q = tl.cdiv(tl.minimum(L, at + M), N)
    gs = load_rows(gs1 + (b * T * heads + h) * R, t, rows, heads * R, R, 0, RP)
    block = tl.program_id(1).to(tl.int64) * cells + scratch_block(entry, M)
    begin, end = split_tiles(Q, per, 0)
    for n in range(begin, end):
        p = L - (Q - n) * N + j
        ok = p >= 0
        exists = rows[:, None] & ok[None, :] & ((at + 1 - (Q - n) * N + j[None, :] + i) >= 0)
        lag = block + (n * N + j)[None, :]
        dz = low_rank(gs, A1 + h * L * R, p, ok, R, RP, PREC)
        if BASE:
            dz += tl.load(from_dh + lag, mask=exists, other=0.0).to(tl.float32) * per_lag(D1 + h * L, p, ok)
        tl.store(to_dz + lag + (i + 1), cast(dz, to_dz.dtype.element_ty), mask=exists)
