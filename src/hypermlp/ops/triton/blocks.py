"""Which rows and slots each program of a kernel works on: spans cut into blocks, on the host, in plain integers.

Inside a span every kernel sees a plain causal sequence. A block of rows is described by eight numbers:

    batch entry, first row, end of the span's rows, first slot of the span, position of the first row in the span,
    slots of the span, and for the backward where its scratch begins and how long a row of it is.

A block of slots (for the gradients of k and v) by six: batch entry, first slot of the span, first slot of the block counted
from there, slots of the span, and the range of row blocks that see it.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hypermlp.ops.types import dense_spans

Ints = NDArray[np.int64]
MARGIN = 256  # cells around the scratch, which tiles of products reach into
BATCH, ROW, ROW_END, SLOT, POSITION, SLOTS, OFFSET, STRIDE = range(8)


class Tables:
    """Tables in one piece of a device's memory, copied once, and read by whatever stream a call is on."""

    def __init__(self, device: str, far: bool, *arrays: Ints) -> None:
        """Tensors of 32 bits, or 64 where numbers computed from them may exceed these; all begin at multiples of 16 bytes."""
        padded = [np.pad(x.ravel(), (0, -x.size % 4)) for x in arrays]
        self.host = torch.from_numpy(np.concatenate(padded).astype(np.int64 if far else np.int32))
        self.memory, self.copied = self.host, None
        self.shapes, self.sizes = [x.shape for x in arrays], [len(x) for x in padded]
        if not device.startswith("cpu"):
            self.host = self.host.pin_memory()  # kept: a captured graph copies from it again
            self.memory = self.host.to(device, non_blocking=True)
            self.copied = (torch.cuda.current_stream(device), torch.cuda.Event())
            self.copied[1].record(self.copied[0])

    def views(self) -> list[Tensor]:
        if self.copied is not None:
            stream, done = self.copied
            current = torch.cuda.current_stream(self.memory.device)
            if current != stream:
                current.wait_event(done)
                self.memory.record_stream(current)
        parts = self.memory.split(self.sizes)
        return [part[: math.prod(shape)].view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


class Chunk(NamedTuple):
    """Row blocks whose scratch exists at the same time, and the slot blocks they reach."""

    tables: Tables  # rows (n 8), spans in order; order (n), the same by falling length; slots (m 6); tallies (lag_tiles)
    blocks: int  # n
    cells: int  # of scratch per head: pairs of a row and a column
    most_tiles: int  # of N columns that a block of rows walks over
    all_tiles: int  # of all blocks together
    lag_tiles: int  # tallies: how many of `order` reach further back than so many of them
    slot_blocks: int  # m
    aligned: bool  # positions and slots of all blocks begin at multiples of 16


def span_list(spans: Tensor | None, B: int, T: int, S: int) -> Ints:
    """Spans with rows, as an array on the host."""
    found = dense_spans(B, T, S) if spans is None else spans
    found = found[found[:, 2] > found[:, 1]]
    return found.cpu().numpy().astype(np.int64)


def row_blocks(spans: Ints, M: int) -> Ints:
    """All row blocks (n 8), spans in order, scratch not yet placed."""
    counts = -(-(spans[:, 2] - spans[:, 1]) // M)
    owner = np.repeat(np.arange(len(spans)), counts)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    b, r0, r1, c0, c1 = spans[owner].T
    first = r0 + number * M
    blocks = np.zeros((len(owner), 8), np.int64)
    blocks[:, :6] = np.stack([b, first, r1, c0, first - r1 + c1 - c0, c1 - c0], 1)
    return blocks


def reach(blocks: Ints, L: int, M: int, N: int) -> Ints:
    """Columns of lags, a multiple of N, that a row block walks over."""
    return -(-np.minimum(L, blocks[:, POSITION] + M) // N) * N


class Plan(NamedTuple):
    """A key by which tables are kept: spans as bytes, and the sizes that decide how they are cut."""

    spans: bytes
    L: int
    M: int
    N: int
    device: str
    far: bool = False  # tables of 64 bits

    def array(self) -> Ints:
        return np.frombuffer(self.spans, np.int64).reshape(-1, 5)


@functools.lru_cache(maxsize=64)
def all_rows(plan: Plan) -> Chunk:
    """All row blocks, for kernels without a scratch."""
    blocks = row_blocks(plan.array(), plan.M)
    return make_chunk(plan, blocks, blocks[:0], 1)


@functools.lru_cache(maxsize=64)
def chunk_rows(plan: Plan, cells: int, lags: int, slots: int) -> tuple[list[Chunk], bool]:
    """Row blocks in chunks of at most `cells` of scratch per head, or one block where that needs more.

    A span stays whole where it fits. True if the gradients of a slot come from more than one chunk.
    """
    blocks = row_blocks(plan.array(), plan.M)
    blocks[:, STRIDE] = reach(blocks, plan.L, plan.M, plan.N) + plan.M
    spans = (
        np.cumsum(np.r_[0, np.any(np.diff(blocks[:, [BATCH, ROW_END, SLOT]], axis=0) != 0, axis=1)])
        if len(blocks)
        else blocks[:0, 0]
    )
    alone = overlapping(plan.array())
    parts: list[list[int]] = [[]]
    held, shared = 0, alone
    for span in np.unique(spans):
        members = np.flatnonzero(spans == span)
        sizes = plan.M * blocks[members, STRIDE]
        if parts[-1] and (alone or held + sizes.sum() > cells):
            parts, held = [*parts, []], 0
        for block, size in zip(members.tolist(), sizes.tolist(), strict=True):
            if parts[-1] and held + size > cells:
                parts, held, shared = [*parts, []], 0, True
            parts[-1].append(block)
            held += size

    def chunk(part: list[int]) -> Chunk:
        own, of = blocks[part], spans[part]
        reached = [slot_blocks(plan, own, np.flatnonzero(of == s), slots, shared) for s in np.unique(of)]
        return make_chunk(plan, own, np.concatenate(reached), lags)

    return [chunk(part) for part in parts if part], shared


@functools.lru_cache(maxsize=64)
def heaviest(plan: Plan) -> int:
    """Cells of scratch that the longest block of rows needs, per head."""
    blocks = row_blocks(plan.array(), plan.M)
    return int(plan.M * (reach(blocks, plan.L, plan.M, plan.N).max(initial=0) + plan.M))


def overlapping(spans: Ints) -> bool:
    """Whether two spans of a batch entry share slots."""
    sorted_spans = spans[np.lexsort((spans[:, 3], spans[:, 0]))]
    before, after = sorted_spans[:-1], sorted_spans[1:]
    return bool(((before[:, 0] == after[:, 0]) & (before[:, 4] > after[:, 3])).any())


def make_chunk(plan: Plan, blocks: Ints, slots: Ints, lags: int) -> Chunk:
    """slots: the slot blocks that the row blocks reach."""
    length = reach(blocks, plan.L, plan.M, plan.N)
    blocks[:, STRIDE] = length + plan.M
    sizes = plan.M * blocks[:, STRIDE]
    blocks[:, OFFSET] = MARGIN + np.cumsum(sizes) - sizes
    order = np.argsort(-length, kind="stable")
    most = int(length.max(initial=0))
    lag_tiles = -(-min(plan.L, most) // lags)
    tallies = (length[None, :] > lags * np.arange(lag_tiles)[:, None]).sum(1)
    aligned = not (np.any(blocks[:, POSITION] % 16) or np.any(slots[:, 2] % 16))
    cells = int(sizes.sum()) + 2 * MARGIN
    tables = Tables(plan.device, plan.far, blocks, order, slots, tallies)
    tiles = length // plan.N
    return Chunk(tables, len(blocks), cells, most // plan.N, int(tiles.sum()), lag_tiles, len(slots), aligned)


def slot_blocks(plan: Plan, blocks: Ints, members: Ints, width: int, shared: bool) -> Ints:
    """Slot blocks (m 6) of one span, whose row blocks are `members`: those they reach, or all if nobody else writes them."""
    first, last = blocks[members[0]], blocks[members[-1]]
    begin, end = 0, first[SLOTS]
    if shared:
        begin = max(0, first[POSITION] - plan.L + 1) // 16 * 16
        end = min(end, last[POSITION] + plan.M)
    c = np.arange(begin, end, width)
    low = -(-(c - plan.M + 1 - first[POSITION]) // plan.M)
    high = (c + width - 1 + plan.L - 1 - first[POSITION]) // plan.M + 1
    low, high = (np.clip(x, 0, len(members)) + members[0] for x in (low, high))
    same = np.ones_like(c)
    return np.stack([first[BATCH] * same, first[SLOT] * same, c, first[SLOTS] * same, low, high], 1)
