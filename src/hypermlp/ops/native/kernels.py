"""The operator, the convolutions and the gates in compiled code for the CPU (kernel.cpp), causal offset layout.

Tensors are float32 or bfloat16, parameters of the operator and of the convolutions float32.

Letters as in ops/types.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hypermlp.ops.native.bindings import (
    Arguments,
    ConvArguments,
    GateArguments,
    GatesArguments,
    LinearArguments,
    LinearEntry,
    ScanArguments,
    StepArguments,
    UngateArguments,
    Weights,
    call,
    pointer,
    row_pointer,
    single,
    thread_pool,
    view,
    whole,
)
from hypermlp.ops.registered import Inputs, linked, register
from hypermlp.ops.types import Spec, dense_spans

SCAN_ROWS, SCAN_GROUP = 16, 128  # tokens whose states are recomputed together, channels whose gradients are summed together


class Passed(NamedTuple):
    """The kernel's arguments, and the tensors that they point into, which must stay alive while it runs."""

    arguments: Arguments
    inputs: Inputs

    @classmethod
    def make(cls, inputs: Inputs, spec: Spec) -> Passed:
        if inputs.spans is None:
            spans = dense_spans(inputs.q.shape[0], inputs.q.shape[1], inputs.k.shape[1])
        else:
            spans = inputs.spans.to("cpu", torch.int64)
            spans = spans[spans[:, 2] > spans[:, 1]].contiguous()
        dtype = element_type(inputs.q, inputs.k, inputs.v, inputs.control1, inputs.control2)
        laid_out = (
            None if x is None else single(x, dtype) if strided else whole(x)
            for strided, x in zip(STRIDED, inputs.differentiable, strict=True)
        )
        t = Inputs._make((*laid_out, spans))
        a = Arguments(t.q.shape[0], t.q.shape[1], t.k.shape[1], t.v.shape[2], t.q.shape[2], t.q.shape[3], t.v.shape[3])
        a.R1 = 0 if t.left1 is None else t.left1.shape[2]
        a.R2 = 0 if t.left2 is None else t.left2.shape[2]
        a.L, a.act, a.norm, a.eps = spec.block_size, int(spec.kind == "relu"), int(spec.norm != "none"), spec.eps
        assert t.spans is not None
        a.n_spans, a.spans = len(t.spans), pointer(t.spans, torch.int64)
        a.nthreads, a.parallel = torch.get_num_threads(), thread_pool()
        a.q, a.k, a.v, a.s1, a.s2 = (view(x, dtype) for x in (t.q, t.k, t.v, t.control1, t.control2))
        a.half = dtype is torch.bfloat16
        a.A1, a.B1, a.diag1 = pointer(t.left1), pointer(t.right1), pointer(t.base1)
        a.B2, a.A2, a.diag2 = pointer(t.left2), pointer(t.right2), pointer(t.base2)  # R2 is applied transposed
        return cls(a, t)


# Which tensors the kernel takes with strides in all axes but the last, as float32 or bfloat16; others are contiguous float32.
STRIDED = tuple(name in ("q", "k", "v", "control1", "control2") for name in Inputs._fields[:-1])


def element_type(*tensors: Tensor | None) -> torch.dtype:
    """What the kernel reads these tensors as: bfloat16 if they are, else float32."""
    return torch.bfloat16 if all(t is None or t.dtype is torch.bfloat16 for t in tensors) else torch.float32


def forward(inputs: Inputs, spec: Spec, chunk: int | None) -> tuple[Tensor, Tensor]:
    a, t = Passed.make(inputs, spec)
    o = t.q.new_empty(*t.q.shape[:2], *t.v.shape[2:])
    rho = t.q.new_empty(o.shape[:3], dtype=torch.float32)
    a.o, a.rho = view(o, o.dtype), pointer(rho)
    call("hm_forward", a)
    return o.to(inputs.q.dtype), rho


def backward(
    d_o: Tensor, o: Tensor | None, rho: Tensor, inputs: Inputs, spec: Spec, chunk: int | None, *, dots: Tensor | None = None
) -> list[Tensor | None]:
    """Gradients. Of o only d_o·o (B T H) is needed: dots stands for it where o was not kept; d_o may then be overwritten."""
    a, kept = Passed.make(inputs, spec)
    dtype = kept.q.dtype
    d_o, o = single(d_o, dtype), None if o is None else single(o, dtype)
    rho, dots = whole(rho), None if dots is None else whole(dots)
    wanted = inputs.differentiable
    replaced = inputs.v if dots is not None and dtype == torch.float32 and rows_are_slots(inputs) else None
    d = inputs.with_differentiable(
        None
        if x is None
        else d_o
        if x is replaced
        else x.new_empty(x.shape, dtype=dtype if name in ("q", "control1", "control2") else torch.float32)
        for name, x in zip(Inputs._fields, wanted, strict=False)
    )
    a.o, a.rho, a.dout, a.dots = view(o, dtype), pointer(rho), view(d_o, dtype), pointer(dots)
    a.dq, a.dk, a.dv, a.ds1, a.ds2 = view(d.q, dtype), view(d.k), view(d.v), view(d.control1, dtype), view(d.control2, dtype)
    a.dA1, a.dB1, a.ddiag1 = pointer(d.left1), pointer(d.right1), pointer(d.base1)
    a.dB2, a.dA2, a.ddiag2 = pointer(d.left2), pointer(d.right2), pointer(d.base2)
    call("hm_backward", a)
    return [None if x is None or g is None else g.to(x.dtype) for g, x in zip(d.differentiable, wanted, strict=True)]


def rows_are_slots(inputs: Inputs) -> bool:
    """Whether every row's own slot has its number, so that the gradient of v may take the place of that of o."""
    spans = inputs.spans
    same = inputs.q.shape[1] == inputs.v.shape[1]
    return same and (spans is None or torch.equal(spans[:, 1:3], spans[:, 3:]))


mix = register("native", forward, backward)
mix_linked = linked(forward, backward)


def convs_forward(x: Tensor, wk: Tensor, wv: Tensor, position: Tensor | None, history: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both depthwise causal convolutions of x (B T C) in one pass; see ops.pointwise.convs."""
    x, wk, wv, position, history = conv_inputs(x, wk, wv, position, history)
    yk, yv = x.new_empty(x.shape), x.new_empty(x.shape)
    a = conv_arguments(x, wk, wv, position, history)
    a.yk, a.yv = view(yk, x.dtype), view(yv, x.dtype)
    call("hm_conv_forward", a)
    return yk, yv


def convs_backward(
    d_yk: Tensor, d_yv: Tensor, x: Tensor, wk: Tensor, wv: Tensor, position: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, wk and wv."""
    weight_type = wk.dtype
    x, wk, wv, position, _ = conv_inputs(x, wk, wv, position, None)
    d_yk, d_yv = single(d_yk, x.dtype), single(d_yv, x.dtype)
    d_x, d_wk, d_wv = x.new_empty(x.shape), wk.new_empty(wk.shape), wv.new_empty(wv.shape)
    a = conv_arguments(x, wk, wv, position, None)
    a.dyk, a.dyv, a.dx = (view(t, x.dtype) for t in (d_yk, d_yv, d_x))
    a.dwk, a.dwv = pointer(d_wk), pointer(d_wv)
    call("hm_conv_backward", a)
    return d_x, d_wk.to(weight_type), d_wv.to(weight_type)


def conv_inputs(
    x: Tensor, wk: Tensor, wv: Tensor, position: Tensor | None, history: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """As the kernel takes them; a convolution of one tap has no history."""
    position = None if position is None else position.expand(x.shape[:2]).to(torch.int64).contiguous()
    dtype = element_type(x)
    history = None if history is None or wk.shape[1] == 1 else whole(history, dtype)
    return single(x, dtype), whole(wk), whole(wv), position, history


def conv_arguments(x: Tensor, wk: Tensor, wv: Tensor, position: Tensor | None, history: Tensor | None) -> ConvArguments:
    a = ConvArguments(*x.shape, wk.shape[1], torch.get_num_threads(), thread_pool(), view(x, x.dtype))
    a.wk, a.wv, a.pos, a.history = pointer(wk), pointer(wv), pointer(position, torch.int64), pointer(history, x.dtype)
    a.half = x.dtype is torch.bfloat16
    return a


def gate_forward(x: Tensor | None, g: Tensor) -> Tensor:
    """x ⊙ σ(g), or σ(g), for x and g (B T C) whose rows may lie apart."""
    y, dtype = g.new_empty(g.shape), g.dtype
    xs, gs, ys = None if x is None else rows(x, dtype), rows(g, dtype), rows(y, dtype)
    a = GateArguments(*gs.shape, torch.get_num_threads(), thread_pool())
    (a.x, a.x_row), (a.g, a.g_row), (a.y, a.y_row) = (row_pointer(t, dtype) for t in (xs, gs, ys))
    a.half = dtype is torch.bfloat16
    call("hm_gate_forward", a)
    return y


def gate_backward(d_y: Tensor, x: Tensor | None, g: Tensor, d_x: Tensor | None, d_g: Tensor) -> None:
    """Writes the gradients of x and g into d_x and d_g, whose rows may lie apart."""
    dtype = g.dtype
    xs, gs, d_ys = None if x is None else rows(x, dtype), rows(g, dtype), rows(d_y, dtype)
    d_xs, d_gs = None if d_x is None else d_x.view(-1, d_x.shape[2]), d_g.view(-1, d_g.shape[2])
    a = GateArguments(*gs.shape, torch.get_num_threads(), thread_pool())
    (a.x, a.x_row), (a.g, a.g_row), (a.dy, a.dy_row) = (row_pointer(t, dtype) for t in (xs, gs, d_ys))
    (a.dx, a.dx_row), (a.dg, a.dg_row) = row_pointer(d_xs, dtype), row_pointer(d_gs, dtype)
    a.half = dtype is torch.bfloat16
    call("hm_gate_backward", a)


def gates_forward(y: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """q ⊙ σ(m1), σ(s1) and σ(s2) of y (B T C) = [q | m1 | s1 | s2]."""
    (Q, _, S1, S2), dtype = sizes, y.dtype
    y = whole(y, dtype)
    q, s1, s2 = (y.new_empty(*y.shape[:2], width) for width in (Q, S1, S2))
    a = GatesArguments(y.shape[0] * y.shape[1], Q, S1, S2, torch.get_num_threads(), thread_pool(), pointer(y, dtype))
    a.q, a.s1, a.s2 = (pointer(t, dtype) for t in (q, s1, s2))
    a.half = dtype is torch.bfloat16
    call("hm_gates_forward", a)
    return q, s1, s2


def gates_backward(d_q: Tensor, d_s1: Tensor, d_s2: Tensor, y: Tensor, sizes: Sequence[int], d_y: Tensor) -> Tensor:
    """Writes the gradient of y into d_y; returns its sum over all rows."""
    (Q, _, S1, S2), dtype = sizes, y.dtype
    y, d_q, d_s1, d_s2 = (whole(t, dtype) for t in (y, d_q, d_s1, d_s2))
    total = y.new_empty(y.shape[2], dtype=torch.float32)
    a = GatesArguments(y.shape[0] * y.shape[1], Q, S1, S2, torch.get_num_threads(), thread_pool(), pointer(y, dtype))
    a.dq, a.ds1, a.ds2, a.dy = (pointer(t, dtype) for t in (d_q, d_s1, d_s2, d_y))
    a.sum, a.half = pointer(total), dtype is torch.bfloat16
    call("hm_gates_backward", a)
    return total


def ungate(d_y: Tensor, y: Tensor, g: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of o, in the place of d_y, and of g, for y = o ⊙ σ(g) (B T H*V), and d_o·o (B T H)."""
    dtype = g.dtype
    y, g = whole(y, dtype), whole(g, dtype)
    d_g, dots = g.new_empty(g.shape), g.new_empty(*g.shape[:2], heads, dtype=torch.float32)
    a = UngateArguments(g.shape[0] * g.shape[1], heads, g.shape[2] // heads, torch.get_num_threads(), thread_pool())
    a.dy, a.y, a.g, a.dx, a.dg = (pointer(t, dtype) for t in (d_y, y, g, d_y, d_g))
    a.dots, a.half = pointer(dots), dtype is torch.bfloat16
    call("hm_ungate", a)
    return d_y, d_g, dots


def linears(products: Sequence[tuple[Tensor, Tensor, Tensor | None]]) -> list[Tensor]:
    """x Wᵀ + b for each (x, W, b), all x with the same few rows (B T in)."""
    entries = (LinearEntry * len(products))()
    made, kept = [], []
    for entry, (x, weight, bias) in zip(entries, products, strict=True):
        xs, weight, bias = rows(x), whole(weight), None if bias is None else whole(bias)
        y = x.new_empty(*x.shape[:2], weight.shape[0])
        entry.x, entry.x_row = row_pointer(xs)
        entry.w, entry.bias, entry.y = pointer(weight), pointer(bias), pointer(y)
        entry.in_, entry.out = weight.shape[1], weight.shape[0]
        made.append(y)
        kept += [xs, weight, bias]
    count = products[0][0].shape[0] * products[0][0].shape[1]
    a = LinearArguments(count, len(products), torch.get_num_threads(), thread_pool(), ctypes.addressof(entries))
    call("hm_linear", a)
    del kept
    return made


class StepParameters(NamedTuple):
    """A layer's parameters as hm_step takes them: linear layers as (weight, bias), None where there is none."""

    q: tuple[Tensor, Tensor | None]
    k: tuple[Tensor, Tensor | None]
    v: tuple[Tensor, Tensor | None]
    gate_qk: tuple[Tensor, Tensor | None] | None
    gate_vo: tuple[Tensor, Tensor | None] | None
    control1: tuple[Tensor, Tensor | None] | None
    control2: tuple[Tensor, Tensor | None] | None
    out: tuple[Tensor, Tensor | None]
    convs: tuple[Tensor, Tensor] | None
    routing: tuple[Tensor, Tensor, Tensor | None, bool] | None  # A, B, diag, shortcut
    reading: tuple[Tensor, Tensor, Tensor | None, bool] | None

    def arguments(self) -> StepArguments | None:
        """The layer's part of a step; None where a parameter is not what the kernel reads."""
        a = StepArguments()
        m = a.mix
        try:
            if self.routing is not None:
                m.A1, m.B1, m.diag1 = (pointer(t) for t in self.routing[:3])
                m.R1, m.shortcut1 = self.routing[0].shape[2], self.routing[3]
            if self.reading is not None:
                m.A2, m.B2, m.diag2 = (pointer(t) for t in self.reading[:3])
                m.R2, m.shortcut2 = self.reading[0].shape[2], self.reading[3]
            if self.convs is not None:
                a.W, a.conv_k, a.conv_v = self.convs[0].shape[1], pointer(self.convs[0]), pointer(self.convs[1])
            for name, layer in zip(("q", "k", "v", "gate_qk", "gate_vo", "control1", "control2", "out"), self, strict=False):
                if layer is not None:
                    setattr(a, name, Weights(pointer(layer[0]), pointer(layer[1])))
        except ValueError:
            return None
        return a


def step(x: Tensor, k: Tensor, v: Tensor, spans: Tensor, history: Tensor, a: StepArguments, spec: Spec) -> Tensor:
    """One token for each row, x (B 1 C), through a whole layer; its k and v are written to the last slot of each row's span.

    a: from StepParameters.arguments.
    """
    y = x.new_empty(x.shape)
    m = a.mix
    m.B, m.T, m.S, m.H, m.G, m.K, m.V = x.shape[0], 1, k.shape[1], v.shape[2], k.shape[2], k.shape[3], v.shape[3]
    m.L, m.act, m.norm, m.eps = spec.block_size, int(spec.kind == "relu"), int(spec.norm != "none"), spec.eps
    m.n_spans, m.spans = x.shape[0], pointer(spans, torch.int64)
    m.nthreads, m.parallel = torch.get_num_threads(), thread_pool()
    m.k, m.v = view(k), view(v)
    a.C, a.y = x.shape[2], pointer(y)
    a.x, a.x_row = row_pointer(x[:, 0])
    if a.W:
        a.history, a.history_b = row_pointer(history.flatten(1))
    call("hm_step", a)
    return y


def rows(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """x (B T C) as rows (N C) of that type, a constant distance apart; copied only if they are not."""
    return single(x, dtype).reshape(-1, x.shape[2])


class ScanInputs(NamedTuple):
    """What the selective scan takes, contiguous float32."""

    x: Tensor  # B T E
    delta: Tensor  # B T E
    A: Tensor  # N E
    B: Tensor  # B T N
    C: Tensor  # B T N
    state: Tensor  # B N E
    begins: Tensor | None  # B T

    def arguments(self) -> ScanArguments:
        a = ScanArguments(*self.x.shape, self.A.shape[0], SCAN_ROWS, SCAN_GROUP, torch.get_num_threads(), thread_pool())
        a.x, a.delta, a.A = pointer(self.x), pointer(self.delta), pointer(self.A)
        a.in_, a.out, a.state, a.begins = (
            pointer(self.B),
            pointer(self.C),
            pointer(self.state),
            pointer(self.begins, torch.uint8),
        )
        return a


def scan_inputs(x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, begins: Tensor | None) -> ScanInputs:
    begins = None if begins is None else begins.expand(x.shape[:2]).to(torch.uint8).contiguous()
    x, delta, A, B, C, state = (whole(t) for t in (x, delta, A, B, C, state))
    return ScanInputs(x, delta, A, B, C, state, begins)


def scan_forward(inputs: ScanInputs, *, marks: bool) -> tuple[Tensor, Tensor, Tensor]:
    """y (B T E), the last state (B N E) and, for backward, the states before each block (B blocks N E)."""
    x, state = inputs.x, inputs.state
    y, last = x.new_empty(x.shape), state.new_empty(state.shape)
    blocks = -(-x.shape[1] // SCAN_ROWS) if marks else 0
    kept = state.new_empty(state.shape[0], blocks, *state.shape[1:])
    a = inputs.arguments()
    a.y, a.last, a.marks = pointer(y), pointer(last), pointer(kept) if marks else None
    call("hm_scan_forward", a)
    return y, last, kept


def scan_backward(d_y: Tensor, d_last: Tensor, inputs: ScanInputs, marks: Tensor) -> tuple[Tensor, ...]:
    """Gradients of x, delta, A, B, C and state."""
    x, delta, _, B, C, state, _ = inputs
    d_y, d_last, marks = whole(d_y), whole(d_last), whole(marks)
    groups = -(-x.shape[2] // SCAN_GROUP)
    d_x, d_delta, d_A, d_state = (torch.empty_like(t) for t in (x, delta, state, state))
    d_B, d_C = B.new_empty(groups, *B.shape), C.new_empty(groups, *C.shape)
    a = inputs.arguments()
    a.marks, a.dy, a.dlast = pointer(marks), pointer(d_y), pointer(d_last)
    a.dx, a.ddelta, a.dA, a.dstate, a.din, a.dout = map(pointer, (d_x, d_delta, d_A, d_state, d_B, d_C))
    call("hm_scan_backward", a)
    return d_x, d_delta, d_A.sum(0), d_B.sum(0), d_C.sum(0), d_state
