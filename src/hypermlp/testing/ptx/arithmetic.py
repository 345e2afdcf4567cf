"""Instructions that compute a number per lane: integers, floats, bits, comparisons.

Floats are computed in their own type, fused multiply-adds through float64. What PTX calls approximate is computed exactly and
rounded: an emulated value may differ from a GPU's in the last bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from hypermlp.testing.ptx.faults import UnknownInstruction
from hypermlp.testing.ptx.machine import KINDS, Site, Step
from hypermlp.testing.ptx.shadow import Row

Rule = Callable[[Site], list[Step]]
INTEGERS = ("s16", "u16", "s32", "u32", "s64", "u64")
FLOATS = ("f16", "f32", "f64")
BITS = ("b16", "b32", "b64")
WIDER = {"s16": np.int32, "u16": np.uint32, "s32": np.int64, "u32": np.uint64}


def elementwise(function: Any, inputs: int, kind: Any, result: Any = None) -> Rule:
    """A ufunc of the operands after the first, which is its result."""

    def rule(site: Site) -> list[Step]:
        site.expect(inputs + 1)
        rows = [site.read(n + 1, kind) for n in range(inputs)]
        return [site.call(function, *rows, site.write(0, kind if result is None else result))]

    return rule


def computed(function: Callable[..., Row], *kinds: Any, result: Any = None) -> Rule:
    """A function of rows that returns a row."""

    def rule(site: Site) -> list[Step]:
        site.expect(len(kinds) + 1)
        rows = [site.read(n + 1, kind) for n, kind in enumerate(kinds)]
        return [site.apply(function, site.write(0, kinds[0] if result is None else result), *rows)]

    return rule


def flushed(function: Callable[..., Row], inputs: int) -> Rule:
    """.ftz: numbers below the normal ones count as zero, on the way in and out."""
    return computed(lambda *rows: flush(function(*map(flush, rows))), *[np.float32] * inputs)


def flush(row: Row) -> Row:
    return np.where(np.abs(row) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), row), row)


def multiply_add(kind: Any) -> Rule:
    def rule(site: Site) -> list[Step]:
        site.expect(4)
        a, b, c = (site.read(n, kind) for n in (1, 2, 3))
        product = site.hold("product", kind)
        return [functools.partial(np.multiply, a, b, product), site.call(np.add, product, c, site.write(0, kind))]

    return rule


def multiply_wide(narrow: Any, wide: Any, add: bool) -> Rule:
    """The whole product of two numbers, which has twice their width."""

    def rule(site: Site) -> list[Step]:
        site.expect(3 + add)
        a, b, out = site.read(1, narrow), site.read(2, narrow), site.write(0, wide)
        if not add:
            return [site.call(np.multiply, a, b, out, dtype=wide)]
        product = site.hold("product", wide)
        return [functools.partial(np.multiply, a, b, product, dtype=wide), site.call(np.add, product, site.read(3, wide), out)]

    return rule


def multiply_high(kind: Any) -> Callable[[Row, Row], Row]:
    bits = 8 * np.dtype(kind).itemsize
    if bits == 64:
        return lambda a, b: np.array([(int(x) * int(y)) >> 64 for x, y in zip(a, b, strict=True)], kind)
    wide = np.dtype(f"{np.dtype(kind).kind}{bits // 4}").type
    return lambda a, b: ((a.astype(wide) * b.astype(wide)) >> wide(bits)).astype(kind)


def fused(kind: Any) -> Rule:
    """The product of two float32 is exact in float64."""

    def rule(site: Site) -> list[Step]:
        site.expect(4)
        a, b, c = (site.read(n, kind) for n in (1, 2, 3))
        product = site.hold("product", np.float64)
        return [
            functools.partial(np.multiply, a, b, product, dtype=np.float64),
            site.call(np.add, product, c, site.write(0, kind), dtype=np.float64, casting="same_kind"),
        ]

    return rule


def divide(a: Row, b: Row) -> Row:
    """Towards zero, as C does."""
    return (a - np.fmod(a, b)) // b


def shift(left: bool, kind: Any) -> Rule:
    """Amounts beyond the width shift everything out."""
    bits = 8 * np.dtype(kind).itemsize
    function: Any = np.left_shift if left else np.right_shift
    signed = np.dtype(kind).kind == "i"

    def clamped(value: Row, amount: Row) -> Row:
        found = function(value, np.minimum(amount, bits - 1).astype(kind))
        return found if signed else np.where(amount < bits, found, kind(0))

    def rule(site: Site) -> list[Step]:
        site.expect(3)
        value, out, amount = site.read(1, kind), site.write(0, kind), site.operands[2]
        if isinstance(amount, str) and amount.lstrip("0x").isalnum() and amount not in site.machine.rows:
            number = int(amount, 0)
            if number < bits:
                return [site.call(function, value, site.machine.constant(amount, kind), out)]
        return [site.apply(clamped, out, value, site.read(2, np.uint32))]

    return rule


def extract(kind: Any) -> Callable[[Row, Row, Row], Row]:
    """bfe: `length` bits from `start` on; bits beyond the number repeat its sign."""
    bits = 8 * np.dtype(kind).itemsize

    def signed(value: Row, start: Row, length: Row) -> Row:
        start, length = (start & 255).astype(np.int64), (length & 255).astype(np.int64)
        end = np.minimum(start + length, bits)
        up = np.clip(bits - end, 0, bits - 1).astype(kind)
        down = np.clip(bits - end + start, 0, bits - 1).astype(kind)
        inside = (value << up) >> down
        beyond = value >> kind(bits - 1)  # all zero or all one
        found = np.where(start < bits, inside, beyond)
        return np.where(length == 0, kind(0), found)

    def unsigned(value: Row, start: Row, length: Row) -> Row:
        start, length = (start & 255).astype(np.int64), (length & 255).astype(np.int64)
        found = np.where(start < bits, value >> np.minimum(start, bits - 1).astype(kind), kind(0))
        kept = np.where(length < bits, (kind(1) << np.minimum(length, bits - 1).astype(kind)) - kind(1), ~kind(0))
        return found & kept

    return signed if np.dtype(kind).kind == "i" else unsigned


def insert(value: Row, into: Row, start: Row, length: Row) -> Row:
    """bfi.b32."""
    start, length = (start & 255).astype(np.uint64), (length & 255).astype(np.uint64)
    one = np.uint64(1)
    window = ((one << np.minimum(length, 32)) - one) << np.minimum(start, 32)
    found = (into & ~window) | ((value.astype(np.uint64) << np.minimum(start, 32)) & window)
    return found.astype(np.uint32)


def permute(a: Row, b: Row, choice: Row) -> Row:
    """prmt: each byte is one of eight, or its sign eight times."""
    both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    found = np.zeros_like(a)
    for n in range(4):
        nibble = (choice >> np.uint32(4 * n)) & np.uint32(15)
        byte = ((both >> ((nibble & 7).astype(np.uint64) * np.uint64(8))) & np.uint64(255)).astype(np.uint32)
        byte = np.where(nibble & 8, np.where(byte & 128, np.uint32(255), np.uint32(0)), byte)
        found |= byte << np.uint32(8 * n)
    return found


def funnel(left: bool, wrap: bool) -> Callable[[Row, Row, Row], Row]:
    """shf: the upper half of two words shifted left, or the lower half shifted right."""

    def shifted(low: Row, high: Row, amount: Row) -> Row:
        n = ((amount & 31) if wrap else np.minimum(amount, 32)).astype(np.uint64)
        both = low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))
        return ((both << n) >> np.uint64(32) if left else both >> n).astype(np.uint32)

    return shifted


def leading_zeros(row: Row) -> Row:
    bits = 8 * row.dtype.itemsize
    return np.array([bits - int(x).bit_length() for x in row], np.uint32)


def reverse_bits(row: Row) -> Row:
    bits = 8 * row.dtype.itemsize
    return np.array([int(f"{int(x):0{bits}b}"[::-1], 2) for x in row], row.dtype)


def select(kind: Any) -> Rule:
    def rule(site: Site) -> list[Step]:
        site.expect(4)
        yes, no, truth, out = site.read(1, kind), site.read(2, kind), site.read(3, np.bool_), site.write(0, kind)
        if site.where is None and site.operands[0] != site.operands[1]:
            return [functools.partial(out.__setitem__, ..., no), functools.partial(np.copyto, out, yes, where=truth)]
        chosen = site.hold("chosen", kind)
        both = [functools.partial(chosen.__setitem__, ..., no), functools.partial(np.copyto, chosen, yes, where=truth)]
        return [*both, site.assign(out, chosen)]

    return rule


def compare(function: Any, kind: Any, unordered: bool | None = None) -> Rule:
    """unordered: what a comparison with NaN gives where it is not what the function gives."""
    if unordered is None:
        return elementwise(function, 2, kind, np.bool_)
    if unordered:
        return computed(lambda a, b: function(a, b) | np.isnan(a) | np.isnan(b), kind, kind, result=np.bool_)
    return computed(lambda a, b: function(a, b) & ~(np.isnan(a) | np.isnan(b)), kind, kind, result=np.bool_)


def move(kind: Any) -> Rule:
    """Also packs a vector of narrow registers into a wide one, and unpacks it."""

    def rule(site: Site) -> list[Step]:
        site.expect(2)
        out, value = site.operands
        if isinstance(out, tuple):
            return unpack(site, out, value, kind)
        if isinstance(value, tuple):
            return pack(site, out, value, kind)
        return [site.assign(site.write(out, kind), site.read(value, kind))]

    return rule


def part_kind(site: Site, parts: int, kind: Any) -> Any:
    size = np.dtype(kind).itemsize // parts
    if size * parts != np.dtype(kind).itemsize or size not in (2, 4):
        raise UnknownInstruction(f"{site.machine.kernel.name}: {site.instruction} has parts of another width")
    return np.dtype(f"uint{8 * size}").type


def pack(site: Site, out: Any, parts: tuple[str, ...], kind: Any) -> list[Step]:
    part = part_kind(site, len(parts), kind)
    room = site.machine.hold("packed", (site.machine.lanes, len(parts)), part)
    steps: list[Step] = [functools.partial(room[:, n].__setitem__, ..., site.read(name, part)) for n, name in enumerate(parts)]
    return [*steps, site.assign(site.write(out, kind), room.view(kind)[:, 0])]


def unpack(site: Site, parts: tuple[str, ...], value: Any, kind: Any) -> list[Step]:
    part = part_kind(site, len(parts), kind)
    room = site.machine.hold("packed", (site.machine.lanes, len(parts)), part)
    steps: list[Step] = [functools.partial(room.view(kind)[:, 0].__setitem__, ..., site.read(value, kind))]
    return steps + [site.assign(site.write(name, part), room[:, n]) for n, name in enumerate(parts) if name != "_"]


def integer_rules() -> dict[str, Rule]:
    rules: dict[str, Rule] = {}
    for name in INTEGERS:
        kind = KINDS[name]
        for opcode, function in (("add", np.add), ("sub", np.subtract), ("mul.lo", np.multiply)):
            rules[f"{opcode}.{name}"] = elementwise(function, 2, kind)
        rules[f"mad.lo.{name}"] = multiply_add(kind)
        rules[f"mul.hi.{name}"] = computed(multiply_high(kind), kind, kind)
        rules[f"min.{name}"], rules[f"max.{name}"] = elementwise(np.minimum, 2, kind), elementwise(np.maximum, 2, kind)
        rules[f"div.{name}"] = computed(divide, kind, kind)
        rules[f"rem.{name}"] = elementwise(np.fmod, 2, kind)
        rules[f"shr.{name}"] = shift(False, kind)
        if name in WIDER:
            rules[f"mul.wide.{name}"] = multiply_wide(kind, WIDER[name], add=False)
            rules[f"mad.wide.{name}"] = multiply_wide(kind, WIDER[name], add=True)
        if name.startswith("s"):
            rules[f"neg.{name}"], rules[f"abs.{name}"] = elementwise(np.negative, 1, kind), elementwise(np.abs, 1, kind)
        if not name.endswith("16"):
            rules[f"bfe.{name}"] = computed(extract(kind), kind, np.uint32, np.uint32)
    return rules


def bit_rules() -> dict[str, Rule]:
    rules: dict[str, Rule] = {}
    for name in (*BITS, "pred"):
        kind = KINDS[name]
        for opcode, function in (("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor)):
            rules[f"{opcode}.{name}"] = elementwise(function, 2, kind)
        rules[f"not.{name}"] = elementwise(np.invert, 1, kind)
    for name in BITS:
        rules[f"shl.{name}"], rules[f"shr.{name}"] = shift(True, KINDS[name]), shift(False, KINDS[name])
    for name in ("b32", "b64"):
        kind = KINDS[name]
        rules[f"popc.{name}"] = computed(np.bitwise_count, kind, result=np.uint32)
        rules[f"clz.{name}"] = computed(leading_zeros, kind, result=np.uint32)
        rules[f"brev.{name}"] = computed(reverse_bits, kind)
    rules["bfi.b32"] = computed(insert, *[np.uint32] * 4)
    rules["prmt.b32"] = computed(permute, *[np.uint32] * 3)
    for side in "lr":
        for mode in ("wrap", "clamp"):
            rules[f"shf.{side}.{mode}.b32"] = computed(funnel(side == "l", mode == "wrap"), *[np.uint32] * 3)
    return rules


def float_rules() -> dict[str, Rule]:
    rules: dict[str, Rule] = {}
    two: dict[str, Any] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
    for name in FLOATS:
        kind = KINDS[name]
        for opcode, function in two.items():
            rules[f"{opcode}.{name}"] = rules[f"{opcode}.rn.{name}"] = elementwise(function, 2, kind)
        rules[f"neg.{name}"], rules[f"abs.{name}"] = elementwise(np.negative, 1, kind), elementwise(np.abs, 1, kind)
        rules[f"min.{name}"], rules[f"max.{name}"] = elementwise(np.fmin, 2, kind), elementwise(np.fmax, 2, kind)
        if name != "f64":
            rules[f"fma.rn.{name}"] = fused(kind)
            rules[f"min.NaN.{name}"], rules[f"max.NaN.{name}"] = (
                elementwise(np.minimum, 2, kind),
                elementwise(np.maximum, 2, kind),
            )
    one: dict[str, Any] = {
        "ex2.approx": np.exp2, "lg2.approx": np.log2, "sqrt.approx": np.sqrt, "sin.approx": np.sin, "cos.approx": np.cos,
        "rcp.approx": np.reciprocal, "rsqrt.approx": lambda x: np.float32(1) / np.sqrt(x),
    }  # fmt: skip
    for opcode, function in one.items():
        rules[f"{opcode}.f32"] = computed(function, np.float32)
        rules[f"{opcode}.ftz.f32"] = flushed(function, 1)
    rules["tanh.approx.f32"] = computed(np.tanh, np.float32)
    for opcode in ("div.full", "div.approx"):
        rules[f"{opcode}.f32"] = elementwise(np.divide, 2, np.float32)
        rules[f"{opcode}.ftz.f32"] = flushed(np.divide, 2)
    for opcode, function in two.items():
        rules[f"{opcode}.ftz.f32"] = rules[f"{opcode}.rn.ftz.f32"] = flushed(function, 2)
    for name in ("f32", "f64"):
        kind = KINDS[name]
        rules[f"div.rn.{name}"] = elementwise(np.divide, 2, kind)
        rules[f"sqrt.rn.{name}"], rules[f"rcp.rn.{name}"] = elementwise(np.sqrt, 1, kind), elementwise(np.reciprocal, 1, kind)
        rules[f"copysign.{name}"] = computed(lambda sign, size: np.copysign(size, sign), kind, kind)
    return rules


def comparison_rules() -> dict[str, Rule]:
    rules: dict[str, Rule] = {}
    ordered = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
    same = {"eq": np.equal, "ne": np.not_equal}
    for name in INTEGERS:
        rules |= {f"setp.{word}.{name}": compare(f, KINDS[name]) for word, f in (ordered | same).items()}
    for name in BITS:
        rules |= {f"setp.{word}.{name}": compare(f, KINDS[name]) for word, f in same.items()}
    for name in FLOATS:
        kind = KINDS[name]
        rules |= {f"setp.{word}.{name}": compare(f, kind) for word, f in (ordered | {"eq": np.equal}).items()}
        rules[f"setp.ne.{name}"] = compare(np.not_equal, kind, unordered=False)
        rules |= {f"setp.{word}u.{name}": compare(f, kind, unordered=True) for word, f in (ordered | same).items()}
        rules[f"setp.num.{name}"] = computed(lambda a, b: ~(np.isnan(a) | np.isnan(b)), kind, kind, result=np.bool_)
        rules[f"setp.nan.{name}"] = computed(lambda a, b: np.isnan(a) | np.isnan(b), kind, kind, result=np.bool_)
    return rules


def move_rules() -> dict[str, Rule]:
    names = [*BITS, *INTEGERS, *FLOATS]
    rules = {f"mov.{name}": move(KINDS[name]) for name in [*names, "pred"]}
    return rules | {f"selp.{name}": select(KINDS[name]) for name in names}


RULES = integer_rules() | bit_rules() | float_rules() | comparison_rules() | move_rules()
