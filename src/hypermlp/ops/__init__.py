"""The operator as pure functions with one signature, and the choice between its implementations."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from hypermlp import notice
from hypermlp.checks import choose_from
from hypermlp.config import Aligner, Impl
from hypermlp.ops import chunked, flops, native, reference, triton
from hypermlp.ops.native import library
from hypermlp.ops.registered import ordinary, transform
from hypermlp.ops.types import Mixing, Spec, dense_spans, tensors_of

__all__ = ["Choice", "Mixing", "Spec", "announce", "choose", "compute", "dense_spans", "mix", "resolve"]


class Choice(NamedTuple):
    """Which implementation computes a call, and why."""

    impl: str
    reason: str


def choose(impl: str = "auto", device: str = "cpu", dtype: str = "float32", aligner: str = "offset") -> Choice:
    """Resolve "auto" (which HYPERMLP_IMPL may overrule), and what "native" and "triton" cannot do here."""
    choose_from("impl", impl, get_args(Impl))
    why = "asked for"
    if impl == "auto" and os.environ.get("HYPERMLP_IMPL"):
        impl, why = os.environ["HYPERMLP_IMPL"], "HYPERMLP_IMPL"
        choose_from("HYPERMLP_IMPL", impl, get_args(Impl))
    if impl in ("dense", "chunked"):
        return Choice(impl, why)
    if impl == "triton" or (impl == "auto" and device.startswith("cuda")):
        obstacle = triton.obstacle(device, dtype, aligner, asked=impl == "triton")
        return Choice("chunked", obstacle) if obstacle else Choice("triton", triton.reason(device, dtype))
    obstacle = native_obstacle(device, dtype, aligner)
    return Choice("chunked", obstacle) if obstacle else Choice("native", f"CPU, {dtype}, {library().reason}")


def native_obstacle(device: str, dtype: str, aligner: str) -> str | None:
    """Why the native kernel cannot compute this; None if it can."""
    if device != "cpu":
        return f"on {device.partition(':')[0]}: the native kernel is for the CPU"
    if dtype not in ("float32", "bfloat16", "float16"):
        return f"for {dtype}: the native kernel computes in float32"
    if aligner != "offset":
        return f"for the {aligner} layout: the native kernel computes the offset layout"
    return None if library().handle is not None else library().reason


def announce(choice: Choice) -> None:
    """Report an automatic choice, once."""
    notice.once(f"impl={choice.impl} ({choice.reason})")


def _resolve(impl: str, device: str, dtype: str, aligner: str) -> str:
    choice = choose(impl, device, dtype, aligner)
    obstacle = transform()
    if obstacle is not None and choice.impl != "dense":
        choice = Choice("dense", f"{obstacle}: the others have first derivatives in reverse mode only")
    elif exporting_to_onnx() and choice.impl != "dense":
        choice = Choice("dense", "ONNX has no operators of ours")
    elif impl not in ("auto", "native", "triton"):
        return choice.impl
    announce(choice)
    return choice.impl


def exporting_to_onnx() -> bool:
    """torch.onnx.is_in_onnx_export, without its imports where nobody has begun to export."""
    begun = ("torch.onnx._internal.exporter._flags", "torch.onnx._internal.torchscript_exporter._globals")
    return any(name in sys.modules for name in begun) and torch.onnx.is_in_onnx_export()


# What torch.compiler.assume_constant_result does, without its import of the whole compiler.
_resolve._dynamo_marked_constant = True  # type: ignore[attr-defined]


def resolve(impl: str, x: Tensor, aligner: Aligner = "offset") -> str:
    """The implementation for inputs like x: "dense", "chunked", "native" or "triton"; an automatic choice is reported once."""
    return _resolve(impl, str(x.device), str(x.dtype).removeprefix("torch."), aligner)


def mix(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    routing: Mixing | None,
    reading: Mixing | None,
    spec: Spec,
    spans: Tensor | None = None,
    *,
    impl: str = "auto",
    chunk: int | None = None,
) -> Tensor:
    """Readout o (B T H V) of queries q (B T G K) over keys k (B S G K) and values v (B S H V); see reference.mix."""
    return compute(resolve(impl, q, spec.aligner), q, k, v, routing, reading, spec, spans, chunk)


def compute(
    impl: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    routing: Mixing | None,
    reading: Mixing | None,
    spec: Spec,
    spans: Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """mix by an implementation that `resolve` has chosen."""
    if spec.aligner == "identity":
        check_fits(k.shape[1], spec.block_size, spans)
    if impl == "dense" or not ordinary(q, k, v, *tensors_of(routing), *tensors_of(reading)):
        return reference.mix(q, k, v, routing, reading, spec, spans)
    fast = {"native": native.mix, "triton": triton.mix}.get(impl, chunked.mix)
    return fast(q, k, v, routing, reading, spec, spans, chunk)


def check_fits(slots: int, block_size: int, spans: Tensor | None) -> None:
    """The identity layout has one parameter per slot and no consistent extension, hence no sliding window."""
    if slots > block_size and spans is not None and not torch.compiler.is_compiling():
        slots = int((spans[:, 4] - spans[:, 3]).max()) if len(spans) else 0
    if slots > block_size:
        raise ValueError(
            f"the identity layout has parameters for block_size ({block_size}) slots and no sliding window: a sequence of "
            f'{slots} tokens needs a larger block_size, or aligner_kind="offset"'
        )


flops.watch()
