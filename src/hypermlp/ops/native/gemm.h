// Matrix products: one register-blocked micro-kernel, MR rows by one panel of NR columns, and the packing that feeds it.

#pragma once

#include "threads.h"

namespace {

// The micro-kernel: C (rows x NVEC vectors) from A (rows x k) and a panel of B (k x NVEC vectors, row stride bs).
//   Set: C = A B     Add: C += A B     Mix: C = X * d + A B   (d one value per column: the diagonal part of an operator)
//   ByRow: A[i,k] = a[i*as + k]        ByCol: A[i,k] = a[i + k*as], the transposed operand
// k counts words, of PER numbers each.

enum Mode { Set, Add, Mix };
enum Layout { ByRow, ByCol };

template <int ROWS, int NVEC, Mode MODE, Layout LAY, i64 PER>
HM_INLINE void micro(i64 k, const float *a, i64 as, const float *b, i64 bs, float *c, i64 ldc, const float *x, i64 ldx,
                     const float *d) {
    vf acc[ROWS][NVEC];
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 16
        for (int j = 0; j < NVEC; j++)
            acc[i][j] = MODE == Mix ? load(x + i * ldx + j * VL) * load(d + j * VL) : vf{};
#pragma GCC unroll 2
    for (i64 p = 0; p < k; p++) {
        vf bv[NVEC];
#pragma GCC unroll 16
        for (int j = 0; j < NVEC; j++) bv[j] = load(b + j * VL);
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; i++) {
            float ai = LAY == ByRow ? a[i * as + p] : a[i];
#pragma GCC unroll 16
            for (int j = 0; j < NVEC; j++) acc[i][j] = add_product<PER>(acc[i][j], ai, bv[j]);
        }
        b += bs;
        if (LAY == ByCol) a += as;
    }
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 16
        for (int j = 0; j < NVEC; j++) {
            float *at = c + i * ldc + j * VL;
            store(at, MODE == Add ? load(at) + acc[i][j] : acc[i][j]);
        }
}

template <int ROWS, int NVEC, Mode MODE, Layout LAY, i64 PER>
__attribute__((noinline)) void micro_fixed(i64 k, const float *a, i64 as, const float *b, i64 bs, float *c, i64 ldc,
                                           const float *x, i64 ldx, const float *d) {
    micro<ROWS, NVEC, MODE, LAY, PER>(k, a, as, b, bs, c, ldc, x, ldx, d);
}

template <int NVEC, Mode MODE, Layout LAY, i64 PER = 1, int ROWS = MR>
HM_INLINE void micro_rows(i64 rows, i64 k, const float *a, i64 as, const float *b, i64 bs, float *c, i64 ldc,
                          const float *x = nullptr, i64 ldx = 0, const float *d = nullptr) {
    if (ROWS == MR && rows == MR) micro<MR, NVEC, MODE, LAY, PER>(k, a, as, b, bs, c, ldc, x, ldx, d);
    else if (rows == ROWS) micro_fixed<ROWS, NVEC, MODE, LAY, PER>(k, a, as, b, bs, c, ldc, x, ldx, d);
    else if constexpr (ROWS > 1) micro_rows<NVEC, MODE, LAY, PER, ROWS - 1>(rows, k, a, as, b, bs, c, ldc, x, ldx, d);
}

// Add into columns of an array that ends before the panel does.
template <Layout LAY, i64 PER = 1>
HM_INLINE void add_panel(i64 rows, i64 cols, i64 k, const float *a, i64 as, const float *b, i64 bs, float *c, i64 ldc) {
    if (cols >= NR) return micro_rows<NV, Add, LAY, PER>(rows, k, a, as, b, bs, c, ldc);
    float tmp[MR * NR];
    micro_rows<NV, Set, LAY, PER>(rows, k, a, as, b, bs, tmp, NR);
    for (i64 i = 0; i < rows; i++)
        for (i64 j = 0; j < cols; j++) c[i * ldc + j] += tmp[i * NR + j];
}

// Rank-wide products (columns = the R of an operator, padded to Rp): half a panel is enough for a small R.
constexpr int NVH = NV / 2, NRH = NVH * VL;
i64 rank_pad(i64 R) { return R <= NRH ? NRH : round_up(R, NR); }

template <Layout LAY>
HM_INLINE void add_rank(i64 rows, i64 Rp, i64 k, const float *a, i64 as, const float *b, float *c) {
    if (Rp == NRH) return micro_rows<NVH, Add, LAY>(rows, k, a, as, b, Rp, c, Rp);
    for (i64 r = 0; r < Rp; r += NR) micro_rows<NV, Add, LAY>(rows, k, a, as, b + r, Rp, c + r, Rp);
}

// n rows of `depth` numbers, transposed into panels of words [n/NR][depth][NR]; missing rows are zero.
template <template <class> class R, class E> void pack_transposed(R<E> src, i64 n, i64 depth, float *dst) {
    constexpr i64 PER = PER_WORD<E>;
    const i64 deep = words<E>(depth);
    for (i64 c = 0; c < n; c += NR, dst += deep * NR) {
        i64 rows = std::min<i64>(NR, n - c);
        i64 full = round_down(rows, 4), d4 = round_down(depth / PER, 4);
        for (i64 s = 0; s < full; s += 4) {
            const E *r0 = src[c + s], *r1 = src[c + s + 1], *r2 = src[c + s + 2], *r3 = src[c + s + 3];
            for (i64 p = 0; p < d4; p += 4) {
                // The rows after next, a line of each per 16 words
                __builtin_prefetch(r0 + p * PER + (8 + p / 4 % 4) * src.stride);
                v4 a0 = four_words(r0 + p * PER), a1 = four_words(r1 + p * PER);
                v4 a2 = four_words(r2 + p * PER), a3 = four_words(r3 + p * PER);
                transpose4(a0, a1, a2, a3);
                float *to = dst + p * NR + s;
                *(v4_mem *)to = a0;
                *(v4_mem *)(to + NR) = a1;
                *(v4_mem *)(to + 2 * NR) = a2;
                *(v4_mem *)(to + 3 * NR) = a3;
            }
        }
        for (i64 s = 0; s < NR; s++)
            for (i64 p = s < full ? d4 : 0; p < deep; p++) dst[p * NR + s] = s < rows ? word(src[c + s], p, depth) : 0.0f;
    }
}

// m rows of `width` numbers, multiplied by a scalar per row (or 1).
template <class E, class F>
void write_rows(const E *src, i64 stride, i64 m, i64 width, const float *scale, F *dst, i64 ld) {
    for (i64 i = 0; i < m; i++) {
        float f = scale ? scale[i] : 1.0f;
        each_vector(width, [&](i64 j, i64 n) { store_some(dst + i * ld + j, load_some(src + i * stride + j, n) * f, n); });
    }
}

// Rows a and b of n numbers as one row of words; b null: zeros.
HM_INLINE void interleave(const bf16 *a, const bf16 *b, i64 n, float *dst) {
    each_vector(n, [&](i64 j, i64 k) {
        vu low = (vu)load_some(a + j, k) >> 16, high = b ? (vu)load_some(b + j, k) : vu{};
        store_some(dst + j, (vf)(low | high), k);
    });
}

// n rows of `width` numbers into panels of words [width/NR][TC rows, one spare][NR]; missing columns are zero.
// The spare row keeps panels from falling on the same cache sets.
constexpr i64 PANEL = (TC + 1) * NR;
template <template <class> class R, class E> void pack_panels(R<E> src, i64 n, i64 width, float *dst) {
    constexpr i64 PER = PER_WORD<E>;
    for (i64 p = 0; p < words<E>(n); p++) {
        const E *from = src[p * PER], *next = p * PER + 1 < n ? src[p * PER + 1] : nullptr;
        float *to = dst + p * NR;
        for (i64 j = 0; j < width; j += NR, to += PANEL) {
            i64 cols = std::min<i64>(NR, width - j);
            if constexpr (PER == 2) interleave(from + j, next ? next + j : nullptr, cols, to);
            else write_rows(from + j, 0, 1, cols, nullptr, to, 0);
            for (i64 i = cols; i < NR; i++) to[i] = 0.0f;
        }
    }
}

// m rows of `width` numbers, multiplied by a scalar per row (or 1), into a padded matrix of words with row stride ld.
template <class E> void pack_rows(const E *src, i64 stride, i64 m, i64 width, const float *scale, float *dst, i64 ld) {
    auto *to = (packed<E> *)dst;
    ld *= PER_WORD<E>;
    write_rows(src, stride, m, width, scale, to, ld);
    for (i64 i = 0; i < m; i++)
        for (i64 j = width; j < ld; j++) to[i * ld + j] = packed<E>{};
}

// m rows of packed numbers (row stride ld words) as rows of words, two rows in one where a word holds two numbers.
template <class E> const float *join_rows(const float *rows, i64 ld, i64 m, i64 width, float *joined) {
    if constexpr (PER_WORD<E> == 1) return rows;
    for (i64 i = 0; i < m; i += 2) {
        auto *row = (const bf16 *)rows + 2 * i * ld;
        interleave(row, i + 1 < m ? row + 2 * ld : nullptr, width, joined + i / 2 * ld);
    }
    return joined;
}

}  // namespace
