"""How the work of a call is cut: enough programs to fill the device first, then a scratch that fits its cache.

A long context has few blocks of rows in a scratch of bounded size, so the slots of a block are split among programs as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from hypermlp.ops.triton.blocks import Chunk, Plan, heaviest
from hypermlp.ops.triton.device import Limits

RESIDENT = 2  # programs that a processor runs at once: registers allow for two of most kernels
LEAST_TILES = 8  # of a split: each computes up to two more tiles of scores than it uses
FAIR_SHARES = 3  # that a block of rows may hold before it is split, since splits repeat some work
BLOCKS_TOGETHER = 4  # of rows, before more heads share a chunk: the sums of dk and dv are read and written once a chunk
LEAST_SCRATCH = 32 << 20  # bytes
CACHE_SHARE = 2  # the scratch takes one part in so many of the L2 cache


class Section(NamedTuple):
    """Rows and heads of a call that share a scratch: a chunk of its rows, and heads first .. first + heads."""

    part: Chunk
    first: int
    heads: int


class Room(NamedTuple):
    """The scratch of a chunk: heads that it holds at once, and cells (pairs of a row and a column) of each."""

    heads: int
    cells: int


def fill(limits: Limits) -> int:
    """Programs that keep the device busy."""
    return RESIDENT * limits.processors


def room(limits: Limits, plan: Plan, heads: int, cell_bytes: int) -> Room:
    """A share of the L2 cache, where the next kernel finds what one has written; more where that leaves processors idle."""
    wave = fill(limits) * LEAST_TILES * plan.M * plan.N
    cells = max(max(LEAST_SCRATCH, limits.cache_bytes // CACHE_SHARE) // cell_bytes, wave)
    together = max(1, min(heads, cells // max(1, BLOCKS_TOGETHER * heaviest(plan))))
    return Room(together, cells // together)


def sections(chunks: Iterable[Chunk], heads: int, together: int) -> Iterator[Section]:
    """All rows and heads, `together` heads at once: the sums over rows of one head stay in the cache."""
    chunks = list(chunks)
    for first in range(0, heads, together):
        for part in chunks:
            yield Section(part, first, min(together, heads - first))


def split(limits: Limits, part: Chunk, programs: int, wider: int = 1, free: bool = False) -> tuple[int, int]:
    """Tiles that each program walks over, and splits of a block's slots: one where no block is much more than a fair share.

    programs: that share a block of rows for other reasons, its heads for one. wider: a tile holds so many of the plan's. free:
    a split computes nothing twice.
    """
    most, tiles = -(-part.most_tiles // wider), -(-part.all_tiles // wider)
    per = max(LEAST_TILES, -(-tiles * programs // fill(limits)))
    if most <= (1 if free else FAIR_SHARES) * per:
        return max(1, most), 1
    return per, -(-most // per)
