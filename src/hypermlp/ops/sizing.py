"""Sizes for a device: rows of a strip, sequences computed together, the type of products, whether torch.compile sees steps.

A CPU wants buffers that stay in a cache. A GPU wants few, large operations: a strip is a quarter of the context and holds the
whole batch, and its height shrinks as slots, heads or sequences grow, so that a buffer keeps its size.

float16 is multiplied in float32 everywhere. Scores of thousands times factors of tens leave its range, and whoever trains in
float16 has a GPU without bfloat16 units (sm_70, sm_75), or wants float16's digits, which products in bfloat16 would cut off.
"""

from __future__ import annotations

from math import isqrt
from typing import NamedTuple

import torch

from hypermlp.ops.registered import Inputs, Unrolled
from hypermlp.ops.types import Spec, compute_dtype


class Sizing(NamedTuple):
    elements: int  # of a strip buffer that holds the scores of all routing heads: what the program aims at
    share: int  # a strip takes this part of the context's slots: taller ones waste more on slots that do not exist
    shortest: int  # rows, where the context is short
    tallest: int
    least: int  # rows down to which the height shrinks for the batch to stay together
    windowed: bool  # count the slots of the sliding window; else all, as the CPU's sizes were measured
    own_products: tuple[torch.dtype, ...]  # half precision that is multiplied as it is; other types in float32 or float64
    unrolled: int  # strips that torch.compile sees, to fuse their steps; more would take it too long, and stay one operator

    def product_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if dtype in self.own_products else compute_dtype(dtype)

    def columns(self, slots: int, spec: Spec) -> int:
        """Columns that a buffer has beside one for each of its rows."""
        return min(slots, spec.block_size) if self.windowed and spec.aligner == "offset" else slots

    def height(self, asked: int | None, rows: int, columns: int, heads: int) -> int:
        """Rows per strip, as asked for or by the context, for so many heads of all sequences of the batch."""
        fitting = (isqrt(columns**2 + 4 * self.elements // max(1, heads)) - columns) // 2  # heads · M (M + columns) ≤ elements
        aligned = fitting // 16 * 16  # as matrix units like it
        chosen = min(max(self.shortest, min(columns // self.share, self.tallest)), max(aligned, self.least))
        return max(1, min(asked or chosen, rows))

    def together(self, height: int, columns: int, heads: int) -> int:
        """Sequences in one buffer, for so many heads of each."""
        return max(1, self.elements // max(1, heads * height * (columns + height)))


# Measured: training steps at 128 to 4096 slots. 4 MiB in float32, small enough for a cache, large enough for BLAS.
CPU = Sizing(1 << 20, 8, 32, 64, 64, windowed=False, own_products=(), unrolled=0)

# Predicted, not measured. Backward has three and a half such buffers for GLU: 450 MiB in bfloat16 where the context fills them.
ACCELERATOR = Sizing(1 << 26, 4, 256, 2048, 16, windowed=True, own_products=(torch.bfloat16,), unrolled=4)
COMPILED = ("cuda", "xpu")  # devices for which torch.compile generates fused code that is not a prototype


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether the device has units for bfloat16; NVIDIA's have since sm_80, and the others that PyTorch drives do."""
    nvidia = device.type == "cuda" and torch.version.hip is None and torch.cuda.is_available()
    return not nvidia or torch.cuda.get_device_capability(device) >= (8, 0)


def of(device: torch.device) -> Sizing:
    """The sizing for tensors on a device. Tests replace it to have CPU tensors treated as an accelerator's."""
    if device.type == "cpu":
        return CPU
    products = ACCELERATOR.own_products if multiplies_bfloat16(device) else ()
    return ACCELERATOR._replace(own_products=products, unrolled=ACCELERATOR.unrolled if device.type in COMPILED else 0)


# What torch.compiler.assume_constant_result does, without its import of the whole compiler.
of._dynamo_marked_constant = True  # type: ignore[attr-defined]


class CallSizes(NamedTuple):
    """How one call is computed on its device."""

    product: torch.dtype  # of matrix products and of what they take
    sums: torch.dtype  # of norms, and of sums over strips
    height: int  # of a strip
    together: int  # sequences at a time


def sizes(inputs: Inputs, spec: Spec, chunk: int | None) -> CallSizes:
    q, suited = inputs.q, of(inputs.q.device)
    columns = suited.columns(inputs.k.shape[1], spec)
    height = suited.height(chunk, q.shape[1], columns, q.shape[0] * q.shape[2])
    return CallSizes(
        suited.product_dtype(q.dtype), compute_dtype(q.dtype), height, suited.together(height, columns, q.shape[2])
    )


def few_strips(inputs: Inputs, spec: Spec, chunk: int | None) -> bool:
    """Whether a compiler may see the steps of a plain batch."""
    made = sizes(inputs, spec, chunk)
    strips = -(-inputs.q.shape[1] // made.height) * -(-inputs.q.shape[0] // made.together)
    return strips <= of(inputs.q.device).unrolled


UNROLLED = Unrolled(on=lambda device: of(device).unrolled > 0, fits=few_strips)
