"""Whether the Triton kernels can compute a call here, told without importing triton."""

from __future__ import annotations

import functools
import importlib.util
import os
from importlib import metadata

import torch

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
    """Whether the user lets float32 products be rounded: torch.set_float32_matmul_precision("high")."""
    return torch.get_float32_matmul_precision() != "highest"


def obstacle(device: str, dtype: str, aligner: str) -> str | None:
    """Why the Triton kernels cannot compute this; None if they can."""
    if aligner != "offset":
        return f"for the {aligner} layout: the Triton kernels compute the offset layout"
    if dtype not in ("bfloat16", "float16", "float32"):
        return f"for {dtype}: the Triton kernels are for bfloat16, float16 and float32"
    if installed() is None:
        return f"triton is not installed ({CURE})"
    if interpreted():
        return None
    if device != "cuda":
        return f"on {device}: the Triton kernels are for CUDA"
    if not torch.cuda.is_available():
        return "on cuda: torch finds no GPU"
    if torch.version.hip is not None:
        return "the Triton kernels are for NVIDIA's GPUs"
    major, minor = torch.cuda.get_device_capability()
    if 10 * major + minor < OLDEST:
        return f"on compute capability {major}.{minor}: the Triton kernels need 8.0"
    if dtype == "float32" and not tf32_allowed():
        return 'for float32: torch.set_float32_matmul_precision("high") would allow the Triton kernels to round to TF32'
    return None


def would_use() -> str:
    """What a GPU would compute with, for a machine that has none."""
    if installed() is None:
        return f"chunked (strips: triton is not installed, {CURE})"
    return f"triton {installed()} for bfloat16 and float16, and for float32 where TF32 is allowed; from compute capability 8.0"


def reason(dtype: str) -> str:
    """Why they were chosen."""
    if interpreted():
        return f"Triton's interpreter, {dtype}"
    major, minor = torch.cuda.get_device_capability()
    products = {"bfloat16": "bfloat16", "float16": "float16, multiplied as bfloat16"}.get(dtype, "float32, multiplied as TF32")
    return f"CUDA sm_{major}{minor}, {products}, triton {installed()}"
