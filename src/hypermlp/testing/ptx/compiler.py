"""Triton kernels to PTX for any architecture, without a GPU and without the assembler, which would take most of the time.

The process must not run Triton's interpreter: TRITON_INTERPRET is read when triton is imported.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from hypermlp.ops.triton.device import interpreted
from hypermlp.ops.triton.specialise import Launch


class Compiled(NamedTuple):
    ptx: str
    shared: int  # bytes


def compile_ptx(launch: Launch, architecture: int) -> Compiled:
    """What Triton would run of a launch on a GPU of that architecture, such as 80."""
    if interpreted():
        raise ValueError("TRITON_INTERPRET=1 makes Triton interpret kernels; compile them in a process without it")
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend

    target = GPUTarget("cuda", architecture, 32)
    backend = make_backend(target)
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes())
    options = backend.parse_options({"num_warps": launch.warps, "num_stages": launch.stages, **source.parse_options()})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    metadata = {"target": target, **options.__dict__}
    module = source.make_ir(target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context)
    for name in ("ttir", "ttgir", "llir", "ptx"):
        module = stages[name](module, metadata)
    return Compiled(without_debugging(module), metadata["shared"])


def without_debugging(ptx: str) -> str:
    """Without the tables for debuggers behind the code, which are longer than it."""
    return re.split(r"^\s*\.file\b|^\s*\.section\b", ptx, maxsplit=1, flags=re.M)[0]


def same_program(ptx: str) -> str:
    """The text without the lines that name its architecture: equal for two architectures if the same program runs on both."""
    return re.sub(r"^\.(version|target) [^\n]*\n", "", ptx, flags=re.M)
