"""Conversions between types. bfloat16, which numpy lacks, is the upper half of a float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hypermlp.testing.ptx.arithmetic import Rule, computed
from hypermlp.testing.ptx.machine import KINDS, Site, Step
from hypermlp.testing.ptx.shadow import Row

WHOLE = ("s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64")
ROUNDINGS: dict[str, Any] = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}


def to_bfloat16(row: Row) -> Row:
    """float32 to the nearest bfloat16, even where two are near, as uint16."""
    bits = row.view(np.uint32)
    found = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    return np.where(np.isnan(row), np.uint16(0x7FFF), found.astype(np.uint16))


def from_bfloat16(row: Row) -> Row:
    return (row.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_tf32(row: Row) -> Row:
    """To the nearest, away from zero where two are near: .rna."""
    bits = row.view(np.uint32)
    found = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(row), found, bits)


def two_halves(narrow: Callable[[Row], Row]) -> Callable[[Row, Row], Row]:
    """The first operand becomes the upper half."""

    def packed(upper: Row, lower: Row) -> Row:
        return (narrow(upper).astype(np.uint32) << np.uint32(16)) | narrow(lower).astype(np.uint32)

    return packed


def to_whole(rounding: Any, kind: Any) -> Callable[[Row], Row]:
    """A float to an integer: what does not fit becomes the nearest that does, NaN becomes 0."""
    limits = np.iinfo(kind)

    def convert(row: Row) -> Row:
        exact = np.nan_to_num(rounding(row.astype(np.float64)), nan=0.0, posinf=np.inf, neginf=-np.inf)
        low, high = exact <= limits.min, exact >= limits.max
        found = np.where(low | high, 0, exact).astype(kind)
        return np.where(low, kind(limits.min), np.where(high, kind(limits.max), found))

    return convert


def source_row(site: Site, name: str) -> Row:
    """The second operand as numbers of a type, which may fill only the lower part of its register."""
    held, kind = site.machine.rows.get(str(site.operands[1])), np.dtype(KINDS[name])
    return site.read(1, kind) if held is None else held.view(kind)[:: held.dtype.itemsize // kind.itemsize]


def of_integers(source: str, target: str) -> Rule:
    """Integers keep their low bits, and their sign where they grow; so do they in a register wider than their type."""

    def rule(site: Site) -> list[Step]:
        site.expect(2)
        row, out, kind = source_row(site, source), site.machine.rows[str(site.operands[0])], np.dtype(KINDS[target])
        if out.dtype.itemsize == kind.itemsize:
            return [site.assign(out.view(kind), row)]
        wide = out.view(f"{kind.kind}{out.dtype.itemsize}")
        return [site.apply(lambda value: value.astype(kind).astype(wide.dtype), wide, row)]

    return rule


def to_float(source: str, target: str) -> Rule:
    """Numbers to floats, rounded to nearest even."""

    def rule(site: Site) -> list[Step]:
        site.expect(2)
        return [site.assign(site.write(0, KINDS[target]), source_row(site, source))]

    return rule


def rules() -> dict[str, Rule]:
    found: dict[str, Rule] = {}
    floats = ("f16", "f32", "f64")
    for source in WHOLE:
        found |= {f"cvt.{target}.{source}": of_integers(source, target) for target in WHOLE if target != source}
        found |= {f"cvt.rn.{target}.{source}": to_float(source, target) for target in floats}
    for source in floats:
        for word, rounding in ROUNDINGS.items():
            found[f"cvt.{word}.{source}.{source}"] = computed(rounding, KINDS[source])
            for target in WHOLE[2:]:
                whole = to_whole(rounding, KINDS[target])
                found[f"cvt.{word}.{target}.{source}"] = computed(whole, KINDS[source], result=KINDS[target])
    for narrow, wide in (("f16", "f32"), ("f16", "f64"), ("f32", "f64")):
        found[f"cvt.rn.{narrow}.{wide}"], found[f"cvt.{wide}.{narrow}"] = to_float(wide, narrow), to_float(narrow, wide)
    found["cvt.rn.bf16.f32"] = computed(to_bfloat16, np.float32, result=np.uint16)
    found["cvt.f32.bf16"] = computed(from_bfloat16, np.uint16, result=np.float32)
    found["cvt.rn.bf16x2.f32"] = computed(two_halves(to_bfloat16), np.float32, np.float32, result=np.uint32)
    to_half = two_halves(lambda row: row.astype(np.float16).view(np.uint16))
    found["cvt.rn.f16x2.f32"] = computed(to_half, np.float32, np.float32, result=np.uint32)
    found["cvt.rna.tf32.f32"] = computed(to_tf32, np.float32, result=np.uint32)
    return found


RULES = rules()
