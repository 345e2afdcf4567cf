// The HyperMLP/HyperGLU operator on a CPU: forward, backward, decoding, and the two elementwise companions of the layer (twin
// depthwise convolutions, sigmoid gates). Plain C++17 with compiler vector types; called from Python by ctypes. Tensors are float
// or bfloat16 (E); sums and what lies between scores and readout are float.
//
// Legend
//   B batch, T rows (new tokens), S slots (cached + new), H heads, G routing heads (2H for glu, H for relu)
//   K key width, V value width, R1 R2 mixing ranks, L lags that have parameters (block_size)
//   span   rows of one batch entry that are the last rows of one sequence of slots
//   strip  m consecutive rows of a span with all slots any of them sees: the unit of work, one head at a time
//   b, h, g  batch entry, head, routing head;  i  row within a strip;  p  position of a row on the slot axis;  c  slot
//   u      lag parameter index of a (row, slot) pair: u = c + L-1-p, so lag 0 is u = L-1
//   z scores, h hidden, a activations, w readout weights;  t1 = z A1, t2 = a B2;  e1 = dh B1, e2 = dw A2
//
// One buffer, two layouts. A strip matrix is stored in *lag layout*: row i, column u. There the mixing operators are plain
// matrix products, every row ends in the same column u = L-1, and the future simply falls off the right end. The element of
// (row i, slot c) sits at column c + L-1-p0-i, so the same memory read with row stride ld-1 is the *time layout*, which the
// products with k and v need. Cells of a row left of its first slot (older than the sequence) are kept at zero.
//
// Every product goes through one register-blocked micro-kernel: MR rows by one panel of NR columns.
//
// One translation unit: arguments <- simd <- threads <- gemm <- strip <- mix <- rows, backward; conv, gates, project, layer, scan, linear, step,
// model.

#include "backward.h"
#include "conv.h"
#include "gates.h"
#include "layer.h"
#include "model.h"
#include "project.h"
#include "rows.h"
#include "scan.h"
#include "step.h"

// Entry points. They return 0, or 1 if there is not enough memory, or 2 for arguments that contradict each other.

namespace {

template <class F> int guarded(F f) {
    try {
        return f();
    } catch (const std::bad_alloc &) {
        return 1;
    }
}

}  // namespace

// Size of a structure as compiled, for the caller to compare with its own; 0: there is none of that name.
HM_API i64 hm_size(const char *name) {
#define HM_SIZE(type) if (!strcmp(name, #type)) return sizeof(type);
    HM_SIZE(hm_view) HM_SIZE(hm_args) HM_SIZE(hm_parameters) HM_SIZE(hm_conv_args) HM_SIZE(hm_gate_args) HM_SIZE(hm_project_args)
    HM_SIZE(hm_layer_args) HM_SIZE(hm_linear) HM_SIZE(hm_step_args) HM_SIZE(hm_norm) HM_SIZE(hm_block) HM_SIZE(hm_model_args)
    HM_SIZE(hm_scan_args)
#undef HM_SIZE
    return 0;
}

HM_API int hm_forward(const hm_args *p) {
    return arguments_agree(*p) ? guarded([&] { return p->half ? run_forward<bf16>(*p) : run_forward<float>(*p); }) : 2;
}

HM_API int hm_backward(const hm_args *p) {
    return arguments_agree(*p, true) ? guarded([&] { return p->half ? run_backward<bf16>(*p) : run_backward<float>(*p); }) : 2;
}

// What takes numbers of either type.
#define HM_ENTRY(name, type, f) \
    HM_API int name(const type *p) { return guarded([&] { return p->half ? f<bf16>(p) : f<float>(p), 0; }); }
HM_ENTRY(hm_conv_forward, hm_conv_args, conv_forward)
HM_ENTRY(hm_conv_backward, hm_conv_args, conv_backward)
HM_ENTRY(hm_gate_forward, hm_gate_args, gate_forward)
HM_ENTRY(hm_gate_backward, hm_gate_args, gate_backward)
HM_ENTRY(hm_ungate, hm_gate_args, ungate)
#undef HM_ENTRY

HM_API int hm_panel() { return NR; }

HM_API int hm_project_forward(const hm_project_args *p) {
    return projections_agree(*p) ? guarded([&] { return project_forward(p), 0; }) : 2;
}

HM_API int hm_project_backward(const hm_project_args *p) {
    return projections_agree(*p) ? guarded([&] { return project_backward(p), 0; }) : 2;
}

// 2 also where kept_size is not the kernel's own.
HM_API int hm_layer_forward(const hm_layer_args *p) { return guarded([&] { return Layer(*p).run(&Layer::forward); }); }

HM_API int hm_layer_backward(const hm_layer_args *p) { return guarded([&] { return Layer(*p).run(&Layer::backward); }); }

HM_API int hm_step(const hm_step_args *p) { return guarded([&] { return run_step(*p); }); }

// 3 where a token is none of the vocabulary's; nothing is changed then.
HM_API int hm_model(const hm_model_args *p) { return guarded([&] { return run_model(*p); }); }

HM_API int hm_scan_forward(const hm_scan_args *p) { return guarded([&] { return run_scan(*p, &Scan::forward); }); }

HM_API int hm_scan_backward(const hm_scan_args *p) { return guarded([&] { return run_scan(*p, &Scan::backward); }); }

// The elementary functions over an array, for tests. kind 0 exp of x <= 0, 1 softplus, 2 sigmoid.
HM_API int hm_math(i64 kind, i64 n, const float *x, float *y) {
    each_pair(n, [&](i64 j, i64 k) {
        pair v = load2_some(x + j, k);
        store2_some(y + j, kind == 0 ? exp_negative(v) : kind == 1 ? softplus(v) : sigmoid(v), k);
    });
    return 0;
}
