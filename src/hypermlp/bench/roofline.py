"""What the Triton kernels should cost on a GPU, predicted: no figure of this file was measured.

A kernel keeps an SM busy for the clocks of its tensor cores plus a share of the clocks in which other instructions issue, and a
launch takes at least as long as its bytes. Multiply-adds and instructions are those of the compiled code
(`hypermlp bench kernels`); both are per tile, and only tiles that exist are counted. The same model, with the instructions of a
FlashAttention forward compiled the same way, gives the figure beside it. What else a layer does (projections, convolutions,
gates) is counted as matrix products at a share of the peak, and as bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hypermlp.bench.kernels import BACKWARD, FORWARD, HEADS, WIDTH

ASSUMPTIONS = (
    "an SM's four schedulers issue one instruction per clock each; 0.9 of the issue clocks are not hidden behind tensor cores",
    "tensor cores reach the published dense bfloat16 rate while they work",
    "scratch stays in the L2 cache, taken as 2.5 times as fast as the memory; other bytes move at 0.8 of the memory's rate",
    "matrix products of projections and of the MLP reach 0.7 of the published rate; a training step does them three times",
    "a launch costs 3 microseconds, hidden behind the one before except in decoding",
    "FlashAttention-2: 482 instructions and 64 MMA per warp and tile of 128 × 64 with 8 warps forward; backward 2.5 times that",
)
ISSUE_SHARE, L2_FACTOR, MEMORY_SHARE, PRODUCT_SHARE = 0.9, 2.5, 0.8, 0.7
LAUNCH = 3e-6
FLASH_TILE = {"M": 128, "N": 64, "warps": 8, "instructions": 482}
SCRATCH_BYTES = {
    "forward": 2 * (1 + 3),
    "backward": 2 * (1 + 1 + 2 + 1 + 2 + 1 + 2 + 2 + 2 + 2 + 2 + 4 + 1 + 3),
}  # per pair, head


@dataclass(frozen=True, kw_only=True)
class Device:
    """Published figures of a GPU."""

    name: str
    arch: int
    sms: int
    clock: float  # GHz, boost
    tflops: float  # dense bfloat16
    memory: float  # GB/s


DEVICES = (
    Device(name="L40S", arch=89, sms=142, clock=2.52, tflops=362, memory=864),
    Device(name="A100", arch=80, sms=108, clock=1.41, tflops=312, memory=2039),
    Device(name="H100", arch=90, sms=132, clock=1.83, tflops=989, memory=3350),
)
PAPER = {"forward_ms": 39.5, "training_ms": 119.0, "flash_forward_ms": 30.0, "flash_training_ms": 88.0}  # Table 5


def kernel_seconds(device: Device, macs: float, instructions: float) -> float:
    """Seconds of all SMs for multiply-adds and warp instructions."""
    tensor = 2 * macs / (device.tflops * 1e12)
    issue = instructions / (4 * device.sms * device.clock * 1e9)
    return tensor + ISSUE_SHARE * issue


def pairs_of(batch: int, time: int, M: int, N: int) -> float:
    """Pairs of rows and slots in the tiles that a causal kernel visits."""
    return batch * sum(-(-(first + M) // N) * N * M for first in range(0, time, M))


def operator_seconds(rows: Sequence[Mapping[str, Any]], device: Device, batch: int, time: int, phase: str) -> float:
    """The operator of one layer (two heads, width 768): "forward" or "backward"."""
    found = {r["kernel"]: r for r in rows if r["arch"] == device.arch and r["dtype"] == "bfloat16"}
    total = 0.0
    for name, times in (FORWARD if phase == "forward" else BACKWARD).items():
        row = found[name]
        M, N = row["tile"]
        pairs = pairs_of(batch, time, M, N) * times * HEADS
        instructions = (row["instructions"] - row["mma"]) * row["warps"] * pairs / (M * N)
        total += kernel_seconds(device, row["macs"] * pairs, instructions)
    scratch = SCRATCH_BYTES[phase] * pairs_of(batch, time, 64, 32) * HEADS
    values = batch * time * WIDTH * 2 * (4 if phase == "forward" else 12)
    traffic = scratch / (L2_FACTOR * device.memory * 1e9) + values / (MEMORY_SHARE * device.memory * 1e9)
    return max(total, traffic)


def flash_seconds(device: Device, batch: int, time: int, phase: str, heads: int = 12) -> float:
    """FlashAttention-2 by the same model, twelve heads of 64."""
    t, width = FLASH_TILE, WIDTH // heads
    pairs = pairs_of(batch, time, t["M"], t["N"]) * heads
    instructions = (t["instructions"] - 64) * t["warps"] * pairs / (t["M"] * t["N"])
    seconds = kernel_seconds(device, 2 * width * pairs, instructions) * (1 if phase == "forward" else 2.5)
    values = batch * time * WIDTH * 2 * (4 if phase == "forward" else 8)
    return max(seconds, values / (MEMORY_SHARE * device.memory * 1e9))


def products_seconds(device: Device, batch: int, time: int, depth: int, vocabulary: int, hyper: bool) -> float:
    """One forward of everything but the mixing in a GPT of this width: matrix products, and bytes of what is elementwise."""
    C, tokens = WIDTH, batch * time
    attention = (C // 4) * 3 * C + 3 * C * C + C * 6 * 16 if hyper else 4 * C * C  # q, k, gate; v, o, gate; controls
    products = 2 * tokens * (depth * (attention + 8 * C * C) + C * vocabulary)
    passes = (26 if hyper else 18) * 2 * C * tokens * depth + 6 * 2 * vocabulary * tokens
    return products / (PRODUCT_SHARE * device.tflops * 1e12) + passes / (MEMORY_SHARE * device.memory * 1e9)


def predict(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Predicted milliseconds per device: the operator of one layer, and GPT-2 small at batch 8 and 1024 tokens (Table 5)."""
    made = []
    for device in DEVICES:
        row: dict[str, Any] = {"device": device.name, "predicted": True}
        for batch, time in ((8, 1024), (1, 16384)):
            for phase in ("forward", "backward"):
                ours = operator_seconds(rows, device, batch, time, phase)
                flash = flash_seconds(device, batch, time, phase)
                row[f"{phase} {batch}×{time}"] = {"hyperglu_ms": 1e3 * ours, "flash_ms": 1e3 * flash}
        for name, hyper in (("hyperglu", True), ("flash", False)):
            forward, backward = (
                12 * (operator_seconds(rows, device, 8, 1024, p) if hyper else flash_seconds(device, 8, 1024, p))
                for p in ("forward", "backward")
            )
            rest = products_seconds(device, 8, 1024, 12, 50257, hyper)
            row[f"{name} model"] = {"forward_ms": 1e3 * (forward + rest), "training_ms": 1e3 * (forward + backward + 3 * rest)}
        made.append(row)
    return made
