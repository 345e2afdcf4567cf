"""Instructions of whole warps: products, matrices in shared memory, shuffles, votes."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from snippets import at_thread, entry, load, store

from hypermlp.testing.ptx import Fault, run
from hypermlp.testing.ptx.instructions import RULES

LANE = np.arange(32)
GROUP, THREAD = LANE // 4, LANE % 4


def fragment(matrix: torch.Tensor, places: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Bytes of a warp's registers (32, …): each lane's elements at these rows and columns."""
    return np.stack([matrix.view(torch.uint8).numpy().reshape(*matrix.shape, -1)[i, j] for i, j in places], 1)


# From the tables of the PTX documentation: which element of A, B or D a lane holds in which place.
HALF_A = [(GROUP + 8 * (n // 2 % 2), 2 * THREAD + n % 2 + 8 * (n // 4)) for n in range(8)]
HALF_B = [(2 * THREAD + n % 2 + 8 * (n // 2), GROUP) for n in range(4)]
SINGLE_A = [(GROUP + 8 * (n % 2), THREAD + 4 * (n // 2)) for n in range(4)]
SINGLE_B = [(THREAD + 4 * n, GROUP) for n in range(2)]
RESULT = [(GROUP + 8 * (n // 2), 2 * THREAD + n % 2) for n in range(4)]


@pytest.mark.parametrize("kind, dtype", [("bf16", torch.bfloat16), ("f16", torch.float16), ("tf32", torch.float32)])
@pytest.mark.parametrize("guard", ["", "@%p1 "])
def test_mma(kind: str, dtype: torch.dtype, guard: str) -> None:
    """Two warps with matrices of their own; the predicate holds for the second."""
    depth = 8 if kind == "tf32" else 16
    chance = torch.Generator().manual_seed(0)
    A, B = torch.randn(2, 16, depth, generator=chance).to(dtype), torch.randn(2, depth, 8, generator=chance).to(dtype)
    if kind == "tf32":  # the last 13 bits do not count
        A = (A.view(torch.int32) | 0x1FFF).view(torch.float32)
    C = torch.randn(2, 16, 8, generator=chance)
    places = (SINGLE_A, SINGLE_B) if kind == "tf32" else (HALF_A, HALF_B)
    given = [
        torch.from_numpy(np.stack([fragment(m, where).reshape(32, -1) for m in matrix]).reshape(64, -1).copy()).view(
            torch.int32
        )
        for matrix, where in zip((A, B, C), (*places, RESULT), strict=True)
    ]
    out = torch.zeros(64, 4)
    opcode = f"mma.sync.aligned.m16n8k{depth}.row.col.f32.{kind}.{kind}.f32"
    body = f"""
    setp.ge.u32 %p1, %r199, 32;
    {at_thread(1, 16, 11)} {at_thread(2, 8, 12)} {at_thread(3, 16, 13)} {at_thread(4, 16, 14)}
    ld.global.v4.b32 {{%r1, %r2, %r3, %r4}}, [%rd11]; ld.global.v2.b32 {{%r5, %r6}}, [%rd12];
    ld.global.v4.b32 {{%r7, %r8, %r9, %r10}}, [%rd13];
    mov.b32 %r21, 0; mov.b32 %r22, 0; mov.b32 %r23, 0; mov.b32 %r24, 0;
    {guard}{opcode} {{%r21, %r22, %r23, %r24}}, {{%r1, %r2, %r3, %r4}}, {{%r5, %r6}}, {{%r7, %r8, %r9, %r10}};
    st.global.v4.b32 [%rd14], {{%r21, %r22, %r23, %r24}};
    """
    exact = (A.view(torch.int32) & -8192).view(torch.float32) if kind == "tf32" else A
    rounded = (B.view(torch.int32) & -8192).view(torch.float32) if kind == "tf32" else B
    expected = exact.double() @ rounded.double() + C
    for order in ("together", "forward"):
        out.zero_()
        run(entry(body, 4, threads=64), (1,), [*given, out], order=order)
        for warp in range(2):
            found = out[32 * warp : 32 * warp + 32].numpy()
            want = np.stack([expected[warp].numpy()[i, j] for i, j in RESULT], 1)
            want = np.zeros_like(want) if guard and warp == 0 else want
            np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)


def test_a_product_needs_all_lanes() -> None:
    body = (
        "setp.ge.u32 %p1, %r199, 5; "
        "@%p1 mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%r1, %r2, %r3, %r4}, {%r1, %r2, %r3, %r4}, "
        "{%r1, %r2}, {%r1, %r2, %r3, %r4};"
    )
    with pytest.raises(Fault, match="needs all lanes"):
        run(entry(body, 0), (1,), [])


MATRIX = re.compile(r"(ld|st)matrix\.sync\.aligned\.m8n8\.x(\d)(\.trans)?\.shared\.b16")


def test_matrices_in_shared_memory() -> None:
    """Rows of 8 × 8 matrices of 16 bits at addresses that lanes 0 to 7, 8 to 15 … give; here in reverse order."""
    checked = set()
    for opcode in RULES:
        found = MATRIX.fullmatch(opcode)
        if not found:
            continue
        checked.add(opcode)
        count, turned = int(found[2]), bool(found[3])
        regs = "{" + ", ".join(f"%r{10 + n}" for n in range(count)) + "}"
        rows = torch.arange(32 * 8, dtype=torch.int16).reshape(32, 8)  # row r is at byte 16 (31 − r)
        lanes = np.zeros((count, 32, 2), np.int16)
        for n in range(count):
            matrix = rows.numpy()[8 * n : 8 * n + 8]
            matrix = matrix.T if turned else matrix
            lanes[n] = np.stack([matrix[GROUP, 2 * THREAD], matrix[GROUP, 2 * THREAD + 1]], 1)
        address = "mov.b32 %r1, 31; sub.s32 %r1, %r1, %r199; mul.lo.u32 %r1, %r1, 16;"
        if found[1] == "ld":
            fill = (
                f"{at_thread(1, 16, 11)} ld.global.v4.b32 {{%r2, %r3, %r4, %r5}}, [%rd11]; "
                f"st.shared.v4.b32 [%r1], {{%r2, %r3, %r4, %r5}}; bar.warp.sync -1;"
            )
            out = torch.zeros(count, 32, 2, dtype=torch.int16)
            body = address + fill + f"{opcode} {regs}, [%r1];"
            body += "".join(
                f"add.s64 %rd3, %rd2, {128 * n}; {at_thread(3, 4, 12)} st.global.b32 [%rd12], %r{10 + n};" for n in range(count)
            )
            run(entry(body, 2, shared=512), (1,), [rows, out])
            np.testing.assert_array_equal(out.numpy(), lanes, err_msg=opcode)
        else:
            given, out = torch.from_numpy(lanes), torch.zeros(8 * count, 8, dtype=torch.int16)
            body = address
            body += "".join(
                f"add.s64 %rd3, %rd1, {128 * n}; {at_thread(3, 4, 12)} ld.global.b32 %r{10 + n}, [%rd12];" for n in range(count)
            )
            body += f"{opcode} [%r1], {regs}; bar.warp.sync -1; setp.lt.u32 %p1, %r199, {8 * count}; {at_thread(2, 16, 11)}"
            body += "@%p1 ld.shared.v4.b32 {%r2, %r3, %r4, %r5}, [%r1]; @%p1 st.global.v4.b32 [%rd11], {%r2, %r3, %r4, %r5};"
            run(entry(body, 2, shared=512), (1,), [given, out])
            np.testing.assert_array_equal(out.numpy(), rows.numpy()[: 8 * count], err_msg=opcode)
    assert len(checked) == 12


def shuffled(mode: str, lane: int, amount: int, bounds: int) -> tuple[int, bool]:
    """The definition in the PTX documentation."""
    segment, clamp = (bounds >> 8) & 31, bounds & 31
    most, least = (lane & segment) | (clamp & ~segment & 31), lane & segment
    place = {"up": lane - amount, "down": lane + amount, "bfly": lane ^ amount, "idx": least | (amount & ~segment & 31)}[mode]
    inside = place >= most if mode == "up" else place <= most
    return (place if inside else lane), inside


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("guard", ["", "@%p1 "])
def test_shuffles(mode: str, guard: str) -> None:
    x, out, told = (torch.zeros(64, dtype=torch.int32) for _ in range(3))
    x.copy_(torch.randint(0, 1 << 30, (64,), generator=torch.Generator().manual_seed(1)))
    for amount, bounds in (
        (1, 31 if mode != "up" else 0),
        (5, 0x181F if mode != "up" else 0x1800),
        (16, 31 if mode != "up" else 0),
    ):
        for variable in (False, True):
            given = "%r11, %r12" if variable else f"{amount}, {bounds}"
            body = (
                load("b32", 1, 10)
                + f"mov.b32 %r11, {amount}; mov.b32 %r12, {bounds}; mov.b32 %r20, 0; mov.pred %p20, 0;"
                + "setp.ge.u32 %p1, %r199, 32;"
            )
            body += f"{guard}shfl.sync.{mode}.b32 %r20|%p20, %r10, {given}, -1;" + store("b32", 2, 20) + store("pred", 3, 20)
            run(entry(body, 3, threads=64), (1,), [x, out, told])
            without = body.replace("|%p20", "")
            again = torch.zeros_like(out)
            run(entry(without, 3, threads=64), (1,), [x, again, torch.zeros_like(told)])
            for n in range(64):
                place, inside = shuffled(mode, n % 32, amount, bounds)
                runs = not guard or n >= 32
                assert (out[n], told[n]) == ((x[n // 32 * 32 + place], inside) if runs else (0, 0)), (mode, amount, n)
            assert torch.equal(out, again)


OVER_WARP: dict[str, tuple[str, str, Callable[[np.ndarray], object]]] = {
    "vote.sync.any.pred": ("pred", "pred", lambda x: x.any()),
    "vote.sync.all.pred": ("pred", "pred", lambda x: x.all()),
    "vote.sync.ballot.b32": ("pred", "b32", lambda x: sum(int(v) << n for n, v in enumerate(x))),
    **{f"redux.sync.add.{t}": (t, t, lambda x: int(x.astype(np.int64).sum()) & 0xFFFFFFFF) for t in ("s32", "u32")},
    **{f"redux.sync.min.{t}": (t, t, lambda x: int(x.min()) & 0xFFFFFFFF) for t in ("s32", "u32")},
    **{f"redux.sync.max.{t}": (t, t, lambda x: int(x.max()) & 0xFFFFFFFF) for t in ("s32", "u32")},
    "redux.sync.and.b32": ("b32", "b32", lambda x: int(np.bitwise_and.reduce(x))),
    "redux.sync.or.b32": ("b32", "b32", lambda x: int(np.bitwise_or.reduce(x))),
    "redux.sync.xor.b32": ("b32", "b32", lambda x: int(np.bitwise_xor.reduce(x))),
}


@pytest.mark.parametrize("opcode", OVER_WARP)
def test_over_a_warp(opcode: str) -> None:
    kind, result, formula = OVER_WARP[opcode]
    chance = np.random.default_rng(2)
    x = chance.integers(0, 1 << 32, 64, dtype=np.uint32).view(np.int32 if kind == "s32" else np.uint32)
    if kind == "pred":
        x = np.concatenate([chance.integers(0, 2, 32), np.ones(32)]).astype(np.uint32)
    given, out = torch.from_numpy(x.view(np.int32).copy()), torch.zeros(64, dtype=torch.int32)
    place, to = ("%p10" if kind == "pred" else "%r10"), ("%p20" if result == "pred" else "%r20")
    body = load(kind, 1, 10) + f"{opcode} {to}, {place}, -1;" + store(result, 2, 20)
    run(entry(body, 2, threads=64), (1,), [given, out])
    for warp in range(2):
        part = x[32 * warp : 32 * warp + 32]
        expected = int(formula(part.astype(bool) if kind == "pred" else part))  # type: ignore[call-overload]
        assert (out[32 * warp : 32 * warp + 32].numpy().view(np.uint32) == expected).all()


def test_instructions_that_only_order() -> None:
    x = torch.zeros(32, dtype=torch.int32)
    for opcode in ("bar.warp.sync -1", "membar.cta", "membar.gl", "membar.sys"):
        run(entry(f"mov.b32 %r1, 3; {opcode};" + store("b32", 1, 1), 1), (1,), [x])
    assert (x == 3).all()


def test_every_instruction_of_warps_has_a_test() -> None:
    mine = {name for name in RULES if name.startswith(("shfl", "vote", "redux", "bar.", "membar"))}
    assert mine == {
        *OVER_WARP,
        *(f"shfl.sync.{m}.b32" for m in ("up", "down", "bfly", "idx")),
        "bar.warp.sync",
        "membar.cta",
        "membar.gl",
        "membar.sys",
    }
