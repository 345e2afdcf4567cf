"""The border between Python and the compiled kernel: its structures, its entry points, and the addresses it is given.

Every address comes from `pointer`, `view` or `row_pointer`, which look at the tensor itself; a tensor that is not what the
kernel would read raises an error instead.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from hypermlp.ops.native.build import library
from hypermlp.ops.registered import ORDINARY, traced

I64, POINTER = ctypes.c_int64, ctypes.c_void_p

FAILURES = {1: "out of memory", 2: "arguments do not agree"}


class View(ctypes.Structure):
    """A tensor (batch, time, head, width) with a contiguous last axis; strides in elements."""

    _fields_ = (("data", POINTER), ("b", I64), ("t", I64), ("h", I64))


class Arguments(ctypes.Structure):
    """hm_args of arguments.h, field by field."""

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
        *((name, POINTER) for name in ("dA1", "dB1", "ddiag1", "dA2", "dB2", "ddiag2", "dots")),
        ("half", I64),
    )


class ConvArguments(ctypes.Structure):
    """hm_conv_args of arguments.h."""

    _fields_ = (
        *((name, I64) for name in ("B", "T", "C", "W", "nthreads")),
        ("parallel", POINTER),
        ("x", View),
        *((name, POINTER) for name in ("wk", "wv", "pos", "history")),
        *((name, View) for name in ("yk", "yv", "dyk", "dyv", "dx")),
        *((name, POINTER) for name in ("dwk", "dwv")),
        ("half", I64),
    )


class GateArguments(ctypes.Structure):
    """hm_gate_args of arguments.h."""

    _fields_ = (
        *((name, I64) for name in ("N", "C", "nthreads")),
        ("parallel", POINTER),
        *((name, POINTER) for name in ("x", "g", "y")),
        *((name, I64) for name in ("x_row", "g_row", "y_row")),
        *((name, POINTER) for name in ("dy", "dx", "dg")),
        *((name, I64) for name in ("dy_row", "dx_row", "dg_row", "half")),
    )


class GatesArguments(ctypes.Structure):
    """hm_gates_args of arguments.h."""

    _fields_ = (
        *((name, I64) for name in ("N", "Q", "S1", "S2", "nthreads")),
        *((name, POINTER) for name in ("parallel", "y", "q", "s1", "s2", "dq", "ds1", "ds2", "dy", "sum")),
        ("half", I64),
    )


PROJECTIONS = 7  # q, its gate, s1, s2, k, v, the readout's gate
POINTERS = POINTER * PROJECTIONS


class ProjectArguments(ctypes.Structure):
    """hm_project_args of arguments.h."""

    _fields_ = (
        *((name, I64) for name in ("B", "T", "C", "W")),
        ("width", I64 * PROJECTIONS),
        ("nthreads", I64),
        *((name, POINTER) for name in ("parallel", "x", "pos", "conv_k", "conv_v")),
        ("w", POINTERS),
        ("bias", POINTERS),
        ("y", POINTER),
        ("out", POINTERS),
        ("dout", POINTERS),
        ("dx", POINTER),
        ("dw", POINTERS),
        ("dbias", POINTERS),
        *((name, POINTER) for name in ("dconv_k", "dconv_v")),
    )


class UngateArguments(ctypes.Structure):
    """hm_ungate_args of arguments.h."""

    _fields_ = (
        *((name, I64) for name in ("N", "H", "V", "nthreads")),
        *((name, POINTER) for name in ("parallel", "dy", "y", "g", "dx", "dg", "dots")),
        ("half", I64),
    )


PARAMETERS = 2 * PROJECTIONS + 10
ADDRESSES = POINTER * PARAMETERS


class LayerArguments(ctypes.Structure):
    """hm_layer_args of arguments.h."""

    _fields_ = (
        *((name, I64) for name in ("B", "T", "C", "W", "H", "G", "K", "V", "R1", "R2", "L")),
        *((name, I64) for name in ("act", "norm", "shortcut1", "shortcut2")),
        ("eps", ctypes.c_double),
        ("nthreads", I64),
        ("parallel", POINTER),
        ("parameter", ADDRESSES),
        *((name, POINTER) for name in ("x", "kept")),
        ("kept_size", I64),
        *((name, POINTER) for name in ("y", "dy", "dx")),
        ("gradient", ADDRESSES),
    )


class LinearEntry(ctypes.Structure):
    """hm_linear_entry of arguments.h."""

    _fields_ = (*((name, POINTER) for name in ("x", "w", "bias", "y")), *((name, I64) for name in ("x_row", "in_", "out")))


class LinearArguments(ctypes.Structure):
    """hm_linear_args of arguments.h."""

    _fields_ = (*((name, I64) for name in ("N", "entries", "nthreads")), ("parallel", POINTER), ("entry", POINTER))


class Weights(ctypes.Structure):
    """hm_weights of arguments.h."""

    _fields_ = (("w", POINTER), ("bias", POINTER))


class StepArguments(ctypes.Structure):
    """hm_step_args of arguments.h."""

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
    """hm_scan_args of arguments.h."""

    _fields_ = (
        *((name, I64) for name in ("B", "T", "E", "N", "rows", "group", "nthreads")),
        ("parallel", POINTER),
        *((name, POINTER) for name in ("x", "delta", "A", "in_", "out", "begins", "state", "y", "last", "marks")),
        *((name, POINTER) for name in ("dy", "dlast", "dx", "ddelta", "dA", "dstate", "din", "dout")),
    )


class Field(ctypes.Structure):
    """hm_field of layout.h."""

    _fields_ = (("name", ctypes.c_char_p), ("offset", I64), ("size", I64))


MIRRORED = {
    "hm_view": View,
    "hm_args": Arguments,
    "hm_conv_args": ConvArguments,
    "hm_gate_args": GateArguments,
    "hm_gates_args": GatesArguments,
    "hm_project_args": ProjectArguments,
    "hm_ungate_args": UngateArguments,
    "hm_layer_args": LayerArguments,
    "hm_linear_entry": LinearEntry,
    "hm_linear_args": LinearArguments,
    "hm_weights": Weights,
    "hm_step_args": StepArguments,
    "hm_scan_args": ScanArguments,
}


def check_layout(handle: ctypes.CDLL) -> None:
    """Compare every field's offset and size with those of the compiled structures; a difference would be read as numbers."""
    compiled = ctypes.POINTER(Field)()
    handle.hm_layout.restype = I64
    count = handle.hm_layout(ctypes.byref(compiled))
    theirs = {compiled[i].name.decode(): (compiled[i].offset, compiled[i].size) for i in range(count)}
    ours = {}
    for name, structure in MIRRORED.items():
        ours[name] = (0, ctypes.sizeof(structure))
        for field in (entry[0] for entry in structure._fields_):
            place = getattr(structure, field)
            ours[f"{name}.{field.removesuffix('_')}"] = (place.offset, place.size)
    wrong = sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))
    if wrong:
        raise RuntimeError(f"bindings.py and arguments.h disagree about {', '.join(wrong)}")


@functools.cache
def thread_pool() -> int | None:
    """Address of torch's own OpenMP entry point, since two thread pools would compete; None: the kernel starts its own."""
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
    check_layout(handle)
    return cast("Callable[..., int]", getattr(handle, name))


def call(name: str, arguments: ctypes.Structure) -> None:
    if torch.autograd.profiler._is_profiler_enabled:  # else nobody could tell the kernels of one node apart
        with torch.profiler.record_function(f"hypermlp::{name}"):
            status = entry_point(name)(ctypes.byref(arguments))
    else:
        status = entry_point(name)(ctypes.byref(arguments))
    if status != 0:
        raise RuntimeError(f"{name} failed with status {status}: {FAILURES.get(status, 'unknown')}")


def is_plain(*tensors: Tensor | None, half: bool = False) -> bool:
    """Whether the kernel may read these tensors' numbers where they lie: float32 in the CPU's memory, no subclass.

    half: bfloat16 will do as well, if it is all of them.
    """
    present = [t for t in tensors if t is not None]
    dtype = torch.bfloat16 if half and present and present[0].dtype == torch.bfloat16 else torch.float32
    if any(t.dtype != dtype or t.device.type != "cpu" for t in present):
        return False
    return traced() or not any(type(t) not in ORDINARY or t.is_neg() for t in present)


def check_border(x: Tensor, dtype: torch.dtype, dense: bool) -> int:
    """The tensor's address; raises where the kernel would read something else than its numbers."""
    address = x.data_ptr() if type(x) in ORDINARY and x.is_cpu and x.layout is torch.strided else 0
    if x.dtype is not dtype or not dense or x.is_neg() or (address == 0 and x.numel() > 0):
        raise ValueError(
            f"the native kernel takes {dtype} tensors in the CPU's memory, contiguous where it counts on it, and not "
            f"{type(x).__name__} {tuple(x.shape)} of {x.dtype} on {x.device} with strides {x.stride()}; "
            'this is a defect of hypermlp, and impl="dense" avoids it'
        )
    return address


def pointer(x: Tensor | None, dtype: torch.dtype = torch.float32) -> int | None:
    """Address of a contiguous tensor, or none."""
    return None if x is None else check_border(x, dtype, x.is_contiguous())


def view(x: Tensor | None, dtype: torch.dtype = torch.float32) -> View:
    """x (B T H V) or (B T C) whose last axis is contiguous."""
    if x is None:
        return View(None, 0, 0, 0)
    address = check_border(x, dtype, x.stride(-1) == 1 or x.shape[-1] <= 1)
    return View(address, x.stride(0), x.stride(1), x.stride(2) if x.dim() == 4 else 0)


def row_pointer(x: Tensor | None, dtype: torch.dtype = torch.float32) -> tuple[int | None, int]:
    """Address and row stride of x (N C) whose rows are contiguous."""
    if x is None:
        return None, 0
    return check_border(x, dtype, x.stride(1) == 1 or x.shape[1] <= 1), x.stride(0)


def single(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of that type, with a contiguous last axis; copied only if it is not."""
    if x.dtype is not dtype or x.is_neg():
        x = x.to(dtype).resolve_neg()
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def whole(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of that type, and contiguous; copied only if it is not."""
    if x.dtype is not dtype or x.is_neg():
        x = x.to(dtype).resolve_neg()
    return x.contiguous()
