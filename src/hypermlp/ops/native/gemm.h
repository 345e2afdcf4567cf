// Matrix products: one register-blocked micro-kernel, MR rows by one panel of NR columns, and the packing that feeds it.

#pragma once

#include "threads.h"

namespace {

// The micro-kernel: C (rows x NVEC vectors) from A (rows x k) and a panel of B (k x NVEC vectors, row stride bs).
//   Set: C = A B     Add: C += A B     Mix: C = X * d + A B   (d one value per column: the diagonal part of an operator)
//   ByRow: A[i,k] = a[i*as + k]        ByCol: A[i,k] = a[i + k*as], the transposed operand

enum Mode { Set, Add, Mix };
enum Layout { ByRow, ByCol };

template <int ROWS, int NVEC, Mode MODE, Layout LAY>
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
            for (int j = 0; j < NVEC; j++) acc[i][j] += ai * bv[j];
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

template <int ROWS, int NVEC, Mode MODE, Layout LAY>
__attribute__((noinline)) void micro_fixed(i64 k, const float *a, i64 as, const float *b, i64 bs, float *c, i64 ldc,
                                           const float *x, i64 ldx, const float *d) {
    micro<ROWS, NVEC, MODE, LAY>(k, a, as, b, bs, c, ldc, x, ldx, d);
}

template <int NVEC, Mode MODE, Layout LAY, int ROWS = MR>
HM_INLINE void micro_rows(i64 rows, i64 k, const float *a, i64 as, const float *b, i64 bs, float *c, i64 ldc,
                          const float *x = nullptr, i64 ldx = 0, const float *d = nullptr) {
    if (ROWS == MR && rows == MR) micro<MR, NVEC, MODE, LAY>(k, a, as, b, bs, c, ldc, x, ldx, d);
    else if (rows == ROWS) micro_fixed<ROWS, NVEC, MODE, LAY>(k, a, as, b, bs, c, ldc, x, ldx, d);
    else if constexpr (ROWS > 1) micro_rows<NVEC, MODE, LAY, ROWS - 1>(rows, k, a, as, b, bs, c, ldc, x, ldx, d);
}

// Add into columns of an array that ends before the panel does.
template <Layout LAY>
HM_INLINE void add_panel(i64 rows, i64 cols, i64 k, const float *a, i64 as, const float *b, i64 bs, float *c, i64 ldc) {
    if (cols >= NR) return micro_rows<NV, Add, LAY>(rows, k, a, as, b, bs, c, ldc);
    float tmp[MR * NR];
    micro_rows<NV, Set, LAY>(rows, k, a, as, b, bs, tmp, NR);
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

// n rows of `depth` floats, transposed into panels [n/NR][depth][NR]; missing rows are zero.
void pack_transposed(const float *src, i64 stride, i64 n, i64 depth, float *dst) {
    for (i64 c = 0; c < n; c += NR, dst += depth * NR) {
        i64 rows = std::min<i64>(NR, n - c);
        const float *from = src + c * stride;
        i64 full = round_down(rows, 4), d4 = round_down(depth, 4);
        for (i64 s = 0; s < full; s += 4)
            for (i64 p = 0; p < d4; p += 4) {
                const float *at = from + s * stride + p;
                __builtin_prefetch(at + (8 + p / 4 % 4) * stride);  // the rows after next, a line of each per 16 floats
                v4 a0 = *(const v4_mem *)at, a1 = *(const v4_mem *)(at + stride);
                v4 a2 = *(const v4_mem *)(at + 2 * stride), a3 = *(const v4_mem *)(at + 3 * stride);
                transpose4(a0, a1, a2, a3);
                float *to = dst + p * NR + s;
                *(v4_mem *)to = a0;
                *(v4_mem *)(to + NR) = a1;
                *(v4_mem *)(to + 2 * NR) = a2;
                *(v4_mem *)(to + 3 * NR) = a3;
            }
        for (i64 s = 0; s < NR; s++)
            for (i64 p = s < full ? d4 : 0; p < depth; p++) dst[p * NR + s] = s < rows ? from[s * stride + p] : 0.0f;
    }
}

// n rows of `width` floats into panels [width/NR][TC rows, one spare][NR]; missing columns are zero.
// The spare row keeps panels from falling on the same cache sets.
constexpr i64 PANEL = (TC + 1) * NR;
void pack_panels(const float *src, i64 stride, i64 n, i64 width, float *dst) {
    i64 full = round_down(width, NR);
    for (i64 s = 0; s < n; s++) {
        const float *from = src + s * stride;
        float *to = dst + s * NR;
        for (i64 j = 0; j < full; j += NR, to += PANEL)
            for (int v = 0; v < NV; v++) store(to + v * VL, load(from + j + v * VL));
        if (full < width)
            for (i64 j = 0; j < NR; j++) to[j] = full + j < width ? from[full + j] : 0.0f;
    }
}

// m rows of `width` floats, multiplied by a scalar per row (or 1), into a padded matrix with row stride ld.
void pack_rows(const float *src, i64 stride, i64 m, i64 width, const float *scale, float *dst, i64 ld) {
    for (i64 i = 0; i < m; i++) {
        float f = scale ? scale[i] : 1.0f, *to = dst + i * ld;
        const float *from = src + i * stride;
        each_vector(width, [&](i64 j, i64 n) { store_some(to + j, load_some(from + j, n) * f, n); });
        for (i64 j = width; j < ld; j++) to[j] = 0.0f;
    }
}

}  // namespace
