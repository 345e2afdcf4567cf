// The mirror's check: every structure's size, and every field's offset and size.

#pragma once

#include "arguments.h"

namespace {

struct hm_field {
    const char *name;
    i64 offset, size;
};

#define HM_SIZE(type) {#type, 0, sizeof(type)}
#define HM_FIELD(type, field) {#type "." #field, offsetof(type, field), sizeof(type::field)}
const hm_field LAYOUT[] = {
    HM_SIZE(hm_view),
    HM_FIELD(hm_view, data), HM_FIELD(hm_view, b), HM_FIELD(hm_view, t), HM_FIELD(hm_view, h),
    HM_SIZE(hm_args),
    HM_FIELD(hm_args, B), HM_FIELD(hm_args, T), HM_FIELD(hm_args, S), HM_FIELD(hm_args, H), HM_FIELD(hm_args, G),
    HM_FIELD(hm_args, K), HM_FIELD(hm_args, V), HM_FIELD(hm_args, R1), HM_FIELD(hm_args, R2), HM_FIELD(hm_args, L),
    HM_FIELD(hm_args, act), HM_FIELD(hm_args, norm), HM_FIELD(hm_args, shortcut1), HM_FIELD(hm_args, shortcut2),
    HM_FIELD(hm_args, eps), HM_FIELD(hm_args, n_spans), HM_FIELD(hm_args, spans), HM_FIELD(hm_args, nthreads),
    HM_FIELD(hm_args, parallel), HM_FIELD(hm_args, q), HM_FIELD(hm_args, k), HM_FIELD(hm_args, v), HM_FIELD(hm_args, s1),
    HM_FIELD(hm_args, s2), HM_FIELD(hm_args, A1), HM_FIELD(hm_args, B1), HM_FIELD(hm_args, diag1), HM_FIELD(hm_args, A2),
    HM_FIELD(hm_args, B2), HM_FIELD(hm_args, diag2), HM_FIELD(hm_args, o), HM_FIELD(hm_args, rho), HM_FIELD(hm_args, dout),
    HM_FIELD(hm_args, dq), HM_FIELD(hm_args, dk), HM_FIELD(hm_args, dv), HM_FIELD(hm_args, ds1), HM_FIELD(hm_args, ds2),
    HM_FIELD(hm_args, dA1), HM_FIELD(hm_args, dB1), HM_FIELD(hm_args, ddiag1), HM_FIELD(hm_args, dA2), HM_FIELD(hm_args, dB2),
    HM_FIELD(hm_args, ddiag2), HM_FIELD(hm_args, dots), HM_FIELD(hm_args, half),
    HM_SIZE(hm_conv_args),
    HM_FIELD(hm_conv_args, B), HM_FIELD(hm_conv_args, T), HM_FIELD(hm_conv_args, C), HM_FIELD(hm_conv_args, W),
    HM_FIELD(hm_conv_args, nthreads), HM_FIELD(hm_conv_args, parallel), HM_FIELD(hm_conv_args, x), HM_FIELD(hm_conv_args, wk),
    HM_FIELD(hm_conv_args, wv), HM_FIELD(hm_conv_args, pos), HM_FIELD(hm_conv_args, history), HM_FIELD(hm_conv_args, yk),
    HM_FIELD(hm_conv_args, yv), HM_FIELD(hm_conv_args, dyk), HM_FIELD(hm_conv_args, dyv), HM_FIELD(hm_conv_args, dx),
    HM_FIELD(hm_conv_args, dwk), HM_FIELD(hm_conv_args, dwv), HM_FIELD(hm_conv_args, half),
    HM_SIZE(hm_gate_args),
    HM_FIELD(hm_gate_args, N), HM_FIELD(hm_gate_args, C), HM_FIELD(hm_gate_args, nthreads), HM_FIELD(hm_gate_args, parallel),
    HM_FIELD(hm_gate_args, x), HM_FIELD(hm_gate_args, g), HM_FIELD(hm_gate_args, y), HM_FIELD(hm_gate_args, x_row),
    HM_FIELD(hm_gate_args, g_row), HM_FIELD(hm_gate_args, y_row), HM_FIELD(hm_gate_args, dy), HM_FIELD(hm_gate_args, dx),
    HM_FIELD(hm_gate_args, dg), HM_FIELD(hm_gate_args, dy_row), HM_FIELD(hm_gate_args, dx_row),
    HM_FIELD(hm_gate_args, dg_row), HM_FIELD(hm_gate_args, half),
    HM_SIZE(hm_gates_args),
    HM_FIELD(hm_gates_args, N), HM_FIELD(hm_gates_args, Q), HM_FIELD(hm_gates_args, S1), HM_FIELD(hm_gates_args, S2),
    HM_FIELD(hm_gates_args, nthreads), HM_FIELD(hm_gates_args, parallel), HM_FIELD(hm_gates_args, y),
    HM_FIELD(hm_gates_args, q), HM_FIELD(hm_gates_args, s1), HM_FIELD(hm_gates_args, s2), HM_FIELD(hm_gates_args, dq),
    HM_FIELD(hm_gates_args, ds1), HM_FIELD(hm_gates_args, ds2), HM_FIELD(hm_gates_args, dy), HM_FIELD(hm_gates_args, sum),
    HM_FIELD(hm_gates_args, half),
    HM_SIZE(hm_project_args),
    HM_FIELD(hm_project_args, B), HM_FIELD(hm_project_args, T), HM_FIELD(hm_project_args, C), HM_FIELD(hm_project_args, W),
    HM_FIELD(hm_project_args, width), HM_FIELD(hm_project_args, nthreads), HM_FIELD(hm_project_args, parallel),
    HM_FIELD(hm_project_args, x), HM_FIELD(hm_project_args, pos), HM_FIELD(hm_project_args, conv_k),
    HM_FIELD(hm_project_args, conv_v), HM_FIELD(hm_project_args, w), HM_FIELD(hm_project_args, bias),
    HM_FIELD(hm_project_args, y), HM_FIELD(hm_project_args, out), HM_FIELD(hm_project_args, dout),
    HM_FIELD(hm_project_args, dx), HM_FIELD(hm_project_args, dw), HM_FIELD(hm_project_args, dbias),
    HM_FIELD(hm_project_args, dconv_k), HM_FIELD(hm_project_args, dconv_v),
    HM_SIZE(hm_ungate_args),
    HM_FIELD(hm_ungate_args, N), HM_FIELD(hm_ungate_args, H), HM_FIELD(hm_ungate_args, V), HM_FIELD(hm_ungate_args, nthreads),
    HM_FIELD(hm_ungate_args, parallel), HM_FIELD(hm_ungate_args, dy), HM_FIELD(hm_ungate_args, y), HM_FIELD(hm_ungate_args, g),
    HM_FIELD(hm_ungate_args, dx), HM_FIELD(hm_ungate_args, dg), HM_FIELD(hm_ungate_args, dots), HM_FIELD(hm_ungate_args, half),
    HM_SIZE(hm_layer_args),
    HM_FIELD(hm_layer_args, B), HM_FIELD(hm_layer_args, T), HM_FIELD(hm_layer_args, C), HM_FIELD(hm_layer_args, W),
    HM_FIELD(hm_layer_args, H), HM_FIELD(hm_layer_args, G), HM_FIELD(hm_layer_args, K), HM_FIELD(hm_layer_args, V),
    HM_FIELD(hm_layer_args, R1), HM_FIELD(hm_layer_args, R2), HM_FIELD(hm_layer_args, L), HM_FIELD(hm_layer_args, act),
    HM_FIELD(hm_layer_args, norm), HM_FIELD(hm_layer_args, shortcut1), HM_FIELD(hm_layer_args, shortcut2),
    HM_FIELD(hm_layer_args, eps), HM_FIELD(hm_layer_args, nthreads), HM_FIELD(hm_layer_args, parallel),
    HM_FIELD(hm_layer_args, parameter), HM_FIELD(hm_layer_args, x), HM_FIELD(hm_layer_args, kept),
    HM_FIELD(hm_layer_args, kept_size), HM_FIELD(hm_layer_args, y), HM_FIELD(hm_layer_args, dy), HM_FIELD(hm_layer_args, dx),
    HM_FIELD(hm_layer_args, gradient),
    HM_SIZE(hm_linear_entry),
    HM_FIELD(hm_linear_entry, x), HM_FIELD(hm_linear_entry, w), HM_FIELD(hm_linear_entry, bias), HM_FIELD(hm_linear_entry, y),
    HM_FIELD(hm_linear_entry, x_row), HM_FIELD(hm_linear_entry, in), HM_FIELD(hm_linear_entry, out),
    HM_SIZE(hm_linear_args),
    HM_FIELD(hm_linear_args, N), HM_FIELD(hm_linear_args, entries), HM_FIELD(hm_linear_args, nthreads),
    HM_FIELD(hm_linear_args, parallel), HM_FIELD(hm_linear_args, entry),
    HM_SIZE(hm_weights),
    HM_FIELD(hm_weights, w), HM_FIELD(hm_weights, bias),
    HM_SIZE(hm_step_args),
    HM_FIELD(hm_step_args, mix), HM_FIELD(hm_step_args, C), HM_FIELD(hm_step_args, W), HM_FIELD(hm_step_args, x),
    HM_FIELD(hm_step_args, x_row), HM_FIELD(hm_step_args, history), HM_FIELD(hm_step_args, history_b),
    HM_FIELD(hm_step_args, conv_k), HM_FIELD(hm_step_args, conv_v), HM_FIELD(hm_step_args, q), HM_FIELD(hm_step_args, k),
    HM_FIELD(hm_step_args, v), HM_FIELD(hm_step_args, gate_qk), HM_FIELD(hm_step_args, gate_vo),
    HM_FIELD(hm_step_args, control1), HM_FIELD(hm_step_args, control2), HM_FIELD(hm_step_args, out),
    HM_FIELD(hm_step_args, y),
    HM_SIZE(hm_scan_args),
    HM_FIELD(hm_scan_args, B), HM_FIELD(hm_scan_args, T), HM_FIELD(hm_scan_args, E), HM_FIELD(hm_scan_args, N),
    HM_FIELD(hm_scan_args, rows), HM_FIELD(hm_scan_args, group), HM_FIELD(hm_scan_args, nthreads),
    HM_FIELD(hm_scan_args, parallel), HM_FIELD(hm_scan_args, x), HM_FIELD(hm_scan_args, delta), HM_FIELD(hm_scan_args, A),
    HM_FIELD(hm_scan_args, in), HM_FIELD(hm_scan_args, out), HM_FIELD(hm_scan_args, begins), HM_FIELD(hm_scan_args, state),
    HM_FIELD(hm_scan_args, y), HM_FIELD(hm_scan_args, last), HM_FIELD(hm_scan_args, marks), HM_FIELD(hm_scan_args, dy),
    HM_FIELD(hm_scan_args, dlast), HM_FIELD(hm_scan_args, dx), HM_FIELD(hm_scan_args, ddelta), HM_FIELD(hm_scan_args, dA),
    HM_FIELD(hm_scan_args, dstate), HM_FIELD(hm_scan_args, din), HM_FIELD(hm_scan_args, dout),
};
#undef HM_SIZE
#undef HM_FIELD

}  // namespace
