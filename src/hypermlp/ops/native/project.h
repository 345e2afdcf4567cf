// The projections around the operator at small widths, a block of rows at a time: what is made of x stays in the cache.

#pragma once

#include "conv.h"
#include "gates.h"
#include "gemm.h"

namespace {

constexpr i64 PROJECT_ROWS = 48;  // of a block: whole blocks of the convolutions
static_assert(PROJECT_ROWS % CONV_ROWS == 0, "a block of the convolutions lies in one block of rows");

enum Projection { PQ, PGATE, PS1, PS2, PK, PV, PREAD };  // q, its gate, both controls, k, v, the readout's gate

// out (n x width) = a (n x depth) · panels [width/NR][depth][NR], plus what is there, or plus the bias (null: nothing).
template <Mode MODE>
void multiply(i64 n, i64 depth, const float *a, i64 lda, const float *panels, i64 width, float *out, i64 ldo,
              const float *bias = nullptr, const float *ones = nullptr) {
    for (i64 j = 0; j < width; j += NR, panels += depth * NR)
        for (i64 i = 0; i < n; i += MR)
            micro_rows<NV, MODE, ByRow>(std::min<i64>(MR, n - i), depth, a + i * lda, lda, panels, NR, out + i * ldo + j, ldo,
                                        MODE == Mix ? bias + j : nullptr, 0, ones);
}

// out (rows_of_out x width) += aᵀ b over n rows: the gradient of a weight.
void multiply_transposed(i64 n, i64 rows_of_out, const float *a, i64 lda, const float *b, i64 width, float *out) {
    for (i64 i = 0; i < rows_of_out; i += MR)
        for (i64 j = 0; j < width; j += NR)
            micro_rows<NV, Add, ByCol>(std::min<i64>(MR, rows_of_out - i), n, a + i, lda, b + j, width, out + i * width + j,
                                       width);
}

void add_rows(i64 n, const float *x, i64 width, float *total) {
    for (i64 i = 0; i < n; i++)
        each_vector(width, [&](i64 j, i64 k) { store_some(total + j, load_some(total + j, k) + load_some(x + i * width + j, k), k); });
}

struct Projector {
    const hm_project_args &p;
    const hm_parameters &weights;
    i64 joined, rows_of_weights = 0, per_batch;
    std::vector<float> panels, biases, ones;
    i64 first_row[7];  // of each weight among all of them

    Projector(const hm_project_args &args, bool backward) : p(args), weights(args.parameters) {
        joined = p.width[PQ] + p.width[PGATE] + p.width[PS1] + p.width[PS2];
        for (i64 k = 0; k < 7; k++) first_row[k] = rows_of_weights, rows_of_weights += p.width[k];
        per_batch = (p.T + PROJECT_ROWS - 1) / PROJECT_ROWS;
        panels.resize(rows_of_weights * p.C);
        if (backward) {
            pack_backward();
            return;
        }
        biases.assign(rows_of_weights, 0.0f);
        ones.assign(NR, 1.0f);
        for (i64 k = 0; k < 7; k++) {
            if (weights.bias[k]) memcpy(biases.data() + first_row[k], weights.bias[k], p.width[k] * sizeof(float));
            if (p.width[k]) pack_transposed(Rows<float>{weights.w[k], p.C}, p.width[k], p.C, panels.data() + first_row[k] * p.C);
        }
    }
    // For each of [joined weights], k, v, gate: panels [C/NR][rows][NR], the products with which give dx.
    void pack_backward() {
        for (i64 k = 0; k < 7; k++) {
            bool in_joined = k < PK;
            i64 rows = in_joined ? joined : p.width[k], before = in_joined ? first_row[k] : 0;
            float *to = panels.data() + (in_joined ? 0 : first_row[k]) * p.C;
            for (i64 r = 0; r < p.width[k]; r++)
                for (i64 j = 0; j < p.C; j += NR)
                    memcpy(to + (j / NR * rows + before + r) * NR, weights.w[k] + r * p.C + j, NR * sizeof(float));
        }
    }
    const float *panels_of(i64 k) const { return panels.data() + first_row[k] * p.C; }
    i64 blocks() const { return p.B * per_batch; }
    i64 workers() const { return workers_for(p.nthreads, blocks()); }
    i64 sums_size() const { return rows_of_weights * (p.C + 1) + 2 * p.W * p.C; }
};

// What one worker needs: the convolutions' view of the call, and room for one block.
struct ProjectWork {
    const Projector &P;
    const hm_project_args &p;
    bool convolved;
    hm_conv_args conv_args;
    std::vector<float> xk, xv, dxk, dxv, dy;
    i64 b = 0, t = 0, n = 0;  // the block

    ProjectWork(const Projector &projector, bool backward) : P(projector), p(projector.p), convolved(P.weights.conv_k != nullptr) {
        conv_args = {};
        conv_args.B = p.B, conv_args.T = p.T, conv_args.C = p.C, conv_args.W = p.W;
        conv_args.x = {(float *)p.x, p.T * p.C, p.C, 0};
        conv_args.wk = P.weights.conv_k, conv_args.wv = P.weights.conv_v, conv_args.pos = p.pos;
        conv_args.dx = {p.dx, p.T * p.C, p.C, 0};
        i64 size = convolved ? (PROJECT_ROWS + p.W) * p.C : 0;
        for (auto *x : {&xk, &xv}) x->resize(size);
        if (!backward) return;
        for (auto *x : {&dxk, &dxv}) x->resize(size);
        dy.resize(PROJECT_ROWS * P.joined);
    }
    void enter(i64 block) {
        b = block / P.per_batch, t = block % P.per_batch * PROJECT_ROWS, n = std::min(PROJECT_ROWS, p.T - t);
        auto local = [&](std::vector<float> &x) { return x.empty() ? hm_view{} : hm_view{x.data() - t * p.C, 0, p.C, 0}; };
        conv_args.yk = local(xk), conv_args.yv = local(xv), conv_args.dyk = local(dxk), conv_args.dyv = local(dxv);
    }
    i64 row() const { return b * p.T + t; }
    const float *x() const { return p.x + row() * p.C; }
    template <class T> T *at_row(T *data, i64 width) const { return data + row() * width; }

    void convolve(const Conv<float> &conv) {
        for (i64 r = t; convolved && r < t + n; r += CONV_ROWS) conv.forward_block(b, r);
    }
    const float *input(i64 k) const { return !convolved || k < PK || k == PREAD ? x() : k == PK ? xk.data() : xv.data(); }

    // f(k, gate) for q and both controls of the block, whose rows in y are `joined` apart.
    template <class F> void each_gate(F f) const {
        const float *y = at_row(p.y, P.joined);
        for (i64 k : {PQ, PS1, PS2}) {
            hm_gate_args gate{};
            gate.C = gate.y_row = gate.dy_row = p.width[k];
            gate.x_row = gate.g_row = gate.dx_row = gate.dg_row = P.joined;
            gate.x = k == PQ ? y : nullptr, gate.g = y + P.first_row[k == PQ ? PGATE : k];
            f(k, gate);
        }
    }

    void forward(const Conv<float> &conv) {
        convolve(conv);
        float *y = at_row(p.y, P.joined);
        multiply<Mix>(n, p.C, x(), p.C, P.panels_of(PQ), P.joined, y, P.joined, P.biases.data(), P.ones.data());
        for (i64 k : {PK, PV, PREAD})
            if (p.width[k])
                multiply<Mix>(n, p.C, input(k), p.C, P.panels_of(k), p.width[k], at_row(p.out[k], p.width[k]), p.width[k],
                              P.biases.data() + P.first_row[k], P.ones.data());
        each_gate([&](i64 k, hm_gate_args &gate) {
            gate.y = at_row(p.out[k], gate.C);
            gate_rows<float>(gate, 0, n);
        });
    }
    // sums: gradients of all weights, of all biases, of the taps of k and of v ([W][C], as Conv's)
    void backward(const Conv<float> &conv, float *sums) {
        i64 C = p.C;
        float *bias = sums + P.rows_of_weights * C, *gk = bias + P.rows_of_weights, *gv = gk + p.W * C, *dx = at_row(p.dx, C);
        auto weigh = [&](i64 k, const float *d, i64 width) {
            multiply_transposed(n, width, d, width, input(k), C, sums + P.first_row[k] * C);
        };
        auto d_out = [&](i64 k) { return at_row(p.dout[k], p.width[k]); };
        convolve(conv);
        for (i64 k : {PK, PV}) {
            weigh(k, d_out(k), p.width[k]);
            add_rows(n, d_out(k), p.width[k], bias + P.first_row[k]);
        }
        if (convolved) {
            i64 rows = std::min(n + p.W - 1, p.T - t);  // the last rows of the block gave to outputs of the next
            multiply<Set>(rows, p.width[PK], d_out(PK), p.width[PK], P.panels_of(PK), C, dxk.data(), C);
            multiply<Set>(rows, p.width[PV], d_out(PV), p.width[PV], P.panels_of(PV), C, dxv.data(), C);
            for (i64 r = t; r < t + n; r += CONV_ROWS) conv.backward_block(b, r, gk, gv);
        } else {
            multiply<Set>(n, p.width[PK], d_out(PK), p.width[PK], P.panels_of(PK), C, dx, C);
            multiply<Add>(n, p.width[PV], d_out(PV), p.width[PV], P.panels_of(PV), C, dx, C);
        }
        each_gate([&](i64 k, hm_gate_args &gate) {
            gate.dy = d_out(k), gate.dx = dy.data(), gate.dg = dy.data() + ((const float *)gate.g - at_row(p.y, P.joined));
            gate_rows_backward<float>(gate, 0, n);
        });
        add_rows(n, dy.data(), P.joined, bias);
        weigh(PQ, dy.data(), P.joined);
        multiply<Add>(n, P.joined, dy.data(), P.joined, P.panels_of(PQ), C, dx, C);
        if (p.width[PREAD]) {
            weigh(PREAD, d_out(PREAD), p.width[PREAD]);
            add_rows(n, d_out(PREAD), p.width[PREAD], bias + P.first_row[PREAD]);
            multiply<Add>(n, p.width[PREAD], d_out(PREAD), p.width[PREAD], P.panels_of(PREAD), C, dx, C);
        }
    }
};

void project_forward(const hm_project_args *p) {
    Projector P(*p, false);
    run_shares(P.blocks(), P.workers(), p->parallel, [&](i64, i64 begin, i64 end) {
        ProjectWork work(P, false);
        Conv<float> conv(work.conv_args);
        for (i64 block = begin; block < end; block++) work.enter(block), work.forward(conv);
    });
}

void project_backward(const hm_project_args *p) {
    Projector P(*p, true);
    i64 nw = P.workers(), size = P.sums_size(), C = p->C;
    std::vector<float> sums(nw * size, 0.0f);
    run_shares(P.blocks(), nw, p->parallel, [&](i64 w, i64 begin, i64 end) {
        ProjectWork work(P, true);
        Conv<float> conv(work.conv_args);
        for (i64 block = begin; block < end; block++) work.enter(block), work.backward(conv, sums.data() + w * size);
    });
    for (i64 w = 1; w < nw; w++)  // in the workers' order
        for (i64 j = 0; j < size; j++) sums[j] += sums[w * size + j];
    const float *bias = sums.data() + P.rows_of_weights * C, *taps = bias + P.rows_of_weights;
    for (i64 k = 0; k < 7; k++) {
        if (p->gradients.w[k]) memcpy(p->gradients.w[k], sums.data() + P.first_row[k] * C, p->width[k] * C * sizeof(float));
        if (p->gradients.bias[k]) memcpy(p->gradients.bias[k], bias + P.first_row[k], p->width[k] * sizeof(float));
    }
    for (float *d_conv : {p->gradients.conv_k, p->gradients.conv_v}) {
        for (i64 c = 0; d_conv && c < C; c++)
            for (i64 j = 0; j < p->W; j++) d_conv[c * p->W + p->W - 1 - j] = taps[j * C + c];
        taps += p->W * C;
    }
}

bool projections_agree(const hm_project_args &p) {
    const hm_parameters &weights = p.parameters;
    if (p.B < 0 || p.T < 0 || p.C <= 0 || p.C % NR || p.width[PQ] != p.width[PGATE]) return false;
    if (!weights.conv_k != !weights.conv_v || (weights.conv_k && p.W <= 0)) return false;
    for (i64 k = 0; k < 7; k++)
        if (p.width[k] < 0 || p.width[k] % NR || (p.width[k] && !weights.w[k])) return false;
    return true;
}

}  // namespace
