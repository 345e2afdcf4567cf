"""Loads, stores and asynchronous copies."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np

from hypermlp.testing.ptx.arithmetic import Rule
from hypermlp.testing.ptx.faults import Fault, UnknownInstruction
from hypermlp.testing.ptx.machine import KINDS, Site, Step
from hypermlp.testing.ptx.parser import Address, Instruction
from hypermlp.testing.ptx.shadow import Row

TYPES = tuple(f"{letter}{bits}" for bits in (8, 16, 32, 64) for letter in ("bus" if bits == 8 else "busf"))
HINTS = ("", ".ca", ".cg", ".cs", ".nc", ".L1::evict_first", ".L1::evict_last", ".L1::evict_normal")  # caches change no value
STORE_HINTS = ("", ".wb", ".cg", ".cs", ".wt", ".L1::evict_first", ".L1::evict_last", ".L1::evict_normal")
VECTORS = {"": 1, ".v2": 2, ".v4": 4}


def names_of(operand: Any) -> tuple[str, ...]:
    return operand if isinstance(operand, tuple) else (operand,)


def load(space: str, count: int, kind: Any) -> Rule:
    width = count * np.dtype(kind).itemsize

    def rule(site: Site) -> list[Step]:
        site.expect(2)
        names, address = names_of(site.operands[0]), site.address(site.operands[1])
        if len(names) != count:
            raise UnknownInstruction(f"{site.machine.kernel.name}: {site.instruction} must have {count} registers")
        outs = [register(site, name, kind) for name in names]

        def step() -> None:
            lanes = site.lanes()
            if lanes is not None and not len(lanes):
                return
            found = fetch(site, space, address(lanes), lanes, width).view(kind)
            for column, out in enumerate(outs):
                out[... if lanes is None else lanes] = found[:, column]

        return [step]

    return rule


def register(site: Site, name: str, kind: Any) -> Row:
    """The row of a register, which may be wider than the type in memory and then keeps its sign."""
    if name == "_":
        return site.hold("sink", kind)
    row = site.machine.rows[name]
    letter = np.dtype(kind).kind
    return row.view(kind) if row.dtype.itemsize == np.dtype(kind).itemsize else row.view(f"{letter}{row.dtype.itemsize}")


def fetch(site: Site, space: str, address: Row, lanes: Row | None, width: int) -> Row:
    """Rows of bytes, one for each of the lanes."""
    machine = site.machine
    memory = machine.shared if space == "shared" else machine.memory
    parts = memory.find(address, lanes, width, site.complaint(lanes))
    if len(parts) == 1 and parts[0][2] is None:
        area, index, _ = parts[0]
        return area.load(index, machine.who.at(lanes), site.complaint(lanes))
    found = np.empty((len(address), width), np.uint8)
    for area, index, chosen in parts:
        own = chosen if lanes is None else lanes[chosen]
        found[chosen] = area.load(index, machine.who.at(own), site.complaint(own))
    return found


def store(space: str, count: int, kind: Any) -> Rule:
    def rule(site: Site) -> list[Step]:
        site.expect(2)
        names, address = names_of(site.operands[1]), site.address(site.operands[0])
        if len(names) != count:
            raise UnknownInstruction(f"{site.machine.kernel.name}: {site.instruction} must have {count} registers")
        values = [site.read(name, kind) if name not in site.machine.rows else register(site, name, kind) for name in names]
        room = site.machine.hold("stored", (site.machine.lanes, count), kind)

        def step() -> None:
            lanes = site.lanes()
            if lanes is not None and not len(lanes):
                return
            for column, value in enumerate(values):
                room[:, column] = value
            data = (room if lanes is None else room[lanes]).view(np.uint8)
            put(site, space, address(lanes), lanes, data)

        return [step]

    return rule


def put(site: Site, space: str, address: Row, lanes: Row | None, data: Row) -> None:
    """data: a row of bytes for each of the lanes."""
    machine = site.machine
    memory = machine.shared if space == "shared" else machine.memory
    for area, index, chosen in memory.find(address, lanes, data.shape[1], site.complaint(lanes)):
        own = lanes if chosen is None else chosen if lanes is None else lanes[chosen]
        part = data if chosen is None else data[chosen]
        area.store(index, part, machine.who.at(own), site.complaint(own))


def load_parameter(kind: Any) -> Rule:
    def rule(site: Site) -> list[Step]:
        site.expect(2)
        address = site.operands[1]
        value = site.machine.parameters.get(address.base) if isinstance(address, Address) and not address.offset else None
        if value is None:
            raise UnknownInstruction(f"{site.machine.kernel.name}: unknown parameter in {site.instruction}")
        return [site.assign(register(site, str(site.operands[0]), kind), value.view(kind)[:1])]

    return rule


# Asynchronous copies.


class Copy(NamedTuple):
    """Copies of one instruction that are under way."""

    site: Site
    width: int
    lanes: Row
    source: Row  # addresses
    filled: Row  # which lanes copy; the others write zeros
    target: Row  # addresses

    def part(self, chosen: Row) -> Copy:
        return self._replace(**{name: getattr(self, name)[chosen] for name in ("lanes", "source", "filled", "target")})

    def begin(self) -> None:
        """From now on nobody may touch the target; the source is looked at already, for its bounds."""
        complain, who = self.site.complaint(self.lanes), self.site.machine.who.at(self.lanes)
        for area, index, _ in self.site.machine.shared.find(self.target, self.lanes, self.width, complain):
            area.await_copy(index, who, complain)
        self._read()

    def finish(self) -> None:
        data, complain, who = self._read(), self.site.complaint(self.lanes), self.site.machine.who.at(self.lanes)
        for area, index, _ in self.site.machine.shared.find(self.target, self.lanes, self.width, complain):
            area.finish_copy(index, data, who)

    def _read(self) -> Row:
        data = np.zeros((len(self.lanes), self.width), np.uint8)
        if self.filled.any():
            data[self.filled] = fetch(self.site, "global", self.source[self.filled], self.lanes[self.filled], self.width)
        return data


def copy(widths: tuple[int, ...]) -> Rule:
    def rule(site: Site) -> list[Step]:
        site.expect(3, 4)
        machine, target, source = site.machine, site.address(site.operands[0]), site.address(site.operands[1])
        width = int(str(site.operands[2]), 0)
        if width not in widths:
            raise UnknownInstruction(f"{machine.kernel.name}: {site.instruction} must copy {widths} bytes")
        sizes = site.read(3, np.uint32) if len(site.operands) == 4 else machine.constant(str(width), np.uint32)

        def step() -> None:
            found = site.lanes()
            lanes = np.arange(machine.lanes) if found is None else found
            if not len(lanes):
                return
            size = sizes[lanes]
            if not np.isin(size, (0, width)).all():
                raise site.fault(Fault, f"copies a part of {width} bytes, which the emulator does not know", int(lanes[0]))
            begun = Copy(site, width, lanes, source(lanes), size > 0, target(lanes))
            begun.begin()
            machine.copies.begin(begun)

        return [step]

    return rule


def commit(which: str) -> Rule:
    """which: the machine's queue of copies or of products."""

    def rule(site: Site) -> list[Step]:
        site.expect(0)
        committed = getattr(site.machine, which).committed
        return [site.call(np.add, committed, np.ones(1, np.int64), committed)]

    return rule


def wait(which: str, all_groups: bool = False) -> Rule:
    def rule(site: Site) -> list[Step]:
        site.expect(0 if all_groups else 1)
        queue, left = getattr(site.machine, which), None if all_groups else int(str(site.operands[0]), 0)
        return [lambda: queue.wait(site.where, left)]

    return rule


def rules() -> dict[str, Rule]:
    found: dict[str, Rule] = {}
    for name in TYPES:
        kind = KINDS[name]
        for vector, count in VECTORS.items():
            if count * np.dtype(kind).itemsize > 16:
                continue
            for space, hints in (("global", HINTS), ("shared", ("",))):
                found |= {f"ld.{space}{hint}{vector}.{name}": load(space, count, kind) for hint in hints}
            for space, hints in (("global", STORE_HINTS), ("shared", ("",))):
                found |= {f"st.{space}{hint}{vector}.{name}": store(space, count, kind) for hint in hints}
        found[f"ld.param.{name}"] = load_parameter(kind)
    found["cp.async.ca.shared.global"], found["cp.async.cg.shared.global"] = copy((4, 8, 16)), copy((16,))
    found["cp.async.commit_group"] = commit("copies")
    found["cp.async.wait_group"], found["cp.async.wait_all"] = wait("copies"), wait("copies", all_groups=True)
    return found


RULES = rules()
WIDTH = re.compile(r"(?:ld|st)\.(global|shared)\S*?(?:\.v([24]))?\.[busf](8|16|32|64)$")


def narrowest(instructions: list[Instruction], space: str) -> int:
    """The narrowest access in bytes that instructions make in a space; 16 if there is none."""
    widths = [16]
    for instruction in instructions:
        found = WIDTH.match(instruction.opcode)
        if found and found[1] == space:
            widths.append(int(found[2] or 1) * int(found[3]) // 8)
        elif instruction.opcode.startswith("cp.async.c") and len(instruction.operands) > 2:
            widths.append(int(str(instruction.operands[2]), 0))
        elif instruction.opcode.startswith(("atom", "red.global")):
            widths.append(int(instruction.opcode[-2:]) // 8)
    return min(widths)
