"""Instructions by which the lanes of a warp exchange numbers, and those that order what they do."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from hypermlp.testing.ptx.arithmetic import Rule
from hypermlp.testing.ptx.machine import WARP, Site, Step
from hypermlp.testing.ptx.shadow import Row


def sources(mode: str, lane: Row, amount: Row, bounds: Row) -> tuple[Row, Row]:
    """The lane of the warp that each reads, and whether that lies inside; those for which it does not read themselves."""
    lane, amount, segment, clamp = (x.astype(np.int64) for x in (lane, amount & 31, (bounds >> 8) & 31, bounds & 31))
    last = (lane & segment) | (clamp & ~segment)
    if mode == "up":
        found = lane - amount
        inside = found >= last
    else:
        found = {"down": lane + amount, "bfly": lane ^ amount, "idx": (lane & segment) | (amount & ~segment)}[mode]
        inside = found <= last
    return np.where(inside, found, lane), inside


def shuffle(mode: str) -> Rule:
    def rule(site: Site) -> list[Step]:
        site.expect(5)
        target = site.operands[0]
        out, said = (target[0], target[1]) if isinstance(target, tuple) else (str(target), None)
        value, amount, bounds = (site.read(n, np.uint32) for n in (1, 2, 3))
        machine = site.machine
        lane = machine.special["%laneid"]
        first = np.arange(machine.lanes) - lane.astype(np.int64)
        fixed = str(site.operands[2]) not in machine.rows and str(site.operands[3]) not in machine.rows
        known = sources(mode, lane, amount, bounds) if fixed else None

        def step() -> None:
            site.whole_warps()
            own, inside = known or sources(mode, lane, amount, bounds)
            for row, found in ((outs[0], value.take(first + own)), *([(outs[1], inside)] if said else [])):
                np.copyto(row, found, where=True if site.where is None else site.where)

        outs = [site.write(out, np.uint32), *([site.write(said, np.bool_)] if said else [])]
        if site.where is None and known is not None and not said:
            found = site.hold("shuffled", np.uint32)
            index = first + known[0]
            return [functools.partial(value.take, index, None, found, "clip"), site.assign(outs[0], found)]
        return [step]

    return rule


def over_warp(function: Any, kind: Any, result: Any) -> Rule:
    """One number for all lanes of a warp, from all of them."""

    def rule(site: Site) -> list[Step]:
        site.expect(3)
        value, out = site.read(1, kind), site.write(0, result)

        def step() -> None:
            site.whole_warps()
            found = np.repeat(function(value.reshape(-1, WARP)), WARP)
            np.copyto(out, found.astype(result), where=True if site.where is None else site.where)

        return [step]

    return rule


def ballot(truth: Row) -> Row:
    return (truth.astype(np.uint64) << np.arange(WARP, dtype=np.uint64)).sum(1)


def nothing(site: Site) -> list[Step]:
    """Steps already run in order: orders what a warp does, or makes it visible, which it is here."""
    return []


def warp_barrier(site: Site) -> list[Step]:
    site.expect(1)
    return [] if site.where is None else [site.whole_warps]


def rules() -> dict[str, Rule]:
    found: dict[str, Rule] = {f"shfl.sync.{mode}.b32": shuffle(mode) for mode in ("bfly", "idx", "up", "down")}
    found["bar.warp.sync"] = warp_barrier
    for name in ("cta", "gl", "sys"):
        found[f"membar.{name}"] = nothing
    found["vote.sync.any.pred"] = over_warp(lambda x: x.any(1), np.bool_, np.bool_)
    found["vote.sync.all.pred"] = over_warp(lambda x: x.all(1), np.bool_, np.bool_)
    found["vote.sync.ballot.b32"] = over_warp(ballot, np.bool_, np.uint32)
    for kind, name in ((np.int32, "s32"), (np.uint32, "u32")):
        found[f"redux.sync.add.{name}"] = over_warp(lambda x: x.sum(1, dtype=x.dtype), kind, kind)
        found[f"redux.sync.min.{name}"] = over_warp(lambda x: x.min(1), kind, kind)
        found[f"redux.sync.max.{name}"] = over_warp(lambda x: x.max(1), kind, kind)
    for word, function in (("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor)):
        found[f"redux.sync.{word}.b32"] = over_warp(functools.partial(function.reduce, axis=1), np.uint32, np.uint32)
    return found


RULES = rules()
