"""Runs a grid: programs side by side, fronts of lanes through basic blocks, barriers.

A front is a set of lanes at the same block. All lanes begin as one front; it splits where they branch differently, and fronts
that meet again are one. Bytes that two warps or programs touch in the wrong order are found by the checks of memory, whatever
the order in which they run. That order is a choice all the same:

    "together"   all warps of as many programs as fit, instruction by instruction: the fastest
    "forward"    one program after the other, one warp after the other between barriers
    "reverse"    the other way round
    a number     in a random order that the number fixes
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from hypermlp.testing.ptx.faults import Fault, UnknownInstruction
from hypermlp.testing.ptx.instructions import bind, check_known
from hypermlp.testing.ptx.machine import WARP, Machine, Step
from hypermlp.testing.ptx.memory import Global, Shared
from hypermlp.testing.ptx.parser import Instruction, Kernel, parse
from hypermlp.testing.ptx.shadow import Row
from hypermlp.testing.ptx.transfers import narrowest

SIDE_BY_SIDE = 1024  # lanes
BARRIERS = ("bar.sync", "barrier.sync", "barrier.sync.aligned")
Order = str | int


class Front:
    """Lanes at the beginning of a block; None: all of them. Fronts of a lower rank run first."""

    __slots__ = ("block", "mask", "rank")

    def __init__(self, block: int, mask: Row | None, rank: int) -> None:
        self.block, self.mask, self.rank = block, mask, rank


class Counts(NamedTuple):
    """What a launch took."""

    programs: int
    warp_instructions: int


class Code:
    """A kernel bound to a machine, block by block when it first gets there."""

    def __init__(self, kernel: Kernel, machine: Machine) -> None:
        self.kernel, self.machine = kernel, machine
        self.bound: dict[tuple[int, bool], list[Step]] = {}

    def steps(self, block: int, masked: bool) -> list[Step]:
        found = self.bound.get((block, masked))
        if found is None:
            instructions = self.kernel.blocks[block].instructions
            found = [step for instruction in instructions for step in bind(self.machine, instruction, masked)]
            self.bound[block, masked] = found
        return found


class Wave:
    """Programs that run side by side, from their first instruction to their last."""

    def __init__(self, code: Code, rank_of: Callable[[int], int] | None) -> None:
        """rank_of: when a warp runs, anew after each barrier; None: all warps together."""
        self.code, self.machine, self.kernel, self.rank_of = code, code.machine, code.kernel, rank_of
        self.ready: list[Front] = []
        self.waiting: list[Front] = []  # at a barrier
        self.executed = 0

    def run(self, programs: int) -> None:
        machine = self.machine
        self.live = np.arange(machine.lanes) < programs * machine.threads
        self.arrived = np.zeros(machine.lanes, np.bool_)
        self._release(0, self.live)
        while self.ready:
            self._advance(self._next())

    def _release(self, block: int, lanes: Row) -> None:
        """Let lanes go on at a block."""
        if self.rank_of is None:
            self.ready.append(Front(block, None if lanes.all() else lanes, 0))
            return
        warp = np.arange(self.machine.lanes) // WARP
        for number in np.unique(warp[lanes]):
            self.ready.append(Front(block, lanes & (warp == number), self.rank_of(int(number))))

    def _next(self) -> Front:
        """The front to run: of the lowest rank the one that is furthest behind, with all that are at the same place."""
        if len(self.ready) == 1:
            return self.ready.pop()
        first = min(self.ready, key=lambda front: (front.rank, front.block))
        same = [front for front in self.ready if (front.rank, front.block) == (first.rank, first.block)]
        self.ready = [front for front in self.ready if front not in same]
        if len(same) > 1:
            masks = [front.mask for front in same if front.mask is not None]
            first.mask = np.logical_or.reduce(masks)
        if first.mask is not None and first.mask.all():
            first.mask = None
        return first

    def _advance(self, front: Front) -> None:
        """Run a front until it ends, waits or splits, or until others may have to go first."""
        blocks, machine = self.kernel.blocks, self.machine
        if front.mask is not None:
            machine.active[...] = front.mask
        warps = machine.warps if front.mask is None else int(front.mask.reshape(-1, WARP).any(1).sum())
        while True:
            if front.block == len(blocks):
                raise Fault(f"{self.kernel.name}: runs past its last instruction")
            for step in self.code.steps(front.block, front.mask is not None):
                step()
            block = blocks[front.block]
            self.executed += warps * (len(block.instructions) + (block.control is not None))
            front.block += 1
            if block.control is not None and not self._control(front, block.control):
                return
            if self.ready:
                self.ready.append(front)
                return

    def _control(self, front: Front, control: Instruction) -> bool:
        """Whether the front goes on as it is."""
        opcode = control.opcode
        if opcode.startswith("bra"):
            return self._branch(front, control)
        if control.predicate is None and opcode in ("ret", "exit"):
            self._end(front, control)
            return False
        if control.predicate is None and opcode in BARRIERS and control.operands == ("0",):
            return self._wait(front, control)
        raise UnknownInstruction(f"{self.kernel.name}: the emulator does not know {control}")

    def _end(self, front: Front, control: Instruction) -> None:
        lanes = self.live if front.mask is None else front.mask
        self.live = self.live & ~lanes
        if (self.arrived.reshape(-1, self.machine.threads).any(1) & lanes.reshape(-1, self.machine.threads).any(1)).any():
            raise Fault(f"{self.kernel.name}: warps end at {control} while others of their program wait at a barrier")

    def _wait(self, front: Front, control: Instruction) -> bool:
        """A barrier lets a program go when all of its lanes have arrived, at the same one."""
        if front.mask is None:
            self.machine.pass_barrier(None)
            return True
        threads = self.machine.threads
        here = front.mask.reshape(-1, threads).any(1)
        if (here & ~self.live.reshape(-1, threads).all(1)).any():
            raise Fault(f"{self.kernel.name}: warps wait at {control} for others of their program that have ended")
        for other in self.waiting:
            if other.mask is not None and other.block != front.block and (other.mask.reshape(-1, threads).any(1) & here).any():
                raise Fault(
                    f"{self.kernel.name}: warps wait at {control} while others of their program wait at another barrier"
                )
        self.arrived = self.arrived | front.mask
        self.waiting.append(front)
        complete = np.repeat(self.arrived.reshape(-1, threads).all(1), threads)
        if complete.any():
            self._let_go(complete)
        return False

    def _branch(self, front: Front, control: Instruction) -> bool:
        target = self.kernel.targets[str(control.operands[0])]
        if control.predicate is None:
            front.block = target
            return True
        truth = self.machine.rows[control.predicate]
        truth = ~truth if control.negated else truth
        lanes = truth.copy() if front.mask is None else truth & front.mask
        jumping, all_lanes = np.count_nonzero(lanes), self.machine.lanes if front.mask is None else np.count_nonzero(front.mask)
        if jumping == all_lanes:
            front.block = target
        if jumping in (0, all_lanes):
            return True
        others = ~lanes if front.mask is None else front.mask & ~lanes
        self.ready += [Front(target, lanes, front.rank), Front(front.block, others, front.rank)]
        return False

    def _let_go(self, lanes: Row) -> None:
        self.machine.pass_barrier(lanes)
        self.arrived = self.arrived & ~lanes
        waiting, self.waiting = self.waiting, []
        for front in waiting:
            assert front.mask is not None
            if (front.mask & lanes).any():
                self._release(front.block, front.mask & lanes)
            if (front.mask & ~lanes).any():
                self.waiting.append(Front(front.block, front.mask & ~lanes, front.rank))


@functools.lru_cache(maxsize=32)
def prepared(text: str, programs: int, shared: int) -> Code:
    """A kernel bound to room for some programs, kept for the next launch."""
    kernel = parse(text)
    instructions = [i for block in kernel.blocks for i in block.instructions]
    check_known(kernel.name, instructions)
    size = max(shared, kernel.static_shared)
    space = Shared(size, programs, kernel.threads, narrowest(instructions, "shared"))
    return Code(kernel, Machine(kernel, programs, space, Global(narrowest(instructions, "global"))))


def global_memory(text: str) -> Global:
    """Memory for the tensors of one launch of a kernel."""
    kernel = parse(text)
    return Global(narrowest([i for block in kernel.blocks for i in block.instructions], "global"))


def execute(
    text: str, grid: tuple[int, ...], values: list[int | float], memory: Global, shared: int = 0, order: Order = "together"
) -> Counts:
    """Run a kernel. values: its parameters, pointers as addresses in the memory; shared: bytes of dynamic shared memory."""
    if isinstance(order, str) and order not in ("together", "forward", "reverse"):
        raise ValueError(f'order ({order!r}) must be "together", "forward", "reverse" or a number')
    kernel = parse(text)
    x, y, z = (*grid, 1, 1, 1)[:3]
    count = x * y * z
    fit = max(1, SIDE_BY_SIDE // kernel.threads) if order == "together" else 1
    waves = -(-count // fit)
    if not waves:
        return Counts(0, 0)
    size = -(-count // waves)
    code = prepared(text, size, shared)
    code.machine.memory = memory
    set_parameters(code.machine, values)
    numbers, rank_of = arrange(order, count)
    executed = 0
    with np.errstate(all="ignore"):
        for first in range(0, count, size):
            part = numbers[first : first + size]
            code.machine.start(part, (x, y, z))
            wave = Wave(code, rank_of)
            wave.run(len(part))
            executed += wave.executed
    return Counts(count, executed)


def arrange(order: Order, count: int) -> tuple[Row, Callable[[int], int] | None]:
    """The order of programs, and a rank for each warp."""
    numbers = np.arange(count)
    if order == "together":
        return numbers, None
    if order == "forward":
        return numbers, lambda warp: warp
    if order == "reverse":
        return numbers[::-1], lambda warp: -warp
    chance = np.random.default_rng(int(order))
    # A warp's own number makes the rank unique: different warps never become one front.
    return chance.permutation(numbers), lambda warp: int(chance.integers(1 << 30)) * WARP + warp


def set_parameters(machine: Machine, values: list[int | float]) -> None:
    """Parameters that a launch leaves out, as Triton does with those of its own, are zero."""
    types = machine.kernel.parameters
    if len(values) > len(types):
        raise ValueError(f"{machine.kernel.name} takes {len(types)} parameters, given are {len(values)}")
    for name, value in zip(types, [*values, *[0] * (len(types) - len(values))], strict=True):
        machine.parameters[name][0] = parameter_bits(value, types[name])


def parameter_bits(value: Any, kind: str) -> Any:
    if isinstance(value, float):
        return np.array([value], f"f{int(kind[1:]) // 8}").view(f"u{int(kind[1:]) // 8}")[0]
    return np.uint64(int(value) & (2**64 - 1))
