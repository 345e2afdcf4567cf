"""What the Triton kernels should cost on a GPU, predicted: no figure of this file was measured.

The launches of a forward and a backward are recorded as a given GPU would get them (`kernels.observed`), and each is compiled
for it. A program's clocks are the turns of its innermost loop times the compiled instructions and multiply-adds of a turn;
programs are put on SMs one after another as they fit (`processors.py`); a launch takes at least as long as its bytes, and
some time of its own. FlashAttention-2 goes through the same model with its own grid.

    python -m hypermlp.bench.roofline 1 16384 89        batch, tokens, architecture: a table per kernel
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hypermlp.bench.kernels import HEADS, RANK, WIDTH, kept_measure, observed
from hypermlp.bench.processors import FULL, occupancy, schedule
from hypermlp.bench.work import LaunchWork, Touch, work_of
from hypermlp.ops.triton.specialise import Launch

ASSUMPTIONS = (
    "instructions, multiply-adds, registers and shared memory are those of the compiled code, grids and tables of launches",
    "an SM's four schedulers issue one instruction per clock each; 0.9 of the issue clocks are not hidden behind tensor cores",
    f"that holds from {FULL} warps on an SM on (two per scheduler, as FlashAttention-2 has); with fewer, in proportion less",
    "tensor cores reach the published dense bfloat16 rate; mma.sync on Hopper 0.62 of it (remembered), wgmma all",
    "programs start in the order of their numbers, wherever one ends; nothing overlaps with the next launch",
    "a launch takes at least its bytes at the rate of the L2 cache, and what misses it at 0.8 of the memory's rate",
    "the L2 cache keeps what was used last (least recently used, whole parts of tensors)",
    "L2: 5.0 TB/s on L40S and A100, 5.6 TB/s on H100: remembered from microbenchmarks of such chips, not published rates",
    "a launch costs 2 microseconds on the GPU, and 9 on the host (Triton's dispatch alone as reported in its community: "
    "6 to 9), which work in parallel; our own Python between launches is not counted",
    "operations of torch between the kernels move their operands once",
    "matrix products of projections and of the MLP reach 0.7 of the published rate; a training step does them three times",
    "FlashAttention-2: 482 instructions and 64 MMA per warp and tile of 128 × 64 with 8 warps forward, as a small kernel has, "
    "compiled for sm_89; 166 registers, 600 instructions outside of its loop; backward 2.5 times that; longest programs first",
    "clocks are boost clocks: power limits are not modelled",
)
ISSUE_SHARE, MEMORY_SHARE, SYNC_SHARE = 0.9, 0.8, 0.62
BACKWARD_FACTOR = 2.5  # FlashAttention's backward by its forward: five products against two
GAP, HOST = 2e-6, 9e-6  # seconds per launch, on the GPU and on the host


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Published figures of a GPU; the rate of its L2 cache as measured by others."""

    name: str
    arch: int
    sms: int
    clock: float  # GHz, boost
    tflops: float  # dense bfloat16
    memory: float  # GB/s
    l2: float  # GB/s
    l2_bytes: int

    @property
    def macs_per_clock(self) -> float:
        """Of one SM."""
        return self.tflops * 1e12 / 2 / (self.sms * self.clock * 1e9)


DEVICES = (
    Gpu(name="L40S", arch=89, sms=142, clock=2.52, tflops=362, memory=864, l2=5000, l2_bytes=96 << 20),
    Gpu(name="A100", arch=80, sms=108, clock=1.41, tflops=312, memory=2039, l2=5000, l2_bytes=40 << 20),
    Gpu(name="H100", arch=90, sms=132, clock=1.83, tflops=989, memory=3350, l2=5600, l2_bytes=50 << 20),
)


class L2Cache:
    """The L2 cache: which parts of which tensors are in it, least recently used first."""

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.held: OrderedDict[tuple[int, ...], tuple[float, bool]] = OrderedDict()  # size, changed

    def use(self, touched: Sequence[Touch]) -> float:
        """Bytes that go to or come from memory when a launch uses these parts."""
        moved = 0.0
        for part in touched:
            size, changed = self.held.pop(part.key, (0.0, False))
            moved += max(0.0, part.size - size) if part.read else 0.0
            self.held[part.key] = (max(size, part.size), changed or part.written)
        while sum(size for size, _ in self.held.values()) > self.capacity:
            _, (size, changed) = self.held.popitem(last=False)
            moved += size if changed else 0.0
        return moved


class KernelCost(NamedTuple):
    """Seconds of one launch by what may bound it; tensor and issue if all SMs shared its work evenly, grid as they do."""

    kernel: str
    programs: int
    tensor: float
    issue: float
    grid: float
    l2: float
    memory: float

    @property
    def seconds(self) -> float:
        return max(self.grid, self.l2, self.memory) + GAP

    @property
    def bound(self) -> str:
        """What would have to shrink first."""
        longest = max(self.grid, self.l2, self.memory)
        if longest < GAP:
            return "launch"
        if longest == self.memory:
            return "DRAM"
        if longest == self.l2:
            return "L2"
        if self.grid > 1.5 * (self.tensor + ISSUE_SHARE * self.issue):
            return "grid"  # too few programs, or too uneven ones
        return "tensor" if self.tensor > ISSUE_SHARE * self.issue else "issue"


def cost_of(row: Mapping[str, Any], work: LaunchWork, device: Gpu, cache: L2Cache) -> KernelCost:
    """One launch of a compiled kernel."""
    M, N = row["tile"]
    slower = SYNC_SHARE if row["sync"] and row["arch"] == 90 else 1.0
    tensor = row["macs"] * M * N / (device.macs_per_clock * slower)
    issue = (row["instructions"] - row["mma"]) * row["warps"] / 4
    outside = row["outside"] * row["warps"] / 4
    clocks = work.turns * (tensor + ISSUE_SHARE * issue) + ISSUE_SHARE * outside
    fit = occupancy(row["arch"], row["registers"], row["warps"], row["shared"], row.get("tensor_memory", 0))
    frequency = device.clock * 1e9
    total = int(work.turns.sum())
    return KernelCost(
        row["kernel"], len(work.turns),
        total * tensor / device.sms / frequency, (total * issue + len(work.turns) * outside) / device.sms / frequency,
        schedule(clocks.tolist(), row["warps"], fit, device.sms) / frequency,
        work.moved / (device.l2 * 1e9), cache.use(work.touched) / (MEMORY_SHARE * device.memory * 1e9),
    )  # fmt: skip


def moving(name: str, touched: Sequence[Touch], device: Gpu, cache: L2Cache) -> KernelCost:
    """A launch that only moves bytes."""
    moved = sum(part.size for part in touched)
    return KernelCost(name, 1, 0, 0, 0, moved / (device.l2 * 1e9), cache.use(touched) / (MEMORY_SHARE * device.memory * 1e9))


def seconds(costs: Sequence[KernelCost]) -> float:
    """Of launches in a row: what the GPU or the host needs, whichever is more."""
    return max(sum(cost.seconds for cost in costs), HOST * len(costs))


# Recorded launches, in a process without Triton's interpreter.


def operator_costs(device: Gpu, batch: int, time: int, width: int = WIDTH, heads: int = HEADS) -> dict[str, list[KernelCost]]:
    """Every launch of the operator of one layer in bfloat16: "forward" and "backward"."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from hypermlp.bench.kernels import operator_inputs, usual_spec
    from hypermlp.ops.triton import gradients, launch

    inputs, spec = operator_inputs("bfloat16", batch, time, time, width, heads, RANK), usual_spec(time)
    cache = L2Cache(device.l2_bytes)
    costs: list[KernelCost] = []
    held: list[Any] = []  # tensors stay alive, so that addresses tell them apart

    def see(one: Launch, arguments: dict[str, Any]) -> None:
        row = kept_measure(one, device.arch, "bfloat16")
        if "failure" in row:
            raise ValueError(f"{one.name} does not compile for sm_{device.arch}: {row['failure']}")
        held.append(arguments)
        costs.append(cost_of(row, work_of(one.kernel.__name__, one.grid, arguments, one.constants), device, cache))

    class TorchCosts(TorchDispatchMode):
        """Operations of torch on floating-point tensors: one launch each, bound by their bytes."""

        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = op(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.is_floating_point() and not op.is_view and "empty" not in str(op):
                tensors = [x for x in args if isinstance(x, torch.Tensor) and x is not result]
                held.append((tensors, result))
                parts = [Touch((x.data_ptr(),), float(x.nbytes), True, False) for x in tensors]
                parts.append(Touch((result.data_ptr(),), float(result.nbytes), False, True))
                costs.append(moving("torch", parts, device, cache))
            return result

    found = {}
    with observed(device.arch, device.sms, device.l2_bytes, see), TorchCosts():
        made = launch.forward(inputs, spec, None)
        found["forward"], costs = costs, []
        d_o = torch.empty_like(made[0])
        gradients.backward(d_o, *made, inputs, spec, None)
        found["backward"] = costs
    return found


# FlashAttention-2.

FLASH: dict[str, Any] = {
    "kernel": "flash", "tile": [128, 64], "warps": 8, "instructions": 482, "outside": 600, "mma": 64, "macs": 128.0,
    "registers": 166, "shared": 32 << 10, "sync": True,
}  # fmt: skip


def flash_costs(device: Gpu, batch: int, time: int, phase: str, heads: int = 12) -> list[KernelCost]:
    """By the same model, twelve heads of 64: a program per block of 128 rows, or of 128 slots in the backward."""
    M, N = FLASH["tile"]
    blocks, size = -(-time // M), batch * time * WIDTH * 2.0
    turns = np.minimum(-(-time // N), (np.arange(blocks) + 1) * M // N)[::-1]  # the longest first
    every = np.tile(turns, batch * heads)
    row = FLASH | {"arch": device.arch}
    tensors, passes = (4, 1.0) if phase == "forward" else (8, BACKWARD_FACTOR)
    row |= {name: passes * row[name] for name in ("instructions", "mma", "macs")}
    moved = float(every.sum()) * passes * 2 * N * (WIDTH // heads) * 2
    parts = [Touch((n,), size, n < tensors - 1, n == tensors - 1) for n in range(tensors)]
    cache = L2Cache(device.l2_bytes)
    cost = cost_of(row, LaunchWork(every, max(moved, tensors * size), parts), device, cache)
    if phase == "forward":
        return [cost]
    before, after = (moving("flash rows", parts[:2], device, cache) for _ in range(2))  # Σ do·o per row; dq rounded
    return [before, cost, after]


def summary(costs: Sequence[KernelCost]) -> list[dict[str, Any]]:
    """One row per kernel: milliseconds, launches, programs of the smallest and largest launch, what bounds most of the time."""
    made = []
    for name in dict.fromkeys(cost.kernel for cost in costs):
        own = [cost for cost in costs if cost.kernel == name]
        bounds: dict[str, float] = {}
        for cost in own:
            bounds[cost.bound] = bounds.get(cost.bound, 0.0) + cost.seconds
        made.append(
            {
                "kernel": name, "ms": 1e3 * sum(c.seconds for c in own), "launches": len(own),
                "programs": [min(c.programs for c in own), max(c.programs for c in own)],
                **{part: 1e3 * sum(getattr(c, part) for c in own) for part in ("tensor", "issue", "grid", "l2", "memory")},
                "bound": max(bounds, key=lambda bound: bounds[bound]),
            }
        )  # fmt: skip
    return made


def print_summary(device: Gpu, batch: int, time: int) -> None:
    """Per kernel, in milliseconds; `tensor` and `issue` as if all SMs shared the work evenly, `grid` as they do."""
    for phase, costs in operator_costs(device, batch, time).items():
        flash = seconds(flash_costs(device, batch, time, phase))
        print(
            f"{device.name} {phase} {batch}×{time}: {1e3 * seconds(costs):.3f} ms PREDICTED, "
            f"FlashAttention-2 {1e3 * flash:.3f}; {len(costs)} launches, host {1e3 * HOST * len(costs):.3f} ms"
        )
        heads = "kernel", "ms", "launches", "programs", "tensor", "issue", "grid", "L2", "DRAM", "bound"
        print("{:20}{:>9}{:>9}  {:>11}{:>8}{:>8}{:>8}{:>8}{:>8}  {}".format(*heads))
        for r in summary(costs):
            programs = "–".join(map(str, dict.fromkeys(r["programs"])))
            parts = "".join(f"{r[part]:8.3f}" for part in ("tensor", "issue", "grid", "l2", "memory"))
            print(f"{r['kernel']:20}{r['ms']:9.3f}{r['launches']:9}  {programs:>11}{parts}  {r['bound']}")


def main() -> None:
    batch, time, arch = (int(x) for x in sys.argv[1:4])
    print_summary(next(d for d in DEVICES if d.arch == arch), batch, time)


if __name__ == "__main__":
    main()
