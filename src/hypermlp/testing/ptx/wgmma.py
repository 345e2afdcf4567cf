"""Products of warp groups (sm_90): four warps multiply 64 rows of A by N columns of B, out of shared memory.

A descriptor says where an operand lies: its address, two distances, and by how many bytes rows are swizzled. Letters: W warps,
g 8 groups, t 4 threads of a group; MN the rows of A or columns of B, K the depth. Each warp computes 16 rows by itself, when it
waits. Not checked: that a fence precedes the product (fence.proxy.async, wgmma.fence).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hypermlp.testing.ptx.arithmetic import Rule
from hypermlp.testing.ptx.faults import Fault, UnknownInstruction
from hypermlp.testing.ptx.machine import WARP, Site, Step
from hypermlp.testing.ptx.matrix import TF32, registers
from hypermlp.testing.ptx.shadow import Row
from hypermlp.testing.ptx.transfers import commit, fetch, wait
from hypermlp.testing.ptx.warp import nothing

SWIZZLES = {0: 0, 1: 128, 2: 64, 3: 32}  # code → bytes
ROWS = 16  # of A that a warp has
DEPTH = 32  # bytes of K


def places(descriptor: int, count: int, size: int, turned: bool) -> Row:
    """Addresses of the 16-byte pieces of an operand: count 2 where K is contiguous, K count/(16/size) where MN is (turned)."""
    start, leading, stride = ((descriptor >> bit & 0x3FFF) << 4 for bit in (0, 16, 32))
    swizzle = SWIZZLES[descriptor >> 62]
    if not turned:
        mn, piece = np.arange(count)[:, None], np.arange(2)[None, :]
        row = swizzle or 16
        address = start + mn // 8 * stride + mn % 8 * row + piece * (16 if swizzle else leading)
    else:
        k, piece = np.arange(DEPTH // size)[:, None], np.arange(count * size // 16)[None, :]
        across = max(1, swizzle // 16)  # pieces of a row
        further, deeper = (leading, stride) if swizzle else (stride, leading)
        address = start + piece % across * 16 + piece // across * further + k % 8 * (swizzle or 16) + k // 8 * deeper
    turn = {0: 0, 128: 7, 64: 3, 32: 1}[swizzle]
    return address ^ ((address >> 7 & turn) << 4)


def widened(data: Row, kind: str) -> Row:
    """Bytes to float32; the last axis counts elements afterwards."""
    if kind == "bf16":
        return (data.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return data.view(np.float16).astype(np.float32) if kind == "f16" else (data.view(np.uint32) & TF32).view(np.float32)


class Operand(NamedTuple):
    """A matrix in shared memory."""

    descriptor: Row
    turned: bool
    kind: str

    def pieces(self, site: Site, lane: int, first: int, count: int, total: int) -> Row:
        """Addresses of rows first … first + count of an operand with `total` of them, as a warp sees it."""
        descriptor, size = int(self.descriptor[lane]), 4 if self.kind == "tf32" else 2
        if descriptor >> 49 & 7:
            raise site.fault(Fault, "has a descriptor with a base offset, which the emulator does not know", lane)
        address, step = places(descriptor, total, size, self.turned), 16 // size
        return address[:, first // step : (first + count) // step] if self.turned else address[first : first + count]

    def read(self, site: Site, lane: int, *rows: int) -> Row:
        """The same rows as numbers, count K."""
        address = self.pieces(site, lane, *rows)
        data = fetch(site, "shared", address.reshape(-1).astype(np.uint64), np.full(address.size, lane), 16)
        matrix = widened(data, self.kind).reshape(address.shape[0], -1)
        return matrix.T if self.turned else matrix

    def hold(self, site: Site, lane: int, readers: int, *rows: int) -> None:
        """Count who reads it in the background."""
        address, machine = self.pieces(site, lane, *rows).reshape(-1).astype(np.uint64), site.machine
        lanes = np.full(address.size, lane)
        for area, index, _ in machine.shared.find(address, lanes, 16, site.complaint(lanes)):
            area.hold(index, readers)


class Product(NamedTuple):
    """Products of one instruction that are under way; a warp is known by its first lane."""

    site: Site
    kind: str
    columns: int
    lanes: Row
    a: Operand | list[Row]
    b: Operand
    keep: Row  # whether D is added
    d: list[Row]  # W g t

    def part(self, chosen: Row) -> Product:
        return self._replace(lanes=self.lanes[chosen])

    def begin(self) -> None:
        """Shared memory is read from now on, and nobody may write what is read."""
        for lane in self.lanes.tolist():
            self._operands(lane)
            self._hold(lane, 1)

    def finish(self) -> None:
        for lane in self.lanes.tolist():
            self._hold(lane, -1)
            self._multiply(lane)

    def _rows(self, lane: int) -> tuple[int, int, int]:
        """Of A, that a warp multiplies."""
        return lane // WARP % (self.site.machine.threads // WARP) % 4 * ROWS, ROWS, 4 * ROWS

    def _hold(self, lane: int, readers: int) -> None:
        self.b.hold(self.site, lane, readers, 0, self.columns, self.columns)
        if isinstance(self.a, Operand):
            self.a.hold(self.site, lane, readers, *self._rows(lane))

    def _operands(self, lane: int) -> tuple[Row, Row]:
        """A (16 K) and B (N K)."""
        b = self.b.read(self.site, lane, 0, self.columns, self.columns)
        if isinstance(self.a, Operand):
            return self.a.read(self.site, lane, *self._rows(lane)), b
        packed = np.empty((2, 8, 2, 4), np.uint32)
        for n, row in enumerate(self.a):
            packed[n % 2, :, n // 2] = row[lane // WARP]
        return widened(packed.reshape(ROWS, 8), self.kind), b

    def _multiply(self, lane: int) -> None:
        warp = lane // WARP
        a, b = self._operands(lane)
        product = (a @ b.T).reshape(2, 8, self.columns // 8, 4, 2)
        for n, row in enumerate(self.d):
            own = product[n // 2 % 2, :, n // 4, :, n % 2]
            row[warp] = own + row[warp] if self.keep[lane] else own


def multiply(kind: str, columns: int) -> Rule:
    def rule(site: Site) -> list[Step]:
        half = kind != "tf32"
        from_registers = isinstance(site.operands[1], tuple)
        site.expect(6 + half * (2 - from_registers))
        given = site.operands
        signs, turns = given[4:6], [str(x) for x in given[6:]]
        if signs != ("1", "1") or set(turns) - {"0", "1"} or site.machine.threads % 128:
            raise UnknownInstruction(f"{site.machine.kernel.name}: unknown signs, turns or threads in {site.instruction}")
        a: Any = registers(site, 1, 4, np.uint32) if from_registers else None
        a = a or Operand(site.read(1, np.uint64), turns[:1] == ["1"], kind)
        b = Operand(site.read(2, np.uint64), turns[-1:] == ["1"], kind)
        keep, d = site.read(3, np.bool_), registers(site, 0, columns // 2, np.float32, write=True)
        every = np.arange(site.machine.warps)

        def step() -> None:
            warps = site.whole_warps()
            lanes = (every if warps is None else warps) * WARP
            # Operands in registers are taken now: the assembler keeps them. Shared memory must stay until it is waited for.
            left = a._replace(descriptor=a.descriptor.copy()) if isinstance(a, Operand) else [row.copy() for row in a]
            right = b._replace(descriptor=b.descriptor.copy())
            begun = Product(site, kind, columns, lanes, left, right, keep.copy(), d)
            begun.begin()
            site.machine.products.begin(begun)

        return [step]

    return rule


def rules() -> dict[str, Rule]:
    found: dict[str, Rule] = {}
    for columns in range(8, 257, 8):
        for kind, depth in (("bf16", 16), ("f16", 16), ("tf32", 8)):
            found[f"wgmma.mma_async.sync.aligned.m64n{columns}k{depth}.f32.{kind}.{kind}"] = multiply(kind, columns)
    found["wgmma.commit_group.sync.aligned"] = commit("products")
    found["wgmma.wait_group.sync.aligned"] = wait("products")
    found["wgmma.fence.sync.aligned"] = found["fence.proxy.async.shared::cta"] = nothing
    return found


RULES = rules()
