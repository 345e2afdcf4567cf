"""Products of small matrices by a warp, and loads and stores in their layouts.

A warp's lane is 4 g + t. Letters: W warps, g 8 groups, t 4 threads of a group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from hypermlp.testing.ptx.arithmetic import Rule
from hypermlp.testing.ptx.faults import UnknownInstruction
from hypermlp.testing.ptx.machine import WARP, Site, Step
from hypermlp.testing.ptx.shadow import Row
from hypermlp.testing.ptx.transfers import fetch, put

TF32 = np.uint32(0xFFFFE000)  # the bits of a float32 that a tensor core reads


def registers(site: Site, number: int, count: int, kind: Any, write: bool = False) -> list[Row]:
    """The rows of a vector operand, each W g t."""
    names = site.operands[number]
    if not isinstance(names, tuple) or len(names) != count:
        raise UnknownInstruction(
            f"{site.machine.kernel.name}: operand {number} of {site.instruction} must be {count} registers"
        )
    rows = [site.write(name, kind) if write else site.read(name, kind) for name in names]
    return [row.reshape(-1, 8, 4) for row in rows]


def widen(kind: str, packed: Row, wide: Row) -> Step:
    """Packed operands to float32. packed: uint32, wide: float32 with room for what it holds."""
    if kind == "bf16":
        bits = wide.view(np.uint32)
        return functools.partial(np.left_shift, packed.view(np.uint16), np.uint32(16), bits, dtype=np.uint32)
    if kind == "f16":
        return functools.partial(wide.__setitem__, ..., packed.view(np.float16))
    return functools.partial(np.bitwise_and, packed, TF32, wide.view(np.uint32))


def mma(kind: str) -> Rule:
    """D = A B + C of 16 × 8 numbers in float32; a row of A is 32 bytes."""

    def rule(site: Site) -> list[Step]:
        site.expect(4)
        W, depth = site.machine.warps, 8 if kind == "tf32" else 16
        hold = site.machine.hold
        a, b = hold("mma a", (W, 2, 8, 2, 4), np.uint32), hold("mma b", (W, 8, 2, 4), np.uint32)
        wide_a, wide_b = hold("mma a", (W, 16, depth), np.float32), hold("mma b", (W, 8, depth), np.float32)
        product = hold("mma d", (W, 16, 8), np.float32)
        steps: list[Step] = [whole_warps_only(site)] if site.where is not None else []
        for n, row in enumerate(registers(site, 1, 4, np.uint32)):
            steps.append(functools.partial(a[:, n % 2, :, n // 2].__setitem__, ..., row))
        for n, row in enumerate(registers(site, 2, 2, np.uint32)):
            steps.append(functools.partial(b[:, :, n].__setitem__, ..., row))
        steps.append(widen(kind, a.reshape(W, 16, 8), wide_a))
        steps.append(widen(kind, b.reshape(W, 8, 8), wide_b))
        steps.append(functools.partial(np.matmul, wide_a, wide_b.swapaxes(1, 2), product))
        parts = product.reshape(W, 2, 8, 4, 2)
        own = [parts[:, n // 2, :, :, n % 2] for n in range(4)]
        steps += [functools.partial(np.add, p, c, p) for p, c in zip(own, registers(site, 3, 4, np.float32), strict=True)]
        where = None if site.where is None else site.where.reshape(-1, 8, 4)
        steps += [
            functools.partial(d.__setitem__, ..., p) if where is None else functools.partial(np.copyto, d, p, where=where)
            for p, d in zip(own, registers(site, 0, 4, np.float32, write=True), strict=True)
        ]
        return steps

    return rule


def whole_warps_only(site: Site) -> Step:
    return site.whole_warps


def load_matrix(count: int, transposed: bool) -> Rule:
    """8 × 8 numbers of 16 bits each; lane 8 n + i has the address of row i of the n-th."""

    def rule(site: Site) -> list[Step]:
        site.expect(2)
        outs, address = registers(site, 0, count, np.uint32, write=True), site.address(site.operands[1])
        every = np.arange(site.machine.warps)

        def step() -> None:
            warps = site.whole_warps()
            chosen = every if warps is None else warps
            if not len(chosen):
                return
            lanes = row_lanes(chosen, count)
            found = fetch(site, "shared", address(lanes), lanes, 16).view(np.uint16).reshape(-1, count, 8, 8)
            if transposed:
                found = np.ascontiguousarray(found.swapaxes(2, 3))
            words = found.view(np.uint32)
            for n, out in enumerate(outs):
                out[chosen] = words[:, n]

        return [step]

    return rule


def store_matrix(count: int, transposed: bool) -> Rule:
    def rule(site: Site) -> list[Step]:
        site.expect(2)
        values, address = registers(site, 1, count, np.uint32), site.address(site.operands[0])
        every = np.arange(site.machine.warps)

        def step() -> None:
            warps = site.whole_warps()
            chosen = every if warps is None else warps
            if not len(chosen):
                return
            lanes = row_lanes(chosen, count)
            found = np.stack([value[chosen] for value in values], 1).view(np.uint16)  # W count 8 8
            if transposed:
                found = np.ascontiguousarray(found.swapaxes(2, 3))
            put(site, "shared", address(lanes), lanes, found.reshape(-1, 8).view(np.uint8))

        return [step]

    return rule


def row_lanes(warps: Row, count: int) -> Row:
    """The lanes of warps that have addresses of rows."""
    return (warps[:, None] * WARP + np.arange(8 * count)).reshape(-1)


def rules() -> dict[str, Rule]:
    found: dict[str, Rule] = {}
    for kind, depth in (("bf16", 16), ("f16", 16), ("tf32", 8)):
        found[f"mma.sync.aligned.m16n8k{depth}.row.col.f32.{kind}.{kind}.f32"] = mma(kind)
    each: tuple[tuple[str, Callable[[int, bool], Rule]], ...] = (("ldmatrix", load_matrix), ("stmatrix", store_matrix))
    for name, rule in each:
        for count in (1, 2, 4):
            for turn in ("", ".trans"):
                found[f"{name}.sync.aligned.m8n8.x{count}{turn}.shared.b16"] = rule(count, bool(turn))
    return found


RULES = rules()
