"""The device that kernels run on: whether it can, what it is, and the one place where a kernel is started.

Whoever wants to see launches, compile them for another architecture or execute them elsewhere puts another `Device` in the
place of `current` (`replaced`): `hypermlp bench kernels` records launches, `hypermlp.testing.ptx` executes their compiled code.
A GPU and Triton's interpreter need nothing. Nothing here imports triton.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Iterator
from importlib import metadata
from typing import Any, NamedTuple

import torch
from torch import Tensor

OLDEST = 80  # compute capability: bfloat16 products on tensor cores
CURE = "pip install 'hypermlp[gpu]'"


def interpreted() -> bool:
    """Whether Triton runs kernels on the CPU, for tests; must be decided before triton is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def installed() -> str | None:
    """Triton's version, if it is there."""
    return metadata.version("triton") if importlib.util.find_spec("triton") else None


def tf32_allowed() -> bool:
    """Whether the user lets float32 products be rounded: torch.set_float32_matmul_precision("high") or its newer spelling."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


class Limits(NamedTuple):
    """What the sizes of tiles and chunks depend on."""

    architecture: int  # compute capability as one number; 0 under the interpreter and on AMD's GPUs
    processors: int  # streaming multiprocessors
    cache_bytes: int  # L2
    backend: str = "cuda"  # or "hip", as Triton calls them


INTERPRETER = Limits(0, 1, 64 << 20)


class Device:
    """The GPU that holds a call's tensors, or Triton's interpreter."""

    def obstacle(self, device: str, dtype: str) -> str | None:
        """Why kernels cannot run on a device such as "cuda:1"; None if they can."""
        kind = device.partition(":")[0]
        if interpreted():
            return None
        if kind != "cuda":
            return f"on {kind}: the Triton kernels are for CUDA"
        if not torch.cuda.is_available():
            return "on cuda: torch finds no GPU"
        if torch.version.hip is not None:
            return None  # where they are asked for; see untried
        major, minor = torch.cuda.get_device_capability(device)
        if 10 * major + minor < OLDEST:
            return f"on compute capability {major}.{minor}: the Triton kernels need 8.0"
        if dtype == "float32" and not tf32_allowed():
            return 'for float32: torch.set_float32_matmul_precision("high") would allow the Triton kernels to round to TF32'
        return None

    def untried(self) -> str | None:
        """Why kernels that can run are not chosen unless they are asked for."""
        if interpreted() or torch.version.hip is None:
            return None
        return (
            "on AMD's GPUs: the Triton kernels compile for gfx942 and gfx90a, but have never been executed there; "
            'impl="triton" or HYPERMLP_IMPL=triton tries them'
        )

    def name(self, device: str) -> str:
        if interpreted():
            return "Triton's interpreter"
        if torch.version.hip is not None:
            return f"HIP {torch.cuda.get_device_properties(device).gcnArchName}"
        return "CUDA sm_{}{}".format(*torch.cuda.get_device_capability(device))

    def limits(self, device: str) -> Limits:
        return INTERPRETER if interpreted() or not torch.cuda.is_available() else gpu_limits(device)

    def start(
        self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any], used: Any
    ) -> None:
        """Launch on the GPU of the first tensor, which need not be the current one. used: a tiles.Tile."""
        where = next(x.device for x in arguments if isinstance(x, Tensor))
        with torch.cuda.device(where) if where.type == "cuda" else contextlib.nullcontext():
            kernel[grid](*arguments, **constants, num_warps=used.warps, num_stages=used.stages)


@functools.cache
def gpu_limits(device: str) -> Limits:
    found = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return Limits(0, found.multi_processor_count, found.L2_cache_size, "hip")
    return Limits(10 * found.major + found.minor, found.multi_processor_count, found.L2_cache_size)


current = Device()


@contextlib.contextmanager
def replaced(device: Device) -> Iterator[None]:
    """Start all kernels on another device."""
    global current
    before, current = current, device
    try:
        yield
    finally:
        current = before


def obstacle(device: str, dtype: str, aligner: str, asked: bool = True) -> str | None:
    """Why the Triton kernels cannot compute this, or should not unless they are asked for; None if they can."""
    if aligner != "offset":
        return f"for the {aligner} layout: the Triton kernels compute the offset layout"
    if dtype not in ("bfloat16", "float16", "float32"):
        return f"for {dtype}: the Triton kernels are for bfloat16, float16 and float32"
    if installed() is None:
        return f"triton is not installed ({CURE})"
    return current.obstacle(device, dtype) or (None if asked else current.untried())


def would_use() -> str:
    """What a GPU would compute with, for a machine that has none."""
    if installed() is None:
        return f"chunked (strips: triton is not installed, {CURE})"
    return f"triton {installed()} for bfloat16 and float16, and for float32 where TF32 is allowed; from compute capability 8.0"


def reason(device: str, dtype: str) -> str:
    """Why they were chosen."""
    products = {"bfloat16": "bfloat16", "float16": "float16, multiplied as bfloat16"}.get(dtype, "float32, multiplied as TF32")
    return f"{current.name(device)}, {products}, triton {installed()}"
