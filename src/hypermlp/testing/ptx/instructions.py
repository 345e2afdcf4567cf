"""Every instruction that the emulator knows, by its whole name with all modifiers."""

from __future__ import annotations

import difflib

from hypermlp.testing.ptx import arithmetic, conversions, matrix, transfers, warp, wgmma
from hypermlp.testing.ptx.arithmetic import Rule
from hypermlp.testing.ptx.faults import UnknownInstruction
from hypermlp.testing.ptx.machine import Machine, Site, Step
from hypermlp.testing.ptx.parser import Instruction

RULES: dict[str, Rule] = arithmetic.RULES | conversions.RULES | transfers.RULES | matrix.RULES | warp.RULES | wgmma.RULES


def bind(machine: Machine, instruction: Instruction, masked: bool) -> list[Step]:
    """The instruction as steps without arguments. masked: only for the machine's active lanes."""
    site = Site(machine, instruction, masked)
    steps = RULES[instruction.opcode](site)
    return [*site.first, *steps] if steps else []


def check_known(kernel: str, instructions: list[Instruction]) -> None:
    unknown = sorted({i.opcode for i in instructions} - RULES.keys())
    if unknown:
        near = difflib.get_close_matches(unknown[0], RULES, 3)
        remedy = f"; known and similar: {', '.join(near)}" if near else ""
        raise UnknownInstruction(f"{kernel}: the emulator does not know {', '.join(unknown)}{remedy}")
