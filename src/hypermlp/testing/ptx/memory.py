"""Memory with checks: bounds, alignment, bytes that nobody wrote, races.

An area is a stretch of bytes. It is read and written in granules, the narrowest access that the kernel makes in that space, so
that the checks are exact and cost one number per lane for most kernels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from hypermlp.testing.ptx.faults import Fault, Race
from hypermlp.testing.ptx.shadow import NEVER, UNDER_WAY, Row, Shadow, Who, describe

GRANULES: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}  # a type to move bytes in
POISON = 0x7FFF7FFF  # a NaN in every type of float
SPACING = 40  # bits: areas of global memory lie this far apart, so that no wrong offset reaches another one
MOST_NOTES = 2048

Complaint = Callable[[type[Fault], str, int], Exception]  # kind of fault, what is wrong, lane


class Area:
    """Bytes at an address. Reads of an area that nobody has written to are only noted, since most never are."""

    def __init__(self, base: int, raw: Row, granule: int, name: str, *, lead: int = 0, shared: bool = False) -> None:
        """lead: bytes at the beginning that do not belong to it, so that granules are aligned."""
        self.base, self.size, self.lead, self.name, self.shared = base, len(raw) - lead, lead, name, shared
        self.granule, self.raw = granule, raw
        count = -(-len(raw) // granule)
        # The last granule may be cut off by the end; no access that passes the check of bounds touches it.
        self.data = np.lib.stride_tricks.as_strided(raw[:0].view(GRANULES[granule]), (count,), (granule,)) if count else raw[:0]
        self.count = count
        self.shadow: Shadow | None = Shadow(count) if shared else None
        self.notes: list[tuple[Row, Who]] = []
        self.held: Row | None = None  # how many products under way read each granule

    def index(self, offset: Row, width: int) -> Row:
        """Granules of accesses at byte offsets: one per lane, or a row per lane."""
        first = offset // self.granule
        wide = width // self.granule
        return first if wide == 1 else first[:, None] + np.arange(wide)

    def take(self, index: Row) -> Row:
        """The bytes of each lane, as a row of uint8."""
        found = self.data.take(index)
        return found.reshape(len(index), -1).view(np.uint8)

    def load(self, index: Row, who: Who, complain: Complaint) -> Row:
        self.note_read(index, who, complain)
        return self.take(index)

    def note_read(self, index: Row, who: Who, complain: Complaint) -> None:
        if self.shadow is None:
            self.notes.append((index, who))
            if len(self.notes) > MOST_NOTES:
                self._watch(complain)
            return
        who = who if index.ndim == 1 else who.columns()
        if self.shared:
            never = self.shadow.writer.take(index) == NEVER
            if never.any():
                raise complain(Fault, "reads shared memory that nobody wrote", first_lane(never))
        culprit = self.shadow.read(index, who)
        if culprit is not None:
            raise self._race("reads", culprit, index, complain)

    def note_write(self, index: Row, who: Who, complain: Complaint, data: Row | None = None) -> None:
        """data: what is written; shared memory may get the same value from several warps."""
        self._watch(complain)
        assert self.shadow is not None
        who = who if index.ndim == 1 else who.columns()
        if self.held is not None and self.held.take(index).any():
            lane = first_lane(self.held.take(index))
            raise complain(Race, f"writes {self.name} that a product still reads: it was not waited for", lane)
        culprit = self.shadow.write(index, who)
        if culprit is not None and self.shared and data is not None:
            same = (self.take(index) == data).reshape(*index.shape, self.granule).all(-1)
            culprit = np.where(same & (culprit != UNDER_WAY), NEVER, culprit)
        if culprit is not None and (culprit != NEVER).any():
            raise self._race("writes", culprit, index, complain)

    def store(self, index: Row, data: Row, who: Who, complain: Complaint) -> None:
        """data: a row of uint8 per lane."""
        self.note_write(index, who, complain, data)
        self.data[index] = data.view(GRANULES[self.granule]).reshape(index.shape)
        lost = (self.take(index) != data).any(-1)
        if lost.any():  # lanes of a warp may; the compiler lets them where they hold one number, rounded in different orders
            assert self.shadow is not None
            winner = self.shadow.writer.take(index).reshape(len(index), -1)
            lost &= (winner != who.me[:, None]).any(-1)
            if lost.any():
                raise complain(Race, "writes other values than another warp to the same address", first_lane(lost))

    def hold(self, index: Row, readers: int) -> None:
        if self.held is None:
            self.held = np.zeros(self.count, np.int32)
        self.held[index] += readers

    def await_copy(self, index: Row, who: Who, complain: Complaint) -> None:
        """A copy to these granules begins: nobody may touch them before it was waited for."""
        self.note_write(index, who, complain)
        assert self.shadow is not None
        self.shadow.writer[index] = UNDER_WAY

    def finish_copy(self, index: Row, data: Row, who: Who) -> None:
        assert self.shadow is not None
        self.data[index] = data.view(GRANULES[self.granule]).reshape(index.shape)
        self.shadow.writer[index] = who.me if index.ndim == 1 else who.me[:, None]

    def _watch(self, complain: Complaint) -> None:
        """From now on every access is compared with those before it."""
        if self.shadow is None:
            self.shadow = Shadow(self.count)
            notes, self.notes = self.notes, []
            for index, who in notes:
                self.note_read(index, who, complain)

    def _race(self, verb: str, culprit: Row, index: Row, complain: Complaint) -> Exception:
        clash = culprit != NEVER
        place, other = int(index[clash].flat[0]) * self.granule - self.lead, describe(int(culprit[clash].flat[0]))
        what = f"{verb} byte {place} of {self.name}, which {other} touched with nothing between to order them"
        return complain(Race, what, first_lane(clash))


def first_lane(found: Row) -> int:
    return int(np.argwhere(found)[0][0])


def misaligned(address: Row, width: int) -> bool:
    return bool(np.bitwise_or.reduce(address) & (width - 1))


class Shared:
    """Shared memory of the programs that run side by side, one behind the other in one area."""

    def __init__(self, size: int, programs: int, threads: int, granule: int) -> None:
        self.size = -(-size // 16) * 16
        raw = np.empty(self.size * programs + 16, np.uint8)[: self.size * programs]
        self.limit = size
        self.area = Area(0, raw, granule, "shared memory", shared=True)
        self.base = np.repeat(np.arange(programs, dtype=np.uint64) * np.uint64(self.size), threads)

    def clear(self) -> None:
        self.area.raw.view(np.uint32).fill(POISON)
        self.area.held = None
        assert self.area.shadow is not None
        self.area.shadow.clear()

    def find(self, address: Row, lanes: Row | None, width: int, complain: Complaint) -> list[tuple[Area, Row, Row | None]]:
        """The area, granules, and which of the lanes: here all."""
        if int(address.max()) + width > self.limit:
            lane = int(address.argmax())
            raise complain(Fault, f"shared address {int(address[lane])} is outside of {self.limit} bytes", lane)
        if misaligned(address, width):
            raise complain(Fault, f"a shared address is not a multiple of {width}", first_lane(address % width != 0))
        base = self.base if lanes is None else self.base[lanes]
        return [(self.area, self.area.index((address + base).astype(np.int64), width), None)]


class Global:
    """The tensors of one launch. Their addresses are made up: far apart, with the alignment of the real ones."""

    def __init__(self, granule: int) -> None:
        self.granule = granule
        self.areas: dict[int, Area] = {}

    def add(self, start: int, size: int, name: str) -> int:
        """Real memory from `start` on; its emulated address."""
        number = len(self.areas) + 1
        base, lead = (number << SPACING) + (1 << (SPACING - 1)) + start % 4096, start % 16 if size else 0
        held: Any = (ctypes.c_uint8 * (lead + size)).from_address(start - lead) if size else b""
        self.areas[number] = Area(base - lead, np.frombuffer(held, np.uint8), self.granule, name, lead=lead)
        return base

    def find(self, address: Row, lanes: Row | None, width: int, complain: Complaint) -> list[tuple[Area, Row, Row | None]]:
        """Each area that is touched, the granules, and which of the lanes touch it; None for all of them."""
        if misaligned(address, width):
            raise complain(Fault, f"a global address is not a multiple of {width}", first_lane(address % np.uint64(width) != 0))
        area = self.areas.get(int(address[0]) >> SPACING)
        if area is not None:
            offset = address - np.uint64(area.base)
            if int(offset.max()) <= area.lead + area.size - width and int(offset.min()) >= area.lead:
                return [(area, area.index(offset.astype(np.int64), width), None)]
        return [self._part(number, address, width, complain) for number in np.unique(address >> np.uint64(SPACING))]

    def _part(self, number: Any, address: Row, width: int, complain: Complaint) -> tuple[Area, Row, Row | None]:
        chosen = np.flatnonzero(address >> np.uint64(SPACING) == number)
        area = self.areas.get(int(number))
        if area is None:
            raise complain(Fault, f"global address {int(address[chosen[0]]):#x} belongs to no tensor", int(chosen[0]))
        offset = address[chosen].astype(np.int64) - area.base
        outside = (offset < area.lead) | (offset + width > area.lead + area.size)
        if outside.any():
            lane = first_lane(outside)
            begin = offset[lane] - area.lead
            what = f"bytes {begin} to {begin + width} of {area.name} are outside of its {area.size}"
            raise complain(Fault, what, int(chosen[lane]))
        return area, area.index(offset, width), chosen


def extent(tensor: Tensor) -> tuple[int, int]:
    """Address and size in bytes of the memory from a tensor's first element to its last."""
    if tensor.numel() == 0:
        return tensor.data_ptr(), 0
    reach = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (reach + 1) * tensor.element_size()


def place_tensors(memory: Global, tensors: dict[str, Tensor]) -> dict[str, int]:
    """Emulated addresses of tensors by name; those that overlap share an area."""
    found: dict[str, int] = {}
    joined: list[tuple[int, int, list[str]]] = []
    for name, (start, size) in sorted(((n, extent(t)) for n, t in tensors.items()), key=lambda entry: entry[1]):
        if joined and size and start < joined[-1][1]:
            first, end, names = joined.pop()
            joined.append((first, max(end, start + size), [*names, name]))
        else:
            joined.append((start, start + size, [name]))
    for start, end, names in joined:
        base = memory.add(start, end - start, " and ".join(names))
        found |= {name: base + tensors[name].data_ptr() - start for name in names}
    return found
