// What surrounds the operator: products of few rows with many weights, and one token through a whole layer.

#pragma once

#include "conv.h"
#include "gates.h"
#include "project.h"
#include "rows.h"

namespace {

// Products of a few rows with many weights (decoding): the weights are read once, at the speed of memory

// One product of a few rows with a weight matrix: y = x w^T + bias.
struct LinearEntry {
    const float *x, *w, *bias;   // (N,n_in) (n_out,n_in) contiguous (n_out) or null
    float *y;                    // (N,n_out) contiguous
    i64 x_row, n_in, n_out;
};

struct LinearArgs {
    i64 N, entries;
    i64 nthreads;
    void *parallel;
    const LinearEntry *entry;
};

// Outputs o..o+OUT-1 of rows r..r+ROWS-1
template <int OUT, int ROWS> void dots(const LinearEntry &e, i64 o, i64 r) {
    vf sums[OUT][ROWS] = {};
    i64 c = 0;
    for (; c + VL <= e.n_in; c += VL) {
        vf x[ROWS];
        for (int j = 0; j < ROWS; j++) x[j] = load(e.x + (r + j) * e.x_row + c);
        for (int i = 0; i < OUT; i++) {
            vf w = load(e.w + (o + i) * e.n_in + c);
            for (int j = 0; j < ROWS; j++) sums[i][j] += w * x[j];
        }
    }
    for (int i = 0; i < OUT; i++)
        for (int j = 0; j < ROWS; j++) {
            float s = sum(sums[i][j]);
            for (i64 rest = c; rest < e.n_in; rest++) s += e.w[(o + i) * e.n_in + rest] * e.x[(r + j) * e.x_row + rest];
            e.y[(r + j) * e.n_out + o + i] = s + (e.bias ? e.bias[o + i] : 0.0f);
        }
}

template <int OUT> void dots_of_rows(const LinearEntry &e, i64 o, i64 rows) {
    i64 r = 0;
    for (; r + 2 <= rows; r += 2) dots<OUT, 2>(e, o, r);
    if (r < rows) dots<OUT, 1>(e, o, r);
}

// Outputs begin..end-1 of an entry. The grouping of outputs does not change a sum, so results do not depend on threads.
void few_rows(const LinearEntry &e, i64 begin, i64 end, i64 rows) {
    i64 o = begin;
    for (; o + 4 <= end; o += 4) dots_of_rows<4>(e, o, rows);
    for (; o < end; o++) dots_of_rows<1>(e, o, rows);
}

void linear_forward(const LinearArgs *p) {
    i64 work = 0;
    for (i64 k = 0; k < p->entries; k++) work += p->entry[k].n_in * p->entry[k].n_out;
    i64 nw = std::max<i64>(1, std::min(std::max<i64>(p->nthreads, 1), work * p->N / 65536));
    run_workers(work ? nw : 0, p->parallel, [&](i64 w) {
        Share mine(work, w, nw);
        i64 before = 0;
        for (i64 k = 0; k < p->entries; k++) {
            const LinearEntry &e = p->entry[k];
            i64 size = e.n_in * e.n_out;
            if (size > 0) {
                i64 begin = std::clamp<i64>((mine.begin - before + e.n_in - 1) / e.n_in, 0, e.n_out);
                i64 end = std::clamp<i64>((mine.end - before + e.n_in - 1) / e.n_in, 0, e.n_out);
                few_rows(e, begin, end, p->N);
            }
            before += size;
        }
    });
}

bool step_agrees(const hm_step_args &p, const hm_args &mix) {
    const hm_parameters &weights = p.parameters;
    if (!weights.w[PQ] || !weights.w[PK] || !weights.w[PV] || !weights.o || !weights.conv_k != !weights.conv_v) return false;
    if ((mix.A1 && !weights.w[PS1]) || (mix.A2 && !weights.w[PS2])) return false;
    return mix.T == 1 && mix.n_spans == mix.B && arguments_agree(mix);
}

// The new token's k and v, all that depends on x alone, the operator, and the readout.
int run_step(const hm_step_args &p) {
    hm_args mix = p.mix;
    const hm_parameters &weights = p.parameters;
    take_factors(mix, weights);
    if (!mix.B) return 0;
    const i64 B = mix.B, C = p.C, Q = mix.G * mix.K, O = mix.H * mix.V, n1 = mix.G * mix.R1, n2 = mix.H * mix.R2;
    std::vector<float> scratch(B * (2 * C + 3 * Q + 3 * O + n1 + n2 + mix.H));
    float *next = scratch.data();
    auto take = [&](i64 n) { return next += B * n, next - B * n; };
    float *xk = take(C), *xv = take(C), *q = take(Q), *gq = take(Q), *k = take(Q), *v = take(O), *go = take(O), *o = take(O),
          *s1 = take(n1), *s2 = take(n2);
    mix.rho = take(mix.H);
    mix.q = {q, Q, Q, mix.K}, mix.s1 = {s1, n1, n1, mix.R1}, mix.s2 = {s2, n2, n2, mix.R2}, mix.o = {o, O, O, mix.V};
    if (!step_agrees(p, mix)) return 2;

    hm_view x{const_cast<float *>(p.x), p.x_row, p.x_row, 0}, to_k{xk, C, C, 0}, to_v{xv, C, C, 0};
    if (weights.conv_k) {
        hm_conv_args conv{};
        conv.B = B, conv.T = 1, conv.C = C, conv.W = p.W, conv.nthreads = 1;
        conv.x = x, conv.wk = weights.conv_k, conv.wv = weights.conv_v, conv.yk = to_k, conv.yv = to_v;
        std::vector<float> history(B * (p.W - 1) * C + 1);
        for (i64 b = 0; b < B && p.W > 1; b++)
            memcpy(history.data() + b * (p.W - 1) * C, p.history + b * p.history_b, (p.W - 1) * C * sizeof(float));
        conv.history = history.data();
        Conv<float> twin(conv);
        for (i64 b = 0; b < B; b++) twin.forward_block(b, 0);
    }
    std::vector<LinearEntry> entries;
    auto linear = [&](const float *w, const float *bias, const float *from, i64 row, i64 in, float *to, i64 out) {
        if (w) entries.push_back({from, w, bias, to, row, in, out});
    };
    auto run = [&] {
        LinearArgs all{B, (i64)entries.size(), mix.nthreads, mix.parallel, entries.data()};
        linear_forward(&all);
        entries.clear();
    };
    float *const to[7] = {q, gq, s1, s2, k, v, go};
    const i64 width[7] = {Q, Q, n1, n2, Q, O, O};
    for (Projection j : {PQ, PGATE, PREAD, PS1, PS2, PK, PV}) {
        bool convolved = weights.conv_k && (j == PK || j == PV);
        const float *from = !convolved ? p.x : j == PK ? xk : xv;
        linear(weights.w[j], weights.bias[j], from, convolved ? C : p.x_row, C, to[j], width[j]);
    }
    run();

    auto gate = [&](const float *from, const float *g, float *to, i64 width) {
        hm_gate_args a{};
        a.N = B, a.C = width, a.nthreads = 1, a.x = from, a.g = g, a.y = to, a.x_row = a.g_row = a.y_row = width;
        gate_forward<float>(&a);
    };
    if (weights.w[PGATE]) gate(q, gq, q, Q);
    if (weights.w[PS1]) gate(nullptr, s1, s1, n1);
    if (weights.w[PS2]) gate(nullptr, s2, s2, n2);
    for (i64 b = 0; b < B; b++) {
        i64 slot = place(mix.spans[5 * b + 4] - 1, mix.S);
        for (i64 g = 0; g < mix.G; g++) memcpy(at(mix.k, b, slot, g), k + b * Q + g * mix.K, mix.K * sizeof(float));
        for (i64 h = 0; h < mix.H; h++) memcpy(at(mix.v, b, slot, h), v + b * O + h * mix.V, mix.V * sizeof(float));
    }
    int status = run_forward<float>(mix);
    if (status) return status;
    if (weights.w[PREAD]) gate(o, go, o, O);
    linear(weights.o, weights.o_bias, o, O, O, p.y, C);
    run();
    return 0;
}

}  // namespace
