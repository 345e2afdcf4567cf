"""Work that a GPU does in the background until somebody waits for it: copies, and products of warp groups.

It happens as late as it may, when it is waited for, so that a missing wait shows.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from hypermlp.testing.ptx.shadow import Row


class QueuedWork(Protocol):
    """What one instruction began for some lanes."""

    @property
    def lanes(self) -> Row: ...

    def part(self, chosen: Row) -> QueuedWork: ...

    def finish(self) -> None: ...


class Begun(NamedTuple):
    work: QueuedWork
    group: Row  # the number of the group that each lane's work belongs to


class Queue:
    """Each lane commits what it began as a group, and waits until at most some of its newest groups are left."""

    def __init__(self, lanes: int) -> None:
        self.committed = np.zeros(lanes, np.int64)  # groups
        self.begun: list[Begun] = []

    def clear(self) -> None:
        self.committed.fill(0)
        self.begun.clear()

    def begin(self, work: QueuedWork) -> None:
        self.begun.append(Begun(work, self.committed[work.lanes]))

    def wait(self, where: Row | None, left: int | None) -> None:
        """Finish the work of these lanes. left: groups that may stay; None: finish what was not committed too."""
        kept = []
        for work, group in self.begun:
            done = np.ones(len(group), np.bool_) if left is None else group < self.committed[work.lanes] - left
            if where is not None:
                done = done & where[work.lanes]
            if done.all():
                work.finish()
                continue
            if done.any():
                work.part(done).finish()
                work, group = work.part(~done), group[~done]
            kept.append(Begun(work, group))
        self.begun[:] = kept
