// One token of each row through a whole layer.

#pragma once

#include "gates.h"
#include "linear.h"
#include "project.h"
#include "rows.h"

namespace {

enum { OUT = PREAD + 1 };  // the readout's weight, behind the projections'

// A layer, and room for what lies between its x and its y.
struct Step {
    const hm_step_args &p;
    hm_args mix;
    i64 B, Q, O, n1, n2;
    float *xk, *xv, *q, *gq, *k, *v, *go, *o, *s1, *s2, *window, *weights;
    const float **rows;  // what each tap meets

    explicit Step(const hm_step_args &args) : p(args), mix(args.mix) {
        B = mix.B, Q = mix.G * mix.K, O = mix.H * mix.V, n1 = mix.A1 ? mix.G * mix.R1 : 0, n2 = mix.A2 ? mix.H * mix.R2 : 0;
    }
    void carve(Arena &mem) {
        auto take = [&](i64 width) { return mem.floats(B * width); };
        xk = take(p.C), xv = take(p.C), q = take(Q), gq = take(Q), k = take(Q), v = take(O), go = take(O), o = take(O);
        window = mem.floats(p.W * p.C), weights = mem.floats(2 * p.W * p.C);
        rows = (const float **)mem.floats(2 * p.W);  // an address is at most two floats wide
        s1 = take(n1), s2 = take(n2), mix.rho = take(mix.H);
        mix.q = {q, Q, Q, mix.K}, mix.s1 = {s1, n1, n1, mix.R1}, mix.s2 = {s2, n2, n2, mix.R2}, mix.o = {o, O, O, mix.V};
    }
    bool agrees() const {
        const i64 width[8] = {Q, Q, n1, n2, Q, O, O, p.C};
        for (i64 j = 0; j < 8; j++)
            if (!linear_agrees(p.w[j], width[j], j == OUT ? O : p.C)) return false;
        for (i64 j : {(i64)PQ, (i64)PK, (i64)PV, (i64)OUT})
            if (!p.w[j].w) return false;
        if (p.W < 0 || !p.conv_k != !p.conv_v || (mix.A1 && !p.w[PS1].w) || (mix.A2 && !p.w[PS2].w)) return false;
        if (p.keep < 0 || (p.conv_k && (p.keep < p.W - 1 || p.W < 1)) || (p.keep && (p.tail < 0 || p.tail >= p.keep || !p.inputs)))
            return false;
        if (mix.T != 1 || mix.n_spans != B || !arguments_agree(mix)) return false;
        for (i64 b = 0; b < B; b++)
            if (mix.spans[5 * b] != b || mix.spans[5 * b + 1] != 0 || mix.spans[5 * b + 2] != 1) return false;
        return true;
    }
    int run(const float *x, float *y) {
        return mix.half ? run<bf16>(x, y) : run<float>(x, y);
    }
    // x joins the inputs that convolutions look back on. The last thing that happens, so that a step which fails changes nothing.
    void remember(const float *x) const { mix.half ? remember<bf16>(x) : remember<float>(x); }

private:
    template <class E> E *input(i64 b, i64 place) const { return (E *)p.inputs + b * p.inputs_b + place * p.C; }
    template <class E> void remember(const float *x) const {
        for (i64 b = 0; b < B && p.keep; b++) copy(x + b * p.C, p.C, input<E>(b, p.tail));
    }
    template <class E> static void copy(const float *from, i64 n, E *to) {
        each_vector(n, [&](i64 j, i64 m) { store_some(to + j, load_some(from + j, m), m); });
    }
    // n numbers as floats: where they lie, or converted into `room`.
    static const float *floats(const float *from, i64, float *) { return from; }
    static const float *floats(const bf16 *from, i64 n, float *room) {
        each_vector(n, [&](i64 j, i64 m) { store_some(room + j, load_some(from + j, m), m); });
        return room;
    }
    const float *taps(const void *w, float *room) const {
        return p.half_rest ? floats((const bf16 *)w, p.C * p.W, room) : (const float *)w;
    }
    template <class E> void convolve(const float *x) const {
        const i64 C = p.C, W = p.W;
        const float *wk = taps(p.conv_k, weights), *wv = taps(p.conv_v, weights + C * W);
        for (i64 b = 0; b < B; b++) {
            for (i64 j = 0; j < W - 1; j++) {  // tap j meets the token W-1-j steps back
                i64 place = p.tail - (W - 1) + j;
                rows[j] = floats(input<E>(b, place < 0 ? place + p.keep : place), C, window + j * C);
            }
            rows[W - 1] = x + b * C;
            if (W == 4) weigh<4>(4, wk, wv, xk + b * C, xv + b * C);
            else weigh<0>(W, wk, wv, xk + b * C, xv + b * C);
        }
    }
    template <int TAPS> void weigh(i64 W, const float *wk, const float *wv, float *to_k, float *to_v) const {
        const i64 taps = TAPS ? TAPS : W;
        for (i64 c = 0; c < p.C; c++) {
            float k = 0.0f, v = 0.0f;
            for (i64 j = 0; j < taps; j++) k += wk[c * taps + j] * rows[j][c], v += wv[c * taps + j] * rows[j][c];
            to_k[c] = k, to_v[c] = v;
        }
    }
    void gate(const float *from, const float *g, float *to, i64 width) const {
        each_pair(B * width, [&](i64 j, i64 n) {
            pair s = sigmoid(load2_some(g + j, n));
            store2_some(to + j, from ? load2_some(from + j, n) * s : s, n);
        });
    }
    template <class E> int run(const float *x, float *y) {
        if (p.conv_k) convolve<E>(x);
        const float *to_k = p.conv_k ? xk : x, *to_v = p.conv_k ? xv : x;
        const Product products[7] = {{&p.w[PQ], x, q}, {&p.w[PGATE], x, gq}, {&p.w[PS1], x, s1}, {&p.w[PS2], x, s2},
                                     {&p.w[PK], to_k, k}, {&p.w[PV], to_v, v}, {&p.w[PREAD], x, go}};
        multiply_all(products, B, mix.nthreads, mix.parallel);
        if (p.w[PGATE].w) gate(q, gq, q, Q);
        gate(nullptr, s1, s1, n1);
        gate(nullptr, s2, s2, n2);
        for (i64 b = 0; b < B; b++) {
            i64 slot = place(mix.spans[5 * b + 4] - 1, mix.S);
            for (i64 g = 0; g < mix.G; g++) copy(k + b * Q + g * mix.K, mix.K, at<E>(mix.k, b, slot, g));
            for (i64 h = 0; h < mix.H; h++) copy(v + b * O + h * mix.V, mix.V, at<E>(mix.v, b, slot, h));
        }
        if (int status = p.half_rest ? run_rows<E, bf16>(mix) : run_rows<E, float>(mix)) return status;
        if (p.w[PREAD].w) gate(o, go, o, O);
        const Product readout[1] = {{&p.w[OUT], o, y}};
        multiply_all(readout, B, mix.nthreads, mix.parallel);
        return 0;
    }
};

int run_step(const hm_step_args &p) {
    Step step(p);
    Block room;
    if (!room.carve([&](Arena &mem) { step.carve(mem); })) return 1;
    if (!step.agrees() || !p.x || !p.y) return p.mix.B ? 2 : 0;
    if (int status = step.run(p.x, p.y)) return status;
    step.remember(p.x);
    return 0;
}

}  // namespace
