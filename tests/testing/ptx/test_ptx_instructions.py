"""Every instruction that the emulator accepts, against formulas in Python's own numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import snippets
import torch
from snippets import KINDS, entry, evaluate, held

from hypermlp.testing.ptx import UnknownInstruction, run
from hypermlp.testing.ptx.instructions import RULES

LANES = 32
INTEGERS = ("s16", "u16", "s32", "u32", "s64", "u64")
FLOATS = ("f16", "f32", "f64")
BITS = ("b16", "b32", "b64")
EPSILON = {"f16": 2e-3, "f32": 4e-7, "f64": 1e-15}
Case = tuple[str, str, tuple[str, ...], Callable[..., Any], str]  # opcode, result, inputs, formula, constant operands


def wrap(value: int, kind: str) -> int:
    bits = int(kind[1:])
    value &= (1 << bits) - 1
    return value - (1 << bits) if kind[0] == "s" and value >> (bits - 1) else value


def towards_zero(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def shift_left(a: int, n: int, bits: int) -> int:
    return a << n if n < bits else 0


def field(value: int, start: int, length: int, kind: str) -> int:
    """bfe by its definition, bit by bit."""
    bits = int(kind[1:])
    start, length = start & 255, length & 255
    sign = 0
    if kind[0] == "s" and length:
        sign = (value >> min(start + length - 1, bits - 1)) & 1
    word = sum((((value >> (start + n)) & 1) if n < length and start + n < bits else sign) << n for n in range(bits))
    return wrap(word, kind)


def inserted(value: int, into: int, start: int, length: int) -> int:
    for n in range(length & 255):
        if (start & 255) + n < 32:
            into = into & ~(1 << (start & 255) + n) | ((value >> n) & 1) << ((start & 255) + n)
    return into


def bytes_chosen(a: int, b: int, choice: int) -> int:
    every = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    picked = []
    for n in range(4):
        nibble = (choice >> 4 * n) & 15
        byte = every[nibble & 7]
        picked.append((255 if byte & 128 else 0) if nibble & 8 else byte)
    return int.from_bytes(bytes(picked), "little")


def funnelled(side: str, mode: str) -> Callable[[int, int, int], int]:
    def shifted(low: int, high: int, n: int) -> int:
        n, both = n & 31 if mode == "wrap" else min(n, 32), low | high << 32
        return ((both << n) >> 32 if side == "l" else both >> n) & 0xFFFFFFFF

    return shifted


def integer_cases() -> Iterator[Case]:
    for kind in INTEGERS:
        bits, two = int(kind[1:]), (kind, kind)
        plain: dict[str, Callable[..., int]] = {
            "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul.lo": lambda a, b: a * b, "min": min, "max": max,
            "mul.hi": lambda a, b, bits=bits: (a * b) >> bits, "div": towards_zero,
            "rem": lambda a, b: a - b * towards_zero(a, b),
        }  # fmt: skip
        for name, formula in plain.items():
            yield f"{name}.{kind}", kind, two, formula, ""
        yield f"mad.lo.{kind}", kind, (kind, kind, kind), lambda a, b, c: a * b + c, ""
        yield f"shr.{kind}", kind, (kind, "u32"), lambda a, n: a >> min(n, 70), ""
        if bits < 64:
            wide = f"{kind[0]}{2 * bits}"
            yield f"mul.wide.{kind}", wide, two, lambda a, b: a * b, ""
            yield f"mad.wide.{kind}", wide, (kind, kind, wide), lambda a, b, c: a * b + c, ""
        if kind[0] == "s":
            yield f"neg.{kind}", kind, (kind,), lambda a: -a, ""
            yield f"abs.{kind}", kind, (kind,), abs, ""
        if bits > 16:
            yield f"bfe.{kind}", kind, (kind, "u32", "u32"), lambda a, s, n, kind=kind: field(a, s, n, kind), ""
            yield f"bfe.{kind}", kind, (kind,), lambda a, kind=kind: field(a, 3, 5, kind), "3, 5"
    for kind in (*BITS, "pred"):
        for name, formula in (("and", lambda a, b: a & b), ("or", lambda a, b: a | b), ("xor", lambda a, b: a ^ b)):
            yield f"{name}.{kind}", kind, (kind, kind), formula, ""
        yield f"not.{kind}", kind, (kind,), (lambda a: not a) if kind == "pred" else (lambda a: ~a), ""
    for kind in BITS:
        bits = int(kind[1:])
        yield f"shl.{kind}", kind, (kind, "u32"), lambda a, n, bits=bits: shift_left(a, n, bits), ""
        yield f"shl.{kind}", kind, (kind,), lambda a: a << 5, "5"
        yield f"shr.{kind}", kind, (kind, "u32"), lambda a, n: a >> min(n, 70), ""
        yield f"shr.{kind}", kind, (kind,), lambda a: 0, "99"
    for kind in ("b32", "b64"):
        bits = int(kind[1:])
        yield f"popc.{kind}", "u32", (kind,), lambda a: a.bit_count(), ""
        yield f"clz.{kind}", "u32", (kind,), lambda a, bits=bits: bits - a.bit_length(), ""
        yield f"brev.{kind}", kind, (kind,), lambda a, bits=bits: sum(((a >> n) & 1) << (bits - 1 - n) for n in range(bits)), ""
    yield "bfi.b32", "b32", ("b32", "b32", "u32", "u32"), inserted, ""
    yield "prmt.b32", "b32", ("b32", "b32", "b32"), bytes_chosen, ""
    for side in "lr":
        for mode in ("wrap", "clamp"):
            yield f"shf.{side}.{mode}.b32", "b32", ("b32", "b32", "u32"), funnelled(side, mode), ""


def flush(x: float) -> float:
    return math.copysign(0.0, x) if abs(x) < 2.0**-126 else x


def fewer(a: float, b: float) -> float:
    return b if math.isnan(a) else a if math.isnan(b) else min(a, b)


def more(a: float, b: float) -> float:
    return -fewer(-a, -b)


def power(x: float) -> float:
    return math.inf if x > 1000 else 2.0**x


def logarithm(x: float) -> float:
    return math.log2(x) if x > 0 else -math.inf if x == 0 else math.nan


def quotient(a: float, b: float) -> float:
    with np.errstate(all="ignore"):
        return float(np.float64(a) / np.float64(b))


def float_cases() -> Iterator[Case]:
    two: dict[str, Callable[..., float]] = {"add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b}
    for kind in FLOATS:
        for name, formula in two.items():
            yield f"{name}.{kind}", kind, (kind, kind), formula, ""
            yield f"{name}.rn.{kind}", kind, (kind, kind), formula, ""
        yield f"neg.{kind}", kind, (kind,), lambda a: -a, ""
        yield f"abs.{kind}", kind, (kind,), abs, ""
        yield f"min.{kind}", kind, (kind, kind), fewer, ""
        yield f"max.{kind}", kind, (kind, kind), more, ""
        if kind != "f64":
            yield f"fma.rn.{kind}", kind, (kind, kind, kind), lambda a, b, c: a * b + c, ""
            yield f"min.NaN.{kind}", kind, (kind, kind), lambda a, b: math.nan if a != a or b != b else min(a, b), ""
            yield f"max.NaN.{kind}", kind, (kind, kind), lambda a, b: math.nan if a != a or b != b else max(a, b), ""
    one: dict[str, Callable[[float], float]] = {
        "ex2.approx": power, "lg2.approx": logarithm, "sqrt.approx": lambda a: math.sqrt(a) if a >= 0 else math.nan,
        "sin.approx": lambda a: math.sin(a) if math.isfinite(a) else math.nan,
        "cos.approx": lambda a: math.cos(a) if math.isfinite(a) else math.nan,
        "rcp.approx": lambda a: quotient(1.0, a), "rsqrt.approx": lambda a: quotient(1.0, math.sqrt(a)) if a >= 0 else math.nan,
    }  # fmt: skip
    for name, formula in one.items():
        yield f"{name}.f32", "f32", ("f32",), formula, ""
        yield f"{name}.ftz.f32", "f32", ("f32",), lambda a, formula=formula: flush(formula(flush(a))), ""
    yield "tanh.approx.f32", "f32", ("f32",), math.tanh, ""
    for name in ("div.full", "div.approx"):
        yield f"{name}.f32", "f32", ("f32", "f32"), quotient, ""
        yield f"{name}.ftz.f32", "f32", ("f32", "f32"), lambda a, b: flush(quotient(flush(a), flush(b))), ""
    for name, formula in two.items():
        for rounding in ("", ".rn"):
            both = lambda a, b, formula=formula: flush(formula(flush(a), flush(b)))  # noqa: E731
            yield f"{name}{rounding}.ftz.f32", "f32", ("f32", "f32"), both, ""
    for kind in ("f32", "f64"):
        yield f"div.rn.{kind}", kind, (kind, kind), quotient, ""
        yield f"sqrt.rn.{kind}", kind, (kind,), lambda a: math.sqrt(a) if a >= 0 else math.nan, ""
        yield f"rcp.rn.{kind}", kind, (kind,), lambda a: quotient(1.0, a), ""
        yield f"copysign.{kind}", kind, (kind, kind), lambda sign, size: math.copysign(size, sign), ""


def comparison_cases() -> Iterator[Case]:
    order: dict[str, Callable[[Any, Any], bool]] = {
        "lt": lambda a, b: a < b, "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
    }  # fmt: skip
    same: dict[str, Callable[[Any, Any], bool]] = {"eq": lambda a, b: a == b, "ne": lambda a, b: a != b}
    for kind in INTEGERS:
        for name, formula in (order | same).items():
            yield f"setp.{name}.{kind}", "pred", (kind, kind), formula, ""
    for kind in BITS:
        for name, formula in same.items():
            yield f"setp.{name}.{kind}", "pred", (kind, kind), formula, ""
    for kind in FLOATS:
        for name, formula in (order | same).items():
            nan = lambda a, b: a != a or b != b  # noqa: E731
            yield f"setp.{name}.{kind}", "pred", (kind, kind), lambda a, b, f=formula, nan=nan: f(a, b) and not nan(a, b), ""
            yield f"setp.{name}u.{kind}", "pred", (kind, kind), lambda a, b, f=formula, nan=nan: f(a, b) or nan(a, b), ""
        yield f"setp.num.{kind}", "pred", (kind, kind), lambda a, b: a == a and b == b, ""
        yield f"setp.nan.{kind}", "pred", (kind, kind), lambda a, b: a != a or b != b, ""


def move_cases() -> Iterator[Case]:
    for kind in (*BITS, *INTEGERS, *FLOATS, "pred"):
        yield f"mov.{kind}", kind, (kind,), lambda a: a, ""
    for kind in (*BITS, *INTEGERS, *FLOATS):
        yield f"selp.{kind}", kind, (kind, kind, "pred"), lambda a, b, p: a if p else b, ""


def rounded(word: str) -> Callable[[float], float]:
    return {"rzi": math.trunc, "rni": round, "rmi": math.floor, "rpi": math.ceil}[word]


def to_integer(x: float, word: str, kind: str) -> int:
    bits, signed = int(kind[1:]), kind[0] == "s"
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    if math.isnan(x):
        return 0
    return high if x == math.inf else low if x == -math.inf else min(max(int(rounded(word)(x)), low), high)


def same_float(x: float, word: str) -> float:
    return float(rounded(word)(x)) if math.isfinite(x) else x


def bfloat16(x: float) -> int:
    """PTX has one NaN of this type."""
    return 0x7FFF if math.isnan(x) else int(torch.tensor(x, dtype=torch.float32).bfloat16().view(torch.int16)) & 0xFFFF


def half(x: float) -> int:
    return int(np.float16(np.float32(x)).view(np.uint16))


def tf32(x: float) -> int:
    """Ten bits of mantissa, away from zero where two are near."""
    if not math.isfinite(x):
        return int(np.float32(x).view(np.uint32))
    unit = 2.0 ** (max(math.frexp(x)[1], -125) - 11)
    return int(np.float32(math.copysign(math.floor(abs(x) / unit + 0.5) * unit, x)).view(np.uint32))


def conversion_cases() -> Iterator[Case]:
    whole = ("s8", "u8", *INTEGERS)
    for source in whole:
        for target in whole:
            if source != target:
                yield f"cvt.{target}.{source}", target, (source,), lambda a: a, ""
        for target in FLOATS:
            yield f"cvt.rn.{target}.{source}", target, (source,), float, ""
    for source in FLOATS:
        for word in ("rzi", "rni", "rmi", "rpi"):
            yield f"cvt.{word}.{source}.{source}", source, (source,), lambda a, word=word: same_float(a, word), ""
            for target in INTEGERS:
                formula = lambda a, word=word, target=target: to_integer(a, word, target)  # noqa: E731
                yield f"cvt.{word}.{target}.{source}", target, (source,), formula, ""
    for narrow, wide in (("f16", "f32"), ("f16", "f64"), ("f32", "f64")):
        yield f"cvt.rn.{narrow}.{wide}", narrow, (wide,), lambda a: a, ""
        yield f"cvt.{wide}.{narrow}", wide, (narrow,), lambda a: a, ""
    yield "cvt.rn.bf16.f32", "b16", ("f32",), bfloat16, ""
    yield "cvt.f32.bf16", "f32", ("b16",), lambda a: float(np.uint32(a << 16).view(np.float32)), ""
    yield "cvt.rn.bf16x2.f32", "b32", ("f32", "f32"), lambda a, b: bfloat16(a) << 16 | bfloat16(b), ""
    yield "cvt.rn.f16x2.f32", "b32", ("f32", "f32"), lambda a, b: half(a) << 16 | half(b), ""
    yield "cvt.rna.tf32.f32", "b32", ("f32",), tf32, ""


CASES = [*integer_cases(), *float_cases(), *comparison_cases(), *move_cases(), *conversion_cases()]
FAMILIES = sorted({case[0].split(".")[0] for case in CASES})


def numbers(kind: str, place: int, opcode: str) -> np.ndarray:
    """Numbers of all sizes, and the ends of the range."""
    chance = np.random.default_rng(place)
    if kind == "pred":
        return chance.integers(2, size=LANES).astype(bool)
    if kind[0] == "f":
        found = chance.normal(size=LANES) * np.exp(chance.normal(size=LANES) * 2)
        found[:8] = [0.0, -0.0, 0.5, 1.5, -2.5, 1e-40 if kind != "f16" else 1e-7, 3.0, -1.0]
        if not opcode.startswith(("sin", "cos", "tanh", "cvt.rna")):
            found[8:11] = [math.inf, -math.inf, math.nan]
        return np.roll(found, 5 * place).astype(KINDS[kind])
    limits = np.iinfo(KINDS[kind])
    if kind == "u32" and place > 0 and opcode.split(".")[0] in ("shl", "shr", "bfe", "bfi", "shf"):
        return np.array([*range(0, 64, 3), 31, 32, 33, 63, 64, 65, 1, 2, 5, 40], np.uint32)[chance.permutation(LANES)]
    found = chance.integers(limits.min, limits.max, size=LANES, endpoint=True, dtype=KINDS[kind])
    found[:6] = [0, 1, limits.max, limits.min, 7, limits.max // 2]
    found = np.roll(found, 3 * place)
    return np.where(found == 0, found.dtype.type(3), found) if opcode.startswith(("div", "rem")) and place else found


def expected_values(formula: Callable[..., Any], result: str, inputs: list[np.ndarray]) -> np.ndarray:
    values = [formula(*arguments) for arguments in zip(*(x.tolist() for x in inputs), strict=True)]
    if result[0] in "sub":
        values = [wrap(int(x), result) for x in values]
    with np.errstate(over="ignore"):
        if result[0] == "f":
            return np.array(values, np.float64).astype(KINDS[result])
        return np.array(values, np.uint32 if result == "pred" else KINDS[result])


def assert_equal(found: np.ndarray, expected: np.ndarray, kind: str, where: str) -> None:
    if kind[0] == "f":
        tiny = np.finfo(KINDS[kind]).smallest_subnormal
        np.testing.assert_allclose(found, expected, rtol=EPSILON[kind], atol=tiny, err_msg=where)
    else:
        np.testing.assert_array_equal(found, expected, err_msg=where)


@pytest.mark.parametrize("family", FAMILIES)
def test_instruction(family: str) -> None:
    """In all lanes, under a predicate, and in a branch that some lanes take."""
    for opcode, result, kinds, formula, constants in CASES:
        if opcode.split(".")[0] != family:
            continue
        inputs = [numbers(kind, place, opcode) for place, kind in enumerate(kinds)]
        if opcode.startswith(("div.s", "rem.s")):
            inputs[0] = np.where(inputs[0] == np.iinfo(inputs[0].dtype).min, 5, inputs[0])  # by −1 it has no result
        expected = expected_values(formula, result, inputs)
        found = evaluate(opcode, result, list(zip(kinds, inputs, strict=True)), constants, LANES)
        assert_equal(found[0], expected, result, opcode)
        for part in found[1:]:
            assert_equal(part, np.where(held(LANES), expected, expected.dtype.type(0)), result, f"{opcode}, some lanes")


ELSEWHERE = (
    "ld.",
    "st.",
    "cp.async",
    "mma",
    "ldmatrix",
    "stmatrix",
    "shfl",
    "bar.",
    "membar",
    "vote",
    "redux",
    "wgmma",
    "fence",
    "red.",
    "atom.",
)


def test_every_accepted_instruction_has_a_case() -> None:
    """Those of memory, matrices and warps are in the other files."""
    mine = {opcode for opcode in RULES if not opcode.startswith(ELSEWHERE)}
    assert mine == {case[0] for case in CASES}


@pytest.mark.parametrize(
    "line",
    [
        "add.sat.s32 %r1, %r199, 1;",
        "tanh.approx.bf16 %rs1, %rs2;",
        "ld.volatile.global.b32 %r1, [%rd1];",
        "bar.sync 1, 64;",
        "trap;",
    ],
)
def test_an_unknown_instruction_is_named(line: str) -> None:
    with pytest.raises(UnknownInstruction, match=line.split()[0].rstrip(";").replace(".", r"\.")):
        run(entry(line, 1), (1,), [torch.zeros(32, dtype=torch.int32)])


def test_an_unknown_directive_is_named() -> None:
    with pytest.raises(UnknownInstruction, match="local"):
        run(entry(".local .align 4 .b8 depot[16];", 0), (1,), [])


def test_registers_of_an_inner_scope() -> None:
    """As inline assembly has them."""
    x = torch.zeros(32, dtype=torch.int32)
    body = "mov.b32 %r1, 5; { .reg .b32 %r1; mov.b32 %r1, 7; add.s32 %r2, %r1, 0; } add.s32 %r2, %r2, %r1;" + snippets.store(
        "b32", 1, 2
    )
    run(entry(body, 1), (1,), [x])
    assert (x == 12).all()


def test_moves_pack_and_unpack() -> None:
    x, y = torch.arange(32, dtype=torch.int64) * 0x123456789AB, torch.zeros(32, dtype=torch.int64)
    unpack = "mov.b64 {%r1, %r2}, %rd10; mov.b32 {%rs1, %rs2}, %r1;"
    body = (
        snippets.load("b64", 1, 10)
        + unpack
        + "mov.b32 %r3, {%rs2, %rs1}; mov.b64 %rd11, {%r3, %r2};"
        + snippets.store("b64", 2, 11)
    )
    run(entry(body, 2), (1,), [x, y])
    for a, b in zip(x.tolist(), y.tolist(), strict=True):
        low = a & 0xFFFFFFFF
        assert b == (a >> 32 << 32) | ((low & 0xFFFF) << 16) | (low >> 16)
