"""One row per sequence against its cached slots, split over the slots: nothing is skewed, since one row has one lag per slot.

    decode_z  z of a part of the slots, and that part's share of u = z A1                   reads k
    decode_a  u from all parts; h and a, shares of y2 = a B2 and of ρ²
    decode_w  y2 from all parts; w and the share of o = w v                                  reads v
    decode_o  o from all parts, divided by ρ

Sequences are spans (ops/types.py) of one row or none, read on the device, or DENSE: batch entries that see all S slots. Grids
depend on the room for slots and not on how many there are, so that a captured graph decodes token after token. The slots lie in
the cache as they are. Sums are in float32 and added in a fixed order. Grid: (parts, sequences, heads); a part is `steps` tiles
of N slots.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hypermlp.ops.triton.skew import cast, load_rows, softplus


@triton.jit
def sequence(spans, S, L, DENSE: tl.constexpr):
    """Batch entry, row, first slot that it sees and how many: none without a row."""
    if DENSE:
        b, row, end, count = tl.program_id(1).to(tl.int64), tl.program_id(1) * 0, S.to(tl.int64), tl.minimum(S, L)
    else:
        entry = spans + tl.program_id(1) * 5
        b, row, end = tl.load(entry), tl.load(entry + 1).to(tl.int32), tl.load(entry + 4)
        count = tl.minimum(end - tl.load(entry + 3), L).to(tl.int32)
        count = tl.where(tl.load(entry + 2) > row, count, 0)
    return b, row, end - count, count


@triton.jit
def part_slots(count, step, steps, L, N: tl.constexpr):
    """Places of a tile of slots, which of them exist, and their lag parameters; in the type of the table."""
    e = ((tl.program_id(0) * steps + step) * N + tl.arange(0, N)).to(count.dtype)
    return e, e < count, L - count + e


@triton.jit
def place(c0, e, S):
    """Where slots c0 + e lie: behind the last comes the first."""
    c = c0 + e
    return tl.where(c < S, c, c - S)


@triton.jit
def all_parts(shares, parts, RP: tl.constexpr):
    """The sum of all parts' shares (parts RP)."""
    r, total = tl.arange(0, RP), tl.zeros([RP], tl.float32)
    for first in range(0, parts, 16):
        n = first + tl.arange(0, 16)
        total += tl.sum(tl.load(shares + n[:, None] * RP + r[None, :], mask=(n < parts)[:, None], other=0.0), 0)
    return total


@triton.jit(do_not_specialize=["steps", "S", "T", "room"])
def decode_z(
    q, k, A1, z, u, spans, steps, S, T, L, H, room, k_b, k_t,
    K: tl.constexpr, KP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, GLU: tl.constexpr, MIX: tl.constexpr,
    DENSE: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """z (sequences G room) and shares of u (sequences G parts RP)."""
    G = 2 * H if GLU else H
    x = tl.arange(0, KP)
    b, t, c0, count = sequence(spans, S, L, DENSE)
    for half in tl.static_range(2 if GLU else 1):
        g = tl.program_id(2) + half * H
        share = tl.zeros([RP], tl.float32)
        for step in range(0, steps):
            e, ok, p = part_slots(count, step, steps, L, N)
            row = tl.load(q + ((b * T + t) * G + g) * K + x, mask=x < K, other=0.0).to(tl.float32)
            keys = load_rows(k + b * k_b + g * K, place(c0, e, S), ok, k_t, K, 0, KP).to(tl.float32)
            score = tl.sum(keys * row[None, :], 1)
            tl.store(z + (tl.program_id(1) * G + g).to(tl.int64) * room + e, score, mask=ok)
            if MIX:
                share += tl.sum(load_rows(A1 + g * L * R, p, ok, R, R, 0, RP).to(tl.float32) * score[:, None], 0)
        if MIX:
            at = ((tl.program_id(1) * G + g) * tl.num_programs(0) + tl.program_id(0)) * RP
            tl.store(u + at + tl.arange(0, RP), share)


@triton.jit
def controlled_sum(shares, control, parts, R: tl.constexpr, RP: tl.constexpr):
    r = tl.arange(0, RP)
    return all_parts(shares, parts, RP) * tl.load(control + r, mask=r < R, other=0.0).to(tl.float32)


@triton.jit
def mixed(y, us, right, D, p, ok, R: tl.constexpr, RP: tl.constexpr, BASE: tl.constexpr):
    """y ⊙ D + us rightᵀ of a tile."""
    out = tl.sum(load_rows(right, p, ok, R, R, 0, RP).to(tl.float32) * us[None, :], 1)
    if BASE:
        out += y * tl.load(D + p, mask=ok, other=0.0).to(tl.float32)
    return out


@triton.jit(do_not_specialize=["steps", "S", "T", "room"])
def decode_a(
    z, u, s1, B1, D1, B2, to_a, y2, square, spans, steps, S, T, L, H, room,
    R1: tl.constexpr, RP1: tl.constexpr, R2: tl.constexpr, RP2: tl.constexpr, GLU: tl.constexpr,
    MIX1: tl.constexpr, BASE1: tl.constexpr, MIX2: tl.constexpr, DENSE: tl.constexpr, N: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """a (sequences H room), shares of y2 (sequences H parts RP) and of ρ² (sequences H parts)."""
    n, h, parts = tl.program_id(1), tl.program_id(2), tl.num_programs(0)
    G = 2 * H if GLU else H
    b, t, _, count = sequence(spans, S, L, DENSE)
    control = s1 + ((b * T + t) * G + h) * R1
    usg, uss = tl.zeros([RP1], tl.float32), tl.zeros([RP1], tl.float32)
    if MIX1:
        usg = controlled_sum(u + (n * G + h) * parts * RP1, control, parts, R1, RP1)
        if GLU:
            uss = controlled_sum(u + (n * G + h + H) * parts * RP1, control + H * R1, parts, R1, RP1)
    share, squares = tl.zeros([RP2], tl.float32), tl.zeros([N], tl.float32)
    own = z + (n * G + h).to(tl.int64) * room
    for step in range(0, steps):
        e, ok, p = part_slots(count, step, steps, L, N)
        hg = tl.load(own + e, mask=ok, other=0.0)
        if MIX1:
            hg = mixed(hg, usg, B1 + h * L * R1, D1 + h * L, p, ok, R1, RP1, BASE1)
        a = tl.maximum(hg, 0.0)
        if GLU:
            hs = tl.load(own + H * room + e, mask=ok, other=0.0)
            if MIX1:
                hs = mixed(hs, uss, B1 + (h + H) * L * R1, D1 + (h + H) * L, p, ok, R1, RP1, BASE1)
            a *= softplus(hs, True, PTX)
        squares += hg * hg
        tl.store(to_a + (n * H + h).to(tl.int64) * room + e, a, mask=ok)
        if MIX2:
            share += tl.sum(load_rows(B2 + h * L * R2, p, ok, R2, R2, 0, RP2).to(tl.float32) * a[:, None], 0)
    at = (n * H + h) * parts + tl.program_id(0)
    tl.store(square + at, tl.sum(squares, 0))
    if MIX2:
        tl.store(y2 + at * RP2 + tl.arange(0, RP2), share)


@triton.jit(do_not_specialize=["steps", "S", "T", "room"])
def decode_w(
    a, y2, s2, A2, D2, v, share, spans, steps, S, T, L, H, room, v_b, v_t,
    V: tl.constexpr, BV: tl.constexpr, R2: tl.constexpr, RP2: tl.constexpr,
    MIX2: tl.constexpr, BASE2: tl.constexpr, DENSE: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Shares of o (sequences H parts V). The pieces of V are computed one after another."""
    n, h, parts = tl.program_id(1), tl.program_id(2), tl.num_programs(0)
    b, t, c0, count = sequence(spans, S, L, DENSE)
    ys = tl.zeros([RP2], tl.float32)
    if MIX2:
        ys = controlled_sum(y2 + (n * H + h) * parts * RP2, s2 + ((b * T + t) * H + h) * R2, parts, R2, RP2)
    own = a + (n * H + h).to(tl.int64) * room
    x = tl.arange(0, BV)
    for first in range(0, V, BV):
        o = tl.zeros([BV], tl.float32)
        for step in range(0, steps):
            e, ok, p = part_slots(count, step, steps, L, N)
            w = tl.load(own + e, mask=ok, other=0.0)
            if MIX2:
                w = mixed(w, ys, A2 + h * L * R2, D2 + h * L, p, ok, R2, RP2, BASE2)
            values = load_rows(v + b * v_b + h * V, place(c0, e, S), ok, v_t, V, first, BV).to(tl.float32)
            o += tl.sum(values * w[:, None], 0)
        at = ((n * H + h) * parts + tl.program_id(0)).to(tl.int64) * V
        tl.store(share + at + first + x, o, mask=first + x < V)


@triton.jit(do_not_specialize=["parts", "S", "T"])
def decode_o(
    share, square, o, spans, parts, S, T, L, H, eps,
    V: tl.constexpr, BV: tl.constexpr, NORM: tl.constexpr, DENSE: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """o (B T H V). Grid (pieces of V, sequences, heads)."""
    n, h = tl.program_id(1), tl.program_id(2)
    x = tl.program_id(0) * BV + tl.arange(0, BV)
    b, t, _, count = sequence(spans, S, L, DENSE)
    total, squares = tl.zeros([BV], tl.float32), tl.zeros([N], tl.float32)
    for first in range(0, parts, N):
        m = first + tl.arange(0, N)
        at = (n * H + h).to(tl.int64) * parts + m
        squares += tl.load(square + at, mask=m < parts, other=0.0)
        total += tl.sum(load_rows(share, at, m < parts, V, V, tl.program_id(0) * BV, BV), 0)
    if NORM:
        total /= tl.sqrt(tl.sum(squares, 0) + eps)
    tl.store(o + ((b * T + t) * H + h) * V + x, cast(total, o.dtype.element_ty), mask=(x < V) & (count + 0 * x > 0))
