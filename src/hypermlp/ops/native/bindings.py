"""The border between Python and the compiled kernel: its structures, its entry points, and the addresses it is given.

Every address comes from `pointer`, `view` or `row_pointer`, which look at the tensor itself and are told the shape that the
kernel counts on; a tensor that is not what the kernel would read raises an error instead.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from hypermlp.ops.native.build import library
from hypermlp.ops.observer import ORDINARY, is_traced
from hypermlp.ops.parameters import LayerParameters

I64, POINTER = ctypes.c_int64, ctypes.c_void_p
SEVEN = POINTER * 7  # addresses for the projections of a layer: q, its gate, both controls, k, v, the readout's gate

AVOID = 'impl="dense" avoids it'


SCALARS = {"i64": I64, "double": ctypes.c_double}
STRUCTURE = re.compile(r"struct (hm_\w+) \{([^{}]*)\};")
FIELDS = re.compile(r"(?:const )?(\w+|unsigned char) (\**\w+(?:\[\d+\])?(?:, \**\w+(?:\[\d+\])?)*)")
PREAMBLE = re.compile(r"#pragma once|#include <\w+>|#define HM_API .*|using i64 = int64_t;")


def read_structures(header: str) -> dict[str, type[ctypes.Structure]]:
    """The structures of arguments.h by name; whatever else stands there must be the preamble or a comment."""
    code = re.sub(r" *//.*", "", header)
    found: dict[str, type[ctypes.Structure]] = {}
    for name, body in STRUCTURE.findall(code):
        fields: list[tuple[str, Any]] = []
        for statement in filter(None, (part.strip() for part in body.split(";"))):
            match = FIELDS.fullmatch(statement)
            if match is None:
                raise ValueError(f"{name} of arguments.h has a line that bindings.py cannot read: {statement!r}")
            fields += [make_field(match[1], declared, found) for declared in match[2].split(", ")]
        found[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    for line in filter(None, STRUCTURE.sub("", code).splitlines()):
        if not PREAMBLE.fullmatch(line):
            raise ValueError(f"arguments.h has a line that bindings.py cannot read: {line!r}")
    return found


def make_field(kind: str, declared: str, known: Mapping[str, type[ctypes.Structure]]) -> tuple[str, Any]:
    """Name and type of `*name`, `name` or `*name[count]`; every pointer is an address."""
    name, _, count = declared.lstrip("*").rstrip("]").partition("[")
    made: Any = POINTER if declared.startswith("*") else SCALARS.get(kind) or known.get(kind)
    if made is None:
        raise ValueError(f"bindings.py knows no type {kind!r}, of {declared!r} in arguments.h")
    return name, made * int(count) if count else made


STRUCTURES = read_structures(Path(__file__).with_name("arguments.h").read_text())
View = STRUCTURES["hm_view"]


def check_sizes(handle: ctypes.CDLL) -> None:
    """Compare with the compiled structures: a difference would be read as numbers."""
    handle.hm_size.restype = I64
    wrong = [name for name, made in STRUCTURES.items() if handle.hm_size(name.encode()) != ctypes.sizeof(made)]
    if wrong:
        raise RuntimeError(f"the structures of arguments.h differ from the compiled ones: {', '.join(wrong)}")


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
    """A function of the kernel; the sizes of the structures on both sides are compared first."""
    handle = library().handle
    assert handle is not None, "chosen only where it loads"
    check_sizes(handle)
    return cast("Callable[..., int]", getattr(handle, name))


def structure(name: str, *values: Any, dtype: torch.dtype = torch.float32) -> ctypes.Structure:
    """The arguments of a call: its first fields, the threads it may use, and the type of its numbers."""
    made = STRUCTURES[name](*values)
    made.nthreads, made.parallel, made.half = torch.get_num_threads(), thread_pool(), dtype is torch.bfloat16
    return made


def places(position: Tensor | None, x: Tensor) -> Tensor | None:
    """Each token's place (1|B T) as the kernel takes it, for x (B T C)."""
    return None if position is None else position.expand(x.shape[:2]).to(torch.int64).contiguous()


def call(name: str, arguments: ctypes.Structure) -> None:
    if torch.autograd.profiler._is_profiler_enabled:  # else nobody could tell the kernels of one node apart
        with torch.profiler.record_function(f"hypermlp::{name}"):
            status = entry_point(name)(ctypes.byref(arguments))
    else:
        status = entry_point(name)(ctypes.byref(arguments))
    if status == 3:
        raise IndexError(f"{name}: a token is outside the vocabulary")
    if status == 1:
        raise MemoryError(f"{name}: out of memory; a smaller batch or fewer threads need less")
    if status != 0:
        raise RuntimeError(f"{name}: the arguments do not agree (status {status}); this is a defect of hypermlp, {AVOID}")


def is_addressable(*tensors: Tensor | None, half: bool = False, contiguous: bool = False) -> bool:
    """Whether the kernel may read these tensors' numbers where they lie: float32 in the CPU's memory, no subclass.

    half: bfloat16 will do as well, if it is all of them. contiguous: ask for that too.
    """
    traced, dtype = is_traced(), torch.float32
    if half and next((t.dtype for t in tensors if t is not None), None) is torch.bfloat16:
        dtype = torch.bfloat16
    for t in tensors:
        if t is None:
            continue
        if t.dtype is not dtype or not t.is_cpu or (contiguous and not t.is_contiguous()):
            return False
        if not traced and (type(t) not in ORDINARY or t.is_neg()):
            return False
    return True


def check_border(x: Tensor, shape: Sequence[int], dtype: torch.dtype, dense: bool) -> int:
    """The tensor's address; raises where the kernel would read something else than its numbers."""
    if x.dtype is dtype and x.shape == shape and type(x) in ORDINARY and x.is_cpu and not x.is_neg():
        address = x.data_ptr()
        if (dense and address) or x.numel() == 0:
            return address
    raise ValueError(
        f"the native kernel takes a {dtype} tensor {tuple(shape)} in the CPU's memory here, contiguous where it counts on it, "
        f"and not {type(x).__name__} {tuple(x.shape)} of {x.dtype} on {x.device} with strides {x.stride()}; {AVOID}"
    )


def pointer(x: Tensor | None, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> int | None:
    """Address of a contiguous tensor, or none."""
    return None if x is None else check_border(x, shape, dtype, x.is_contiguous())


def view(x: Tensor | None, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> ctypes.Structure:
    """x (B T H V) or (B T C) whose last axis is contiguous."""
    if x is None:
        return View(None, 0, 0, 0)
    address = check_border(x, shape, dtype, x.stride(-1) == 1 or x.shape[-1] <= 1)
    return View(address, x.stride(0), x.stride(1), x.stride(2) if x.dim() == 4 else 0)


def row_pointer(x: Tensor | None, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> tuple[int | None, int]:
    """Address and row stride of x (N C) whose rows are contiguous."""
    if x is None:
        return None, 0
    return check_border(x, shape, dtype, x.stride(1) == 1 or x.shape[1] <= 1), x.stride(0)


def addresses(p: LayerParameters, shapes: Sequence[Sequence[int]]) -> ctypes.Structure:
    """hm_parameters of contiguous tensors."""
    return hm_parameters([pointer(t, shape) for t, shape in zip(p, shapes, strict=True)])


def hm_parameters(found: Sequence[int | None]) -> ctypes.Structure:
    return STRUCTURES["hm_parameters"](SEVEN(*found[:7]), SEVEN(*found[7:14]), *found[14:])


def room_for(p: LayerParameters, wanted: LayerParameters) -> LayerParameters:
    """Uninitialised tensors for the wanted gradients."""
    pairs = zip(p, cast("tuple[bool, ...]", wanted), strict=True)
    return LayerParameters._make(t.new_empty(t.shape) if t is not None and want else None for t, want in pairs)


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
