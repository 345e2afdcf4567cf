// Products of a few rows with many weights (decoding): the weights are read once, where they lie, at the speed of memory.

#pragma once

#include "threads.h"

namespace {

constexpr int OUTPUTS = 4;                    // computed together, so that their sums need few instructions
constexpr int ABREAST = VL == 16 ? 4 : 2;     // rows that share what is read of the weights
constexpr i64 PRODUCT_SHARE = 65536;          // multiply-adds that are worth a thread

// One product: y = x wᵀ + bias.
struct Product {
    const hm_linear *m;
    const float *x;  // (B,n_in) contiguous
    float *y;        // (B,n_out) contiguous
    i64 groups() const { return (m->n_out + OUTPUTS - 1) / OUTPUTS; }
};

HM_INLINE float number(const void *p, bool half, i64 i) { return half ? value(((const bf16 *)p)[i]) : ((const float *)p)[i]; }

// Outputs o..o+3, of which `outs` exist, of ROWS rows from r on.
template <class W, int ROWS> void product_group(const Product &p, i64 o, i64 outs, i64 r) {
    const hm_linear &m = *p.m;
    const W *w[OUTPUTS];
    for (int i = 0; i < OUTPUTS; i++) w[i] = (const W *)m.w + (o + std::min<i64>(i, outs - 1)) * m.n_in;
    const float *x = p.x + r * m.n_in;
    vf total[OUTPUTS][ROWS] = {};
    each_vector(m.n_in, [&](i64 c, i64 n) {
        vf xs[ROWS];
        for (int j = 0; j < ROWS; j++) xs[j] = load_some(x + j * m.n_in + c, n);
        for (int i = 0; i < OUTPUTS; i++) {
            if (c * sizeof(W) % 64 == 0) __builtin_prefetch(w[i] + OUTPUTS * m.n_in + c);  // the group after this one
            vf ws = load_some(w[i] + c, n);
            for (int j = 0; j < ROWS; j++) total[i][j] += ws * xs[j];
        }
    });
    for (int j = 0; j < ROWS; j++) {
        v4 s = sums(total[0][j], total[1][j], total[2][j], total[3][j]);
        for (i64 i = 0; i < outs; i++) {
            float y = m.scale ? s[i] * number(m.scale, m.half, o + i) : s[i];
            p.y[(r + j) * m.n_out + o + i] = m.bias ? y + number(m.bias, m.half, o + i) : y;
        }
    }
}

// Groups begin..end-1 of outputs, for all rows. A sum does not depend on who computes it.
template <class W> void product_groups(const Product &p, i64 begin, i64 end, i64 rows) {
    for (i64 o = begin * OUTPUTS; o < std::min(end * OUTPUTS, p.m->n_out); o += OUTPUTS) {
        i64 r = 0, outs = std::min<i64>(OUTPUTS, p.m->n_out - o);
        for (; r + ABREAST <= rows; r += ABREAST) product_group<W, ABREAST>(p, o, outs, r);
        for (; r < rows; r++) product_group<W, 1>(p, o, outs, r);
    }
}

void multiply_rows(const Product &p, i64 begin, i64 end, i64 rows) {
    if (p.m->kind == 0) product_groups<float>(p, begin, end, rows);
    else if (p.m->kind == 1) product_groups<bf16>(p, begin, end, rows);
    else product_groups<int8_t>(p, begin, end, rows);
}

// Several products of the same rows, in one go: products that are null have no weights.
template <int N> void multiply_all(const Product (&products)[N], i64 rows, i64 nthreads, void *parallel) {
    i64 groups = 0, work = 0;
    for (const Product &p : products)
        if (p.m->w) groups += p.groups(), work += p.m->n_out * p.m->n_in;
    i64 nw = std::max<i64>(1, std::min(std::max<i64>(nthreads, 1), work * rows / PRODUCT_SHARE));
    run_shares(groups, nw, parallel, [&](i64, i64 begin, i64 end) {
        i64 before = 0;
        for (const Product &p : products) {
            if (!p.m->w) continue;
            i64 n = p.groups();
            multiply_rows(p, std::clamp<i64>(begin - before, 0, n), std::clamp<i64>(end - before, 0, n), rows);
            before += n;
        }
    });
}

bool linear_agrees(const hm_linear &m, i64 n_out, i64 n_in) {
    return !m.w || (m.n_out == n_out && m.n_in == n_in && m.kind >= 0 && m.kind <= 2 && !m.scale == (m.kind != 2));
}

}  // namespace
