"""What an emulated program can do wrong."""

from __future__ import annotations


class Fault(ValueError):
    """The program does what a GPU would punish or leave undefined: a bad address, a barrier that never completes."""


class Race(Fault):
    """Two warps or programs touch the same bytes, one of them writes, and nothing orders them."""


class UnknownInstruction(Fault):
    """The emulator does not know an instruction, a modifier or a directive. It never skips one."""
