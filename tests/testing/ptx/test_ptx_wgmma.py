"""Products of warp groups: every layout of shared memory that a descriptor can name, as the documentation draws it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from snippets import at_thread, entry
from test_ptx_warps import HALF_A, SINGLE_A, fragment

from hypermlp.testing.ptx import Fault, Race, UnknownInstruction, run
from hypermlp.testing.ptx.instructions import RULES

CODES = {0: 0, 128: 1, 64: 2, 32: 3}
TYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "tf32": torch.float32}
ROOM = 1 << 15  # bytes of shared memory for each operand


def atom_place(row: int, byte: int, swizzle: int) -> int:
    """Byte of an atom of 8 rows: pieces of 16 bytes change places within a row, by the row's number."""
    if not swizzle:
        return row * 16 + byte
    piece = (byte // 16) ^ {128: row, 64: row // 2, 32: row // 4}[swizzle]
    return row * swizzle + piece * 16 + byte % 16


def laid_out(matrix: torch.Tensor, swizzle: int, turned: bool) -> tuple[np.ndarray, int, int]:
    """The bytes of a matrix (MN K) in shared memory, and the leading and the stride distance. Distances have gaps."""
    raw = matrix.contiguous().view(torch.uint8).numpy().reshape(*matrix.shape, -1)
    (mn, k), size = matrix.shape, raw.shape[2]
    width = swizzle or 16  # bytes of a row of an atom
    atom = 8 * width
    image = np.zeros(ROOM, np.uint8)
    along = 2 * atom  # from 8 rows to the next 8, with a gap
    across = along * -(-(k if turned else mn) // 8)  # from one row's bytes to the next atom's
    leading, stride = (across, along) if swizzle or not turned else (along, across)
    for i in range(mn):
        for j in range(k):
            row, byte = (j, i * size) if turned else (i, j * size)
            place = row // 8 * along + byte // width * across + atom_place(row % 8, byte % width, swizzle)
            assert not image[place : place + size].any()
            image[place : place + size] = raw[i, j]
    return image, leading, stride


def descriptor(address: int, leading: int, stride: int, swizzle: int) -> int:
    value = address >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | CODES[swizzle] << 62
    return value - (1 << 64) if value >> 63 else value


def matrices(kind: str, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A (64 K) and B (N K) without zeros, exact in every type."""
    chance, depth = torch.Generator().manual_seed(columns), 8 if kind == "tf32" else 16
    A, B = (torch.randint(1, 9, (n, depth), generator=chance).to(TYPES[kind]) for n in (64, columns))
    return A, B


FILL = """
mul.lo.u32 %r1, %r199, 16; mov.b32 %r2, 0;
$FILL: cvt.u64.u32 %rd20, %r1; add.s64 %rd21, %rd1, %rd20; ld.global.v4.b32 {%r3, %r4, %r5, %r6}, [%rd21];
st.shared.v4.b32 [%r1], {%r3, %r4, %r5, %r6}; add.s32 %r1, %r1, 2048; setp.lt.u32 %p1, %r1, 65536; @%p1 bra $FILL;
fence.proxy.async.shared::cta; bar.sync 0; wgmma.fence.sync.aligned;
"""
WAIT = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"


def multiply(
    kind: str, columns: int, swizzles: tuple[int, int], turned: tuple[bool, bool],
    in_registers: bool = False, keep: str = "1", wait: str = WAIT, order: str = "together",
) -> torch.Tensor:  # fmt: skip
    """D (64 N), which begins as ones."""
    A, B = matrices(kind, columns)
    (left, *at), (right, *bt) = laid_out(A, swizzles[0], turned[0]), laid_out(B, swizzles[1], turned[1])
    image = torch.from_numpy(np.concatenate([left, right]))
    where = SINGLE_A if kind == "tf32" else HALF_A
    held = np.concatenate([fragment(A[16 * w : 16 * w + 16], where).reshape(32, -1) for w in range(4)])
    out, count = torch.zeros(128, columns // 2), columns // 2
    d = "{" + ", ".join(f"%r{20 + n}" for n in range(count)) + "}"
    a = "{%r10, %r11, %r12, %r13}" if in_registers else str(descriptor(0, *at, swizzles[0]))
    turns = "" if kind == "tf32" else f", {int(turned[1])}" if in_registers else f", {int(turned[0])}, {int(turned[1])}"
    opcode = f"wgmma.mma_async.sync.aligned.m64n{columns}k{A.shape[1]}.f32.{kind}.{kind}"
    body = FILL + f"{at_thread(2, 16, 30)} ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%rd30];"
    body += "".join(f"mov.b32 %r{20 + n}, 0f3F800000;" for n in range(count))
    body += f"{opcode} {d}, {a}, {descriptor(ROOM, *bt, swizzles[1])}, {keep}, 1, 1{turns}; {wait}"
    body += at_thread(3, 4 * count, 31)
    body += "".join(f"st.global.b32 [%rd31 + {4 * n}], %r{20 + n};" for n in range(count))
    text = entry(body, 3, threads=128, shared=2 * ROOM).replace("%r<200>", "%r<400>")
    run(text, (1,), [image, torch.from_numpy(held.copy()), out], order=order)
    lane, found = np.arange(128) % 32, torch.zeros(64, columns)
    for n in range(count):
        rows = np.arange(128) // 32 * 16 + lane // 4 + 8 * (n // 2 % 2)
        found[rows, 8 * (n // 4) + 2 * (lane % 4) + n % 2] = out[:, n]
    return found


def product(kind: str, columns: int) -> torch.Tensor:
    A, B = matrices(kind, columns)
    return A.float() @ B.float().T


@pytest.mark.parametrize("kind", ["bf16", "f16"])
@pytest.mark.parametrize("turned", [(False, False), (False, True), (True, False), (True, True)])
def test_layouts_of_16_bits(kind: str, turned: tuple[bool, bool]) -> None:
    for swizzle in CODES:
        found = multiply(kind, 80, (swizzle, swizzle), turned)
        assert torch.equal(found, product(kind, 80) + 1), swizzle


@pytest.mark.parametrize("swizzle", CODES)
def test_layouts_of_32_bits(swizzle: int) -> None:
    assert torch.equal(multiply("tf32", 40, (swizzle, swizzle), (False, False)), product("tf32", 40) + 1)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("order", ["together", "forward", "reverse"])
def test_operand_in_registers(kind: str, order: str) -> None:
    turned = (False, kind != "tf32")
    assert torch.equal(multiply(kind, 16, (0, 128), turned, in_registers=True, order=order), product(kind, 16) + 1)


def test_every_width() -> None:
    kinds = {name for name in RULES if name.startswith("wgmma.mma_async")}
    for columns in range(8, 257, 8):
        for kind, depth in (("bf16", 16), ("f16", 16), ("tf32", 8)):
            kinds.remove(f"wgmma.mma_async.sync.aligned.m64n{columns}k{depth}.f32.{kind}.{kind}")
        if columns % 56 == 8:
            assert torch.equal(multiply("bf16", columns, (32, 32), (False, False)), product("bf16", columns) + 1)
    assert not kinds


def test_what_was_there_may_not_count() -> None:
    assert torch.equal(multiply("bf16", 8, (128, 128), (False, False), keep="0"), product("bf16", 8))


@pytest.mark.parametrize("wait", ["", "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 1;"])
def test_results_come_only_when_waited_for(wait: str) -> None:
    assert (multiply("bf16", 8, (128, 128), (False, False), wait=wait) == 1).all()


@pytest.mark.parametrize("write", ["st.shared.b32 [%r8], %r7;", "cp.async.cg.shared.global [%r8], [%rd30], 16;"])
def test_shared_memory_that_is_written_before_the_wait(write: str) -> None:
    """A barrier does not wait for products."""
    spoil = f"mov.b32 %r7, 0; mul.lo.u32 %r8, %r199, 16; bar.sync 0; {write}"
    wait = "wgmma.commit_group.sync.aligned; {} wgmma.wait_group.sync.aligned 0; {}"
    multiply("bf16", 8, (128, 128), (False, False), wait=wait.format("", spoil))
    with pytest.raises(Race, match="a product still reads"):
        multiply("bf16", 8, (128, 128), (False, False), wait=wait.format(spoil, ""))


def test_descriptors_are_checked() -> None:
    body = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r1, %r2, %r3, %r4}, %rd1, %rd1, 1, 1, {sign}, 0, 0;"
    text = entry(body.replace("{sign}", "-1"), 0, threads=128, shared=1024)
    with pytest.raises(UnknownInstruction, match="unknown signs"):
        run(text, (1,), [])
    far = entry("mov.b64 %rd1, 16383;" + body.replace("{sign}", "1"), 0, threads=128, shared=1024)
    with pytest.raises(Fault, match="outside of 1024 bytes"):
        run(far, (1,), [])
