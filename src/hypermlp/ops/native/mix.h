// The operator forward, strip by strip: activations, the plan of a whole call, one head of one strip.

#pragma once

#include "strip.h"

namespace {

// Activations over one row of a tile

// a = act(h) and the running sum of squares of the gate
void activate_row(bool glu, i64 n, const float *gate, const float *scale, float *a, float *squares) {
    pair sq{};
    for (i64 j = 0; j < n; j += VL2) {
        pair hg = load2(gate + j);
        sq = sq + hg * hg;
        store2(a + j, glu ? softplus(load2(scale + j)) * relu(hg) : relu(hg));
    }
    store(squares, load(squares) + (sq.x + sq.y));
}

// In: da, dw and h. Out: a, dh in place of h, ddiag2 += dw * a. The norm contributes pull * h_gate, pull = dρ/ρ.
void activate_row_backward(bool glu, i64 n, float *gate, float *scale, const float *da, const float *dw, float pull,
                           float *a, float *gdiag) {
    for (i64 j = 0; j < n; j += VL2) {
        pair hg = load2(gate + j), d = load2(da + j), act = relu(hg);
        pair_mask off = hg <= 0.0f;
        if (glu) {
            pair hs = load2(scale + j), e = exp_negative(minus_abs(hs)), sp = relu(hs) + log1p_unit(e);
            store2(scale + j, d * act * sigmoid_from(hs, e));
            d = d * sp;
            act = act * sp;
        }
        store2(gate + j, zeros_if(off, d) + pull * hg);
        store2(a + j, act);
        store2(gdiag + j, load2(gdiag + j) + load2(dw + j) * act);
    }
}

// ---------------------------------------------------------------------------------------------------------------------------
// The plan of a whole call

struct Plan {
    const hm_args &p;
    i64 parts;                    // routing heads per head: 2 (gate, scale) or 1
    bool glu;
    Operator op1, op2;
    std::vector<Strip> strips;    // of spans that go by strips
    std::vector<Strip> rows;      // single rows that are decoded in place
    i64 m_max = 0, Wp_max = 0, u0 = 0;
    i64 Kp, Vp;
    bool covered_all = true;
    std::vector<uint8_t> covered;  // (B,T)

    Plan(const hm_args &args, bool backward) : p(args), parts(args.act == 0 ? 2 : 1), glu(args.act == 0) {
        covered.assign(p.B * p.T, 0);
        std::vector<i64> order(p.n_spans);
        for (i64 j = 0; j < p.n_spans; j++) order[j] = j;
        std::stable_sort(order.begin(), order.end(),
                         [&](i64 x, i64 y) { return p.spans[5 * x] < p.spans[5 * y]; });
        u0 = p.L;
        for (i64 j : order) {
            const i64 *span = p.spans + 5 * j;
            for (i64 r = span[1]; r < span[2]; r++) covered[span[0] * p.T + r] = 1;
            i64 count = span[2] - span[1];
            if (!backward && count <= ROW_PATH)
                for (i64 r = 0; r < count; r++) rows.emplace_back(span[0], span[1] + r, 1, span[4] - count + r, span[3], p.L);
            else
                for (const Strip &s : cut_span(span, p.L, p.V <= NARROW)) strips.push_back(s);
        }
        for (uint8_t x : covered) covered_all = covered_all && x;
        for (const Strip &s : strips) {
            m_max = std::max(m_max, s.m);
            Wp_max = std::max(Wp_max, s.Wp);
            u0 = std::min(u0, s.ubase);
        }
        Kp = round_up(p.K, NR);
        Vp = round_up(p.V, NR) + (p.V > NR ? 16 : 0);  // an odd number of cache lines for the usual widths
        op1.describe(p.A1, p.B1, p.diag1, p.shortcut1 != 0, p.R1, p.G, p.L, u0);
        op2.describe(p.A2, p.B2, p.diag2, p.shortcut2 != 0, p.R2, p.H, p.L, u0);
        op1.first_sum = &op1.fa;
        op2.first_sum = &op2.fb;
    }
    Plan(const Plan &) = delete;
    i64 routing(i64 h, i64 part) const { return h + part * p.H; }
    bool dv_in_place() const { return p.dv.data && p.dv.data == p.dout.data; }
    void carve(Arena &mem, bool backward) {
        op1.carve(mem, backward);
        op2.carve(mem, backward);
    }
    void fill(bool backward) {
        run_shares(strips.empty() ? 0 : p.G, workers(p.G), p.parallel, [&](i64, i64 begin, i64 end) {
            for (i64 g = begin; g < end; g++) {
                op1.fill(g, backward);
                if (g < p.H) op2.fill(g, backward);
            }
        });
    }
    i64 workers(i64 items) const { return workers_for(p.nthreads, items); }
    // Rows of (B, T, heads, width) in no span are zero.
    template <class E> void clear_uncovered(const hm_view &x, i64 heads, i64 width) const {
        if (covered_all || !x.data) return;
        for (i64 b = 0; b < p.B; b++)
            for (i64 t = 0; t < p.T; t++)
                if (!covered[b * p.T + t])
                    for (i64 h = 0; h < heads; h++) memset(at<E>(x, b, t, h), 0, width * sizeof(E));
    }
};

// t * s, the controls of the rows applied; padding columns are zero.
template <class E>
void apply_controls(const Strip &s, const hm_view &control, i64 head, i64 R, i64 Rp, const float *t, float *ts) {
    for (i64 i = 0; i < s.m; i++) {
        const E *sc = at<E>(control, s.b, s.row + i, head);
        const float *from = t + i * Rp;
        float *to = ts + i * Rp;
        each_vector(R, [&](i64 r, i64 n) { store_some(to + r, load_some(from + r, n) * load_some(sc + r, n), n); });
        for (i64 r = R; r < Rp; r++) to[r] = 0.0f;
    }
}

// ds = t * e, the gradient of the controls
template <class E>
void write_controls(const Strip &s, const hm_view &out, i64 head, i64 R, i64 Rp, const float *t, const float *e) {
    for (i64 i = 0; i < s.m; i++, t += Rp, e += Rp) {
        E *to = at<E>(out, s.b, s.row + i, head);
        each_vector(R, [&](i64 r, i64 n) { store_some(to + r, load_some(t + r, n) * load_some(e + r, n), n); });
    }
}

constexpr i64 LDA = TL + 16;  // row stride of the tiles a and da

// What one worker needs for one strip.
struct Work {
    Matrix z[2], h[2], dw;
    float *q[2], *t1[2], *t1s[2], *e1[2], *e1s[2], *t2, *t2s, *e2, *e2s;
    float *pack, *tile, *out, *squares, *dout, *pull, *rrho, *a, *da, *dq, *joined, *joined_tile;

    void carve(Arena &mem, const Plan &P, bool backward) {
        i64 m = P.m_max, ld = strip_ld(P.Wp_max, m), off = margin(m);
        auto matrix = [&]() {
            float *p = mem.floats(m * ld + NR);
            return Matrix{p ? p + off : nullptr, ld};
        };
        for (i64 g = 0; g < P.parts; g++) {
            z[g] = matrix();
            q[g] = mem.floats(m * P.Kp);
            t1[g] = mem.floats(m * P.op1.Rp);
            t1s[g] = mem.floats(m * P.op1.Rp);
        }
        t2 = mem.floats(m * P.op2.Rp);
        t2s = mem.floats(m * P.op2.Rp);
        i64 panels = PANEL * std::max(P.Kp, round_up(P.p.V, NR)) / NR;
        pack = mem.floats(std::max(panels, TC * std::max(P.p.K, P.p.V)));
        tile = mem.floats(m * LDT + NR);
        squares = mem.floats(m * VL);
        if (!backward) {
            out = mem.floats(m * P.Vp);
            return;
        }
        for (i64 g = 0; g < P.parts; g++) {
            h[g] = matrix();
            e1[g] = mem.floats(m * P.op1.Rp);
            e1s[g] = mem.floats(m * P.op1.Rp);
        }
        dw = matrix();
        e2 = mem.floats(m * P.op2.Rp);
        e2s = mem.floats(m * P.op2.Rp);
        dout = mem.floats(m * P.Vp);
        pull = mem.floats(m);
        rrho = mem.floats(m);
        a = mem.floats(m * LDA);
        da = mem.floats(m * LDA);
        dq = mem.floats(m * P.Kp);
        joined = mem.floats((m + 1) / 2 * std::max(P.Kp, P.Vp));
        joined_tile = mem.floats((m + 1) / 2 * LDT);
    }
};

// Ask for the rows of a strip in a tensor (B,T,heads,width), to be read or written later.
template <int WRITE, class E> void prefetch_strip(const Strip &s, const hm_view &x, i64 head, i64 width) {
    for (i64 i = 0; i < s.m; i++)
        for (i64 j = 0; j < width; j += 64 / sizeof(E)) __builtin_prefetch(at<E>(x, s.b, s.row + i, head) + j, WRITE, 2);
}

template <class E> void scores_of_head(const Plan &P, const Strip &s, i64 head, Work &w) {
    const hm_args &p = P.p;
    for (i64 part = 0; part < P.parts && P.op1.present(); part++) prefetch_strip<0, E>(s, p.s1, P.routing(head, part), p.R1);
    if (P.op2.present()) prefetch_strip<0, E>(s, p.s2, head, p.R2);
    for (i64 part = 0; part < P.parts; part++) {
        i64 g = P.routing(head, part);
        pack_rows(at<E>(p.q, s.b, s.row, g), p.q.t, s.m, p.K, nullptr, w.q[part], P.Kp);
        score(s, w.q[part], P.Kp, p.K, slots_from<E>(p.k, p.S, s.b, s.c0, g), w.z[part], w.pack, P.op1, P.op1.fa, g, w.t1[part]);
        if (P.op1.present()) apply_controls<E>(s, p.s1, g, p.R1, P.op1.Rp, w.t1[part], w.t1s[part]);
    }
}

// h = z R1 of a row group, columns ya..yb (whole panels); h may be z.
HM_INLINE void hidden_group(const Plan &P, const Strip &s, i64 head, i64 i, i64 rows, i64 ya, i64 yb, const Work &w, const Matrix *h) {
    for (i64 part = 0; part < P.parts; part++) {
        expand_group(s, i, rows, w.z[part].lag(0, ya), w.z[part].ld, ya, yb, P.op1, P.op1.fb, P.routing(head, part), w.t1s[part],
                     h[part].lag(0, ya), h[part].ld);
        clear_before_start(s, i, rows, h[part].lag(0, ya), h[part].ld, ya, yb);
    }
}

// h = z R1, a = act(h) in place of z_gate, t2 = a B2: one sweep, a few rows by TL lags at a time.
void activate_strip(const Plan &P, const Strip &s, i64 head, Work &w) {
    memset(w.squares, 0, s.m * VL * sizeof(float));
    if (P.op2.present()) memset(w.t2, 0, s.m * P.op2.Rp * sizeof(float));
    for (i64 ya = 0; ya < s.Wp; ya += TL) {
        i64 yb = std::min(ya + TL, s.Wp);
        row_groups(s.m, [&](i64 i, i64 rows) {
            i64 y = std::max(ya, round_down(s.first_lag(i + rows - 1), NR));
            if (y >= yb) return;
            hidden_group(P, s, head, i, rows, ya, yb, w, w.z);
            for (i64 r = i; r < i + rows; r++)
                activate_row(P.glu, yb - y, w.z[0].lag(r, y), P.glu ? w.z[1].lag(r, y) : nullptr, w.z[0].lag(r, y),
                             w.squares + r * VL);
            if (P.op2.present())
                reduce_group(s, i, rows, w.z[0].lag(0, ya), w.z[0].ld, ya, std::min(yb, s.W), P.op2, P.op2.fb, head, w.t2);
        });
    }
}

// Columns from..to of X = X * D + t Fᵀ, in place
void expand_strip(const Strip &s, Matrix X, i64 from, i64 to, const Operator &op, const Factor &f, i64 head, const float *t) {
    row_groups(s.m, [&](i64 i, i64 rows) {
        expand_group(s, i, rows, X.lag(0, from), X.ld, from, to, op, f, head, t, X.lag(0, from), X.ld);
    });
}

template <class E> void forward_strip(const Plan &P, const Strip &s, i64 head, Work &w) {
    const hm_args &p = P.p;
    scores_of_head<E>(P, s, head, w);
    activate_strip(P, s, head, w);
    if (P.op2.present()) apply_controls<E>(s, p.s2, head, p.R2, P.op2.Rp, w.t2, w.t2s);

    // w = a R2ᵀ in place, as far as the next slots need it, then õ += w v.
    Matrix a = w.z[0];
    memset(w.out, 0, s.m * P.Vp * sizeof(float));
    i64 done = P.op2.present() ? 0 : s.Wp;
    for (i64 j = 0; j < s.n; j += TC) {
        i64 width = std::min<i64>(TC, s.n - j), ca = s.c0 + j;
        i64 need = std::min(s.Wp, round_up(std::max<i64>(s.lag_of(ca + width, 0), 0), NR));
        if (need > done) {
            expand_strip(s, a, done, need, P.op2, P.op2.fa, head, w.t2s);
            done = need;
        }
        if (j + width == s.n) prefetch_strip<1, E>(s, p.o, head, p.V);
        Tile tile = time_tile<E>(s, a, ca, width, w.tile);
        Ring<E> v = slots_from<E>(p.v, p.S, s.b, ca, head);
        pack_panels(v, width, p.V, w.pack);
        Ahead<E> next = ahead(v.from(width), std::min<i64>(TC, s.n - j - width), p.V);
        read_tile(s, tile, ca, width, w.pack, p.V, w.out, P.Vp, next);
    }
    for (i64 i = 0; i < s.m; i++) {
        float rho = p.norm ? sqrtf(sum(load(w.squares + i * VL)) + (float)p.eps) : 1.0f, inv = 1.0f / rho;
        p.rho[(s.b * p.T + s.row + i) * p.H + head] = rho;
        write_rows(w.out + i * P.Vp, P.Vp, 1, p.V, &inv, at<E>(p.o, s.b, s.row + i, head), p.o.t);
    }
}

void take_factors(hm_args &mix, const hm_parameters &p) {
    mix.A1 = p.A1, mix.B1 = p.B1, mix.diag1 = p.diag1, mix.A2 = p.A2, mix.B2 = p.B2, mix.diag2 = p.diag2;
}

bool arguments_agree(const hm_args &p, bool backward = false) {
    if (p.B < 0 || p.T < 0 || p.S < 0 || p.H <= 0 || p.K <= 0 || p.V <= 0 || p.L <= 0) return false;
    if (p.G != (p.act == 0 ? 2 * p.H : p.H) || (p.A1 && p.R1 <= 0) || (p.A2 && p.R2 <= 0)) return false;
    bool empty = p.B == 0 || p.T == 0;
    if (!p.A1 != !p.B1 || !p.A2 != !p.B2 || (!empty && ((p.A1 && !p.s1.data) || (p.A2 && !p.s2.data)))) return false;
    bool in_place = p.dv.data && p.dv.data == p.dout.data;
    if (in_place && (p.S != p.T || p.dv.b != p.dout.b || p.dv.t != p.dout.t || p.dv.h != p.dout.h)) return false;
    for (i64 j = 0; j < p.n_spans; j++) {
        const i64 *s = p.spans + 5 * j;
        if (s[0] < 0 || s[0] >= p.B || s[1] < 0 || s[2] < s[1] || s[2] > p.T || s[3] < 0 || s[3] > p.S) return false;
        if (s[4] - s[3] > p.S || (backward && s[4] > p.S)) return false;  // backward knows no rings
        if (s[4] - s[3] < s[2] - s[1]) return false;  // every row has its own slot
        if (in_place && (s[3] != s[1] || s[4] != s[2])) return false;
    }
    return true;
}

}  // namespace
