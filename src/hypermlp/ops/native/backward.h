// The operator backward: gradients of one strip, the division of work, the sums over workers.

#pragma once

#include "mix.h"

namespace {

// Gradients of the parameters of one head, collected by one worker; [u][Rp] from u0 on. The first worker of a head collects
// those of the factors in the outputs themselves, where these have the same rows.
struct ParamSum {
    float *A1[2], *B1[2], *diag1[2], *A2, *B2, *diag2;
    void carve(Arena &mem, const Plan &P, i64 head, bool first) {
        i64 lags = P.op1.Lp - P.u0;
        auto factor = [&](const Operator &op, i64 op_head, float *out) {
            bool there = first && out && op.R == op.Rp;
            return there ? out + (op_head * op.L + P.u0) * op.R : mem.floats(lags * op.Rp);
        };
        for (i64 part = 0; part < P.parts; part++) {
            i64 g = P.routing(head, part);
            A1[part] = factor(P.op1, g, P.p.dA1);
            B1[part] = factor(P.op1, g, P.p.dB1);
            diag1[part] = mem.floats(lags);
        }
        A2 = factor(P.op2, head, P.p.dA2);
        B2 = factor(P.op2, head, P.p.dB2);
        diag2 = mem.floats(lags);
    }
    void clear(const Plan &P) const {
        auto zero = [&](float *x, i64 width) { memset(x, 0, (P.p.L - P.u0) * width * sizeof(float)); };
        for (i64 part = 0; part < P.parts; part++)
            zero(A1[part], P.op1.Rp), zero(B1[part], P.op1.Rp), memset(diag1[part], 0, (P.op1.Lp - P.u0) * sizeof(float));
        zero(A2, P.op2.Rp), zero(B2, P.op2.Rp), memset(diag2, 0, (P.op1.Lp - P.u0) * sizeof(float));
    }
};

// dõ = do/ρ
template <class E> void output_gradient(const Plan &P, const Strip &s, i64 head, Work &w) {
    const hm_args &p = P.p;
    for (i64 i = 0; i < s.m; i++) w.rrho[i] = p.norm ? 1.0f / p.rho[(s.b * p.T + s.row + i) * p.H + head] : 1.0f;
    pack_rows(at<E>(p.dout, s.b, s.row, head), p.dout.t, s.m, p.V, w.rrho, w.dout, P.Vp);
    if (P.dv_in_place())
        for (i64 i = 0; i < s.m; i++) memset(at(p.dv, s.b, s.row + i, head), 0, p.V * sizeof(float));
}

// Σ d a dw over n columns of a row
float weighted_product(i64 n, const float *d, const float *a, const float *dw) {
    pair total{};
    each_pair(n, [&](i64 j, i64 k) { total = total + load2_some(d + j, k) * load2_some(a + j, k) * load2_some(dw + j, k); });
    return sum(total.x + total.y);
}

// The pull of the norm: dρ/ρ = -(do·o)/ρ². Where few slots exist it nearly cancels the rest of dh, so do·o is found as Σ w dw,
// from the same numbers as the rest: Σ D2 a dw is in `pull` already, (a B2 ⊙ s2)·(dw A2) is added here. For the same reason ρ² is
// that of the h which was computed again: the forward pass may have added in another order.
void pull_of_norm(const Plan &P, const Strip &s, Work &w) {
    const i64 Rp = P.op2.Rp;
    for (i64 i = 0; i < s.m; i++) {
        float product = w.pull[i];
        for (i64 r = 0; P.op2.present() && r < Rp; r++) product += w.t2s[i * Rp + r] * w.e2[i * Rp + r];
        w.pull[i] = P.p.norm ? -product / (sum(load(w.squares + i * VL)) + (float)P.p.eps) : 0.0f;
    }
}

// h, its squares, t2 = a B2 and Σ D2 a dw once more, with a only in a tile
void hidden_again(const Plan &P, const Strip &s, i64 head, Work &w) {
    const Operator &op2 = P.op2;
    if (op2.present()) memset(w.t2, 0, s.m * op2.Rp * sizeof(float));
    for (i64 part = 0; part < P.parts; part++) clear_older(s, w.h[part]);
    memset(w.squares, 0, s.m * VL * sizeof(float));
    memset(w.pull, 0, s.m * sizeof(float));
    for (i64 ya = 0; ya < s.Wp; ya += TL) {
        i64 yb = std::min(ya + TL, s.Wp);
        row_groups(s.m, [&](i64 i, i64 rows) {
            i64 y = std::max(ya, round_down(s.first_lag(i + rows - 1), NR));
            if (y >= yb) return;
            hidden_group(P, s, head, i, rows, ya, yb, w, w.h);
            for (i64 r = i; r < i + rows; r++) {
                float *a = w.a + r * LDA + y - ya;
                activate_row(P.glu, yb - y, w.h[0].lag(r, y), P.glu ? w.h[1].lag(r, y) : nullptr, a,
                             w.squares + r * VL);
                i64 n = std::min(yb, s.W) - y;
                if (P.p.norm && n > 0) w.pull[r] += weighted_product(n, op2.diagonal(head, s.ubase + y), a, w.dw.lag(r, y));
            }
            if (op2.present()) reduce_group(s, i, rows, w.a, LDA, ya, std::min(yb, s.W), op2, op2.fb, head, w.t2);
        });
    }
}

// Through R2 and the activation: dh in place of h, w in place of dw, e1 = dh B1 on the way.
void through_reading(const Plan &P, const Strip &s, i64 head, Work &w, const ParamSum &sums) {
    const Operator &op1 = P.op1, &op2 = P.op2;
    for (i64 part = 0; part < P.parts && op1.present(); part++) memset(w.e1[part], 0, s.m * op1.Rp * sizeof(float));
    for (i64 ya = 0; ya < s.Wp; ya += TL) {
        i64 yb = std::min(ya + TL, s.Wp), u = s.ubase + ya;
        float *dw = w.dw.lag(0, ya);
        row_groups(s.m, [&](i64 i, i64 rows) {
            i64 y = std::max(ya, round_down(s.first_lag(i + rows - 1), NR));
            for (i64 r = i; r < i + rows; r++)  // the products below reach over all rows of a column group
                memset(w.a + r * LDA, 0, (std::min(y, yb) - ya) * sizeof(float));
            if (y >= yb) return;
            expand_group(s, i, rows, dw, w.dw.ld, ya, yb, op2, op2.fb, head, w.e2s, w.da, LDA);
            for (i64 r = i; r < i + rows; r++)
                activate_row_backward(P.glu, yb - y, w.h[0].lag(r, y), P.glu ? w.h[1].lag(r, y) : nullptr,
                                      w.da + r * LDA + y - ya, w.dw.lag(r, y), w.pull[r], w.a + r * LDA + y - ya,
                                      sums.diag2 + u - P.u0 + y - ya);
            if (op1.present())
                for (i64 part = 0; part < P.parts; part++)
                    reduce_group(s, i, rows, w.h[part].lag(0, ya), w.h[part].ld, ya, std::min(yb, s.W), op1, op1.fb,
                                 P.routing(head, part), w.e1[part]);
        });
        if (!op2.present()) {
            row_groups(s.m, [&](i64 i, i64 rows) {
                for (i64 r = i; r < i + rows; r++) memcpy(w.dw.lag(r, ya), w.a + r * LDA, (yb - ya) * sizeof(float));
            });
            continue;
        }
        scatter_lags(s, dw, w.dw.ld, ya, yb, w.t2s, op2.Rp, sums.A2 + (s.ubase - P.u0) * op2.Rp);
        scatter_lags(s, w.a, LDA, ya, yb, w.e2s, op2.Rp, sums.B2 + (s.ubase - P.u0) * op2.Rp);
        row_groups(s.m, [&](i64 i, i64 rows) {
            expand_group(s, i, rows, w.a, LDA, ya, yb, op2, op2.fa, head, w.t2s, dw, w.dw.ld);
        });
    }
}

// Columns ya..yb through R1: dz in place of dh, and the gradients of R1's parameters
void through_routing(const Plan &P, const Strip &s, i64 head, i64 part, i64 ya, i64 yb, Work &w, const ParamSum &sums) {
    const Operator &op1 = P.op1;
    Matrix z = w.z[part], dh = w.h[part];
    i64 first = s.ubase - P.u0;
    if (P.p.diag1)
        for (i64 i = 0; i < s.m; i++) {
            float *sum = sums.diag1[part] + first + ya, *x = dh.lag(i, ya), *zz = z.lag(i, ya);
            for (i64 y = round_down(std::max<i64>(s.first_lag(i) - ya, 0), VL); y < yb - ya; y += VL)
                store(sum + y, load(sum + y) + load(x + y) * load(zz + y));
        }
    scatter_lags(s, z.lag(0, ya), z.ld, ya, yb, w.e1s[part], op1.Rp, sums.A1[part] + first * op1.Rp);
    scatter_lags(s, dh.lag(0, ya), dh.ld, ya, yb, w.t1s[part], op1.Rp, sums.B1[part] + first * op1.Rp);
    expand_strip(s, dh, ya, yb, op1, op1.fa, P.routing(head, part), w.e1s[part]);
}

template <class E>
void backward_strip(const Plan &P, const Strip &s, i64 head, Work &w, const ParamSum &sums, const SlotSum *dk, SlotSum dv) {
    const hm_args &p = P.p;
    const Operator &op1 = P.op1, &op2 = P.op2;

    // dw = dõ vᵀ and e2 = dw A2
    output_gradient<E>(P, s, head, w);
    score(s, w.dout, P.Vp, p.V, slots_from<E>(p.v, p.S, s.b, s.c0, head), w.dw, w.pack, op2, op2.fa, head, w.e2);

    scores_of_head<E>(P, s, head, w);
    hidden_again(P, s, head, w);
    if (op2.present()) {
        apply_controls<E>(s, p.s2, head, p.R2, op2.Rp, w.t2, w.t2s);
        apply_controls<E>(s, p.s2, head, p.R2, op2.Rp, w.e2, w.e2s);
        write_controls<E>(s, p.ds2, head, p.R2, op2.Rp, w.t2, w.e2);
    }
    pull_of_norm(P, s, w);

    through_reading(P, s, head, w, sums);
    const float *dout = join_rows<E>(w.dout, P.Vp, s.m, P.Vp, w.joined);
    for (i64 j = 0; j < s.n; j += TC) {
        i64 width = std::min<i64>(TC, s.n - j);
        Tile tile = time_tile<E>(s, w.dw, s.c0 + j, width, w.tile);
        tile = join_rows<E>(tile, s.m, width, w.joined_tile);
        scatter_tile<E>(s, tile, s.c0 + j, width, dout, P.Vp, p.V, dv);
    }

    // Through R1 and the scores.
    for (i64 part = 0; part < P.parts; part++) {
        i64 g = P.routing(head, part);
        Matrix dh = w.h[part];
        if (op1.present()) {
            apply_controls<E>(s, p.s1, g, p.R1, op1.Rp, w.e1[part], w.e1s[part]);
            write_controls<E>(s, p.ds1, g, p.R1, op1.Rp, w.t1[part], w.e1[part]);
        }
        memset(w.dq, 0, s.m * P.Kp * sizeof(float));
        const float *q = join_rows<E>(w.q[part], P.Kp, s.m, P.Kp, w.joined);
        i64 done = 0;
        for (i64 j = 0; j < s.n; j += TC) {
            i64 width = std::min<i64>(TC, s.n - j), ca = s.c0 + j;
            i64 need = std::min(s.Wp, round_up(std::max<i64>(s.lag_of(ca + width, 0), 0), NR));
            for (; op1.present() && done < need; done = std::min(done + TL, need))
                through_routing(P, s, head, part, done, std::min(done + TL, need), w, sums);
            Tile tile = time_tile<E>(s, dh, ca, width, w.tile);
            pack_panels(slots_from<E>(p.k, p.S, s.b, ca, g), width, p.K, w.pack);
            read_tile(s, tile, ca, width, w.pack, p.K, w.dq, P.Kp, Ahead<E>{});
            tile = join_rows<E>(tile, s.m, width, w.joined_tile);
            scatter_tile<E>(s, tile, ca, width, q, P.Kp, p.K, dk[part]);
        }
        write_rows(w.dq, P.Kp, s.m, p.K, nullptr, at<E>(p.dq, s.b, s.row, g), p.dq.t);
    }
}

// The strips of all heads in order (head, batch, time), cut into one run per worker of about equal cost. A worker adds to the
// outputs dk, dv itself, except in the (head, batch) unit it shares with workers before it: there it has a private copy.
// In time order a strip gives to slots whose own rows have been read, so that dv may be collected in the place of dout.
struct Schedule {
    struct Run {
        i64 begin, end;        // items; item = head * strips + strip
        i64 shared_end;        // items [begin, shared_end) belong to a unit that an earlier worker began
        i64 first = 0, last = 0;   // slots [first, last) of the private copy
        float *copy = nullptr;
        std::vector<ParamSum> sums;  // one per head from head_begin on
        i64 head_begin = 0;
    };
    std::vector<Run> runs;

    Schedule(const Plan &P, i64 nw) {
        i64 per_head = (i64)P.strips.size(), items = per_head * P.p.H;
        auto unit_begins = [&](i64 k) { return k % per_head == 0 || P.strips[k % per_head].b != P.strips[k % per_head - 1].b; };
        double total = 0.0;
        for (const Strip &s : P.strips) total += s.cost() * (double)P.p.H;
        double share = total / (double)nw;
        std::vector<double> before{0.0};  // cost of all items before each
        for (i64 k = 0; k < items; k++) before.push_back(before[k] + P.strips[k % per_head].cost());
        std::vector<i64> cut{0};
        // Cut at the item nearest to the even share, or at the start of a unit if one is nearly as near: no copy then.
        for (i64 w = 1; w < nw; w++) {
            double target = share * (double)w, best = 0.05 * share;
            i64 here = cut.back();
            while (here < items && 0.5 * (before[here] + before[here + 1]) < target) here++;
            for (i64 j = cut.back(); j < items && before[j] <= target + 0.05 * share; j++)
                if (unit_begins(j) && std::fabs(before[j] - target) < best) best = std::fabs(before[j] - target), here = j;
            cut.push_back(here);
        }
        cut.push_back(items);
        for (i64 w = 0; w < nw; w++) {
            Run r;
            r.begin = cut[w], r.end = cut[w + 1], r.shared_end = r.begin;
            if (r.begin < r.end) {
                r.head_begin = r.begin / per_head;
                r.sums.resize((r.end - 1) / per_head - r.head_begin + 1);
                if (!unit_begins(r.begin)) {
                    r.first = INT64_MAX;
                    do {
                        const Strip &s = P.strips[r.shared_end % per_head];
                        r.first = std::min(r.first, s.c0);
                        r.last = std::max(r.last, s.last() + 1);
                        r.shared_end++;
                    } while (r.shared_end < r.end && !unit_begins(r.shared_end));
                }
            }
            runs.push_back(std::move(r));
        }
    }
};

// Output u, r of a parameter gradient is the sum over the workers' collections, in their order.
template <class Get>
void write_param(const Plan &P, const Schedule &schedule, float *out, i64 head, i64 out_head, i64 R, i64 Rp, Share lags, Get get) {
    if (!out) return;
    std::vector<const float *> parts;
    for (const auto &run : schedule.runs) {
        i64 j = head - run.head_begin;
        if (j >= 0 && j < (i64)run.sums.size()) parts.push_back(get(run.sums[j]));
    }
    for (i64 u = lags.begin; u < lags.end; u++)
        for (i64 r = 0; r < R; r++) {
            float s = 0.0f;
            if (u >= P.u0)
                for (const float *part : parts) s += part[(u - P.u0) * Rp + r];
            out[(out_head * P.p.L + u) * R + r] = s;
        }
}

template <class E> int run_backward(const hm_args &p) {
    Plan P(p, true);
    i64 per_head = (i64)P.strips.size(), items = per_head * p.H, nw = P.workers(items);
    Schedule schedule(P, nw);
    i64 width = P.parts * p.K + p.V;  // of a private copy: dk of every part, dv

    Block shared;
    std::vector<Block> own(nw);
    std::vector<Work> work(nw);
    auto carve_all = [&](Arena &mem) {
        P.carve(mem, true);
        i64 begun = 0;  // heads that have a first worker
        for (auto &run : schedule.runs) {
            for (i64 j = 0; j < (i64)run.sums.size(); j++) {
                i64 head = run.head_begin + j;
                run.sums[j].carve(mem, P, head, head >= begun);
                begun = std::max(begun, head + 1);
            }
            if (run.shared_end > run.begin) run.copy = mem.floats((run.last - run.first) * width);
        }
    };
    if (!shared.carve(carve_all)) return 1;
    for (i64 w = 0; w < nw && items; w++)
        if (!own[w].carve([&](Arena &mem) { work[w].carve(mem, P, true); })) return 1;
    P.fill(true);

    run_workers(nw, p.parallel, [&](i64 w) {
        Share rows(p.B * p.S, w, nw);
        const auto &run = schedule.runs[w];
        for (const auto &sum : run.sums) sum.clear(P);
        if (run.copy) memset(run.copy, 0, (run.last - run.first) * width * sizeof(float));
        for (i64 j = rows.begin; j < rows.end; j++) {
            for (i64 g = 0; g < p.G; g++) memset(at(p.dk, j / p.S, j % p.S, g), 0, p.K * sizeof(float));
            for (i64 h = 0; h < p.H && !P.dv_in_place(); h++) memset(at(p.dv, j / p.S, j % p.S, h), 0, p.V * sizeof(float));
        }
    });
    P.clear_uncovered<E>(p.dq, p.G, p.K);
    if (P.dv_in_place()) P.clear_uncovered<float>(p.dv, p.H, p.V);
    if (P.op1.present()) P.clear_uncovered<E>(p.ds1, p.G, p.R1);
    if (P.op2.present()) P.clear_uncovered<E>(p.ds2, p.H, p.R2);

    run_workers(items ? nw : 0, p.parallel, [&](i64 w) {
        auto &run = schedule.runs[w];
        for (i64 k = run.begin; k < run.end; k++) {
            i64 head = k / per_head;
            const Strip &s = P.strips[k % per_head];
            SlotSum dk[2], dv;
            for (i64 part = 0; part < P.parts; part++)
                dk[part] = k < run.shared_end ? SlotSum{run.copy + part * p.K, width, run.first}
                                              : SlotSum{at(p.dk, s.b, 0, P.routing(head, part)), p.dk.t, 0};
            dv = k < run.shared_end ? SlotSum{run.copy + P.parts * p.K, width, run.first}
                                    : SlotSum{at(p.dv, s.b, 0, head), p.dv.t, 0};
            backward_strip<E>(P, s, head, work[w], run.sums[head - run.head_begin], dk, dv);
        }
    });

    run_workers(nw, p.parallel, [&](i64 w) {
        for (const auto &run : schedule.runs) {
            if (!run.copy) continue;
            i64 head = run.begin / per_head, b = P.strips[run.begin % per_head].b;
            Share slots(p.S, w, nw);  // the same cuts for every copy: a slot is added to by one thread, in the order of copies
            i64 begin = std::max(slots.begin, run.first) - run.first, end = std::min(slots.end, run.last) - run.first;
            for (i64 j = begin; j < end; j++) {
                const float *from = run.copy + j * width;
                for (i64 part = 0; part < P.parts; part++, from += p.K) {
                    float *to = at(p.dk, b, run.first + j, P.routing(head, part));
                    for (i64 x = 0; x < p.K; x++) to[x] += from[x];
                }
                float *to = at(p.dv, b, run.first + j, head);
                for (i64 x = 0; x < p.V; x++) to[x] += from[x];
            }
        }
        Share lags(p.L, w, nw);
        for (i64 h = 0; h < p.H; h++) {
            for (i64 part = 0; part < P.parts; part++) {
                i64 g = P.routing(h, part);
                write_param(P, schedule, p.dA1, h, g, p.R1, P.op1.Rp, lags, [&](const ParamSum &x) { return x.A1[part]; });
                write_param(P, schedule, p.dB1, h, g, p.R1, P.op1.Rp, lags, [&](const ParamSum &x) { return x.B1[part]; });
                write_param(P, schedule, p.ddiag1, h, g, 1, 1, lags, [&](const ParamSum &x) { return x.diag1[part]; });
            }
            write_param(P, schedule, p.dA2, h, h, p.R2, P.op2.Rp, lags, [&](const ParamSum &x) { return x.A2; });
            write_param(P, schedule, p.dB2, h, h, p.R2, P.op2.Rp, lags, [&](const ParamSum &x) { return x.B2; });
            write_param(P, schedule, p.ddiag2, h, h, 1, 1, lags, [&](const ParamSum &x) { return x.diag2; });
        }
    });
    return 0;
}

}  // namespace
