// Few rows against many slots (decoding), and the forward pass as a whole.

#pragma once

#include "mix.h"

namespace {

// Few rows against many slots: k, v and the parameters are read where they are, once per stage. A row is cut in blocks of DB
// slots whose sums are added in order, so that the result does not depend on the number of threads.

// Rows are asked for before they are needed: those of one head lie apart, where the processor does not foresee them.
constexpr i64 AHEAD = 12;  // rows

// f(first, count, rows) for the pieces, at most two, in which the first n rows of a ring lie.
template <class E, class F> void each_piece(Ring<E> ring, i64 n, F f) {
    i64 before = std::min(n, ring.run);
    f(i64(0), before, Rows<E>{ring.data, ring.stride});
    if (before < n) f(before, n - before, Rows<E>{ring[before], ring.stride});
}

// out[c] = x · row c, rows of `width` numbers; N: their vectors, where that is known
template <int N, class E, class X> void dots_of(i64 n, Rows<E> rows, const X *x, i64 width, float *out) {
    i64 full = N ? N * VL : round_down(width, VL), rest = N ? 0 : width - full;
    vf last = rest ? load_some(x + full, rest) : vf{};
    for (i64 c = 0; c < n; c += 4) {
        const i64 held = std::min<i64>(4, n - c);
        const E *r[4];
        for (i64 i = 0; i < 4; i++) r[i] = rows[c + std::min(i, held - 1)];
        if (c + AHEAD + 4 <= n)
            for (i64 i = 0; i < 4; i++)
                for (i64 j = 0; j < width; j += 64 / sizeof(E)) __builtin_prefetch(rows[c + AHEAD + i] + j);
        vf total[4] = {};
        for (i64 j = 0; j < full; j += VL) {
            vf xs = load(x + j);
            for (int i = 0; i < 4; i++) total[i] += xs * load(r[i] + j);
        }
        for (int i = 0; i < 4 && rest; i++) total[i] += last * load_some(r[i] + full, rest);
        v4 s = sums(total[0], total[1], total[2], total[3]);
        if (held == 4) *(v4_mem *)(out + c) = s;
        else memcpy(out + c, &s, held * sizeof(float));
    }
}
template <class E, class X> void dots(i64 n, Rows<E> rows, const X *x, i64 width, float *out) {
    if (width == VL) dots_of<1>(n, rows, x, width, out);
    else if (width == 2 * VL) dots_of<2>(n, rows, x, width, out);
    else if (width == 3 * VL) dots_of<3>(n, rows, x, width, out);
    else dots_of<0>(n, rows, x, width, out);
}
template <class E, class X> void dots(i64 n, Ring<E> ring, const X *x, i64 width, float *out) {
    each_piece(ring, n, [&](i64 c, i64 count, Rows<E> rows) { dots(count, rows, x, width, out + c); });
}

// acc += Σ_c x[c] · row c, for N vectors of each row. Sums stay in registers, in several chains where N is small.
template <int N, template <class> class R, class E> void narrow_sum(i64 n, const float *x, R<E> rows, float *acc) {
    constexpr int CHAINS = N < 4 ? 4 / N : 1;
    vf total[CHAINS][N] = {};
    for (int j = 0; j < N; j++) total[0][j] = load(acc + j * VL);
    i64 c = 0;
    for (; c + CHAINS <= n; c += CHAINS)
#pragma GCC unroll 4
        for (int i = 0; i < CHAINS; i++) {
            const E *row = rows[c + i], *next = rows[std::min(c + i + AHEAD, n - 1)];
            const vf weight = splat(x[c + i]);
#pragma GCC unroll 24
            for (int j = 0; j < N; j++) {
                if (j * VL * sizeof(E) % 64 == 0) __builtin_prefetch(next + j * VL);
                total[i][j] += weight * load(row + j * VL);
            }
        }
    for (; c < n; c++)
        for (int j = 0; j < N; j++) total[0][j] += x[c] * load(rows[c] + j * VL);
    for (int j = 0; j < N; j++) {
        for (int i = 1; i < CHAINS; i++) total[0][j] += total[i][j];
        store(acc + j * VL, total[0][j]);
    }
}

constexpr int WIDE = NV * MR;  // vectors that fit in registers

// acc += Σ_c x[c] · row c, N vectors of the columns after the other. In the same order wherever a ring begins.
template <int N = WIDE, template <class> class R, class E>
void weighted_sum(i64 n, const float *x, R<E> rows, i64 width, float *acc) {
    for (; width >= N * VL; width -= N * VL, rows.data += N * VL, acc += N * VL) narrow_sum<N>(n, x, rows, acc);
    if constexpr (N > 1) {
        if (width) weighted_sum<N == WIDE ? 8 : N / 2>(n, x, rows, width, acc);
    } else if (width) {
        vf total = load_some(acc, width);
        for (i64 c = 0; c < n; c++) total += x[c] * load_some(rows[c], width);
        store_some(acc, total, width);
    }
}

// E: what k and v are; P: what the factors are; X: what q, the controls and o are.
template <class E, class F = float, class X = E> struct RowWork {
    const Plan &P;
    std::vector<i64> first_block;  // of each unit (row, head)
    std::vector<i64> first_slot;   // offset of each unit's slots in z
    float *z, *t1, *t2, *squares, *out, *mixed;
    i64 slots = 0, blocks = 0;

    explicit RowWork(const Plan &plan) : P(plan) {
        for (const Strip &s : P.rows)
            for (i64 h = 0; h < P.p.H; h++) {
                first_block.push_back(blocks), first_slot.push_back(slots);
                blocks += (s.n + DB - 1) / DB;
                slots += round_up(s.n, VL);
            }
        first_block.push_back(blocks);
    }
    void carve(Arena &mem) {
        z = mem.floats(P.parts * slots);
        t1 = mem.floats(blocks * P.parts * P.p.R1);
        t2 = mem.floats(blocks * P.p.R2);
        squares = mem.floats(blocks);
        out = mem.floats(blocks * P.p.V);
        mixed = mem.floats(blocks * std::max(P.p.R1, P.p.R2));  // t1 or t2 with the controls applied, for each block its own
    }
    // One block: which unit, row and head it belongs to, its slots [j, j + n) of the row, the lag index u of the first.
    struct Piece {
        i64 unit, k;
        const Strip &s;
        i64 h, j, n, u;
    };
    Piece piece(i64 unit, i64 k) const {
        const Strip &s = P.rows[unit / P.p.H];
        i64 j = (k - first_block[unit]) * DB;
        return {unit, k, s, unit % P.p.H, j, std::min(DB, s.n - j), s.c0 + j + s.L - 1 - s.p0};
    }
    void run() const {
        i64 units = (i64)first_block.size() - 1, nw = P.workers(units), threads = P.workers(blocks);
        if (units >= threads) {  // whole rows per worker: the threads meet once
            run_workers(nw, P.p.parallel, [&](i64 w) {
                Share mine(units, w, nw);
                for (i64 unit = mine.begin; unit < mine.end; unit++) {
                    for (i64 k = first_block[unit]; k < first_block[unit + 1]; k++) scores(piece(unit, k));
                    for (i64 k = first_block[unit]; k < first_block[unit + 1]; k++) activations(piece(unit, k));
                    for (i64 k = first_block[unit]; k < first_block[unit + 1]; k++) readout(piece(unit, k));
                    finish(unit);
                }
            });
            return;
        }
        for (auto stage : {&RowWork::scores, &RowWork::activations, &RowWork::readout})
            run_workers(threads, P.p.parallel, [&](i64 w) {
                Share mine(blocks, w, threads);
                i64 unit = std::upper_bound(first_block.begin(), first_block.end(), mine.begin) - first_block.begin() - 1;
                for (i64 k = mine.begin; k < mine.end; k++) {
                    while (first_block[unit + 1] <= k) unit++;
                    (this->*stage)(piece(unit, k));
                }
            });
        for (i64 unit = 0; unit < units; unit++) finish(unit);
    }
    // Sum of the partial results of a unit's blocks, times the row's controls.
    void gather(const float *partial, i64 width, i64 offset, i64 R, i64 unit, const X *control, float *t) const {
        for (i64 r = 0; r < R; r++) t[r] = 0.0f;
        for (i64 k = first_block[unit]; k < first_block[unit + 1]; k++)
            for (i64 r = 0; r < R; r++) t[r] += partial[k * width + offset + r];
        for (i64 r = 0; r < R; r++) t[r] *= value(control[r]);
    }
    void scores(Piece b) const {  // z and this block's share of t1
        const hm_args &p = P.p;
        i64 R1 = P.op1.R;
        for (i64 part = 0; part < P.parts; part++) {
            i64 g = P.routing(b.h, part);
            float *x = z + part * slots + first_slot[b.unit] + b.j, *t = t1 + (b.k * P.parts + part) * p.R1;
            dots(b.n, slots_from<E>(p.k, p.S, b.s.b, b.s.c0 + b.j, g), at<X>(p.q, b.s.b, b.s.row, g), p.K, x);
            memset(t, 0, R1 * sizeof(float));
            if (R1) weighted_sum(b.n, x, Rows<F>{(const F *)p.A1 + (g * p.L + b.u) * R1, R1}, R1, t);
        }
    }
    void activations(Piece b) const {  // h, a in place of z_gate, and this block's share of t2 and of the norm
        const hm_args &p = P.p;
        i64 R1 = P.op1.R, R2 = P.op2.R;
        float hidden[2][DB] = {};  // DB is a whole number of pairs
        float *t = mixed + b.k * std::max(p.R1, p.R2), *a = z + first_slot[b.unit] + b.j, sq[VL] = {};
        for (i64 part = 0; part < P.parts; part++) {
            i64 g = P.routing(b.h, part);
            const float *x = z + part * slots + first_slot[b.unit] + b.j;
            if (!R1) {
                memcpy(hidden[part], x, b.n * sizeof(float));
                continue;
            }
            gather(t1, P.parts * p.R1, part * p.R1, R1, b.unit, at<X>(p.s1, b.s.b, b.s.row, g), t);
            dots(b.n, Rows<F>{(const F *)p.B1 + (g * p.L + b.u) * R1, R1}, t, R1, hidden[part]);
            mix_in(b.n, x, p.shortcut1, p.diag1 ? (const F *)p.diag1 + g * p.L + b.u : nullptr, hidden[part]);
        }
        activate_row(P.glu, round_up(b.n, VL2), hidden[0], hidden[1], hidden[0], sq);  // cells beyond n are zero
        squares[b.k] = sum(load(sq));
        memcpy(a, hidden[0], b.n * sizeof(float));
        memset(t2 + b.k * p.R2, 0, R2 * sizeof(float));
        if (R2) weighted_sum(b.n, a, Rows<F>{(const F *)p.B2 + (b.h * p.L + b.u) * R2, R2}, R2, t2 + b.k * p.R2);
    }
    void readout(Piece b) const {  // w and this block's share of õ
        const hm_args &p = P.p;
        i64 R2 = P.op2.R;
        float weight[DB], *t = mixed + b.k * std::max(p.R1, p.R2);
        const float *a = z + first_slot[b.unit] + b.j, *x = a;
        if (R2) {
            gather(t2, p.R2, 0, R2, b.unit, at<X>(p.s2, b.s.b, b.s.row, b.h), t);
            dots(b.n, Rows<F>{(const F *)p.A2 + (b.h * p.L + b.u) * R2, R2}, t, R2, weight);
            mix_in(b.n, a, p.shortcut2, p.diag2 ? (const F *)p.diag2 + b.h * p.L + b.u : nullptr, weight);
            x = weight;
        }
        memset(out + b.k * p.V, 0, p.V * sizeof(float));
        weighted_sum(b.n, x, slots_from<E>(p.v, p.S, b.s.b, b.s.c0 + b.j, b.h), p.V, out + b.k * p.V);
    }
    static void mix_in(i64 n, const float *x, bool shortcut, const F *diag, float *y) {
        float one = shortcut ? 1.0f : 0.0f;
        if (diag)
            for (i64 c = 0; c < n; c++) y[c] += x[c] * (one + value(diag[c]));
        else if (shortcut)
            for (i64 c = 0; c < n; c++) y[c] += x[c];
    }
    void finish(i64 unit) const {
        const hm_args &p = P.p;
        const Strip &s = P.rows[unit / p.H];
        i64 h = unit % p.H;
        float sq = 0.0f, *first = out + first_block[unit] * p.V;
        for (i64 k = first_block[unit]; k < first_block[unit + 1]; k++) sq += squares[k];
        float rho = p.norm ? sqrtf(sq + (float)p.eps) : 1.0f, inv = 1.0f / rho;
        p.rho[(s.b * p.T + s.row) * p.H + h] = rho;
        for (i64 k = first_block[unit] + 1; k < first_block[unit + 1]; k++)
            for (i64 j = 0; j < p.V; j++) first[j] += out[k * p.V + j];
        write_rows(first, p.V, 1, p.V, &inv, at<X>(p.o, s.b, s.row, h), p.o.t);
    }
};

// A call all of whose spans are rows.
template <class E, class F> int run_rows(const hm_args &p) {
    Plan P(p, false);
    RowWork<E, F, float> rows(P);
    Block shared;
    if (!P.strips.empty()) return 2;
    if (!shared.carve([&](Arena &mem) { rows.carve(mem); })) return 1;
    rows.run();
    return 0;
}

template <class E> int run_forward(const hm_args &p) {
    Plan P(p, false);
    i64 items = (i64)P.strips.size() * p.H, nw = P.workers(items);
    Block shared;
    RowWork<E> rows(P);
    std::vector<Block> own(nw);
    std::vector<Work> work(nw);
    if (!shared.carve([&](Arena &mem) { P.carve(mem, false), rows.carve(mem); })) return 1;
    for (i64 w = 0; w < nw && items; w++)
        if (!own[w].carve([&](Arena &mem) { work[w].carve(mem, P, false); })) return 1;
    P.clear_uncovered<E>(p.o, p.H, p.V);
    if (!P.covered_all)
        for (i64 j = 0; j < p.B * p.T; j++)
            for (i64 h = 0; h < p.H && !P.covered[j]; h++) p.rho[j * p.H + h] = 1.0f;
    if (items) {
        P.fill(false);
        // Strips are independent, so any order gives the same result: whoever is free takes the next. One batch entry and
        // head after the other, because then its k and v stay in cache; the long strips at the end of a sequence first.
        std::vector<std::pair<const Strip *, i64>> order;
        for (auto end = P.strips.rbegin(), begin = end; begin != P.strips.rend(); begin = end) {
            while (end != P.strips.rend() && end->b == begin->b) ++end;
            for (i64 h = 0; h < p.H; h++)
                for (auto s = begin; s != end; ++s) order.emplace_back(&*s, h);
        }
        std::atomic<i64> next{0};
        run_workers(nw, p.parallel, [&](i64 w) {
            for (i64 k; (k = next.fetch_add(1)) < items;) forward_strip<E>(P, *order[k].first, order[k].second, work[w]);
        });
    }
    if (!P.rows.empty()) rows.run();
    return 0;
}

}  // namespace
