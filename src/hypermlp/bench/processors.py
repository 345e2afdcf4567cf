"""How programs share the streaming multiprocessors (SMs) of a GPU: how many fit, and how long a launch takes.

An SM works off clocks of work. Programs that are on it at the same time share its rate in proportion to their warps, and it
reaches its full rate from FULL warps on; with fewer the rate falls in proportion, because latency is not hidden.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

FULL = 8  # warps on an SM, two per scheduler


class SMLimits(NamedTuple):
    """Of one SM, by compute capability (CUDA C++ Programming Guide, technical specifications)."""

    warps: int
    blocks: int
    shared: int  # bytes for all blocks together; each takes 1 KiB more than it asks for


SM_LIMITS = {
    80: SMLimits(64, 32, 167_936),
    86: SMLimits(48, 16, 102_400),
    89: SMLimits(48, 24, 102_400),
    90: SMLimits(64, 32, 233_472),
    100: SMLimits(64, 32, 233_472),
    120: SMLimits(48, 24, 102_400),
}
REGISTERS, TENSOR_MEMORY = 65_536, 512  # registers of an SM; columns of Blackwell's tensor memory


def occupancy(arch: int, registers: int, warps: int, shared: int, tensor_memory: int = 0) -> int:
    """Programs that fit on an SM; 0 if none does."""
    limits = SM_LIMITS[arch]
    per_warp = -(-registers // 8) * 8 * 32  # registers are given out in units of 256 per warp
    of_registers = REGISTERS // per_warp // 4 * 4 // warps if per_warp else limits.blocks  # warps in fours
    of_shared = limits.shared // (-(-shared // 128) * 128 + 1024)
    of_tensor_memory = TENSOR_MEMORY // tensor_memory if tensor_memory else limits.blocks
    return min(limits.blocks, limits.warps // warps, of_registers, of_shared, of_tensor_memory)


def rate(warps: int) -> float:
    """The share of an SM's rate that so many warps reach."""
    return min(1.0, warps / FULL)


def schedule(clocks: Sequence[float], warps: int, fit: int, sms: int) -> float:
    """Clocks until all programs are done: the next program starts where one ends, first on SMs with the fewest.

    clocks: work of each program on an SM at full rate, in the order in which programs start.
    """
    if fit < 1:
        raise ValueError(f"a program must fit on an SM, but {fit} do; take a smaller tile")
    start = min(len(clocks), sms * fit)
    machines: list[list[float]] = [sorted(clocks[sm:start:sms]) for sm in range(min(sms, start))]
    # On an SM with n programs each advances at rate(n × warps) / n: its programs are kept by the work at which they end.
    done = [0.0] * len(machines)  # work that each resident program of the SM has done since the launch began
    events = [(ends_at(0.0, 0.0, work, warps), sm) for sm, work in enumerate(machines)]
    heapq.heapify(events)
    last, upcoming = 0.0, start
    while events:
        now, sm = heapq.heappop(events)
        work = machines[sm]
        done[sm] = work.pop(0)
        last = now
        if upcoming < len(clocks):
            insert(work, done[sm] + clocks[upcoming])
            upcoming += 1
        if work:
            heapq.heappush(events, (ends_at(now, done[sm], work, warps), sm))
    return last


def ends_at(now: float, done: float, work: list[float], warps: int) -> float:
    """When the SM's shortest program ends."""
    return now + (work[0] - done) * len(work) / rate(len(work) * warps)


def insert(sorted_values: list[float], value: float) -> None:
    import bisect

    bisect.insort(sorted_values, value)
