// What the kernel is called with, written once: bindings.py reads this file and makes its structures of it. So a line is a comment,
// or a field's type and names as its `read_structures` knows them, and nothing else. Every field is 8 bytes wide, or made of such, so
// that there is no padding.

#pragma once

#include <cstddef>
#include <cstdint>

#define HM_API extern "C" __attribute__((visibility("default")))

using i64 = int64_t;

// A tensor (batch, time, head, width) whose last dimension is contiguous; strides count elements. What a `void *` points to is
// bfloat16 where the structure's `half` is 1, else float.
struct hm_view {
    void *data;
    i64 b, t, h;
};

struct hm_args {
    i64 B, T, S, H, G, K, V, R1, R2, L;
    i64 act;                   // 0 glu: softplus(h_scale) * relu(h_gate), head j pairs routing heads j and j + H;  1 relu
    i64 norm;                  // 1: o is divided by rho = sqrt(sum h_gate^2 + eps);  0: rho = 1
    i64 shortcut1, shortcut2;  // D = shortcut + diag
    double eps;
    i64 n_spans;
    const i64 *spans;          // n_spans x [batch, row_begin, row_end, slot_begin, slot_end]; no row is in two spans
    i64 nthreads;
    void *parallel;            // null (std::thread) or a function like libgomp's GOMP_parallel
    hm_view q, k, v, s1, s2;   // (B,T,G,K) (B,S,G,K) (B,S,H,V) (B,T,G,R1) (B,T,H,R2)
    const float *A1, *B1, *diag1;  // (G,L,R1) (G,L,R1) (G,L); A1 null: R1 is the identity; diag1 may be null
    const float *A2, *B2, *diag2;  // (H,L,R2) (H,L,R2) (H,L); likewise
    hm_view o;                 // (B,T,H,V), written by forward
    float *rho;                // (B,T,H) contiguous, written by forward, read by backward
    hm_view dout;              // backward only, from here on
    // dk and dv, which are summed in place, are always float; dv may be dout, where every row's own slot has its number.
    hm_view dq, dk, dv, ds1, ds2;
    float *dA1, *dB1, *ddiag1, *dA2, *dB2, *ddiag2;  // may be null where the operator or its diagonal is absent
    i64 half;
};

// The parameters of a layer, or their gradients; ops/parameters.py names them in this order. All contiguous. Null: there is none;
// of a gradient: it is not wanted. A call says which of them it knows.
struct hm_parameters {
    float *w[7], *bias[7];       // q, its gate, both controls, k, v, the readout's gate: (width,C) (width)
    float *conv_k, *conv_v;      // (C,W), tap W-1 meets the current token
    float *A1, *B1, *diag1;      // (G,L,R1) (G,L,R1) (G,L)
    float *A2, *B2, *diag2;      // (H,L,R2) (H,L,R2) (H,L)
    float *o, *o_bias;           // (C,H*V) (C)
};

struct hm_conv_args {
    i64 B, T, C, W;
    i64 nthreads;
    void *parallel;
    hm_view x;                   // (B,T,C); the field h of every view here is ignored
    const float *wk, *wv;        // (C,W), tap W-1 meets the current token
    const i64 *pos;              // (B,T) position of each token in its own sequence, or null
    const void *history;         // (B,W-1,C) inputs before t = 0, or null for zeros
    hm_view yk, yv;              // forward: written;  backward: ignored
    hm_view dyk, dyv, dx;        // backward
    float *dwk, *dwv;            // backward, (C,W)
    i64 half;
};

struct hm_gate_args {
    i64 N, C;
    i64 nthreads;
    void *parallel;
    const void *x, *g;           // (N,C), row strides below; x null: ones, so that y = sigmoid(g)
    void *y;                     // of hm_ungate: read, and x is not
    i64 x_row, g_row, y_row;
    const void *dy;
    void *dx, *dg;               // dx is not written where x is null; it may be dy
    i64 dy_row, dx_row, dg_row;
    i64 half;
};

// All projections of a layer: q, its gate, both controls and the readout's gate from x, k and v from x's convolutions. Widths and
// C are whole panels (hm_panel). All contiguous. Of the parameters: w, bias, conv_k and conv_v.
struct hm_project_args {
    i64 B, T, C, W;
    i64 width[7];                // of each projection; 0: there is none
    i64 nthreads;
    void *parallel;
    const float *x;              // (B,T,C)
    const i64 *pos;              // as in hm_conv_args
    hm_parameters parameters;
    float *y;                    // (B,T,joined): q, its gate, s1, s2 before their activations; backward: read
    float *out[7];               // (B,T,width): q gated, nothing, s1 and s2 activated, k, v, gate
    const float *dout[7];        // backward only, from here on
    float *dx;
    hm_parameters gradients;
};

// A whole layer on plain sequences: hm_project_args, hm_args and the gated readout. C, H*V and all widths are whole panels. `mix`
// holds sizes and choices; the kernel adds the tensors and spans.
struct hm_layer_args {
    hm_args mix;
    i64 C, W;
    hm_parameters parameters;
    const float *x;              // (B,T,C)
    float *kept;                 // written by forward, read by backward
    i64 kept_size;               // in floats, as the kernel counts them
    float *y;                    // forward only, (B,T,C)
    const float *dy;             // backward only, from here on
    float *dx;
    hm_parameters gradients;
};

// y = x wᵀ + bias. w null: there is none.
struct hm_linear {
    const void *w, *bias;        // (n_out,n_in) contiguous; (n_out) or null
    const void *scale;           // (n_out), of codes
    i64 n_out, n_in;
    i64 kind;                    // of w: 0 float, 1 bfloat16, 2 codes of 8 bits, which an output's scale multiplies
    i64 half;                    // bias and scale are bfloat16
};

// One token for each row of the batch through a whole layer. In `mix`, span b is the row of batch entry b and its last slot the
// new one, k and v are the cache (half: of bfloat16), and q, s1, s2, o, rho are not read: the kernel makes them. Everything between
// is computed in float.
struct hm_step_args {
    hm_args mix;
    i64 C, W;                    // width, taps of the convolutions
    hm_linear w[8];              // q, its gate, both controls, k, v, the readout's gate, the readout
    const void *conv_k, *conv_v; // (C,W), tap W-1 meets the current token
    i64 half_rest;               // convolutions and factors are bfloat16
    void *inputs;                // (B,keep,C), a ring of the inputs before x, of the cache's type; x is written to place `tail`
    i64 inputs_b, keep, tail;
    const float *x;              // (B,C) contiguous
    float *y;                    // (B,C) contiguous
};

// x / sqrt(mean x² + eps) * weight; with `centred` of x - mean x, + bias.
struct hm_norm {
    const void *weight, *bias;   // (C) or null
    double eps;
    i64 centred, half;
};

// x + mixer(norm(x)), then x + feed-forward(norm(x)): down (silu(gate) ⊙ up), or down gelu(up) where there is no gate. The mixer's
// x and y are not read.
struct hm_block {
    hm_step_args mixer;
    hm_norm norm_mixer, norm_ffn;
    hm_linear gate, up, down;
};

// One token for each row through a whole language model.
struct hm_model_args {
    i64 B, C, V, depth;          // V: tokens that there are
    i64 nthreads;
    void *parallel;
    const i64 *tokens;           // (B)
    const void *embedding;       // (V,C), bfloat16 where half
    const void *positions;       // (n_positions,C) or null
    i64 n_positions;
    const i64 *places;           // (B), rows of positions
    i64 half;
    const hm_block *blocks;      // depth
    hm_norm norm;
    hm_linear head;
    float *logits;               // (B,V)
};

// Mamba's selective scan, channel by channel: h = exp(delta A) h + delta x B, y = C h.
struct hm_scan_args {
    i64 B, T, E, N;                        // batch, time, channels, state width
    i64 rows, group;                       // tokens of a block, channels of a group (whole pairs of vectors)
    i64 nthreads;
    void *parallel;
    const float *x, *delta;                // (B,T,E)
    const float *A;                        // (N,E), at most 0
    const float *input, *output;           // (B,T,N), the B and C of the paper
    const unsigned char *begins;           // (B,T), nonzero: h is emptied first; or null
    const float *state;                    // (B,N,E), h before the first token
    float *y, *last;                       // (B,T,E) (B,N,E), written by forward
    float *marks;                          // (B,blocks,N,E), h before each block: written by forward, or null
    const float *dy, *dlast;               // backward only, from here on
    float *dx, *ddelta;
    float *dA, *dstate;                    // (B,N,E), dA still to be summed over the batch
    float *dinput, *doutput;               // (groups,B,T,N), still to be summed over the groups
};
