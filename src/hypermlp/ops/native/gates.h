// Sigmoid gates: one, those of the joined projections, and the way back through the readout's.

#pragma once

#include "threads.h"

namespace {

// Rows of about this many elements for each worker: a smaller share costs more to hand out than to compute.
constexpr i64 GATE_SHARE = 16384;

// f(begin, end) for the rows of each worker
template <class A, class F> void share_rows(const A &p, i64 columns, F f) {
    i64 nw = workers_for(p.nthreads, std::min(p.N, p.N * columns / GATE_SHARE));
    run_shares(p.N, nw, p.parallel, [&](i64, i64 begin, i64 end) { f(begin, end); });
}

HM_INLINE pair slope_of(pair g, pair e, pair s) {  // σ' = σ(x) σ(-x), without cancellation
    return s * sigmoid_from(-1.0f * g, e);
}

template <class E> void gate_rows(const hm_gate_args &p, i64 begin, i64 end) {
    for (i64 r = begin; r < end; r++) {
        const E *x = p.x ? (const E *)p.x + r * p.x_row : nullptr, *g = (const E *)p.g + r * p.g_row;
        E *y = (E *)p.y + r * p.y_row;
        each_pair(p.C, [&](i64 j, i64 n) {
            pair s = sigmoid(load2_some(g + j, n));
            store2_some(y + j, x ? load2_some(x + j, n) * s : s, n);
        });
    }
}

template <class E> void gate_forward(const hm_gate_args *p) {
    share_rows(*p, p->C, [&](i64 begin, i64 end) { gate_rows<E>(*p, begin, end); });
}

template <class E> void gate_backward(const hm_gate_args *p) {
    share_rows(*p, p->C, [&](i64 begin, i64 end) {
        for (i64 r = begin; r < end; r++) {
            const E *x = p->x ? (const E *)p->x + r * p->x_row : nullptr, *g = (const E *)p->g + r * p->g_row;
            const E *dy = (const E *)p->dy + r * p->dy_row;
            E *dx = p->x ? (E *)p->dx + r * p->dx_row : nullptr, *dg = (E *)p->dg + r * p->dg_row;
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
template <class E> struct GatesRow {
    i64 Q, S1, S2;

    void forward(const E *y, E *q, E *s1, E *s2) const {
        auto activate = [](i64 size, const E *from, E *to) {
            each_pair(size, [&](i64 j, i64 n) { store2_some(to + j, sigmoid(load2_some(from + j, n)), n); });
        };
        each_pair(Q, [&](i64 j, i64 n) { store2_some(q + j, load2_some(y + j, n) * sigmoid(load2_some(y + Q + j, n)), n); });
        activate(S1, y + 2 * Q, s1);
        activate(S2, y + 2 * Q + S1, s2);
    }
    // dy, and dy added to the sum of all rows where there is one
    void backward(const E *y, const E *dq, const E *ds1, const E *ds2, E *dy, float *sum = nullptr) const {
        auto put = [&](i64 j, pair d, i64 n) {
            store2_some(dy + j, d, n);
            if (sum) store2_some(sum + j, load2_some(sum + j, n) + d, n);
        };
        auto alone = [&](i64 begin, i64 size, const E *d) {
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

template <class E> void gates_forward(const hm_gates_args *p) {
    GatesRow<E> gates{p->Q, p->S1, p->S2};
    i64 width = 2 * p->Q + p->S1 + p->S2;
    share_rows(*p, width, [&](i64 begin, i64 end) {
        for (i64 r = begin; r < end; r++)
            gates.forward((const E *)p->y + r * width, (E *)p->q + r * p->Q, (E *)p->s1 + r * p->S1, (E *)p->s2 + r * p->S2);
    });
}

template <class E> void gates_backward(const hm_gates_args *p) {
    GatesRow<E> gates{p->Q, p->S1, p->S2};
    i64 width = 2 * p->Q + p->S1 + p->S2;
    share_rows(*p, width, [&](i64 begin, i64 end) {
        for (i64 r = begin; r < end; r++)
            gates.backward((const E *)p->y + r * width, (const E *)p->dq + r * p->Q, (const E *)p->ds1 + r * p->S1,
                           (const E *)p->ds2 + r * p->S2, (E *)p->dy + r * width);
    });
}

// With y = o σ(g): do = dy σ(g), dg = dy o σ(g) σ(-g) = dy y σ(-g).
template <class E> void ungate_rows(const hm_gate_args &p, i64 begin, i64 end) {
    for (i64 r = begin; r < end; r++) {
        const E *dy = (const E *)p.dy + r * p.dy_row, *y = (const E *)p.y + r * p.y_row, *gate = (const E *)p.g + r * p.g_row;
        E *dx = (E *)p.dx + r * p.dx_row, *dg = (E *)p.dg + r * p.dg_row;
        each_pair(p.C, [&](i64 j, i64 n) {
            pair g = load2_some(gate + j, n), d = load2_some(dy + j, n), e = exp_negative(minus_abs(g));
            store2_some(dg + j, d * load2_some(y + j, n) * sigmoid_from(-1.0f * g, e), n);
            store2_some(dx + j, d * sigmoid_from(g, e), n);
        });
    }
}

template <class E> void ungate(const hm_gate_args *p) {
    share_rows(*p, p->C, [&](i64 begin, i64 end) { ungate_rows<E>(*p, begin, end); });
}

}  // namespace
