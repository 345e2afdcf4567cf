"""The operator, the convolutions and the gates in compiled code for the CPU (kernel.cpp), float32, causal offset layout.

Letters as in ops/types.py.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor

from hypermlp.ops.build import library
from hypermlp.ops.registered import Inputs, register
from hypermlp.ops.types import Spec, dense_spans

I64, POINTER = ctypes.c_int64, ctypes.c_void_p

SCAN_ROWS, SCAN_GROUP = 16, 128  # tokens whose states are made again at once, channels whose gradients are summed at once

FAILURES = {1: "out of memory", 2: "arguments do not agree"}


class View(ctypes.Structure):
    """A tensor (batch, time, head, width) with a contiguous last axis; strides in floats."""

    _fields_ = (("data", POINTER), ("b", I64), ("t", I64), ("h", I64))


class Arguments(ctypes.Structure):
    """hm_args of kernel.cpp, field by field."""

    _fields_ = (
        *(
            (name, I64)
            for name in ("B", "T", "S", "H", "G", "K", "V", "R1", "R2", "L", "act", "norm", "shortcut1", "shortcut2")
        ),
        ("eps", ctypes.c_double),
        ("n_spans", I64),
        ("spans", POINTER),
        ("nthreads", I64),
        ("parallel", POINTER),
        *((name, View) for name in ("q", "k", "v", "s1", "s2")),
        *((name, POINTER) for name in ("A1", "B1", "diag1", "A2", "B2", "diag2")),
        ("o", View),
        ("rho", POINTER),
        *((name, View) for name in ("dout", "dq", "dk", "dv", "ds1", "ds2")),
        *((name, POINTER) for name in ("dA1", "dB1", "ddiag1", "dA2", "dB2", "ddiag2")),
    )


class ConvArguments(ctypes.Structure):
    """hm_conv_args of kernel.cpp."""

    _fields_ = (
        *((name, I64) for name in ("B", "T", "C", "W", "nthreads")),
        ("parallel", POINTER),
        ("x", View),
        *((name, POINTER) for name in ("wk", "wv", "pos", "history")),
        *((name, View) for name in ("yk", "yv", "dyk", "dyv", "dx")),
        *((name, POINTER) for name in ("dwk", "dwv")),
    )


class GateArguments(ctypes.Structure):
    """hm_gate_args of kernel.cpp."""

    _fields_ = (
        *((name, I64) for name in ("N", "C", "nthreads")),
        ("parallel", POINTER),
        *((name, POINTER) for name in ("x", "g", "y")),
        *((name, I64) for name in ("x_row", "g_row", "y_row")),
        *((name, POINTER) for name in ("dy", "dx", "dg")),
        *((name, I64) for name in ("dy_row", "dx_row", "dg_row")),
    )


class LinearEntry(ctypes.Structure):
    """hm_linear_entry of kernel.cpp."""

    _fields_ = (*((name, POINTER) for name in ("x", "w", "bias", "y")), *((name, I64) for name in ("x_row", "in_", "out")))


class LinearArguments(ctypes.Structure):
    """hm_linear_args of kernel.cpp."""

    _fields_ = (*((name, I64) for name in ("N", "entries", "nthreads")), ("parallel", POINTER), ("entry", POINTER))


class Weights(ctypes.Structure):
    """hm_weights of kernel.cpp."""

    _fields_ = (("w", POINTER), ("bias", POINTER))


class StepArguments(ctypes.Structure):
    """hm_step_args of kernel.cpp."""

    _fields_ = (
        ("mix", Arguments),
        ("C", I64),
        ("W", I64),
        ("x", POINTER),
        ("x_row", I64),
        ("history", POINTER),
        ("history_b", I64),
        ("conv_k", POINTER),
        ("conv_v", POINTER),
        *((name, Weights) for name in ("q", "k", "v", "gate_qk", "gate_vo", "control1", "control2", "out")),
        ("y", POINTER),
    )


class ScanArguments(ctypes.Structure):
    """hm_scan_args of kernel.cpp."""

    _fields_ = (
        *((name, I64) for name in ("B", "T", "E", "N", "rows", "group", "nthreads")),
        ("parallel", POINTER),
        *((name, POINTER) for name in ("x", "delta", "A", "in_", "out", "begins", "state", "y", "last", "marks")),
        *((name, POINTER) for name in ("dy", "dlast", "dx", "ddelta", "dA", "dstate", "din", "dout")),
    )


MIRRORED = (Arguments, ConvArguments, GateArguments, LinearArguments, LinearEntry, StepArguments, ScanArguments)


@functools.cache
def thread_pool() -> int | None:
    """Address of torch's own OpenMP entry point, since two pools of threads would fight; None: the kernel starts its own."""
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*")):
        try:
            return ctypes.cast(ctypes.CDLL(str(path)).GOMP_parallel, POINTER).value
        except (OSError, AttributeError):
            continue
    return None


@functools.cache
def entry_point(name: str) -> Callable[..., int]:
    """A function of the kernel; the structures on both sides are compared first."""
    handle = library().handle
    assert handle is not None, "chosen only where it loads"
    sizes = (I64 * len(MIRRORED))()
    handle.hm_sizes(sizes)
    assert list(sizes) == [ctypes.sizeof(structure) for structure in MIRRORED], "native.py and kernel.cpp disagree"
    return cast("Callable[..., int]", getattr(handle, name))


def call(name: str, arguments: ctypes.Structure) -> None:
    status = entry_point(name)(ctypes.byref(arguments))
    if status != 0:
        raise RuntimeError(f"{name} failed with status {status}: {FAILURES.get(status, 'unknown')}")


def view(x: Tensor | None) -> View:
    """x is (B T H V) or (B T C)."""
    if x is None:
        return View(None, 0, 0, 0)
    head = x.stride(2) if x.dim() == 4 else 0
    return View(x.data_ptr(), x.stride(0), x.stride(1), head)


def pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def single(x: Tensor) -> Tensor:
    """float32 with a contiguous last axis, as it is where it can be."""
    x = x.to(torch.float32)
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def arguments(inputs: Inputs, spec: Spec) -> tuple[Arguments, list[Tensor]]:
    """The kernel's arguments, and the tensors that must live while it runs."""
    q, k, v = (single(x) for x in inputs[:3])
    left1, right1, base1, left2, right2, base2 = (
        None if x is None else x.to(torch.float32).contiguous() for x in (*inputs[3:6], *inputs[7:10])
    )
    control1, control2 = (None if x is None else single(x) for x in (inputs.control1, inputs.control2))
    B, T, S, H = q.shape[0], q.shape[1], k.shape[1], v.shape[2]
    spans = dense_spans(B, T, S) if inputs.spans is None else inputs.spans
    spans = spans[spans[:, 2] > spans[:, 1]].contiguous()
    a = Arguments(B, T, S, H, q.shape[2], q.shape[3], v.shape[3])
    a.R1 = 0 if left1 is None else left1.shape[2]
    a.R2 = 0 if left2 is None else left2.shape[2]
    a.L, a.act, a.norm, a.eps = spec.block_size, int(spec.kind == "relu"), int(spec.norm != "none"), spec.eps
    a.n_spans, a.spans = len(spans), spans.data_ptr()
    a.nthreads, a.parallel = torch.get_num_threads(), thread_pool()
    a.q, a.k, a.v, a.s1, a.s2 = view(q), view(k), view(v), view(control1), view(control2)
    a.A1, a.B1, a.diag1 = pointer(left1), pointer(right1), pointer(base1)
    a.B2, a.A2, a.diag2 = pointer(left2), pointer(right2), pointer(base2)  # R2 is applied transposed
    kept = [q, k, v, spans, left1, right1, base1, left2, right2, base2, control1, control2]
    return a, [x for x in kept if x is not None]


def forward(inputs: Inputs, spec: Spec, chunk: int | None) -> tuple[Tensor, Tensor]:
    a, kept = arguments(inputs, spec)
    q, v = kept[0], kept[2]
    o = q.new_empty(q.shape[0], q.shape[1], v.shape[2], v.shape[3])
    rho = q.new_empty(o.shape[:3])
    a.o, a.rho = view(o), rho.data_ptr()
    call("hm_forward", a)
    return o.to(inputs.q.dtype), rho


def backward(d_o: Tensor, o: Tensor, rho: Tensor, inputs: Inputs, spec: Spec, chunk: int | None) -> list[Tensor | None]:
    a, kept = arguments(inputs, spec)
    d_o, o, rho = single(d_o), single(o), rho.contiguous()
    found = [None if x is None else x.new_empty(x.shape, dtype=torch.float32) for x in inputs[:11]]
    a.o, a.rho, a.dout = view(o), rho.data_ptr(), view(d_o)
    a.dq, a.dk, a.dv, a.ds1, a.ds2 = (view(found[i]) for i in (0, 1, 2, 6, 10))
    a.dA1, a.dB1, a.ddiag1 = (pointer(found[i]) for i in (3, 4, 5))
    a.dB2, a.dA2, a.ddiag2 = (pointer(found[i]) for i in (7, 8, 9))
    call("hm_backward", a)
    del kept
    return [None if x is None or g is None else g.to(x.dtype) for g, x in zip(found, inputs[:11], strict=True)]


mix = register("native", forward, backward)


def convs_forward(x: Tensor, wk: Tensor, wv: Tensor, position: Tensor | None, history: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both depthwise causal convolutions of x (B T C) in one pass; see ops.pointwise.convs."""
    x, wk, wv = single(x), wk.contiguous(), wv.contiguous()
    yk, yv = x.new_empty(x.shape), x.new_empty(x.shape)
    a, kept = conv_arguments(x, wk, wv, position, history)
    a.yk, a.yv = view(yk), view(yv)
    call("hm_conv_forward", a)
    del kept
    return yk, yv


def convs_backward(
    d_yk: Tensor, d_yv: Tensor, x: Tensor, wk: Tensor, wv: Tensor, position: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, wk and wv."""
    x, wk, wv, d_yk, d_yv = single(x), wk.contiguous(), wv.contiguous(), single(d_yk), single(d_yv)
    d_x, d_wk, d_wv = x.new_empty(x.shape), wk.new_empty(wk.shape), wv.new_empty(wv.shape)
    a, kept = conv_arguments(x, wk, wv, position, None)
    a.dyk, a.dyv, a.dx, a.dwk, a.dwv = view(d_yk), view(d_yv), view(d_x), d_wk.data_ptr(), d_wv.data_ptr()
    call("hm_conv_backward", a)
    del kept
    return d_x, d_wk, d_wv


def conv_arguments(
    x: Tensor, wk: Tensor, wv: Tensor, position: Tensor | None, history: Tensor | None
) -> tuple[ConvArguments, list[Tensor | None]]:
    position = None if position is None else position.expand(x.shape[:2]).contiguous()
    history = None if history is None else history.to(torch.float32).contiguous()
    a = ConvArguments(*x.shape, wk.shape[1], torch.get_num_threads(), thread_pool(), view(x))
    a.wk, a.wv, a.pos, a.history = wk.data_ptr(), wv.data_ptr(), pointer(position), pointer(history)
    return a, [position, history]


def gate_forward(x: Tensor | None, g: Tensor) -> Tensor:
    """x ⊙ σ(g), or σ(g), for x and g (B T C) whose rows may lie apart."""
    y = g.new_empty(g.shape)
    xs, gs, ys = None if x is None else rows(x), rows(g), rows(y)
    a = GateArguments(*gs.shape, torch.get_num_threads(), thread_pool())
    a.x, a.g, a.y, a.g_row, a.y_row = pointer(xs), gs.data_ptr(), ys.data_ptr(), gs.stride(0), ys.stride(0)
    a.x_row = 0 if xs is None else xs.stride(0)
    call("hm_gate_forward", a)
    return y


def gate_backward(d_y: Tensor, x: Tensor | None, g: Tensor, d_x: Tensor | None, d_g: Tensor) -> None:
    """Writes the gradients of x and g into d_x and d_g, whose rows may lie apart."""
    xs, gs, d_ys = None if x is None else rows(x), rows(g), rows(d_y)
    d_xs, d_gs = None if d_x is None else d_x.view(-1, d_x.shape[2]), d_g.view(-1, d_g.shape[2])
    a = GateArguments(*gs.shape, torch.get_num_threads(), thread_pool())
    a.x, a.g, a.dy, a.dx, a.dg = pointer(xs), gs.data_ptr(), d_ys.data_ptr(), pointer(d_xs), d_gs.data_ptr()
    a.g_row, a.dy_row, a.dg_row = gs.stride(0), d_ys.stride(0), d_gs.stride(0)
    a.x_row, a.dx_row = 0 if xs is None else xs.stride(0), 0 if d_xs is None else d_xs.stride(0)
    call("hm_gate_backward", a)


def linears(products: Sequence[tuple[Tensor, Tensor, Tensor | None]]) -> list[Tensor]:
    """x Wᵀ + b for each (x, W, b), all x with the same few rows (B T in)."""
    entries = (LinearEntry * len(products))()
    made, kept = [], []
    for entry, (x, weight, bias) in zip(entries, products, strict=True):
        xs, weight = rows(x), weight.contiguous()
        y = x.new_empty(*x.shape[:2], weight.shape[0])
        entry.x, entry.w, entry.bias, entry.y = xs.data_ptr(), weight.data_ptr(), pointer(bias), y.data_ptr()
        entry.x_row, entry.in_, entry.out = xs.stride(0), weight.shape[1], weight.shape[0]
        made.append(y)
        kept += [xs, weight]
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

    def tensors(self) -> Iterator[Tensor]:
        for group in self:
            yield from (t for t in group or () if isinstance(t, Tensor))


def step(x: Tensor, k: Tensor, v: Tensor, spans: Tensor, history: Tensor, p: StepParameters, spec: Spec) -> Tensor:
    """One token for each row, x (B 1 C), through a whole layer; its k and v are written to the last slot of each row's span."""
    y = x.new_empty(x.shape)
    a = StepArguments()
    m = a.mix
    m.B, m.T, m.S, m.H, m.G, m.K, m.V = x.shape[0], 1, k.shape[1], v.shape[2], k.shape[2], k.shape[3], v.shape[3]
    m.L, m.act, m.norm, m.eps = spec.block_size, int(spec.kind == "relu"), int(spec.norm != "none"), spec.eps
    m.n_spans, m.spans, m.nthreads, m.parallel = x.shape[0], spans.data_ptr(), torch.get_num_threads(), thread_pool()
    m.k, m.v = view(k), view(v)
    if p.routing is not None:
        m.A1, m.B1, m.diag1 = (pointer(t) for t in p.routing[:3])
        m.R1, m.shortcut1 = p.routing[0].shape[2], p.routing[3]
    if p.reading is not None:
        m.A2, m.B2, m.diag2 = (pointer(t) for t in p.reading[:3])
        m.R2, m.shortcut2 = p.reading[0].shape[2], p.reading[3]
    a.C, a.x, a.x_row, a.y = x.shape[2], x.data_ptr(), x.stride(0), y.data_ptr()
    if p.convs is not None:
        a.W, a.conv_k, a.conv_v = p.convs[0].shape[1], p.convs[0].data_ptr(), p.convs[1].data_ptr()
        a.history, a.history_b = history.data_ptr(), history.stride(0)
    for name in ("q", "k", "v", "gate_qk", "gate_vo", "control1", "control2", "out"):
        layer = getattr(p, name)
        if layer is not None:
            setattr(a, name, Weights(layer[0].data_ptr(), pointer(layer[1])))
    call("hm_step", a)
    return y


def rows(x: Tensor) -> Tensor:
    """x (B T C) as float32 rows (N C) a constant distance apart, with no copy where it can be."""
    return single(x).reshape(-1, x.shape[2])


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
        a.x, a.delta, a.A, a.in_, a.out, a.state, a.begins = (pointer(t) for t in self)
        return a


def scan_inputs(x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, begins: Tensor | None) -> ScanInputs:
    begins = None if begins is None else begins.expand(x.shape[:2]).to(torch.uint8).contiguous()
    x, delta, A, B, C, state = (t.contiguous() for t in (x, delta, A, B, C, state))
    return ScanInputs(x, delta, A, B, C, state, begins)


def scan_forward(inputs: ScanInputs, *, marks: bool) -> tuple[Tensor, Tensor, Tensor]:
    """y (B T E), the last state (B N E) and, for backward, the states before each block (B blocks N E)."""
    x, state = inputs.x, inputs.state
    y, last = x.new_empty(x.shape), state.new_empty(state.shape)
    blocks = -(-x.shape[1] // SCAN_ROWS) if marks else 0
    kept = state.new_empty(state.shape[0], blocks, *state.shape[1:])
    a = inputs.arguments()
    a.y, a.last, a.marks = y.data_ptr(), last.data_ptr(), kept.data_ptr() if marks else None
    call("hm_scan_forward", a)
    return y, last, kept


def scan_backward(d_y: Tensor, d_last: Tensor, inputs: ScanInputs, marks: Tensor) -> tuple[Tensor, ...]:
    """Gradients of x, delta, A, B, C and state."""
    x, delta, _, B, C, state, _ = inputs
    d_y, d_last = d_y.contiguous(), d_last.contiguous()
    groups = -(-x.shape[2] // SCAN_GROUP)
    d_x, d_delta, d_A, d_state = (torch.empty_like(t) for t in (x, delta, state, state))
    d_B, d_C = B.new_empty(groups, *B.shape), C.new_empty(groups, *C.shape)
    a = inputs.arguments()
    a.marks, a.dy, a.dlast = marks.data_ptr(), d_y.data_ptr(), d_last.data_ptr()
    a.dx, a.ddelta, a.dA, a.dstate, a.din, a.dout = (t.data_ptr() for t in (d_x, d_delta, d_A, d_state, d_B, d_C))
    call("hm_scan_backward", a)
    return d_x, d_delta, d_A.sum(0), d_B.sum(0), d_C.sum(0), d_state
