// Mamba's selective scan.

#pragma once

#include "threads.h"

namespace {

// Selective scan. Work is divided by batch entry and channels, VL2 at a time; time is walked through in order. Backward goes
// block by block from the end, makes the states of a block again from those before it, and walks back through them.

struct Scan {
    const hm_scan_args &p;
    i64 blocks, groups, cells;  // cells: floats of the states of VL2 channels

    explicit Scan(const hm_scan_args &args)
        : p(args), blocks((p.T + p.rows - 1) / p.rows), groups((p.E + p.group - 1) / p.group), cells(p.N * VL2) {}

    // Rows of (N,E) at channel e, n of them, from or into N x VL2 floats.
    void gather(const float *from, i64 e, i64 n, float *to) const {
        for (i64 s = 0; s < p.N; s++) store2(to + s * VL2, load2_some(from + s * p.E + e, n));
    }
    void scatter(const float *from, float *to, i64 e, i64 n) const {
        for (i64 s = 0; s < p.N; s++) store2_some(to + s * p.E + e, load2(from + s * VL2), n);
    }

    // One token: f gets every state's place, its decay and its new value.
    template <class F> HM_INLINE void token(i64 row, i64 e, i64 n, const float *A, const float *h, F f) const {
        pair delta = load2_some(p.delta + row * p.E + e, n), u = delta * load2_some(p.x + row * p.E + e, n);
        const float *in = p.input + row * p.N;
        bool begins = p.begins && p.begins[row];
        for (i64 s = 0; s < p.N; s++) {
            pair decay = begins ? both(0.0f) : exp_negative(delta * load2(A + s * VL2));
            f(s, decay, decay * load2(h + s * VL2) + u * in[s]);
        }
    }

    void forward(i64 b, i64 group) const {
        std::vector<float> memory(2 * cells);
        float *A = memory.data(), *h = A + cells;
        for (i64 e = group * p.group; e < std::min(p.E, (group + 1) * p.group); e += VL2) {
            i64 n = std::min<i64>(VL2, p.E - e);
            gather(p.A, e, n, A);
            gather(p.state + b * p.N * p.E, e, n, h);
            for (i64 t = 0; t < p.T; t++) {
                i64 row = b * p.T + t;
                if (p.marks && t % p.rows == 0) scatter(h, p.marks + (b * blocks + t / p.rows) * p.N * p.E, e, n);
                const float *out = p.output + row * p.N;
                pair y = both(0.0f);
                token(row, e, n, A, h, [&](i64 s, pair, pair value) {
                    store2(h + s * VL2, value);
                    y = y + value * out[s];
                });
                store2_some(p.y + row * p.E + e, y, n);
            }
            scatter(h, p.last + b * p.N * p.E, e, n);
        }
    }

    void backward(i64 b, i64 group) const {
        i64 first = group * p.group, end = std::min(p.E, first + p.group), parts = (end - first + VL2 - 1) / VL2;
        std::vector<float> memory((3 * parts + 4 * p.rows + 1) * cells, 0.0f);
        float *A = memory.data(), *dA = A + parts * cells, *dh = dA + parts * cells;  // of every part
        float *decay = dh + parts * cells, *din = decay + p.rows * cells, *dout = din + p.rows * cells;
        float *h = dout + p.rows * cells;  // before and after every token of a block
        for (i64 j = 0; j < parts; j++) {
            i64 e = first + j * VL2, n = std::min<i64>(VL2, p.E - e);
            gather(p.A, e, n, A + j * cells);
            gather(p.dlast + b * p.N * p.E, e, n, dh + j * cells);
        }
        for (i64 block = blocks - 1; block >= 0; block--) {
            i64 row = b * p.T + block * p.rows, rows = std::min(p.rows, p.T - block * p.rows);
            std::fill(din, din + 2 * p.rows * cells, 0.0f);
            for (i64 j = 0; j < parts; j++) {
                i64 e = first + j * VL2, n = std::min<i64>(VL2, p.E - e);
                gather(p.marks + (b * blocks + block) * p.N * p.E, e, n, h);
                for (i64 i = 0; i < rows; i++)
                    token(row + i, e, n, A + j * cells, h + i * cells, [&](i64 s, pair a, pair value) {
                        store2(decay + i * cells + s * VL2, a);
                        store2(h + (i + 1) * cells + s * VL2, value);
                    });
                for (i64 i = rows - 1; i >= 0; i--)
                    token_backward(row + i, e, n, A + j * cells, decay + i * cells, h + i * cells, dh + j * cells,
                                   dA + j * cells, din + i * cells, dout + i * cells);
            }
            for (i64 k = 0; k < rows * p.N; k++) {
                i64 at = (group * p.B * p.T + row) * p.N + k;
                p.dinput[at] = sum(load(din + k * VL2) + load(din + k * VL2 + VL));
                p.doutput[at] = sum(load(dout + k * VL2) + load(dout + k * VL2 + VL));
            }
        }
        for (i64 j = 0; j < parts; j++) {
            i64 e = first + j * VL2, n = std::min<i64>(VL2, p.E - e);
            scatter(dA + j * cells, p.dA + b * p.N * p.E, e, n);
            scatter(dh + j * cells, p.dstate + b * p.N * p.E, e, n);
        }
    }

    // h holds the states before and, one row on, after the token; dh goes from the state after it to the one before.
    HM_INLINE void token_backward(i64 row, i64 e, i64 n, const float *A, const float *decay, const float *h, float *dh, float *dA,
                                  float *din, float *dout) const {
        pair delta = load2_some(p.delta + row * p.E + e, n), x = load2_some(p.x + row * p.E + e, n), u = delta * x;
        pair dy = load2_some(p.dy + row * p.E + e, n), du = both(0.0f), ddelta = both(0.0f);
        const float *in = p.input + row * p.N, *out = p.output + row * p.N;
        for (i64 s = 0; s < p.N; s++) {
            i64 k = s * VL2;
            pair d = load2(dh + k) + dy * out[s], back = d * load2(decay + k), dg = back * load2(h + k);
            store2(dout + k, load2(dout + k) + dy * load2(h + cells + k));
            store2(din + k, load2(din + k) + d * u);
            store2(dA + k, load2(dA + k) + dg * delta);
            store2(dh + k, back);
            du = du + d * in[s];
            ddelta = ddelta + dg * load2(A + k);
        }
        store2_some(p.dx + row * p.E + e, du * delta, n);
        store2_some(p.ddelta + row * p.E + e, ddelta + du * x, n);
    }
};

int run_scan(const hm_scan_args &p, void (Scan::*direction)(i64, i64) const) {
    if (p.rows <= 0 || p.group <= 0 || p.group % VL2) return 2;
    const Scan scan(p);
    i64 items = p.B * scan.groups;
    run_shares(items, workers_for(p.nthreads, items), p.parallel, [&](i64, i64 begin, i64 end) {
        for (i64 k = begin; k < end; k++) (scan.*direction)(k / scan.groups, k % scan.groups);
    });
    return 0;
}

}  // namespace
