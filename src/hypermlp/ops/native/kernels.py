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

from hypermlp.ops.native.bindings import call, places, pointer, row_pointer, single, structure, view, whole
from hypermlp.ops.registered import Inputs, owned, register
from hypermlp.ops.types import Spec, dense_spans

SCAN_ROWS, SCAN_GROUP = 16, 128  # tokens whose states are recomputed together, channels whose gradients are summed together


class KernelCall(NamedTuple):
    """The kernel's arguments, and the tensors that they point into, which must stay alive while it runs."""

    arguments: ctypes.Structure
    inputs: Inputs

    @classmethod
    def make(cls, inputs: Inputs, spec: Spec) -> KernelCall:
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
        (B, T, G, K), (_, S, H, V) = t.q.shape, t.v.shape
        a = structure("hm_args", B, T, S, H, G, K, V, dtype=dtype)
        a.R1 = 0 if t.left1 is None else t.left1.shape[2]
        a.R2 = 0 if t.left2 is None else t.left2.shape[2]
        a.L, a.act, a.norm, a.eps = spec.block_size, int(spec.kind == "relu"), int(spec.norm != "none"), spec.eps
        assert t.spans is not None
        a.n_spans, a.spans = len(t.spans), pointer(t.spans, (len(t.spans), 5), torch.int64)
        laid = cls(a, t)
        laid.point(t, "", dtype, dtype)
        return laid

    def point(self, t: Inputs, prefix: str, dtype: torch.dtype, of_slots: torch.dtype) -> None:
        """Hand over the inputs, or with the prefix "d" their gradients, of which k and v may have another type."""
        a = self.arguments
        q, k, v, s1, s2 = (
            (a.B, a.T, a.G, a.K),
            (a.B, a.S, a.G, a.K),
            (a.B, a.S, a.H, a.V),
            (a.B, a.T, a.G, a.R1),
            (a.B, a.T, a.H, a.R2),
        )
        factors1, factors2 = (a.G, a.L, a.R1), (a.H, a.L, a.R2)
        handed = {
            "q": view(t.q, q, dtype),
            "k": view(t.k, k, of_slots),
            "v": view(t.v, v, of_slots),
            "s1": view(t.control1, s1, dtype),
            "s2": view(t.control2, s2, dtype),
            "A1": pointer(t.left1, factors1),
            "B1": pointer(t.right1, factors1),
            "diag1": pointer(t.base1, (a.G, a.L)),
            "B2": pointer(t.left2, factors2),  # R2 is applied transposed
            "A2": pointer(t.right2, factors2),
            "diag2": pointer(t.base2, (a.H, a.L)),
        }
        for name, value in handed.items():
            setattr(a, prefix + name, value)


# Which tensors the kernel takes with strides in all axes but the last, as float32 or bfloat16; others are contiguous float32.
STRIDED = tuple(name in ("q", "k", "v", "control1", "control2") for name in Inputs._fields[:-1])


def element_type(*tensors: Tensor | None) -> torch.dtype:
    """What the kernel reads these tensors as: bfloat16 if they are, else float32."""
    return torch.bfloat16 if all(t is None or t.dtype is torch.bfloat16 for t in tensors) else torch.float32


def forward(inputs: Inputs, spec: Spec, chunk: int | None) -> tuple[Tensor, Tensor]:
    a, t = KernelCall.make(inputs, spec)
    o = t.q.new_empty(*t.q.shape[:2], *t.v.shape[2:])
    rho = t.q.new_empty(o.shape[:3], dtype=torch.float32)
    a.o, a.rho = view(o, o.shape, o.dtype), pointer(rho, rho.shape)
    call("hm_forward", a)
    return o.to(inputs.q.dtype), rho


def backward(
    d_o: Tensor, o: Tensor | None, rho: Tensor, inputs: Inputs, spec: Spec, chunk: int | None, *, overwrite: bool = False
) -> list[Tensor | None]:
    """Gradients; o is not needed. overwrite: d_o may be."""
    inputs.refuse_rings()
    laid = KernelCall.make(inputs, spec)
    a, dtype = laid.arguments, laid.inputs.q.dtype
    shape = (a.B, a.T, a.H, a.V)
    d_o, rho = single(d_o, dtype), whole(rho)
    wanted = inputs.differentiable
    replaced = inputs.v if overwrite and dtype == torch.float32 and rows_are_slots(inputs) else None
    d = inputs.with_differentiable(
        None
        if x is None
        else d_o
        if x is replaced
        else x.new_empty(x.shape, dtype=dtype if name in ("q", "control1", "control2") else torch.float32)
        for name, x in zip(Inputs._fields, wanted, strict=False)
    )
    a.rho, a.dout = pointer(rho, shape[:3]), view(d_o, shape, dtype)
    laid.point(d, "d", dtype, torch.float32)
    call("hm_backward", a)
    return [None if x is None or g is None else g.to(x.dtype) for g, x in zip(d.differentiable, wanted, strict=True)]


def rows_are_slots(inputs: Inputs) -> bool:
    """Whether every row's own slot has its number, so that the gradient of v may take the place of that of o."""
    spans = inputs.spans
    same = inputs.q.shape[1] == inputs.v.shape[1]
    return same and (spans is None or torch.equal(spans[:, 1:3], spans[:, 3:]))


mix = register("native", forward, backward)
mix_owned = owned(forward, backward)


def convs_forward(x: Tensor, wk: Tensor, wv: Tensor, position: Tensor | None, history: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both depthwise causal convolutions of x (B T C) in one pass; see ops.pointwise.convs."""
    x, wk, wv, position, history = conv_inputs(x, wk, wv, position, history)
    yk, yv = x.new_empty(x.shape), x.new_empty(x.shape)
    a = conv_arguments(x, wk, wv, position, history)
    a.yk, a.yv = view(yk, x.shape, x.dtype), view(yv, x.shape, x.dtype)
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
    a.dyk, a.dyv, a.dx = (view(t, x.shape, x.dtype) for t in (d_yk, d_yv, d_x))
    a.dwk, a.dwv = pointer(d_wk, wk.shape), pointer(d_wv, wv.shape)
    call("hm_conv_backward", a)
    return d_x, d_wk.to(weight_type), d_wv.to(weight_type)


def conv_inputs(
    x: Tensor, wk: Tensor, wv: Tensor, position: Tensor | None, history: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """As the kernel takes them; a convolution of one tap has no history."""
    dtype = element_type(x)
    history = None if history is None or wk.shape[1] == 1 else whole(history, dtype)
    return single(x, dtype), whole(wk), whole(wv), places(position, x), history


def conv_arguments(x: Tensor, wk: Tensor, wv: Tensor, position: Tensor | None, history: Tensor | None) -> ctypes.Structure:
    (B, T, C), W = x.shape, wk.shape[1]
    a = structure("hm_conv_args", B, T, C, W, dtype=x.dtype)
    a.x, a.wk, a.wv = view(x, (B, T, C), x.dtype), pointer(wk, (C, W)), pointer(wv, (C, W))
    a.pos, a.history = pointer(position, (B, T), torch.int64), pointer(history, (B, W - 1, C), x.dtype)
    return a


def gate_forward(x: Tensor, g: Tensor) -> Tensor:
    """x ⊙ σ(g), for x and g (B T C) whose rows may lie apart."""
    y = g.new_empty(g.shape)
    run_gate("hm_gate_forward", x=rows(x, g.dtype), g=rows(g, g.dtype), y=y.view(-1, g.shape[2]))
    return y


def gate_backward(d_y: Tensor, x: Tensor, g: Tensor, *, overwrite: bool = False) -> tuple[Tensor, Tensor]:
    """Gradients of x, with `overwrite` in the place of d_y, and of g."""
    d_x, d_g = d_y if overwrite else x.new_empty(x.shape), g.new_empty(g.shape)
    inputs = {name: rows(t, g.dtype) for name, t in (("x", x), ("g", g), ("dy", d_y))}
    run_gate("hm_gate_backward", **inputs, dx=d_x.view(-1, g.shape[2]), dg=d_g.view(-1, g.shape[2]))
    return d_x, d_g


def ungate(d_y: Tensor, y: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of o, in the place of d_y, and of g, for y = o ⊙ σ(g) (B T C)."""
    d_g, d = g.new_empty(g.shape), d_y.view(-1, g.shape[2])
    run_gate("hm_ungate", y=rows(y, g.dtype), g=rows(g, g.dtype), dy=d, dx=d, dg=d_g.view(-1, g.shape[2]))
    return d_y, d_g


def run_gate(name: str, **tensors: Tensor) -> None:
    """Call a kernel of gates with rows (N C), by their names in hm_gate_args."""
    shape, dtype = tensors["g"].shape, tensors["g"].dtype
    a = structure("hm_gate_args", *shape, dtype=dtype)
    for field, t in tensors.items():
        address, apart = row_pointer(t, shape, dtype)
        setattr(a, field, address)
        setattr(a, f"{field}_row", apart)
    call(name, a)


def gates_forward(y: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """q ⊙ σ(m1), σ(s1) and σ(s2) of y (B T C) = [q | m1 | s1 | s2]."""
    q, m1, s1, s2 = columns(y, sizes)
    made = [y.new_empty(*y.shape[:2], part.shape[1]) for part in (q, s1, s2)]
    for given, to in zip(({"x": q, "g": m1}, {"g": s1}, {"g": s2}), made, strict=True):
        run_gate("hm_gate_forward", **given, y=to.flatten(0, 1))
    return made[0], made[1], made[2]


def gates_backward(d_q: Tensor, d_s1: Tensor, d_s2: Tensor, y: Tensor, sizes: Sequence[int]) -> Tensor:
    """The gradient of y, in one piece."""
    d_y = y.new_empty(y.shape)
    (q, m1, s1, s2), (to_q, to_m1, to_s1, to_s2) = columns(y, sizes), columns(d_y, sizes)
    run_gate("hm_gate_backward", x=q, g=m1, dy=rows(d_q, y.dtype), dx=to_q, dg=to_m1)
    for g, d, to in ((s1, d_s1, to_s1), (s2, d_s2, to_s2)):
        run_gate("hm_gate_backward", g=g, dy=rows(d, y.dtype), dg=to)
    return d_y


def columns(x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """The rows (N C) of x, cut to columns of these widths."""
    if x.shape[2] != sum(sizes):
        raise ValueError(f"gates and what they gate have the widths {list(sizes)} here, and not {x.shape[2]} together")
    return rows(x, x.dtype).split(list(sizes), dim=1)


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

    def arguments(self) -> ctypes.Structure:
        (B, T, E), N = self.x.shape, self.A.shape[0]
        a = structure("hm_scan_args", B, T, E, N, SCAN_ROWS, SCAN_GROUP)
        a.x, a.delta, a.A = pointer(self.x, (B, T, E)), pointer(self.delta, (B, T, E)), pointer(self.A, (N, E))
        a.input, a.output, a.state = pointer(self.B, (B, T, N)), pointer(self.C, (B, T, N)), pointer(self.state, (B, N, E))
        a.begins = pointer(self.begins, (B, T), torch.uint8)
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
    a.y, a.last, a.marks = pointer(y, x.shape), pointer(last, state.shape), pointer(kept, kept.shape) if marks else None
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
    blocks = -(-x.shape[1] // SCAN_ROWS)
    a.marks = pointer(marks, (state.shape[0], blocks, *state.shape[1:]))
    a.dy, a.dlast = pointer(d_y, x.shape), pointer(d_last, state.shape)
    made = (d_x, d_delta, d_A, d_state, d_B, d_C)
    a.dx, a.ddelta, a.dA, a.dstate, a.dinput, a.doutput = (pointer(t, t.shape) for t in made)
    call("hm_scan_backward", a)
    return d_x, d_delta, d_A.sum(0), d_B.sum(0), d_C.sum(0), d_state
