"""What compiled kernels say about themselves: instructions and multiply-adds of the innermost loop, registers, spills.

NVIDIA's machine code names the shape of a product for HMMA (one warp) and HGMMA (four warps). For Blackwell's UTCHMMA the shape
is in a descriptor that only exists at run time, so those are counted in Triton's own code (TTGIR), where operands have types.
AMD's assembly tells registers and spills in its metadata.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

WARP_MACS = {"16816": 2048, "1688": 1024, "1684": 512}
LABEL, JUMP = re.compile(r"\s*(\.L_\w+):"), re.compile(r"BRA\S*\s+.*?`\((\.L_\w+)\)")


class Counted(NamedTuple):
    """Resources of a compiled kernel, and instructions per warp: of the innermost loop, and outside of it."""

    registers: int
    spill: int  # bytes
    instructions: int
    outside: int
    mma: int  # of `instructions`, on tensor cores
    loop_macs: float  # multiply-adds of a program in one turn of the loop
    sync: bool = False  # whether one warp multiplies alone (mma.sync), which newer tensor cores do more slowly


def tool(name: str, *arguments: str) -> str:
    """The output of one of the binary utilities that come with triton."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([str(path), *arguments], capture_output=True, text=True, check=True).stdout


def count_nvidia(cubin: bytes, ttgir: str, warps: int) -> Counted:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = tool("cuobjdump", "--dump-resource-usage", file.name), tool("nvdisasm", "-c", file.name)
    numbers = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert numbers is not None, usage
    body, everything = hot_loop(code), before_padding(code)
    macs = warps * sum(map(tensor_macs, body)) + (gen5_macs(ttgir) if any(map(is_gen5, body)) else 0)
    inside = instructions(body)
    mma = sum(tensor_macs(line) > 0 or is_gen5(line) for line in body)
    sync = any("HMMA." in line and tensor_macs(line) > 0 for line in body if "HGMMA" not in line)
    return Counted(int(numbers[1]), int(numbers[2]), inside, instructions(everything) - inside, mma, macs, sync)


def count_amd(code: str) -> Counted:
    """Registers and spills of gfx942's assembly, and v_mfma of the whole kernel; multiply-adds are not counted."""
    found = {name: int(value) for name, value in re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)", code)}
    lines = [line.strip() for line in code.splitlines()]
    mma = sum(line.startswith("v_mfma") for line in lines)
    every = sum(bool(re.match(r"[vs]_|ds_|global_|buffer_|flat_|scratch_", line)) for line in lines)
    return Counted(found["vgpr_count"], found["private_segment_fixed_size"], 0, every, mma, 0)


def instructions(lines: list[str]) -> int:
    return sum(";" in line for line in lines)


def before_padding(code: str) -> list[str]:
    """Lines up to the jump to itself that ends every kernel."""
    lines: list[str] = []
    for line in code.splitlines():
        jump, label = JUMP.search(line), LABEL.match(lines[-1]) if lines else None
        if jump and label and jump[1] == label[1]:
            return lines
        lines.append(line)
    return lines


def hot_loop(code: str) -> list[str]:
    """The body of the loop with the most tensor-core work, else of the longest loop; empty without a loop."""
    lines, labels, loops = before_padding(code), {}, []
    for number, line in enumerate(lines):
        label = LABEL.match(line)
        if label:
            labels[label[1]] = number
        jump = JUMP.search(line)
        if jump and jump[1] in labels:
            loops.append(lines[labels[jump[1]] : number + 1])
    return max(loops, key=lambda body: (sum(map(tensor_macs, body)), sum(map(is_gen5, body)), len(body)), default=[])


def tensor_macs(line: str) -> float:
    """Multiply-adds of one instruction, per warp; zero where it is not one of tensor cores, or does not tell."""
    warp = re.search(r"\bHMMA\.(16816|1688|1684)\b", line)
    if warp:
        return WARP_MACS[warp[1]]
    group = re.search(r"\bHGMMA\.(\d+)x(\d+)x(\d+)", line)  # four warps together
    return int(group[1]) * int(group[2]) * int(group[3]) / 4 if group else 0


def is_gen5(line: str) -> bool:
    """A product of Blackwell's tensor cores, started by one thread for its block."""
    return re.search(r"\bUTC[A-Z]*MMA\b", line) is not None


def gen5_macs(ttgir: str) -> int:
    """Multiply-adds of a block in the loop that has the most of them, from the types of tc_gen5_mma's operands (M K, K N)."""
    open_loops: list[tuple[int, int]] = []  # indentation, multiply-adds
    most = 0
    for line in ttgir.splitlines():
        depth = len(line) - len(line.lstrip())
        while open_loops and depth <= open_loops[-1][0]:
            most = max(most, open_loops.pop()[1])
        if "scf.for" in line or "scf.while" in line:
            open_loops.append((depth, 0))
        shapes = re.findall(r"memdesc<(\d+)x(\d+)x(?:bf16|f16|f32|tf32)\b", line) if "tc_gen5_mma" in line else []
        if shapes and open_loops:
            (M, K), (_, N) = shapes[0], shapes[1]
            open_loops[-1] = (open_loops[-1][0], open_loops[-1][1] + int(M) * int(K) * int(N))
    return max([most, *(macs for _, macs in open_loops)])
