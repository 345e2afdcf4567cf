// One token of each row through a whole language model: embedding, blocks of mixer and feed-forward, norm, head.

#pragma once

#include "step.h"

namespace {

HM_INLINE vf some_numbers(const void *p, bool half, i64 j, i64 n) {
    return half ? load_some((const bf16 *)p + j, n) : load_some((const float *)p + j, n);
}

void normalise(const hm_norm &norm, i64 rows, i64 C, const float *x, float *y) {
    for (i64 r = 0; r < rows; r++, x += C, y += C) {
        float mean = 0.0f;
        if (norm.centred) {
            vf total{};
            each_vector(C, [&](i64 j, i64 n) { total += load_some(x + j, n); });
            mean = sum(total) / C;
        }
        vf squares{};
        each_vector(C, [&](i64 j, i64 n) {
            vf d = load_some(x + j, n) - mean;
            store_some(y + j, d, n);
            d = load_some(y + j, n);  // zeros beyond the last
            squares += d * d;
        });
        float inverse = 1.0f / std::sqrt(sum(squares) / C + (float)norm.eps);
        each_vector(C, [&](i64 j, i64 n) {
            vf d = load_some(y + j, n) * inverse;
            if (norm.weight) d *= some_numbers(norm.weight, norm.half, j, n);
            if (norm.bias) d += some_numbers(norm.bias, norm.half, j, n);
            store_some(y + j, d, n);
        });
    }
}

void add(i64 n, const float *x, float *to) {
    each_vector(n, [&](i64 j, i64 m) { store_some(to + j, load_some(to + j, m) + load_some(x + j, m), m); });
}

struct Model {
    const hm_model_args &p;
    std::vector<Step> steps;
    float *x, *y, *inner, *gate;
    std::vector<float *> inputs;  // of each mixer
    i64 widest = 0;

    explicit Model(const hm_model_args &args) : p(args), inputs(args.depth) {
        for (i64 i = 0; i < p.depth; i++) {
            steps.emplace_back(p.blocks[i].mixer);
            steps.back().mix.nthreads = p.nthreads;
            widest = std::max(widest, p.blocks[i].up.n_out);
        }
    }
    void carve(Arena &mem) {
        auto take = [&](i64 width) { return mem.floats(p.B * width); };
        x = take(p.C), y = take(p.C), inner = take(widest), gate = take(widest);
        for (float *&input : inputs) input = take(p.C);
        Arena before = mem;
        for (Step &step : steps) {  // one after the other, in the same room
            Arena mine = before;
            step.carve(mine);
            mem.used = std::max(mem.used, mine.used);
        }
    }
    bool agrees() const {
        if (!p.head.w || !linear_agrees(p.head, p.V, p.C)) return false;
        for (i64 b = 0; b < p.B && p.positions; b++)
            if (p.places[b] < 0 || p.places[b] >= p.n_positions) return false;
        for (i64 i = 0; i < p.depth; i++) {
            const hm_block &block = p.blocks[i];
            i64 width = block.up.n_out;
            if (!steps[i].agrees() || steps[i].B != p.B || block.mixer.C != p.C || !block.up.w || !block.down.w) return false;
            if (!linear_agrees(block.up, width, p.C) || !linear_agrees(block.gate, width, p.C)) return false;
            if (!linear_agrees(block.down, p.C, width)) return false;
        }
        return true;
    }
    int run() {
        for (i64 b = 0; b < p.B; b++)
            if (p.tokens[b] < 0 || p.tokens[b] >= p.V) return 3;
        for (i64 b = 0; b < p.B; b++)
            each_vector(p.C, [&](i64 j, i64 n) {
                vf e = some_numbers(p.embedding, p.half, p.tokens[b] * p.C + j, n);
                if (p.positions) e += some_numbers(p.positions, p.half, p.places[b] * p.C + j, n);
                store_some(x + b * p.C + j, e, n);
            });
        for (i64 i = 0; i < p.depth; i++) {
            const hm_block &block = p.blocks[i];
            normalise(block.norm_mixer, p.B, p.C, x, inputs[i]);
            if (int status = steps[i].run(inputs[i], y)) return status;
            add(p.B * p.C, y, x);
            normalise(block.norm_ffn, p.B, p.C, x, y);
            feed_forward(block);
            add(p.B * p.C, y, x);
        }
        normalise(p.norm, p.B, p.C, x, y);
        const Product head[1] = {{&p.head, y, p.logits}};
        multiply_all(head, p.B, p.nthreads, p.parallel);
        for (i64 i = 0; i < p.depth; i++) steps[i].remember(inputs[i]);
        return 0;
    }

private:
    void feed_forward(const hm_block &block) {  // from y to y
        const Product in[2] = {{&block.gate, y, gate}, {&block.up, y, inner}}, out[1] = {{&block.down, inner, y}};
        multiply_all(in, p.B, p.nthreads, p.parallel);
        i64 n = p.B * block.up.n_out;
        if (block.gate.w)
            each_pair(n, [&](i64 j, i64 m) {
                pair g = load2_some(gate + j, m);
                store2_some(inner + j, g * sigmoid(g) * load2_some(inner + j, m), m);
            });
        else
            for (i64 j = 0; j < n; j++) inner[j] *= 0.5f * (1.0f + std::erf(inner[j] * 0.70710678f));
        multiply_all(out, p.B, p.nthreads, p.parallel);
    }
};

int run_model(const hm_model_args &p) {
    if (!p.B) return 0;
    Model model(p);
    Block room;
    if (!room.carve([&](Arena &mem) { model.carve(mem); })) return 1;
    return model.agrees() ? model.run() : 2;
}

}  // namespace
