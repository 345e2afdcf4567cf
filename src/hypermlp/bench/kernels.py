"""`hypermlp bench kernels`: compile every shipped configuration of the Triton kernels ahead of time, with no GPU, and count.

The launches of one training step and one decoding step are recorded instead of made, so what is compiled is what would run:
types, constants, alignments, tile sizes. Registers, spills and shared memory come from the compiled code; multiply-adds on
tensor cores are counted in its innermost loop and compared with what the algorithm needs. Counts are kept in the cache folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypermlp.errors import RunError
from hypermlp.files import write_json
from hypermlp.ops.triton.specialise import Launch, describe

ARCHITECTURES = (80, 86, 89, 90, 100, 120, 942)  # compute capabilities, and numbers for AMD's
AMD = {942: "gfx942", 910: "gfx90a"}
TYPES = ("bfloat16", "float32")
# Bytes per block.
SHARED_LIMIT = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376, 942: 65_536, 910: 65_536}
WIDTH, HEADS, RANK, TOKENS = 768, 2, 16, 1024
SPILL_LIMIT = 256  # bytes, in backward kernels; forward and decode kernels must not spill


def architecture_name(arch: int) -> str:
    return AMD.get(arch, f"sm_{arch}")


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
    rows = []
    with ThreadPoolExecutor(workers or min(len(cases), os.cpu_count() or 1)) as pool:
        made = pool.map(lambda case: in_own_process(__name__, str(case[0]), case[1]), cases)
        for (arch, dtype), found in zip(cases, made, strict=True):
            tell(f"compiled for {architecture_name(arch)}, {dtype}")
            for row in found:
                rows.append(row)
                done(row)
    return rows


def in_own_process(module: str, *arguments: str) -> list[dict[str, Any]]:
    """The lines of JSON that a module prints, run without Triton's interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", module, *arguments]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RunError(f"{module} {' '.join(arguments)} failed: {ended.stderr.strip()[-2000:]}")
    return [json.loads(line) for line in ended.stdout.splitlines()]


def problems(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What breaks a promise: kernels that do not compile or fit, and for NVIDIA's GPUs wasted products."""
    found = []
    for row in rows:
        found += misfits(row)
        if "failure" not in row and row["arch"] not in AMD and row["macs"] != row["analytic"]:
            found.append(f"{title(row)}: {row['macs']} multiply-adds per pair, needed are {row['analytic']}")
    return found


def title(row: Mapping[str, Any]) -> str:
    return f"{row['kernel']} {architecture_name(row['arch'])} {row['dtype']}"


def misfits(row: Mapping[str, Any]) -> list[str]:
    """Why a kernel does not fit onto its GPU: spills where none are allowed, too much shared memory, or no code at all."""
    if "failure" in row:
        return [f"{title(row)}: does not compile: {row['failure']}"]
    found = []
    allowed = SPILL_LIMIT if row["kernel"].startswith("backward") else 0
    promised = row["arch"] not in AMD or (row["kernel"].startswith("forward") and row["dtype"] == "bfloat16")
    if promised and row["spill"] > allowed:
        found.append(f"{title(row)}: spills {row['spill']} B, allowed are {allowed}")
    if row["shared"] > SHARED_LIMIT[row["arch"]]:
        found.append(f"{title(row)}: needs {row['shared']} B of shared memory, there are {SHARED_LIMIT[row['arch']]}")
    return found


# Each head's share of a pair: kernels that run once per routing head count twice, those once per piece of V as often.
FORWARD = {"forward_u": 1, "forward_y": 1, "forward_w": 1, "forward_v": 3}
BACKWARD = {
    "backward_dw": 1, "backward_h": 1, "backward_parameters": 3, "backward_dz": 2,
    "backward_q": 2, "backward_k": 2, "backward_v": 3,
}  # fmt: skip
FLASH_FORWARD, FLASH_BACKWARD = 2 * WIDTH, 5 * WIDTH  # multiply-adds per pair of softmax attention, all heads


def against_flash(rows: Sequence[Mapping[str, Any]], arch: int, dtype: str = "bfloat16") -> dict[str, float] | None:
    """Multiply-adds of the compiled code by FlashAttention's, forward and backward; None where they were not all counted."""
    found = {row["kernel"]: row.get("macs", 0) for row in rows if row["arch"] == arch and row["dtype"] == dtype}
    if not all(found.get(name) for name in (*FORWARD, *BACKWARD)):
        return None

    def total(parts: dict[str, int]) -> int:
        return HEADS * sum(found[name] * times for name, times in parts.items())

    return {"forward": total(FORWARD) / FLASH_FORWARD, "backward": total(BACKWARD) / FLASH_BACKWARD}


# In the process that compiles.

See = Callable[[Launch, dict[str, Any]], object]


@contextmanager
def observed(architecture: int, processors: int, cache_bytes: int, see: See) -> Iterator[None]:
    """Kernels are shown to `see`, with their arguments by name, instead of started; the GPU is the one described."""
    from hypermlp.ops.triton.device import Device, Limits, replaced

    class Recorder(Device):
        def limits(self, device: str) -> Limits:
            if architecture in AMD:
                return Limits(0, processors, cache_bytes, "hip")
            return Limits(architecture, processors, cache_bytes)

        def start(self, kernel: Any, grid: Any, arguments: Any, constants: Any, used: Any) -> None:
            name = kernel.__name__ if used.kernel == "decode" else used.kernel
            launch = describe(name, kernel, grid, used, arguments, constants)
            see(launch, dict(zip(kernel.arg_names, arguments, strict=False)))

    with replaced(Recorder()):
        yield


def operator_inputs(dtype: str, batch: int, rows: int, slots: int, width: int, heads: int, rank: int) -> Any:
    """A layer's tensors without content: `rows` new tokens against `slots`."""
    import torch

    from hypermlp.ops.registered import Inputs

    kind, H = getattr(torch, dtype), heads

    def tensor(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=kind)

    def mixing(heads: int) -> tuple[torch.Tensor, ...]:
        left, right = tensor(heads, slots, rank), tensor(heads, slots, rank)
        return left, right, torch.zeros(heads, slots), tensor(batch, rows, heads, rank)

    K = width // (8 * H)
    q, k, v = tensor(batch, rows, 2 * H, K), tensor(batch, slots, 2 * H, K), tensor(batch, slots, H, width // H)
    return Inputs._make((q, k, v, *mixing(2 * H), *mixing(H), None))


def usual_spec(slots: int) -> Any:
    from hypermlp.ops.types import Spec

    return Spec(kind="glu", norm="out_scale", aligner="offset", causal=True, block_size=slots, eps=1e-12)


def record_launches(arch: int, dtype: str, width: int = WIDTH, heads: int = HEADS, rank: int = RANK) -> list[Launch]:
    """The launches of a forward and backward of one layer's operator, and of a decoding step; each kernel once."""
    import torch

    from hypermlp.ops.triton import gradients, launch, stepping

    found: dict[str, Launch] = {}
    spec = usual_spec(TOKENS)
    step, token = (operator_inputs(dtype, 1, rows, TOKENS, width, heads, rank) for rows in (TOKENS, 1))
    with observed(arch, 1, 64 << 20, lambda one, arguments: found.setdefault(one.name, one)):
        made = launch.forward(step, spec, None)
        gradients.backward(torch.zeros_like(made[0]), *made, step, spec, None)
        stepping.decode(token, spec)
    return list(found.values())


def compile_launch(launch: Launch, arch: int) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes())
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    target = GPUTarget("hip", AMD[arch], 64) if arch in AMD else GPUTarget("cuda", arch, 32)
    return triton.compile(source, target=target, options=options)


def unmeasured(launch: Launch, arch: int, dtype: str) -> dict[str, Any]:
    """What is known of a kernel before it is compiled."""
    return {
        "kernel": launch.name, "arch": arch, "dtype": dtype, "tile": list(tile_of(launch.constants)),
        "warps": launch.warps, "stages": launch.stages, "analytic": macs(launch.name, launch.constants),
    }  # fmt: skip


def measure(launch: Launch, arch: int, dtype: str) -> dict[str, Any]:
    """The row of a kernel; a row that says why where it does not compile."""
    from hypermlp.bench import assembly

    row = unmeasured(launch, arch, dtype)
    M, N = row["tile"]
    try:
        compiled = compile_launch(launch, arch)
    except Exception as error:  # compilers of three vendors, with errors of their own
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        return {**row, "failure": reason.strip()[:200]}
    text = compiled.asm.get("ttgir", "")
    if arch in AMD:
        counted = assembly.count_amd(compiled.asm["amdgcn"])
    else:
        counted = assembly.count_nvidia(compiled.asm["cubin"], text, launch.warps)
    return {
        **row, "registers": counted.registers, "spill": counted.spill, "shared": compiled.metadata.shared,
        "tensor_memory": getattr(compiled.metadata, "tmem_size", 0), "instructions": counted.instructions,
        "outside": counted.outside, "mma": counted.mma, "macs": counted.loop_macs / (M * N), "sync": counted.sync,
    }  # fmt: skip


def kept_measure(launch: Launch, arch: int, dtype: str) -> dict[str, Any]:
    """`measure`, kept in the cache folder as long as kernel, constants, compiler and the way of counting stay the same."""
    import triton

    from hypermlp.bench import assembly
    from hypermlp.ops.native.build import cache_folder

    ways = [Path(str(file)).read_bytes() for file in (__file__, assembly.__file__)]
    what = (triton.__version__, launch.kernel.cache_key, *launch._replace(kernel=None, grid=()), arch, dtype, ways)
    path = cache_folder() / "kernels" / f"{hashlib.sha256(repr(what).encode()).hexdigest()[:32]}.json"
    if path.is_file():
        kept: dict[str, Any] = json.loads(path.read_text())
        return kept
    path.parent.mkdir(exist_ok=True)
    row = measure(launch, arch, dtype)
    write_json(path, row)
    return row


def guarded_measure(launch: Launch, arch: int, dtype: str) -> dict[str, Any]:
    """`kept_measure` where the compiler may end the process, as AMD's does on a mistake: a child tries first."""
    with tempfile.TemporaryFile() as told:
        child = os.fork()
        if child == 0:
            os.dup2(told.fileno(), 2)
            kept_measure(launch, arch, dtype)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        told.seek(0)
        message = told.read().decode(errors="replace").strip()
    if status == 0:
        return kept_measure(launch, arch, dtype)
    return unmeasured(launch, arch, dtype) | {"failure": message.splitlines()[0][:200] if message else "the compiler died"}


def main() -> None:
    arch, dtype = int(sys.argv[1]), sys.argv[2]
    measured = guarded_measure if arch in AMD else kept_measure
    for launch in record_launches(arch, dtype):
        print(json.dumps(measured(launch, arch, dtype)), flush=True)


if __name__ == "__main__":
    main()
