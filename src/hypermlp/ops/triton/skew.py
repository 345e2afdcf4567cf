"""From time order to lag order and back inside a kernel, and the other pieces that all kernels are made of.

A kernel works on a block of M rows whose first sits at position p of its sequence. Its scores come in tiles of N columns:

    time tile n: slots c_n + j,     c_n = p + 1 − (Q − n) N,  Q = ceil(min(L, p + M) / N)
    lag tile n:  slots c_n + i + j, one lag (Q − n) N − 1 − j per column, so parameters are plain columns

`rotate` turns row i of a time tile by i places. A lag tile is then a select between two neighbouring rotated tiles, three
where M = 2N, and nothing is computed twice:

    rot_n[i, j] = time_n[i, (i + j) mod N]        lag_n = where(i + j < N, rot_n, rot_{n+1})

The way back needs no turning: a lag tile stored with row i shifted by i places is in time order.

Letters as in ops/types.py; M rows and N columns of a tile, K1 + K2 and BV × NV the pieces of K and V, RP the padded rank.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hypermlp.ops.triton.device import interpreted

INTERPRET = tl.constexpr(interpreted())


@triton.jit
def mm(a, b, acc, PREC: tl.constexpr):
    """a b + acc. The interpreter multiplies the bit patterns of bfloat16, so it gets float32."""
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc=acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc=acc, input_precision=PREC)


@triton.jit
def cast(x, DT: tl.constexpr):
    """x in another type, rounded to nearest even; the interpreter would truncate."""
    if INTERPRET and tl.bfloat16 == DT:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
        x = tl.where(x == x, rounded, x)
    return x.to(DT)


# Tiles of matrices whose rows are `stride` apart: columns first .. first + W of the given rows, zero where not ok. Rows have
# the type of the tables they come from: 64 bits where a row times its stride may exceed 32 (launch.FAR).


@triton.jit
def load_rows(ptr, row, ok, stride, width, first, W: tl.constexpr):
    e = first + tl.arange(0, W)
    return tl.load(ptr + row[:, None] * stride + e[None, :], mask=ok[:, None] & (e[None, :] < width), other=0.0)


@triton.jit
def load_cols(ptr, row, ok, stride, width, first, W: tl.constexpr):
    """The same transposed."""
    e = first + tl.arange(0, W)
    return tl.load(ptr + row[None, :] * stride + e[:, None], mask=ok[None, :] & (e[:, None] < width), other=0.0)


@triton.jit
def store_rows(ptr, row, ok, stride, width, first, x, W: tl.constexpr):
    e = first + tl.arange(0, W)
    keep = ok[:, None] & (e[None, :] < width)
    tl.store(ptr + row[:, None] * stride + e[None, :], cast(x, ptr.dtype.element_ty), mask=keep)


@triton.jit
def scores(q1, q2, k_ptr, c, ok, stride, K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, PREC: tl.constexpr):
    """q kᵀ over slots c; the width in two powers of two, so that 48 = 32 + 16 wastes nothing."""
    z = mm(q1, load_cols(k_ptr, c, ok, stride, K, 0, K1), None, PREC)
    if K2 > 0:
        z = mm(q2, load_cols(k_ptr, c, ok, stride, K, K1, K2), z, PREC)
    return z


@triton.jit
def piece_scores(
    x_ptr, t, rows, x_stride, y_ptr, c, ok, y_stride,
    W: tl.constexpr, BW: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """x yᵀ of rows t and slots c over any width W in pieces of BW: one at a time, so that memory does not grow with W."""
    z = tl.zeros([M, N], tl.float32)
    for first in range(0, tl.minimum(W, x_stride), BW):  # W, but the compiler does not know: it would unroll the loop and spill
        x = load_rows(x_ptr, t, rows, x_stride, W, first, BW)
        z = mm(x, load_cols(y_ptr, c, ok, y_stride, W, first, BW), z, PREC)
    return z


@triton.jit
def wide_scores(x0, x1, x2, v_ptr, c, ok, stride, V: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr, PREC: tl.constexpr):
    """x vᵀ over slots c, where the pieces of x, three at most, stay at hand."""
    z = mm(x0, load_cols(v_ptr, c, ok, stride, V, 0, BV), None, PREC)
    if NV > 1:
        z = mm(x1, load_cols(v_ptr, c, ok, stride, V, BV, BV), z, PREC)
    if NV > 2:
        z = mm(x2, load_cols(v_ptr, c, ok, stride, V, 2 * BV, BV), z, PREC)
    return z


@triton.jit
def low_rank(us, right_ptr, p, ok, R: tl.constexpr, RP: tl.constexpr, PREC: tl.constexpr):
    """us rightᵀ over the lag columns p."""
    return mm(us, load_cols(right_ptr, p, ok, R, R, 0, RP), None, PREC)


@triton.jit
def controlled(u_ptr, s_ptr, t, rows, stride, R: tl.constexpr, RP: tl.constexpr, DT: tl.constexpr):
    """u ⊙ s of a row block, in the type of the products."""
    u = load_rows(u_ptr, t, rows, stride, R, 0, RP).to(tl.float32)
    s = load_rows(s_ptr, t, rows, stride, R, 0, RP).to(tl.float32)
    return cast(u * s, DT)


@triton.jit
def per_lag(ptr, p, ok):
    """A vector over lags as a row."""
    return tl.load(ptr + p, mask=ok, other=0.0).to(tl.float32)[None, :]


# The skew.


@triton.jit
def rotate(x, M: tl.constexpr, N: tl.constexpr):
    i, j = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    return tl.gather(x, (i + j) & (N - 1), 1)


@triton.jit
def pack(x, y):
    """Two tiles as bfloat16 halves of one word, so that one gather turns both."""
    low = cast(x, tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    high = cast(y, tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16
    return low | high


@triton.jit
def unpack(word):
    return (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def lag_select(older, before, now, M: tl.constexpr, N: tl.constexpr):
    """The lag tile that the newest of three rotated tiles completes."""
    i, j = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    early = ((i & (N - 1)) + j) < N
    tile = tl.where(early, before, now)
    if M > N:
        tile = tl.where(i >= N, tile, tl.where(early, older, before))
    return tile


@triton.jit
def to_lags(zg, zs, g1, g2, s1, s2, M: tl.constexpr, N: tl.constexpr, GLU: tl.constexpr, PACK: tl.constexpr):
    """The next lag tile of gate and scale from the next time tile, and what to carry on: the last two rotated tiles of each."""
    if GLU and PACK:
        now = rotate(pack(zg, zs), M, N)
        zg, zs = unpack(lag_select(g2, g1, now, M, N))
        g2, g1 = g1, now
    else:
        now = rotate(zg, M, N)
        zg = lag_select(g2, g1, now, M, N)
        g2, g1 = g1, now
        if GLU:
            now = rotate(zs, M, N)
            zs = lag_select(s2, s1, now, M, N)
            s2, s1 = s1, now
    return zg, zs, g1, g2, s1, s2


# The activation.


@triton.jit
def log2_fast(x, PTX: tl.constexpr):
    """One instruction of NVIDIA's GPUs, where tl.log2 becomes a polynomial."""
    if PTX and not INTERPRET:
        return tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.log2(x)


@triton.jit
def log1p(t, EXACT: tl.constexpr, PTX: tl.constexpr):
    """log(1 + t) of 0 ≤ t ≤ 1; EXACT keeps the relative accuracy of small t, which half precision does not see."""
    value = 0.6931471805599453 * log2_fast(1.0 + t, PTX)
    if EXACT:
        value = tl.where(t < 0.03125, t * (1.0 - t * (0.5 - t * (0.3333333333333333 - t * 0.25))), value)
    return value


@triton.jit
def softplus(x, EXACT: tl.constexpr, PTX: tl.constexpr):
    return tl.maximum(x, 0.0) + log1p(tl.exp2(-1.4426950408889634 * tl.abs(x)), EXACT, PTX)


@triton.jit
def softplus_sigmoid(x, EXACT: tl.constexpr, PTX: tl.constexpr):
    small = tl.exp2(-1.4426950408889634 * tl.abs(x))
    return tl.maximum(x, 0.0) + log1p(small, EXACT, PTX), tl.where(x >= 0, 1.0, small) / (1.0 + small)
