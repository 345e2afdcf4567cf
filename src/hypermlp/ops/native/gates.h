// Sigmoid gates, and the way back through the readout's.

#pragma once

#include "threads.h"

namespace {

// Rows of about this many elements for each worker: a smaller share costs more to hand out than to compute.
constexpr i64 GATE_SHARE = 16384;

// f(gate, begin, end) for the rows of each worker
template <class F> void share_rows(const hm_gate_args *p, F f) {
    i64 nw = workers_for(p->nthreads, std::min(p->N, p->N * p->C / GATE_SHARE));
    run_shares(p->N, nw, p->parallel, [&](i64, i64 begin, i64 end) { f(*p, begin, end); });
}

HM_INLINE pair slope_of(pair g, pair e, pair s) {  // σ' = σ(x) σ(-x), without cancellation
    return s * sigmoid_from(-1.0f * g, e);
}

// y = x σ(g), or σ(g) where x is null.
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

template <class E> void gate_rows_backward(const hm_gate_args &p, i64 begin, i64 end) {
    for (i64 r = begin; r < end; r++) {
        const E *x = p.x ? (const E *)p.x + r * p.x_row : nullptr, *g = (const E *)p.g + r * p.g_row;
        const E *dy = (const E *)p.dy + r * p.dy_row;
        E *dx = p.x ? (E *)p.dx + r * p.dx_row : nullptr, *dg = (E *)p.dg + r * p.dg_row;
        each_pair(p.C, [&](i64 j, i64 n) {
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

template <class E> void gate_forward(const hm_gate_args *p) { share_rows(p, gate_rows<E>); }
template <class E> void gate_backward(const hm_gate_args *p) { share_rows(p, gate_rows_backward<E>); }
template <class E> void ungate(const hm_gate_args *p) { share_rows(p, ungate_rows<E>); }

}  // namespace
