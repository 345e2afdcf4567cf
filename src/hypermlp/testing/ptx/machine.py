"""The threads that run side by side: their registers, and what an instruction is bound to.

Every register is a row with one number per lane. A lane is a thread; the lanes are those of several warps, and of several
programs. An instruction is bound to its rows once, as steps that take no arguments, and runs many times.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from hypermlp.testing.ptx.faults import Fault, UnknownInstruction
from hypermlp.testing.ptx.memory import POISON, Complaint, Global, Shared
from hypermlp.testing.ptx.parser import WIDTHS, Address, Instruction, Kernel, Operand
from hypermlp.testing.ptx.queue import Queue
from hypermlp.testing.ptx.shadow import PROGRAM, WARPS, Row, Who

Step = Callable[[], Any]
WARP = 32
STORAGE: dict[int, Any] = {0: np.bool_, 1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
KINDS: dict[str, Any] = {
    "pred": np.bool_, "f16": np.float16, "f32": np.float32, "f64": np.float64,
    **{f"{letter}{bits}": np.dtype(f"uint{bits}").type for letter in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": np.dtype(f"int{bits}").type for bits in (8, 16, 32, 64)},
}  # fmt: skip


class Machine:
    """Room for `programs` programs of a kernel; used again by all launches of that size."""

    def __init__(self, kernel: Kernel, programs: int, shared: Shared, memory: Global) -> None:
        self.kernel, self.programs, self.shared, self.memory = kernel, programs, shared, memory
        self.threads, self.lanes = kernel.threads, programs * kernel.threads
        self.warps = self.lanes // WARP
        self.files = {width: np.empty((0, self.lanes), STORAGE[width]) for width in STORAGE}
        names: dict[int, list[str]] = {width: [] for width in STORAGE}
        for name, kind in kernel.registers.items():
            names[WIDTHS[kind]].append(name)
        self.files = {width: np.zeros((len(found), self.lanes), STORAGE[width]) for width, found in names.items()}
        self.rows = {name: self.files[width][n] for width, found in names.items() for n, name in enumerate(found)}
        self.thread = np.tile(np.arange(self.threads, dtype=np.uint32), programs)
        self.special: dict[str, Row] = {"%tid.x": self.thread, "%laneid": self.thread % np.uint32(WARP)}
        self.special |= {f"%tid.{axis}": np.zeros(self.lanes, np.uint32) for axis in "yz"}
        self.special |= {
            f"%ntid.{axis}": np.full(self.lanes, n, np.uint32) for axis, n in zip("xyz", (self.threads, 1, 1), strict=True)
        }
        self.special |= {f"%{name}.{axis}": np.zeros(self.lanes, np.uint32) for name in ("ctaid", "nctaid") for axis in "xyz"}
        self.parameters = {name: np.zeros(1, np.uint64) for name in kernel.parameters}
        self.active = np.ones(self.lanes, np.bool_)  # lanes that a masked step runs for
        self.held: dict[Any, Row] = {}
        self.who = Who.make(np.zeros(self.lanes, np.int64))
        self.copies, self.products = Queue(self.lanes), Queue(self.lanes)

    def start(self, numbers: Row, grid: tuple[int, int, int]) -> None:
        """Put programs with these numbers into place; registers and shared memory hold a NaN that says nobody wrote them."""
        for width, file in self.files.items():
            if width >= 2:
                file.view(np.uint16).reshape(-1)[...] = POISON & 0xFFFF
        self.shared.clear()
        place = np.zeros(self.programs, np.int64)
        place[: len(numbers)] = numbers
        for axis, size in zip("xyz", grid, strict=True):
            self.special[f"%ctaid.{axis}"][...] = np.repeat(place % size, self.threads)
            self.special[f"%nctaid.{axis}"][...] = size
            place = place // size
        number = np.zeros(self.programs, np.int64)
        number[: len(numbers)] = numbers
        self.who = Who.make(np.repeat(number, self.threads) * PROGRAM + self.thread // WARP)
        self.copies.clear()
        self.products.clear()

    def pass_barrier(self, lanes: Row | None) -> None:
        """What these lanes do from now on is ordered after what their programs did."""
        more = WARPS if lanes is None else WARPS * lanes
        self.who = Who.make(self.who.me + more)

    def hold(self, name: Any, shape: tuple[int, ...], dtype: Any) -> Row:
        """An array for intermediate values, shared by all instructions that ask for it by name."""
        key = (name, shape, np.dtype(dtype).str)
        if key not in self.held:
            self.held[key] = np.zeros(shape, dtype)
        return self.held[key]

    def constant(self, text: str, dtype: Any) -> Row:
        key = ("constant", text, np.dtype(dtype).str)
        if key not in self.held:
            self.held[key] = np.full(self.lanes, parse_constant(text, dtype))
        return self.held[key]


def parse_constant(text: str, dtype: Any) -> Any:
    """A number as PTX writes it; 0f… and 0d… are the bits of a float."""
    dtype = np.dtype(dtype)
    bits = {"0f": np.uint32, "0F": np.uint32, "0d": np.uint64, "0D": np.uint64}.get(text[:2])
    if bits is not None and len(text) == 2 + 2 * np.dtype(bits).itemsize:
        value = np.array([int(text[2:], 16)], bits)
        return value.view(dtype)[0] if dtype.itemsize == value.itemsize else value.view(f"f{value.itemsize}").astype(dtype)[0]
    if dtype.kind == "f":
        return dtype.type(float(text))
    number = int(text.rstrip("U"), 0)
    if dtype.kind == "b":
        return dtype.type(number != 0)
    return np.array([number & ((1 << 8 * dtype.itemsize) - 1)], f"u{dtype.itemsize}").view(dtype)[0]


class Site:
    """One instruction at the rows it reads and writes, and the lanes it runs for."""

    def __init__(self, machine: Machine, instruction: Instruction, masked: bool) -> None:
        self.machine, self.instruction = machine, instruction
        self.first: list[Step] = []  # what finds out the lanes
        self.where: Row | None = machine.active if masked else None
        if instruction.predicate is not None:
            predicate = machine.rows[instruction.predicate]
            self.where = machine.hold("where", (machine.lanes,), np.bool_)
            if instruction.negated:
                self.first.append(functools.partial(np.logical_not, predicate, self.where))
            else:
                self.first.append(functools.partial(self.where.__setitem__, ..., predicate))
            if masked:
                self.first.append(functools.partial(np.logical_and, self.where, machine.active, self.where))

    @property
    def operands(self) -> tuple[Operand, ...]:
        return self.instruction.operands

    def expect(self, *counts: int) -> None:
        if len(self.operands) not in counts:
            raise UnknownInstruction(f"{self.machine.kernel.name}: {self.instruction} has {len(self.operands)} operands")

    def read(self, operand: Operand | int, dtype: Any) -> Row:
        """The row of an operand, or of the one with that number: a register, a special one, a constant."""
        text = self.operands[operand] if isinstance(operand, int) else operand
        if not isinstance(text, str):
            raise UnknownInstruction(f"{self.machine.kernel.name}: cannot read {text} in {self.instruction}")
        machine = self.machine
        row = machine.rows.get(text)
        row = machine.special.get(text) if row is None else row
        if row is None:
            text = str(machine.kernel.symbols[text]) if text in machine.kernel.symbols else text
            try:
                return machine.constant(text, dtype)
            except ValueError:
                raise UnknownInstruction(f"{machine.kernel.name}: unknown operand {text} in {self.instruction}") from None
        return self.typed(row, dtype)

    def write(self, operand: Operand | int, dtype: Any) -> Row:
        text = self.operands[operand] if isinstance(operand, int) else operand
        if text == "_":
            return self.machine.hold("sink", (self.machine.lanes,), dtype)
        if not isinstance(text, str) or text not in self.machine.rows:
            raise UnknownInstruction(f"{self.machine.kernel.name}: cannot write {text} in {self.instruction}")
        return self.typed(self.machine.rows[text], dtype)

    def typed(self, row: Row, dtype: Any) -> Row:
        if row.dtype == dtype:
            return row
        if row.dtype.itemsize != np.dtype(dtype).itemsize or (row.dtype == np.bool_) != (np.dtype(dtype) == np.bool_):
            raise UnknownInstruction(f"{self.machine.kernel.name}: {self.instruction} takes a register of another width")
        return row.view(dtype)

    def hold(self, name: Any, dtype: Any) -> Row:
        return self.machine.hold(name, (self.machine.lanes,), dtype)

    def call(self, function: Any, *rows: Row, **options: Any) -> Step:
        """A ufunc whose last row is its result, written where the instruction runs."""
        if self.where is not None:
            options["where"] = self.where
        return functools.partial(function, *rows[:-1], out=rows[-1], **options)

    def assign(self, out: Row, value: Row) -> Step:
        if self.where is None:
            return functools.partial(out.__setitem__, ..., value)
        return functools.partial(np.copyto, out, value, where=self.where, casting="unsafe")

    def apply(self, function: Callable[..., Row], out: Row, *rows: Row) -> Step:
        """Any function of rows that returns a row."""
        where = self.where
        if where is None:

            def everywhere() -> None:
                out[...] = function(*rows)

            return everywhere

        def somewhere() -> None:
            np.copyto(out, function(*rows), where=where, casting="unsafe")

        return somewhere

    def lanes(self) -> Row | None:
        """While running: the lanes, None for all."""
        if self.where is None:
            return None
        found = np.flatnonzero(self.where)
        return None if len(found) == self.machine.lanes else found

    def whole_warps(self) -> Row | None:
        """While running: the warps, None for all. An instruction of a warp needs all of its lanes."""
        if self.where is None:
            return None
        lanes = self.where.reshape(-1, WARP)
        found = lanes.all(1)
        if (found != lanes.any(1)).any():
            raise self.fault(Fault, "needs all lanes of a warp", int(np.flatnonzero(self.where)[0]))
        return None if found.all() else np.flatnonzero(found)

    def address(self, operand: Operand) -> Callable[[Row | None], Row]:
        """The bytes that an address operand points to, for lanes."""
        if not isinstance(operand, Address):
            raise UnknownInstruction(f"{self.machine.kernel.name}: {operand} is no address in {self.instruction}")
        machine = self.machine
        row = machine.rows.get(operand.base)
        if row is None:
            row = self.read(operand.base, np.uint64)
        offset = np.uint64(operand.offset & (2**64 - 1))

        def find(lanes: Row | None) -> Row:
            found = row if lanes is None else row[lanes]
            wide = found.astype(np.uint64)
            return wide + offset if offset else wide

        return find

    def complaint(self, lanes: Row | None) -> Complaint:
        return lambda kind, what, lane: self.fault(kind, what, lane if lanes is None else int(lanes.flat[lane]))

    def fault(self, kind: type[Fault], what: str, lane: int) -> Fault:
        machine = self.machine
        program = tuple(int(machine.special[f"%ctaid.{axis}"][lane]) for axis in "xyz")
        thread = lane % machine.threads
        return kind(
            f"{machine.kernel.name}, program {program}, warp {thread // WARP}, lane {thread % WARP}: {self.instruction} {what}"
        )
