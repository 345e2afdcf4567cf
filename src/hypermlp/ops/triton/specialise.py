"""A launch as Triton specialises it, for whoever compiles kernels ahead of time. Nothing here imports triton."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.float64: "*fp64",
    torch.int8: "*i8", torch.uint8: "*u8", torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64", torch.bool: "*i1",
}  # fmt: skip


class Launch(NamedTuple):
    """One kernel as it would be started."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    divisible: tuple[int, ...]
    warps: int
    stages: int
    grid: tuple[int, ...]

    def attributes(self) -> dict[tuple[int, ...], list[list[Any]]]:
        """What the compiler may assume about arguments."""
        return {(place,): [["tt.divisibility", 16]] for place in self.divisible}


def describe(name: str, kernel: Any, grid: tuple[int, ...], used: Any, arguments: Any, constants: dict[str, Any]) -> Launch:
    """Pointers and whole numbers divisible by 16 are known to be; a number that is 1 becomes a constant."""
    signature, divisible, fixed = {}, [], dict(constants)
    plain = [p.do_not_specialize for p in getattr(kernel, "params", ())] or [False] * len(kernel.arg_names)
    for place, (argument, value) in enumerate(zip(kernel.arg_names, arguments, strict=False)):
        if isinstance(value, torch.Tensor):
            signature[argument] = TYPES[value.dtype]
            if value.data_ptr() % 16 == 0:
                divisible.append(place)
        elif isinstance(value, float):
            signature[argument] = "fp32"
        elif value == 1 and not plain[place]:
            fixed[argument] = 1
        else:
            signature[argument] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not plain[place]:
                divisible.append(place)
    signature |= {argument: "constexpr" for argument in fixed}
    ordered = {argument: signature[argument] for argument in kernel.arg_names}
    return Launch(name, kernel, ordered, fixed, tuple(divisible), used.warps, used.stages, grid)
