// Both depthwise causal convolutions in one pass.

#pragma once

#include "threads.h"

namespace {

constexpr i64 CONV_ROWS = 8;  // rows per block: taps stay in registers while a column of the block is computed

template <class E> struct Conv {
    const hm_conv_args &p;
    std::vector<float> taps;  // [2][W][C], tap j meets the token j steps back
    explicit Conv(const hm_conv_args &args) : p(args), taps(2 * args.W * args.C) {
        for (i64 j = 0; j < p.W; j++)
            for (i64 c = 0; c < p.C; c++) {
                taps[j * p.C + c] = p.wk[c * p.W + p.W - 1 - j];
                taps[(p.W + j) * p.C + c] = p.wv[c * p.W + p.W - 1 - j];
            }
    }
    const float *k(i64 j) const { return taps.data() + j * p.C; }
    const float *v(i64 j) const { return taps.data() + (p.W + j) * p.C; }
    const E *x(i64 b, i64 t) const {  // t may reach into the history
        return t >= 0 ? at<E>(p.x, b, t, 0) : (const E *)p.history + (b * (p.W - 1) + p.W - 1 + t) * p.C;
    }
    i64 reach(i64 b, i64 t) const {  // how many taps see anything at row t
        i64 n = p.history ? p.W : std::min(p.W, t + 1);
        return p.pos ? std::max<i64>(0, std::min(n, p.pos[b * p.T + t] + 1)) : n;
    }
    // Full reach for rows t..t+n-1
    bool plain(i64 b, i64 t, i64 n) const {
        for (i64 r = t; r < t + n; r++)
            if (r >= p.T || reach(b, r) < p.W || r < p.W - 1) return false;
        return true;
    }
    i64 blocks() const { return (p.T + CONV_ROWS - 1) / CONV_ROWS; }

    void forward_block(i64 b, i64 t) const {
        i64 n = std::min(CONV_ROWS, p.T - t);
        if (p.W == 4 && n == CONV_ROWS && plain(b, t, n)) {
            const E *in = x(b, t - 3);
            E *yk = at<E>(p.yk, b, t, 0), *yv = at<E>(p.yv, b, t, 0);
            each_vector(p.C, [&](i64 c, i64 k_) {
                vf k0 = load_some(k(0) + c, k_), k1 = load_some(k(1) + c, k_), k2 = load_some(k(2) + c, k_),
                   k3 = load_some(k(3) + c, k_), v0 = load_some(v(0) + c, k_), v1 = load_some(v(1) + c, k_),
                   v2 = load_some(v(2) + c, k_), v3 = load_some(v(3) + c, k_);
                vf x3 = load_some(in + c, k_), x2 = load_some(in + p.x.t + c, k_), x1 = load_some(in + 2 * p.x.t + c, k_);
                for (i64 r = 0; r < CONV_ROWS; r++) {
                    vf x0 = load_some(in + (3 + r) * p.x.t + c, k_);
                    store_some(yk + r * p.yk.t + c, k0 * x0 + k1 * x1 + k2 * x2 + k3 * x3, k_);
                    store_some(yv + r * p.yv.t + c, v0 * x0 + v1 * x1 + v2 * x2 + v3 * x3, k_);
                    x3 = x2, x2 = x1, x1 = x0;
                }
            });
            return;
        }
        for (i64 r = t; r < t + n; r++) {
            i64 taps_here = reach(b, r);
            E *yk = at<E>(p.yk, b, r, 0), *yv = at<E>(p.yv, b, r, 0);
            each_vector(p.C, [&](i64 c, i64 k_) {
                vf sk{}, sv{};
                for (i64 j = 0; j < taps_here; j++) {
                    vf xv = load_some(x(b, r - j) + c, k_);
                    sk += load_some(k(j) + c, k_) * xv;
                    sv += load_some(v(j) + c, k_) * xv;
                }
                store_some(yk + c, sk, k_);
                store_some(yv + c, sv, k_);
            });
        }
    }
    // dx of rows t..t+n-1, and their share of the tap gradients (gk, gv: [W][C], as `taps`)
    void backward_block(i64 b, i64 t, float *gk, float *gv) const {
        i64 n = std::min(CONV_ROWS, p.T - t);
        if (p.W == 4 && n == CONV_ROWS && plain(b, t, n + 3)) {
            const E *dk = at<E>(p.dyk, b, t, 0), *dv = at<E>(p.dyv, b, t, 0), *in = x(b, t - 3);
            E *dx = at<E>(p.dx, b, t, 0);
            each_vector(p.C, [&](i64 c, i64 k_) {
                vf from_k[CONV_ROWS];
                for (int side = 0; side < 2; side++) {  // k, then v: the taps and sums of one side fit in registers
                    const E *d = side ? dv : dk;
                    i64 step = side ? p.dyv.t : p.dyk.t;
                    const float *w = side ? v(0) : k(0);
                    float *g = side ? gv : gk;
                    vf w0 = load_some(w + c, k_), w1 = load_some(w + p.C + c, k_), w2 = load_some(w + 2 * p.C + c, k_),
                       w3 = load_some(w + 3 * p.C + c, k_);
                    vf g0{}, g1{}, g2{}, g3{};
                    vf d0 = load_some(d + c, k_), d1 = load_some(d + step + c, k_), d2 = load_some(d + 2 * step + c, k_);
                    vf x3 = load_some(in + c, k_), x2 = load_some(in + p.x.t + c, k_), x1 = load_some(in + 2 * p.x.t + c, k_);
                    for (i64 r = 0; r < CONV_ROWS; r++) {
                        vf d3 = load_some(d + (r + 3) * step + c, k_), x0 = load_some(in + (3 + r) * p.x.t + c, k_);
                        vf s = w0 * d0 + w1 * d1 + w2 * d2 + w3 * d3;
                        if (side) store_some(dx + r * p.dx.t + c, from_k[r] + s, k_);
                        else from_k[r] = s;
                        g0 += d0 * x0, g1 += d0 * x1, g2 += d0 * x2, g3 += d0 * x3;
                        d0 = d1, d1 = d2, d2 = d3, x3 = x2, x2 = x1, x1 = x0;
                    }
                    store_some(g + c, load_some(g + c, k_) + g0, k_);
                    store_some(g + p.C + c, load_some(g + p.C + c, k_) + g1, k_);
                    store_some(g + 2 * p.C + c, load_some(g + 2 * p.C + c, k_) + g2, k_);
                    store_some(g + 3 * p.C + c, load_some(g + 3 * p.C + c, k_) + g3, k_);
                }
            });
            return;
        }
        for (i64 r = t; r < t + n; r++) {
            i64 taps_here = reach(b, r);
            const E *dk = at<E>(p.dyk, b, r, 0), *dv = at<E>(p.dyv, b, r, 0);
            E *dx = at<E>(p.dx, b, r, 0);
            each_vector(p.C, [&](i64 c, i64 k_) {
                vf s{};
                for (i64 j = 0; j < p.W && r + j < p.T; j++)
                    if (reach(b, r + j) > j)
                        s += load_some(k(j) + c, k_) * load_some(at<E>(p.dyk, b, r + j, 0) + c, k_) +
                             load_some(v(j) + c, k_) * load_some(at<E>(p.dyv, b, r + j, 0) + c, k_);
                store_some(dx + c, s, k_);
                for (i64 j = 0; j < taps_here; j++) {
                    vf xv = load_some(x(b, r - j) + c, k_);
                    float *a = gk + j * p.C + c, *z = gv + j * p.C + c;
                    store_some(a, load_some(a, k_) + load_some(dk + c, k_) * xv, k_);
                    store_some(z, load_some(z, k_) + load_some(dv + c, k_) * xv, k_);
                }
            });
        }
    }
};

template <class E> void conv_forward(const hm_conv_args *p) {
    Conv<E> conv(*p);
    i64 per_batch = conv.blocks(), blocks = p->B * per_batch, nw = workers_for(p->nthreads, blocks);
    run_shares(blocks, nw, p->parallel, [&](i64, i64 begin, i64 end) {
        for (i64 k = begin; k < end; k++) conv.forward_block(k / per_batch, k % per_batch * CONV_ROWS);
    });
}

template <class E> void conv_backward(const hm_conv_args *p) {
    Conv<E> conv(*p);
    i64 per_batch = conv.blocks(), blocks = p->B * per_batch, nw = workers_for(p->nthreads, blocks), n = p->W * p->C;
    std::vector<float> sums(nw * 2 * n, 0.0f);
    run_shares(blocks, nw, p->parallel, [&](i64 w, i64 begin, i64 end) {
        float *gk = sums.data() + w * 2 * n;
        for (i64 k = begin; k < end; k++) conv.backward_block(k / per_batch, k % per_batch * CONV_ROWS, gk, gk + n);
    });
    for (i64 c = 0; c < p->C; c++)
        for (i64 j = 0; j < p->W; j++) {
            float k = 0.0f, v = 0.0f;
            for (i64 w = 0; w < nw; w++) {
                k += sums[w * 2 * n + j * p->C + c];
                v += sums[w * 2 * n + n + j * p->C + c];
            }
            p->dwk[c * p->W + p->W - 1 - j] = k;
            p->dwv[c * p->W + p->W - 1 - j] = v;
        }
}

}  // namespace
