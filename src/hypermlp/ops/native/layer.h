// A whole layer on few tokens, in one call forward and one back: projections, operator, gated readout.

#pragma once

#include "backward.h"
#include "project.h"
#include "rows.h"

namespace {

// Memory for (tokens, width) tensors, one after the other.
struct Tokens {
    i64 count, used = 0;
    float *base;
    Tokens(i64 tokens, float *memory) : count(tokens), base(memory) {}
    float *take(i64 width) {
        float *found = base ? base + used : nullptr;
        used += count * width;
        return found;
    }
};

struct Layer {
    const hm_layer_args &p;
    hm_args mix;
    i64 N, O;  // tokens, width of o
    hm_project_args project{};
    std::vector<i64> spans;
    i64 kept;
    float *gated;  // o, multiplied by its gate in place

    hm_view heads(float *x, i64 count, i64 width) const { return {x, mix.T * count * width, count * width, width}; }
    hm_view keys(float *x) const { return heads(x, mix.G, mix.K); }
    hm_view values(float *x) const { return heads(x, mix.H, mix.V); }

    explicit Layer(const hm_layer_args &args) : p(args), mix(p.mix), N(mix.B * mix.T), O(mix.H * mix.V) {
        const i64 Q = mix.G * mix.K, width[7] = {Q, Q, mix.G * mix.R1, mix.H * mix.R2, Q, O, O};
        Tokens memory(N, p.kept);
        project.B = mix.B, project.T = mix.T, project.C = p.C, project.W = p.W, project.nthreads = mix.nthreads;
        project.parallel = mix.parallel, project.x = p.x, project.parameters = p.parameters;
        project.y = memory.take(width[PQ] + width[PGATE] + width[PS1] + width[PS2]);
        for (i64 k = 0; k < 7; k++) {
            project.width[k] = width[k];
            if (k != PGATE) project.out[k] = memory.take(width[k]);
        }
        gated = memory.take(O);

        for (i64 b = 0; b < mix.B && mix.T; b++) spans.insert(spans.end(), {b, 0, mix.T, 0, mix.T});
        mix.n_spans = (i64)spans.size() / 5, mix.spans = spans.data();
        mix.q = keys(project.out[PQ]), mix.k = keys(project.out[PK]), mix.v = values(project.out[PV]), mix.o = values(gated);
        mix.s1 = heads(project.out[PS1], mix.G, mix.R1), mix.s2 = heads(project.out[PS2], mix.H, mix.R2);
        take_factors(mix, p.parameters);
        mix.rho = memory.take(mix.H);
        kept = memory.used;
    }
    int run(int (Layer::*direction)()) {
        bool agrees = p.parameters.o && kept == p.kept_size && mix.S == mix.T && projections_agree(project) && arguments_agree(mix);
        return agrees ? (this->*direction)() : 2;
    }
    // Blocks of rows of the readout, by workers: f(worker, first row, rows).
    i64 workers() const { return workers_for(mix.nthreads, (N + PROJECT_ROWS - 1) / PROJECT_ROWS); }
    template <class F> void blocks(F f) const {
        run_shares(N, workers(), mix.parallel, [&](i64 w, i64 begin, i64 end) {
            for (i64 r = begin; r < end; r += PROJECT_ROWS) f(w, r, std::min(PROJECT_ROWS, end - r));
        });
    }

    int forward() {
        project_forward(&project);
        if (int status = run_forward<float>(mix)) return status;
        std::vector<float> panels(p.C * O), bias(p.C, 0.0f), ones(NR, 1.0f);
        pack_transposed(Rows<float>{p.parameters.o, O}, p.C, O, panels.data());
        if (p.parameters.o_bias) memcpy(bias.data(), p.parameters.o_bias, p.C * sizeof(float));
        hm_gate_args gate{};
        gate.C = gate.x_row = gate.g_row = gate.y_row = O, gate.x = gate.y = gated, gate.g = project.out[PREAD];
        blocks([&](i64, i64 r, i64 n) {
            gate_rows<float>(gate, r, r + n);
            multiply<Mix>(n, O, gated + r * O, O, panels.data(), p.C, p.y + r * p.C, p.C, bias.data(), ones.data());
        });
        return 0;
    }

    int backward() {
        Tokens sizes(N, nullptr);
        for (int k = 0; k < 2; k++) {  // the first pass only measures
            if (k) sizes = Tokens(N, (float *)scratch.p);
            for (i64 j : {PQ, PS1, PS2, PK, PV, PREAD}) project.dout[j] = sizes.take(project.width[j]);
            if (!k && !scratch.allocate(sizes.used * sizeof(float))) return 1;
        }
        auto gradient = [&](Projection k) { return const_cast<float *>(project.dout[k]); };
        read_backward(gradient(PV), gradient(PREAD));

        mix.dout = mix.dv = values(gradient(PV));  // do, and then dv in its place
        mix.dq = keys(gradient(PQ)), mix.dk = keys(gradient(PK));
        mix.ds1 = heads(gradient(PS1), mix.G, mix.R1), mix.ds2 = heads(gradient(PS2), mix.H, mix.R2);
        const hm_parameters &d = p.gradients;
        mix.dA1 = d.A1, mix.dB1 = d.B1, mix.ddiag1 = d.diag1, mix.dA2 = d.A2, mix.dB2 = d.B2, mix.ddiag2 = d.diag2;
        if (int status = run_backward<float>(mix)) return status;

        project.dx = p.dx, project.gradients = d;
        project_backward(&project);
        return 0;
    }

private:
    Block scratch;

    // From dy: the gradients of o, of its gate and of the readout's parameters.
    void read_backward(float *d_o, float *d_gate) {
        const i64 C = p.C, size = C * O + C, nw = workers();
        std::vector<float> panels(C * O), sums(nw * size, 0.0f);
        for (i64 r = 0; r < C; r++)
            for (i64 j = 0; j < O; j += NR)
                memcpy(panels.data() + (j / NR * C + r) * NR, p.parameters.o + r * O + j, NR * sizeof(float));
        hm_gate_args gate{};
        gate.C = gate.y_row = gate.g_row = gate.dy_row = gate.dx_row = gate.dg_row = O;
        gate.y = gated, gate.g = project.out[PREAD], gate.dy = gate.dx = d_o, gate.dg = d_gate;
        blocks([&](i64 w, i64 r, i64 n) {
            const float *dy = p.dy + r * C;
            float *sum = sums.data() + w * size;
            multiply_transposed(n, C, dy, C, gated + r * O, O, sum);
            add_rows(n, dy, C, sum + C * O);
            multiply<Set>(n, C, dy, C, panels.data(), O, d_o + r * O, O);
            ungate_rows<float>(gate, r, r + n);
        });
        for (i64 w = 1; w < nw; w++)  // in the workers' order
            for (i64 j = 0; j < size; j++) sums[j] += sums[w * size + j];
        if (p.gradients.o) memcpy(p.gradients.o, sums.data(), C * O * sizeof(float));
        if (p.gradients.o_bias) memcpy(p.gradients.o_bias, sums.data() + C * O, C * sizeof(float));
    }
};

}  // namespace
