"""Which implementation computes a call of the operator, and why; then the call itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from hypermlp import notice
from hypermlp.checks import choose_from
from hypermlp.config import Aligner, Impl
from hypermlp.ops import chunked, native, reference, triton
from hypermlp.ops.observer import ordinary, transform
from hypermlp.ops.types import MixCall


class Choice(NamedTuple):
    """Which implementation computes a call, and why."""

    impl: str
    reason: str


def choose(impl: str = "auto", device: str = "cpu", dtype: str = "float32", aligner: str = "offset") -> Choice:
    """Which implementation would compute a call, and why; a ValueError where "triton" is asked for and cannot run.

    Args:
        impl: "auto" (which HYPERMLP_IMPL may overrule), "dense", "chunked", "native" or "triton".
        device: where the tensors are, such as "cpu" or "cuda:1".
        dtype: their type, such as "bfloat16".
        aligner: the layout of the mixing parameters, "offset" or "identity".
    """
    choose_from("impl", impl, get_args(Impl))
    why = "asked for"
    if impl == "auto" and os.environ.get("HYPERMLP_IMPL"):
        impl, why = os.environ["HYPERMLP_IMPL"], "HYPERMLP_IMPL"
        choose_from("HYPERMLP_IMPL", impl, get_args(Impl))
    if impl in ("dense", "chunked"):
        return Choice(impl, why)
    if impl == "triton" or (impl == "auto" and device.startswith("cuda")):
        obstacle = triton.obstacle(device, dtype, aligner, asked=impl == "triton")
        if obstacle and impl == "triton" and why == "asked for":
            raise ValueError(f'impl="triton" cannot run here: {obstacle}; impl="auto" takes what can')
        return Choice("chunked", obstacle) if obstacle else Choice("triton", triton.reason(device, dtype))
    obstacle = native_obstacle(device, dtype, aligner)
    return Choice("chunked", obstacle) if obstacle else Choice("native", f"CPU, {dtype}, {native.library().reason}")


def native_obstacle(device: str, dtype: str, aligner: str) -> str | None:
    """Why the native kernel cannot compute this; None if it can."""
    if device != "cpu":
        return f"on {device.partition(':')[0]}: the native kernel is for the CPU"
    if dtype not in ("float32", "bfloat16", "float16"):
        return f"for {dtype}: the native kernel computes in float32"
    if aligner != "offset":
        return f"for the {aligner} layout: the native kernel computes the offset layout"
    return None if native.library().handle is not None else native.library().reason


# Variables that decide which code multiplies matrices.
MATH = ("MKL_", "ATEN_CPU", "HYPERMLP_IMPL", "HYPERMLP_CXXFLAGS")


def rounding() -> dict[str, Any]:
    """What decides the last bits of a result, beside versions and processor: the compiled kernel, and settings of libraries."""
    compiler = native.build.find_compiler()
    digest = native.build.digest(compiler) if compiler is not None and choose().impl == "native" else None
    math = {name: value for name, value in sorted(os.environ.items()) if name.startswith(MATH)}
    if preloaded := os.environ.get("LD_PRELOAD", "").replace(":", " ").split():
        math["LD_PRELOAD"] = " ".join(Path(path).name for path in preloaded)  # without the machine's folders
    return {"kernel": digest, "math": math}


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


def mix(call: MixCall, *, impl: str = "auto") -> Tensor:
    """Readout o (B T H V) of one call of the operator; see reference.mix.

    Args:
        call: queries, keys, values, mixings, the fixed choices, spans.
        impl: "auto", "dense", "chunked", "native" or "triton".
    """
    return compute(resolve(impl, call.q, call.spec.aligner), call)


def compute(impl: str, call: MixCall, keep: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """mix by an implementation that `resolve` has chosen; `keep` (see reference.mix) is for "dense" alone."""
    if call.spec.aligner == "identity":
        check_fits(call)
    if impl == "dense" or not ordinary(*call.leaves().values()):
        return reference.mix(*call[:7], keep)
    return {"chunked": chunked.mix, "native": native.mix, "triton": triton.mix}[impl](call)


def check_fits(call: MixCall) -> None:
    """The identity layout has one parameter per slot and no consistent extension, hence no sliding window."""
    slots, spans, block_size = call.k.shape[1], call.spans, call.spec.block_size
    if slots > block_size and spans is not None and not torch.compiler.is_compiling():
        slots = int((spans[:, 4] - spans[:, 3]).max()) if len(spans) else 0
    if slots > block_size:
        raise ValueError(
            f"the identity layout has parameters for block_size ({block_size}) slots and no sliding window: a sequence of "
            f'{slots} tokens needs a larger block_size, or aligner_kind="offset"'
        )
