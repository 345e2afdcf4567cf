"""Who touched which bytes last, and whether two accesses are ordered.

A warp of a program between two barriers is one number: program · 2²⁴ + barriers passed · 2⁶ + warp. Two accesses are ordered if
they come from the same warp, or from the same program with a barrier between them. Programs of one launch are never ordered.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Row = NDArray[Any]
WARPS, PROGRAM = 1 << 6, 1 << 24
SEVERAL_WARPS = WARPS - 1  # the last number of a warp: several of them since the last barrier
NEVER = -1
SEVERAL_PROGRAMS = 1 << 62
UNDER_WAY = 1 << 61  # an asynchronous copy that nobody has waited for


class Who(NamedTuple):
    """The accessing warp of each lane; the first number of its program and of its time since the last barrier."""

    me: Row
    program: Row
    since: Row

    @classmethod
    def make(cls, me: Row) -> Who:
        return cls(me, me & -PROGRAM, me & -WARPS)

    def at(self, lanes: Row | None) -> Who:
        return self if lanes is None else Who.make(self.me[lanes])

    def columns(self) -> Who:
        return Who(self.me[:, None], self.program[:, None], self.since[:, None])

    def unordered(self, other: Row) -> Row:
        """Where another's access, by number, is not ordered before ours."""
        return (other != self.me) & ((other >= self.since) | ((other < self.program) & (other >= 0)))


def describe(number: int) -> str:
    if number == UNDER_WAY:
        return "an asynchronous copy that was not waited for"
    if number == SEVERAL_PROGRAMS:
        return "several programs"
    warp = number % WARPS
    return f"{'several warps' if warp == SEVERAL_WARPS else f'warp {warp}'} of program {number // PROGRAM}"


class Shadow:
    """The last writer and reader of every granule of an area."""

    def __init__(self, granules: int) -> None:
        self.writer, self.reader = np.full(granules, NEVER, np.int64), np.full(granules, NEVER, np.int64)

    def clear(self) -> None:
        self.writer.fill(NEVER)
        self.reader.fill(NEVER)

    def read(self, index: Row, who: Who) -> Row | None:
        """Note a read. Whose write it is not ordered after, NEVER for none; None if that holds everywhere."""
        before = self.reader.take(index)
        clash = who.unordered(before)
        mine = np.broadcast_to(who.me, index.shape)
        noted = np.where(clash, several(before, who), mine) if clash.any() else mine
        self.reader[index] = noted
        after = self.reader.take(index)
        lost = after != noted  # lanes of one instruction read the same granule
        if lost.any():
            together = np.where(who.unordered(after), several(after, who), after)
            self.reader[index[lost]] = together[lost]
        return unordered_of(who, self.writer.take(index))

    def write(self, index: Row, who: Who) -> Row | None:
        """Note a write. Whose write or reads it is not ordered after, as above."""
        writer, reader = self.writer.take(index), self.reader.take(index)
        self.writer[index] = who.me
        found, also = unordered_of(who, writer), unordered_of(who, reader)
        return also if found is None else found if also is None else np.maximum(found, also)


def unordered_of(who: Who, other: Row) -> Row | None:
    clash = who.unordered(other)
    return np.where(clash, other, NEVER) if clash.any() else None


def several(other: Row, who: Who) -> Row:
    own = (other >= who.program) & (other < who.program + PROGRAM)
    return np.where(own, who.since | SEVERAL_WARPS, SEVERAL_PROGRAMS)
