// Sigmoid gates: one, those of the joined projections, and the way back through the readout's.

#pragma once

#include "threads.h"

namespace {

// Rows of about this many elements for each worker: a smaller share costs more to hand out than to compute.
constexpr i64 GATE_SHARE = 16384;

i64 gate_workers(i64 rows, i64 columns, i64 nthreads) {
    return std::max<i64>(1, std::min({std::max<i64>(nthreads, 1), rows, rows * columns / GATE_SHARE}));
}

HM_INLINE pair slope_of(pair g, pair e, pair s) {  // σ' = σ(x) σ(-x), without cancellation
    return s * sigmoid_from(-1.0f * g, e);
}

void gate_rows(const hm_gate_args &p, i64 begin, i64 end) {
    for (i64 r = begin; r < end; r++) {
        const float *x = p.x ? p.x + r * p.x_row : nullptr, *g = p.g + r * p.g_row;
        float *y = p.y + r * p.y_row;
        each_pair(p.C, [&](i64 j, i64 n) {
            pair s = sigmoid(load2_some(g + j, n));
            store2_some(y + j, x ? load2_some(x + j, n) * s : s, n);
        });
    }
}

void gate_forward(const hm_gate_args *p) {
    i64 nw = gate_workers(p->N, p->C, p->nthreads);
    run_workers(p->N ? nw : 0, p->parallel, [&](i64 w) {
        Share mine(p->N, w, nw);
        gate_rows(*p, mine.begin, mine.end);
    });
}

void gate_backward(const hm_gate_args *p) {
    i64 nw = gate_workers(p->N, p->C, p->nthreads);
    run_workers(p->N ? nw : 0, p->parallel, [&](i64 w) {
        Share mine(p->N, w, nw);
        for (i64 r = mine.begin; r < mine.end; r++) {
            const float *x = p->x ? p->x + r * p->x_row : nullptr, *g = p->g + r * p->g_row, *dy = p->dy + r * p->dy_row;
            float *dx = p->x ? p->dx + r * p->dx_row : nullptr, *dg = p->dg + r * p->dg_row;
            each_pair(p->C, [&](i64 j, i64 n) {
                pair gv = load2_some(g + j, n), d = load2_some(dy + j, n);
                pair e = exp_negative(minus_abs(gv)), s = sigmoid_from(gv, e);
                if (x) {
                    pair xv = load2_some(x + j, n);
                    store2_some(dx + j, d * s, n);
                    d = d * xv;
                }
                store2_some(dg + j, d * slope_of(gv, e, s), n);
            });
        }
    });
}

// One row of joined projections [q | m | s1 | s2].
struct GatesRow {
    i64 Q, S1, S2;

    void forward(const float *y, float *q, float *s1, float *s2) const {
        auto activate = [](i64 size, const float *from, float *to) {
            each_pair(size, [&](i64 j, i64 n) { store2_some(to + j, sigmoid(load2_some(from + j, n)), n); });
        };
        each_pair(Q, [&](i64 j, i64 n) { store2_some(q + j, load2_some(y + j, n) * sigmoid(load2_some(y + Q + j, n)), n); });
        activate(S1, y + 2 * Q, s1);
        activate(S2, y + 2 * Q + S1, s2);
    }
    // dy, and dy added to the sum of all rows
    void backward(const float *y, const float *dq, const float *ds1, const float *ds2, float *dy, float *sum) const {
        auto put = [&](i64 j, pair d, i64 n) {
            store2_some(dy + j, d, n);
            store2_some(sum + j, load2_some(sum + j, n) + d, n);
        };
        auto alone = [&](i64 begin, i64 size, const float *d) {
            each_pair(size, [&](i64 j, i64 n) {
                pair g = load2_some(y + begin + j, n), e = exp_negative(minus_abs(g));
                put(begin + j, load2_some(d + j, n) * slope_of(g, e, sigmoid_from(g, e)), n);
            });
        };
        each_pair(Q, [&](i64 j, i64 n) {
            pair g = load2_some(y + Q + j, n), d = load2_some(dq + j, n), e = exp_negative(minus_abs(g));
            pair s = sigmoid_from(g, e);
            put(j, d * s, n);
            put(Q + j, d * load2_some(y + j, n) * slope_of(g, e, s), n);
        });
        alone(2 * Q, S1, ds1);
        alone(2 * Q + S1, S2, ds2);
    }
};

void gates_forward(const hm_gates_args *p) {
    GatesRow gates{p->Q, p->S1, p->S2};
    i64 width = 2 * p->Q + p->S1 + p->S2, nw = gate_workers(p->N, width, p->nthreads);
    run_workers(p->N ? nw : 0, p->parallel, [&](i64 w) {
        Share mine(p->N, w, nw);
        for (i64 r = mine.begin; r < mine.end; r++)
            gates.forward(p->y + r * width, p->q + r * p->Q, p->s1 + r * p->S1, p->s2 + r * p->S2);
    });
}

void gates_backward(const hm_gates_args *p) {
    GatesRow gates{p->Q, p->S1, p->S2};
    i64 width = 2 * p->Q + p->S1 + p->S2, nw = gate_workers(p->N, width, p->nthreads);
    std::vector<float> sums(nw * width, 0.0f);
    run_workers(p->N ? nw : 0, p->parallel, [&](i64 w) {
        Share mine(p->N, w, nw);
        for (i64 r = mine.begin; r < mine.end; r++)
            gates.backward(p->y + r * width, p->dq + r * p->Q, p->ds1 + r * p->S1, p->ds2 + r * p->S2, p->dy + r * width,
                           sums.data() + w * width);
    });
    for (i64 j = 0; j < width; j++) {
        p->sum[j] = 0.0f;
        for (i64 w = 0; w < nw; w++) p->sum[j] += sums[w * width + j];
    }
}

// With y = o σ(g): do = dy σ(g), dg = dy o σ(g) σ(-g) = dy y σ(-g), do·o = dy·y.
void ungate_rows(const hm_ungate_args &p, i64 begin, i64 end) {
    for (i64 r = begin; r < end; r++)
        for (i64 h = 0; h < p.H; h++) {
            i64 at = (r * p.H + h) * p.V;
            pair dot{};
            each_pair(p.V, [&](i64 j, i64 n) {
                pair g = load2_some(p.g + at + j, n), d = load2_some(p.dy + at + j, n), e = exp_negative(minus_abs(g));
                pair product = d * load2_some(p.y + at + j, n);
                store2_some(p.dx + at + j, d * sigmoid_from(g, e), n);
                store2_some(p.dg + at + j, product * sigmoid_from(-1.0f * g, e), n);
                dot = dot + product;
            });
            p.dots[r * p.H + h] = sum(dot.x + dot.y);
        }
}

void ungate(const hm_ungate_args *p) {
    i64 nw = gate_workers(p->N, p->H * p->V, p->nthreads);
    run_workers(p->N ? nw : 0, p->parallel, [&](i64 w) {
        Share mine(p->N, w, nw);
        ungate_rows(*p, mine.begin, mine.end);
    });
}

}  // namespace
