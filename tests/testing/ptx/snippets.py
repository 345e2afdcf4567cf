"""PTX for tests: one warp or more, whose threads load their own numbers, do something, and store."""

from __future__ import annotations

import numpy as np
import torch

from hypermlp.testing.ptx import run

KINDS = {
    "pred": np.bool_, "f16": np.float16, "f32": np.float32, "f64": np.float64,
    **{f"{letter}{bits}": np.dtype(f"uint{bits}").type for letter in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": np.dtype(f"int{bits}").type for bits in (8, 16, 32, 64)},
}  # fmt: skip
FILE = {1: ("b16", "%rs"), 2: ("b16", "%rs"), 4: ("b32", "%r"), 8: ("b64", "%rd")}
REGISTERS = ".reg .pred %p<40>; .reg .b16 %rs<80>; .reg .b32 %r<200>; .reg .b64 %rd<80>;"


def entry(body: str, pointers: int, threads: int = 32, shared: int = 0, numbers: int = 0) -> str:
    """A kernel `k`; %rd1 … are its pointers, %r199 is the thread."""
    parameters = [f".param .u64 .ptr .global .align 1 k_param_{n}" for n in range(pointers)]
    parameters += [f".param .u32 k_param_{n}" for n in range(pointers, pointers + numbers)]
    loads = "\n".join(f"ld.param.b64 %rd{n + 1}, [k_param_{n}];" for n in range(pointers))
    room = f".shared .align 16 .b8 room[{shared}];" if shared else ""
    return f"""
.version 8.7
.target sm_80
.address_size 64
{room}
.visible .entry k({", ".join(parameters)})
.reqntid {threads}
{{
{REGISTERS}
mov.u32 %r199, %tid.x;
{loads}
{body}
ret;
}}
"""


def register(kind: str, number: int) -> str:
    return f"%p{number}" if kind == "pred" else f"{FILE[np.dtype(KINDS[kind]).itemsize][1]}{number}"


def at_thread(pointer: int, size: int, to: int) -> str:
    return f"mad.wide.u32 %rd{to}, %r199, {size}, %rd{pointer};"


def load(kind: str, pointer: int, number: int) -> str:
    """A thread's number into register `number` of its kind."""
    if kind == "pred":
        return f"{at_thread(pointer, 4, 60)} ld.global.b32 %r198, [%rd60]; setp.ne.b32 %p{number}, %r198, 0;"
    size = np.dtype(KINDS[kind]).itemsize
    return f"{at_thread(pointer, size, 60)} ld.global.b{8 * size} {register(kind, number)}, [%rd60];"


def store(kind: str, pointer: int, number: int) -> str:
    if kind == "pred":
        return f"selp.b32 %r198, 1, 0, %p{number}; {at_thread(pointer, 4, 60)} st.global.b32 [%rd60], %r198;"
    size = np.dtype(KINDS[kind]).itemsize
    return f"{at_thread(pointer, size, 60)} st.global.b{8 * size} [%rd60], {register(kind, number)};"


def memory(values: np.ndarray) -> torch.Tensor:
    values = values.astype(np.uint32) if values.dtype == np.bool_ else values
    return torch.from_numpy(np.ascontiguousarray(values).view(np.uint8).copy())


def evaluate(
    opcode: str, result: str, inputs: list[tuple[str, np.ndarray]], constants: str = "", threads: int = 32
) -> list[np.ndarray]:
    """An instruction's results in all lanes; where a predicate holds; inside a branch that the same lanes take.

    Where it does not run its register keeps zero. The predicate holds in two lanes of three. constants: further operands.
    """
    operands = ", ".join(register(kind, 10 + n) for n, (kind, _) in enumerate(inputs))
    operands = ", ".join(filter(None, (operands, constants)))
    outs = [register(result, 30 + n) for n in range(3)]
    move = "pred" if result == "pred" else f"b{8 * np.dtype(KINDS[result]).itemsize}"
    move = move.replace("b8", "b16")
    body = [
        *(load(kind, n + 1, 10 + n) for n, (kind, _) in enumerate(inputs)),
        f"rem.u32 %r197, %r199, 3; setp.lt.u32 %p39, %r197, 2; mov.{move} {outs[1]}, 0; mov.{move} {outs[2]}, 0;",
        f"{opcode} {outs[0]}, {operands}; @%p39 {opcode} {outs[1]}, {operands};",
        f"@!%p39 bra $L1; {opcode} {outs[2]}, {operands}; $L1:",
        *(store(result, len(inputs) + 1 + n, 30 + n) for n in range(3)),
    ]
    kind = np.uint32 if result == "pred" else KINDS[result]
    found = [torch.zeros(threads * np.dtype(kind).itemsize, dtype=torch.uint8) for _ in range(3)]
    run(entry("\n".join(body), len(inputs) + 3, threads), (1,), [*(memory(x) for _, x in inputs), *found])
    return [x.numpy().view(kind) for x in found]


def held(threads: int = 32) -> np.ndarray:
    """The lanes for which evaluate's predicate holds."""
    return np.arange(threads) % 3 < 2
