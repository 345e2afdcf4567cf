// A strip of rows and its mixing operators: how the one buffer is laid out, and the products along it.

#pragma once

#include "gemm.h"

namespace {

// A mixing operator with its parameters in the two forms the products want, for u in [u0, L)

struct Factor {            // A or B of one operator, all its heads
    const float *rows;     // [head][u][Rp], for sums over u
    i64 head_rows;
    const float *cols;     // [head][u / NR][R][NR], for sums over the rank
    i64 head_cols;
};

struct Operator {
    i64 R = 0, Rp = 0, u0 = 0, Lp = 0, L = 0, heads = 0;
    const float *A = nullptr, *B = nullptr, *diag = nullptr;
    bool shortcut = false;
    Factor fa{}, fb{};
    float *d = nullptr;    // [head][u]: shortcut + diag; ones for an absent operator, zero from L on

    bool present() const { return A != nullptr; }
    const float *rows(const Factor &f, i64 head, i64 u) const { return f.rows + head * f.head_rows + (u - u0) * Rp; }
    const float *cols(const Factor &f, i64 head, i64 u) const { return f.cols + head * f.head_cols + (u - u0) * R; }
    const float *diagonal(i64 head, i64 u) const { return d + head * (Lp - u0) + (u - u0); }

    void describe(const float *a, const float *b, const float *dg, bool sc, i64 rank, i64 n_heads, i64 n_lags, i64 first) {
        A = a, B = b, diag = dg, shortcut = sc, heads = n_heads, L = n_lags;
        R = a ? rank : 0;
        Rp = R ? rank_pad(R) : 0;
        u0 = first;
        Lp = round_up(L, NR);
    }
    void carve(Arena &mem, bool rows_of_both) {
        d = mem.floats(heads * (Lp - u0));
        if (!present()) return;
        // Readers of `rows` stop at L, so parameters whose rank fills a panel are used where they are.
        for (auto *f : {&fa, &fb}) {
            bool own = R != Rp && (rows_of_both || f == first_sum);
            f->head_rows = own ? (L - u0) * Rp : L * R;
            f->rows = own ? mem.floats(heads * f->head_rows) : (f == &fa ? A : B) + u0 * R;
            f->head_cols = (Lp - u0) * R;
            f->cols = rows_of_both || f != first_sum ? mem.floats(heads * f->head_cols) : nullptr;
        }
    }
    // Which factor the forward pass sums over u with: A for z A1, B for a B2. Backward needs both of both.
    Factor *first_sum = nullptr;

    void fill(i64 head, bool rows_of_both) {
        float *dd = d + head * (Lp - u0);
        for (i64 u = u0; u < Lp; u++) {
            float value = present() ? (shortcut ? 1.0f : 0.0f) + (diag && u < L ? diag[head * L + u] : 0.0f) : 1.0f;
            dd[u - u0] = u < L ? value : 0.0f;
        }
        if (!present()) return;
        for (auto *f : {&fa, &fb}) {
            const float *src = (f == &fa ? A : B) + (head * L + u0) * R;
            if (R != Rp && (rows_of_both || f == first_sum))
                pack_rows(src, R, L - u0, R, nullptr, (float *)f->rows + head * f->head_rows, Rp);
            if (f->cols) pack_transposed(Rows<float>{src, R}, L - u0, R, (float *)f->cols + head * f->head_cols);
        }
    }
};

// ---------------------------------------------------------------------------------------------------------------------------
// Strips

struct Strip {
    i64 b, row, m;        // batch entry, first row, number of rows
    i64 p0, sb, L;        // position of the first row, first slot of the sequence, lags
    i64 c0, n;            // first slot any row sees, number of slots up to the last row
    i64 ubase, W, Wp;     // lag column y stands for u = ubase + y; W columns exist, Wp is W in whole panels

    Strip(i64 b, i64 row, i64 m, i64 p0, i64 sb, i64 L) : b(b), row(row), m(m), p0(p0), sb(sb), L(L) {
        c0 = std::max(sb, p0 - L + 1);
        n = last() - c0 + 1;
        ubase = round_down(std::max<i64>(0, sb + L - 1 - last()), NR);
        W = L - ubase;
        Wp = round_up(W, NR);
    }
    i64 last() const { return p0 + m - 1; }
    i64 first_slot(i64 i) const { return std::max(sb, p0 + i - L + 1); }             // of row i
    i64 first_lag(i64 i) const { return std::max<i64>(0, sb + L - 1 - p0 - i) - ubase; }  // of row i, as a column y
    i64 lag_of(i64 c, i64 i) const { return c + L - 1 - p0 - i - ubase; }            // column y of (row i, slot c)
    double cost() const { return double(m) * double(n) + 64.0 * double(m); }
};

i64 margin(i64 m) { return round_up(m + NR, 16); }  // left of column y = 0: slots that have left a row's window
// The row stride is an odd number of cache lines, so that walking down a column does not fall on one cache set.
i64 strip_ld(i64 Wp, i64 m) {
    i64 ld = round_up(Wp + 2 * margin(m), 16);
    return (ld / 16) % 2 ? ld : ld + 16;
}

std::vector<Strip> cut_span(const i64 *span, i64 L, bool narrow) {
    std::vector<Strip> strips;
    i64 rows = span[2] - span[1];
    if (rows <= 0) return strips;
    bool low = narrow && std::min(L, span[4] - span[3]) <= FEW_LAGS;
    i64 height = low ? M_NARROW : rows <= M_SINGLE ? rows : M_STRIP, count = (rows + height - 1) / height;
    i64 each = round_up((rows + count - 1) / count, MR);
    for (i64 r = 0; r < rows; r += each)
        strips.emplace_back(span[0], span[1] + r, std::min(each, rows - r), span[4] - rows + r, span[3], L);
    return strips;
}

// A strip matrix: base points at row 0, column y = 0.
struct Matrix {
    float *base;
    i64 ld;
    float *lag(i64 i, i64 y) const { return base + i * ld + y; }
    float *time(const Strip &s, i64 i, i64 c) const { return base + i * ld + s.lag_of(c, i); }
};

// Memory that will be wanted soon, asked for a little at a time while something else is computed.
template <class E> struct Ahead {
    const E *data = nullptr;
    i64 stride = 0, rows = 0, width = 0, row = 0, col = 0;
    HM_INLINE void some(i64 lines) {
        for (; lines > 0 && row < rows; lines--) {
            __builtin_prefetch(data + row * stride + col, 0, 2);
            col += 64 / sizeof(E);
            if (col >= width) col = 0, row++;
        }
    }
};

// As many of these rows as lie together.
template <class E> Ahead<E> ahead(Ring<E> rows, i64 n, i64 width) { return {rows.data, rows.stride, std::min(n, rows.run), width}; }

template <class F> HM_INLINE void row_groups(i64 m, F f) {
    for (i64 i = 0; i < m; i += MR) f(i, std::min<i64>(MR, m - i));
}

// t += X(:, ya..yb) F: the sums over lags, a row group at a time. X points at column ya.
HM_INLINE void reduce_group(const Strip &s, i64 i, i64 rows, const float *X, i64 ldx, i64 ya, i64 yb, const Operator &op,
                            const Factor &f, i64 head, float *t) {
    i64 y = std::max(ya, s.first_lag(i + rows - 1));
    if (y >= yb) return;
    add_rank<ByRow>(rows, op.Rp, yb - y, X + i * ldx + y - ya, ldx, op.rows(f, head, s.ubase + y), t + i * op.Rp);
}

// C = X * D + t Fᵀ over columns ya..yb (whole panels). X and C point at column ya.
HM_INLINE void expand_group(const Strip &s, i64 i, i64 rows, const float *X, i64 ldx, i64 ya, i64 yb, const Operator &op,
                            const Factor &f, i64 head, const float *t, float *C, i64 ldc) {
    for (i64 y = std::max(ya, round_down(s.first_lag(i + rows - 1), NR)); y < yb; y += NR)
        micro_rows<NV, Mix, ByRow>(rows, op.R, t + i * op.Rp, op.Rp, op.R ? op.cols(f, head, s.ubase + y) : nullptr, NR,
                                   C + i * ldc + y - ya, ldc, X + i * ldx + y - ya, ldx,
                                   op.diagonal(head, s.ubase + y));
}

// Rows of a group start at different lags; cells before a row's own start do not exist.
HM_INLINE void clear_before_start(const Strip &s, i64 i, i64 rows, float *X, i64 ldx, i64 ya, i64 yb) {
    i64 y = std::max(ya, round_down(s.first_lag(i + rows - 1), NR));
    for (i64 r = i; r < i + rows; r++) {
        i64 end = std::min(yb, s.first_lag(r));
        if (end > y) memset(X + r * ldx + y - ya, 0, (end - y) * sizeof(float));
    }
}

// Zero what no row group writes: the cells older than the sequence.
void clear_older(const Strip &s, Matrix X) {
    for (i64 i = 0; i < s.m; i++) memset(X.lag(i, 0), 0, s.first_lag(i) * sizeof(float));
}

// gF[y] += Σ_i X[i,y] t[i]: the gradient of a factor, columns ya..yb. X points at column ya, gF at y = 0.
void scatter_lags(const Strip &s, const float *X, i64 ldx, i64 ya, i64 yb, const float *t, i64 Rp, float *gF) {
    yb = std::min(yb, s.W);
    for (i64 y = ya; y < yb; y += MR) {
        i64 cols = std::min<i64>(MR, yb - y), i = 0;
        while (i < s.m && s.first_lag(i) > y + cols - 1) i++;
        if (i < s.m) add_rank<ByCol>(cols, Rp, s.m - i, X + i * ldx + y - ya, ldx, t + i * Rp, gF + y * Rp);
    }
}

// X = a srcᵀ into a strip matrix (scores z = q kᵀ, or dw = dõ vᵀ), and t = X F on the fly while its columns are in cache.
template <class E>
void score(const Strip &s, const float *a, i64 lda, i64 depth, Ring<E> src, Matrix X, float *pack, const Operator &op,
           const Factor &f, i64 head, float *t) {
    if (op.present()) memset(t, 0, s.m * op.Rp * sizeof(float));
    clear_older(s, X);
    i64 done = 0;
    for (i64 j = 0; j < s.n; j += TC) {
        i64 width = std::min<i64>(TC, s.n - j), ca = s.c0 + j;
        pack_transposed(src.from(j), width, depth, pack);
        Ahead<E> next = ahead(src.from(j + width), std::min<i64>(TC, s.n - j - width), depth);
        const i64 lines = 1 + depth * TC / 16 / (TC / NR * round_up(s.m, MR) / MR);
        for (i64 c = ca; c < ca + width; c += NR) {
            const float *panel = pack + (c - ca) * words<E>(depth);
            row_groups(s.m, [&](i64 i, i64 rows) {
                next.some(lines);
                if (c > s.p0 + i + rows - 1 || c + NR <= s.first_slot(i)) return;  // all future, or all left the window
                micro_rows<NV, Set, ByRow, PER_WORD<E>>(rows, words<E>(depth), a + i * lda, lda, panel, NR, X.time(s, i, c),
                                                        X.ld - 1);
            });
        }
        i64 upto = std::min(s.W, s.lag_of(ca + width, s.m - 1));  // columns complete in every row
        if (upto <= done) continue;
        if (op.present())
            row_groups(s.m, [&](i64 i, i64 rows) {
                reduce_group(s, i, rows, X.lag(0, done), X.ld, done, upto, op, f, head, t);
            });
        done = upto;
    }
    for (i64 i = 0; i < s.m; i++) memset(X.lag(i, s.W), 0, (s.Wp - s.W) * sizeof(float));  // panels overshoot the newest lag
}

constexpr i64 LDT = TC + 16;  // row stride of a time tile in words

// Words of a strip matrix in time layout.
struct Tile {
    const float *data;
    i64 ld;
};

// Columns ca..ca+width of a strip matrix in time layout; zero where a slot does not exist for a row. They are read where they lie
// if all exist and need no packing, else copied into `tile`.
template <class E> Tile time_tile(const Strip &s, Matrix X, i64 ca, i64 width, float *tile) {
    if (PER_WORD<E> == 1 && ca >= s.first_slot(s.m - 1) && ca + width <= s.p0 + 1) return {X.time(s, 0, ca), X.ld - 1};
    using N = packed<E>;
    const i64 whole = words<E>(width) * PER_WORD<E>;
    for (i64 i = 0; i < s.m; i++) {
        N *to = (N *)tile + i * LDT * PER_WORD<E>;
        i64 from = std::min(std::max(s.first_slot(i), ca), ca + width);
        i64 end = std::max(std::min(s.p0 + i + 1, ca + width), from);
        memset(to, 0, (from - ca) * sizeof(N));
        write_rows(X.time(s, i, from), 0, 1, end - from, nullptr, to + from - ca, 0);
        memset(to + end - ca, 0, (ca + whole - end) * sizeof(N));
    }
    return {tile, LDT};
}

// acc (m x width, row stride ld) += tile · src rows, with the source packed in panels.
template <class E>
void read_tile(const Strip &s, Tile tile, i64 ca, i64 width, const float *panels, i64 cols, float *acc, i64 ld,
               Ahead<E> ahead) {
    const i64 share = 1 + (ahead.rows * round_up(cols, 16) / 16) / (round_up(cols, NR) / NR * round_up(s.m, MR) / MR);
    for (i64 j = 0; j < cols; j += NR, panels += PANEL)
        row_groups(s.m, [&](i64 i, i64 rows) {
            ahead.some(share);
            i64 from = std::max(s.first_slot(i) - ca, i64(0)) / PER_WORD<E>;
            i64 end = words<E>(std::min(s.p0 + i + rows - ca, width));
            if (from < end)
                micro_rows<NV, Add, ByRow, PER_WORD<E>>(rows, end - from, tile.data + i * tile.ld + from, tile.ld, panels + from * NR, NR,
                                                        acc + i * ld + j, ld);
        });
}

// Where gradients of slots are collected: the output itself, or a private copy of part of it.
struct SlotSum {
    float *data;
    i64 t, first;
    float *row(i64 c) const { return data + (c - first) * t; }
};

// Two rows of a tile in one, where a word holds two numbers.
template <class E> Tile join_rows(Tile tile, i64 m, i64 width, float *joined) {
    return {join_rows<E>(tile.data, tile.ld, m, width, joined), tile.ld};
}

// out[c] += Σ_i tile[i,c] x[i], both from join_rows  (x: m rows of cols numbers, row stride ldx, padded to whole panels)
template <class E>
void scatter_tile(const Strip &s, Tile tile, i64 ca, i64 width, const float *x, i64 ldx, i64 cols, SlotSum out) {
    for (i64 j = 0; j < cols; j += NR)
        for (i64 c = 0; c < width; c += MR) {
            i64 slots = std::min<i64>(MR, width - c);
            i64 from = std::max(ca + c - s.p0, i64(0)), end = std::min(ca + c + slots - 1 + s.L - s.p0, s.m);
            if (from >= end) continue;
            from = from / PER_WORD<E>, end = words<E>(end);
            float *to = out.row(ca + c) + j;
            for (i64 r = 0; r < slots; r++) __builtin_prefetch(to + r * out.t, 1);
            add_panel<ByCol, PER_WORD<E>>(slots, cols - j, end - from, tile.data + from * tile.ld + c, tile.ld, x + from * ldx + j, ldx, to,
                                         out.t);
        }
}

}  // namespace
