"""`hypermlp bench kernels`: compile every shipped configuration of the Triton kernels ahead of time, with no GPU, and count.

The launches of one training step and one decoding step are recorded instead of made, so what is compiled is what would run:
types, constants, alignments, tile sizes. Registers, spills and shared memory come from the compiled code; multiply-adds on
tensor cores are counted in its innermost loop and compared with what the algorithm needs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hypermlp.errors import RunError
from hypermlp.ops.triton.specialise import Launch, describe

ARCHITECTURES = (80, 89, 90)
TYPES = ("bfloat16", "float32")
# Bytes per block that a program may ask for.
SHARED_LIMIT: dict[int | str, int] = {
    80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376, "gfx90a": 65_536, "gfx942": 65_536,
}  # fmt: skip
WIDTH, HEADS, RANK, TOKENS = 768, 2, 16, 1024
SPILL_LIMIT = 256  # bytes, in backward kernels; forward and decode kernels must not spill


def macs(name: str, c: dict[str, Any]) -> int:
    """Multiply-adds per pair of a row and a slot that a kernel needs, with widths padded to powers of two."""
    routes, keys = 1 + c.get("GLU", False), c.get("K1", 0) + c.get("K2", 0)
    hidden = routes * (keys + c.get("RP1", 0))
    return {
        "forward_u": lambda: routes * (keys + c["RP"]),
        "forward_y": lambda: hidden + c["RP2"],
        "forward_w": lambda: hidden + c["RP2"],
        "backward_dw": lambda: c["NV"] * c["BV"] + c["RP2"],
        "backward_h": lambda: hidden + 2 * c["RP2"] + routes * c["RP1"],
        "backward_parameters": lambda: 2 * c["RP"],
        "backward_dz": lambda: c["RP"],
    }.get(name, lambda: c.get("W1", 0) + c.get("W2", 0))()


def tile_of(c: dict[str, Any]) -> tuple[int, int]:
    """Rows and columns of one tile."""
    return int(c.get("M", 1)), int(c.get("SLOTS", c.get("LAGS", c.get("N", 1))))


def run(
    architectures: Sequence[int] = ARCHITECTURES,
    types: Sequence[str] = TYPES,
    *,
    workers: int | None = None,
    tell: Callable[[str], None] = lambda text: None,
    done: Callable[[dict[str, Any]], None] = lambda row: None,
) -> list[dict[str, Any]]:
    """One row per kernel, architecture and type, each compiled in a process that Triton's interpreter does not touch."""
    cases = [(arch, dtype) for dtype in types for arch in architectures]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    rows = []

    def compile_case(case: tuple[int, str]) -> Iterator[dict[str, Any]]:
        command = [sys.executable, "-m", __name__, str(case[0]), case[1]]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            found = [json.loads(line) for line in process.stdout]
            message = process.stderr.read()
        if process.returncode:
            raise RunError(f"compiling for sm_{case[0]} in {case[1]} failed: {message.strip()[-2000:]}")
        yield from found

    with ThreadPoolExecutor(workers or min(len(cases), os.cpu_count() or 1)) as pool:
        for case, found in zip(cases, pool.map(lambda case: list(compile_case(case)), cases), strict=True):
            tell(f"compiled for sm_{case[0]}, {case[1]}")
            for row in found:
                rows.append(row)
                done(row)
    return rows


def problems(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What breaks a promise: spills, shared memory, wasted products."""
    found = []
    for row in rows:
        where = f"{row['kernel']} sm_{row['arch']} {row['dtype']}"
        allowed = SPILL_LIMIT if row["kernel"].startswith("backward") else 0
        if row["spill"] > allowed:
            found.append(f"{where}: spills {row['spill']} B, allowed are {allowed}")
        if row["shared"] > SHARED_LIMIT[row["arch"]]:
            found.append(f"{where}: needs {row['shared']} B of shared memory, there are {SHARED_LIMIT[row['arch']]}")
        if row["macs"] != row["analytic"]:
            found.append(f"{where}: {row['macs']} multiply-adds per pair, needed are {row['analytic']}")
    return found


# Each head's share of a pair: kernels that run once per routing head count twice, those once per piece of V as often.
FORWARD = {"forward_u": 1, "forward_y": 1, "forward_w": 1, "forward_v": 3}
BACKWARD = {
    "backward_dw": 1, "backward_h": 1, "backward_parameters": 3, "backward_dz": 2,
    "backward_q": 2, "backward_k": 2, "backward_v": 3,
}  # fmt: skip
FLASH_FORWARD, FLASH_BACKWARD = 2 * WIDTH, 5 * WIDTH  # multiply-adds per pair of softmax attention, all heads


def against_flash(rows: Sequence[dict[str, Any]], arch: int, dtype: str = "bfloat16") -> dict[str, float]:
    """Multiply-adds of the compiled code by FlashAttention's, forward and backward."""
    found = {row["kernel"]: row["macs"] for row in rows if row["arch"] == arch and row["dtype"] == dtype}

    def total(parts: dict[str, int]) -> int:
        return HEADS * sum(found[name] * times for name, times in parts.items())

    return {"forward": total(FORWARD) / FLASH_FORWARD, "backward": total(BACKWARD) / FLASH_BACKWARD}


# In the process that compiles.


def record_launches(arch: int | str, dtype: str, width: int = WIDTH, heads: int = HEADS, rank: int = RANK) -> list[Launch]:
    """The launches of a forward and backward of one layer's operator, and of a decoding step; each kernel once.

    arch: a compute capability such as 89, or the name of one of AMD's GPUs such as "gfx942".
    """
    import torch

    from hypermlp.ops.registered import Inputs
    from hypermlp.ops.triton import gradients, launch, stepping
    from hypermlp.ops.triton.device import Device, Limits, replaced
    from hypermlp.ops.types import Spec

    found: dict[str, Launch] = {}

    class Recorder(Device):
        def limits(self, device: str) -> Limits:
            return Limits(0, 1, 64 << 20, "hip") if isinstance(arch, str) else Limits(arch, 1, 64 << 20)

        def start(self, kernel: Any, grid: Any, arguments: Any, constants: Any, used: Any) -> None:
            name = kernel.__name__ if used.kernel == "decode" else used.kernel
            if name not in found:
                found[name] = describe(name, kernel, grid, used, arguments, constants)

    kind = getattr(torch, dtype)
    H, L, K, V = heads, TOKENS, width // (8 * heads), width // heads

    def tensor(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=kind)

    def mixing(heads: int, rows: int) -> tuple[torch.Tensor, ...]:
        left, right = tensor(heads, L, rank), tensor(heads, L, rank)
        return left, right, torch.zeros(heads, L), tensor(1, rows, heads, rank)

    def inputs(rows: int) -> Inputs:
        q, k, v = tensor(1, rows, 2 * H, K), tensor(1, L, 2 * H, K), tensor(1, L, H, V)
        return Inputs._make((q, k, v, *mixing(2 * H, rows), *mixing(H, rows), None))

    spec = Spec(kind="glu", norm="out_scale", aligner="offset", causal=True, block_size=L, eps=1e-12)
    step = inputs(L)
    with replaced(Recorder()):
        made = launch.forward(step, spec, None)
        gradients.backward(torch.zeros_like(made[0]), *made, step, spec, None)
        stepping.decode(inputs(1), spec)
    return list(found.values())


def compile_launch(launch: Launch, arch: int | str) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes())
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    target = GPUTarget("hip", arch, 64) if isinstance(arch, str) else GPUTarget("cuda", arch, 32)
    return triton.compile(source, target=target, options=options)


def tool(name: str, *arguments: str) -> str:
    """The output of one of the binary utilities that come with triton."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([str(path), *arguments], capture_output=True, text=True, check=True).stdout


def registers_and_spill(compiled: Any) -> tuple[int, int]:
    """Registers of a thread, and bytes of it that did not find one."""
    if "cubin" in compiled.asm:
        found = re.search(r"REG:(\d+) STACK:(\d+)", inspect(compiled, "cuobjdump", "--dump-resource-usage"))
        words = 1
    else:
        code = compiled.asm["amdgcn"]
        found = re.search(r"\.vgpr_count:\s+(\d+)\s+\.vgpr_spill_count:\s+(\d+)", code)
        words = 4
    assert found is not None
    return int(found[1]), words * int(found[2])


def inspect(compiled: Any, name: str, *arguments: str) -> str:
    """What one of the binary utilities says of a kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        return tool(name, *arguments, file.name)


def measure(launch: Launch, arch: int, dtype: str) -> dict[str, Any]:
    compiled = compile_launch(launch, arch)
    registers, spill = registers_and_spill(compiled)
    code = inspect(compiled, "nvdisasm", "-c")
    body = hot_loop(code)
    rows, columns = tile_of(launch.constants)
    analytic = macs(launch.name, launch.constants)
    executed = sum(tensor_macs(line) for line in body) * launch.warps
    return {
        "kernel": launch.name, "arch": arch, "dtype": dtype,
        "tile": [rows, columns],
        "warps": launch.warps, "stages": launch.stages, "registers": registers, "spill": spill,
        "shared": compiled.metadata.shared, "instructions": sum(";" in line for line in body),
        "mma": sum(tensor_macs(line) > 0 for line in body), "macs": executed / (rows * columns), "analytic": analytic,
    }  # fmt: skip


def hot_loop(code: str) -> list[str]:
    """The body of the loop with the most tensor-core work, else of the longest loop."""
    lines, labels, loops = code.splitlines(), {}, []
    for number, line in enumerate(lines):
        label = re.match(r"\s*(\.L_\w+):", line)
        if label:
            labels[label[1]] = number
        jump = re.search(r"BRA\S*\s+.*?`\((\.L_\w+)\)", line)
        if jump and jump[1] in labels:
            loops.append(lines[labels[jump[1]] : number + 1])
    return max(loops, key=lambda body: (sum(map(tensor_macs, body)), len(body)), default=[])


def tensor_macs(line: str) -> float:
    """Multiply-adds of one instruction, per warp; zero where it is not one of tensor cores."""
    warp = re.search(r"\bHMMA\.(16816|1688|1684)\b", line)
    if warp:
        return {"16816": 2048, "1688": 1024, "1684": 512}[warp[1]]
    group = re.search(r"\bHGMMA\.(\d+)x(\d+)x(\d+)", line)  # four warps together
    return int(group[1]) * int(group[2]) * int(group[3]) / 4 if group else 0


def main() -> None:
    arch, dtype = int(sys.argv[1]), sys.argv[2]
    for launch in record_launches(arch, dtype):
        print(json.dumps(measure(launch, arch, dtype)), flush=True)


if __name__ == "__main__":
    main()
