"""Triton kernels to execute as compiled: right ones, and ones with a fault that only the compiled program has or shows.

The functions at the end run in a child process without the interpreter (compiled.py) and return plain numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hypermlp.testing.ptx import run
from hypermlp.testing.ptx.emulator import Emulator


@triton.jit
def add_kernel(x, y, out, n, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    ok = at < n
    tl.store(out + at, tl.load(x + at, mask=ok, other=0.0) + tl.load(y + at, mask=ok, other=0.0), mask=ok)


@triton.jit
def too_far_kernel(x, out, n, N: tl.constexpr):
    """One element too many."""
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out + at, tl.load(x + at, mask=at <= n, other=0.0), mask=at < n)


@triton.jit
def matmul_kernel(a, b, c, K, n, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr):
    i, j, d = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1) * N + tl.arange(0, N), tl.arange(0, D)
    total = tl.zeros([M, N], tl.float32)
    for first in range(0, K, D):
        left = tl.load(a + i[:, None] * K + first + d[None, :])
        total = tl.dot(left, tl.load(b + (first + d)[:, None] * n + j[None, :]), total, input_precision="tf32")
    tl.store(c + i[:, None] * n + j[None, :], total)


@triton.jit
def softmax_kernel(x, y, width, N: tl.constexpr):
    at, j = tl.program_id(0) * width, tl.arange(0, N)
    row = tl.load(x + at + j, mask=j < width, other=-float("inf"))
    e = tl.exp(row - tl.max(row, 0))
    tl.store(y + at + j, e / tl.sum(e, 0), mask=j < width)


@triton.jit
def gather_kernel(x, index, y, M: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(y + at, tl.gather(tl.load(x + at), tl.load(index + at), 1))


@triton.jit
def delayed_kernel(x, y, steps, ALIAS: tl.constexpr, N: tl.constexpr):
    """y[n] = x[n − 2]. Two names for one value before the loop are one carried value to the compiler."""
    j = tl.arange(0, N)
    before = tl.zeros([N], tl.float32)
    older = before if ALIAS else tl.zeros([N], tl.float32)
    for n in range(0, steps):
        now = tl.load(x + n * N + j)
        tl.store(y + n * N + j, older)
        older, before = before, now


@triton.jit
def strided_kernel(x, y, stride, far, WIDE: tl.constexpr, N: tl.constexpr):
    """Row 3 of a matrix whose rows are far apart; `far` is where it begins. 32 bits do not hold 3 · 2³⁰."""
    row = tl.program_id(0) + 3
    begin = row.to(tl.int64) * stride if WIDE else (row * stride).to(tl.int64)
    tl.store(y + tl.arange(0, N), tl.load(x + (begin - far) + tl.arange(0, N)))


@triton.jit
def in_place_kernel(x, N: tl.constexpr):
    """A tensor with fewer elements than threads: all warps load it, one of them stores."""
    at = tl.arange(0, N)
    tl.store(x + at, tl.load(x + at) + 1.0)


@triton.jit
def twice_used_kernel(x, y, out, total, steps, M: tl.constexpr, N: tl.constexpr):
    """out = xᵀ y and total = Σ x ⊙ x. On sm_90 the product runs on while the loop goes on, and x is used by more than it."""
    i, j = tl.arange(0, M), tl.arange(0, N)
    product, squares = tl.zeros([M, N], tl.float32), tl.zeros([M], tl.float32)
    for n in range(0, steps):
        row = n * M + i
        a = tl.load(x + row[:, None] * M + i[None, :])
        product = tl.dot(tl.trans(a), tl.load(y + row[:, None] * N + j[None, :]), product)
        squares += tl.sum(a.to(tl.float32) * a.to(tl.float32), 0)
    tl.store(out + i[:, None] * N + j[None, :], product)
    tl.store(total + i, squares)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def add(arch: int, order: str | int, extra: int) -> float:
    """extra: elements by which the output is shorter than what the kernel is told."""
    x, y = torch.randn(300, generator=generator()), torch.randn(300, generator=generator())
    out = torch.zeros(300 - extra)
    Emulator(arch, order).run(add_kernel, (3,), x, y, out, 300, N=128)
    return (out - x - y).abs().max().item()


def too_far(arch: int) -> None:
    Emulator(arch).run(too_far_kernel, (3,), torch.zeros(300), torch.zeros(300), 300, N=128)


def matmul(arch: int, dtype: torch.dtype, order: str | int, warps: int, stages: int, rows: int = 32) -> float:
    """The relative error. With 64 rows and 4 warps sm_90 multiplies by warp groups."""
    M, N, K = 128, 48, 96
    a, b = torch.randn(M, K, generator=generator()).to(dtype), torch.randn(K, N, generator=generator()).to(dtype)
    c = torch.full((M, N), float("nan"))
    emulator = Emulator(arch, order)
    emulator.run(matmul_kernel, (M // rows, N // 16), a, b, c, K, N, M=rows, N=16, D=32, warps=warps, stages=stages)
    assert ("wgmma" in emulator.launches[0][1]) == (arch == 90 and rows == 64)
    exact = a.double() @ b.double()
    return ((c - exact).norm() / exact.norm()).item()


def softmax(arch: int, order: str | int, barriers: bool = True) -> float:
    x = torch.randn(5, 300, generator=generator())
    y, emulator = torch.zeros_like(x), Emulator(arch, order)
    emulator.run(softmax_kernel, (5,), x, y, 300, N=512)
    if not barriers:
        text = emulator.launches[0][1]
        assert "bar.sync" in text
        run(text.replace("bar.sync \t0;", ""), (5,), [x, y, 300], shared=64, order=order)
    return (y - x.softmax(1)).abs().max().item()


def gather(arch: int, order: str | int) -> bool:
    x = torch.randn(16, 32, generator=generator())
    index = torch.randint(0, 32, (16, 32), generator=generator(), dtype=torch.int32)
    y = torch.zeros_like(x)
    Emulator(arch, order).run(gather_kernel, (1,), x, index, y, M=16, N=32)
    return torch.equal(y, x.gather(1, index.long()))


def delayed(arch: int, alias: bool) -> bool:
    x = torch.randn(6, 128, generator=generator())
    y = torch.full_like(x, float("nan"))
    Emulator(arch).run(delayed_kernel, (1,), x, y, 6, ALIAS=alias, N=128)
    return torch.equal(y[2:], x[:-2]) and bool((y[:2] == 0).all())


def strided(arch: int, wide: bool) -> bool:
    x, y = torch.randn(64, generator=generator()), torch.zeros(64)
    Emulator(arch).run(strided_kernel, (1,), x, y, 1 << 30, 3 << 30, WIDE=wide, N=64)
    return torch.equal(x, y)


def in_place(arch: int, elements: int) -> bool:
    x = torch.zeros(elements)
    Emulator(arch).run(in_place_kernel, (1,), x, N=elements)
    return bool((x == 1).all())


def twice_used(arch: int, stages: int) -> float:
    """The relative error of the product."""
    x, y = (torch.randn(192, n, generator=generator()).bfloat16() for n in (64, 16))
    out, total = torch.zeros(64, 16), torch.zeros(64)
    Emulator(arch).run(twice_used_kernel, (1,), x, y, out, total, 3, M=64, N=16, stages=stages)
    exact = x.double().T @ y.double()
    return ((out - exact).norm() / exact.norm()).item()


def one_program() -> bool:
    """Two architectures that get the same program."""
    programs = []
    for arch in (80, 89):
        emulator = Emulator(arch)
        emulator.run(add_kernel, (1,), torch.zeros(64), torch.zeros(64), torch.zeros(64), 64, N=64)
        programs.append(emulator.programs())
    return programs[0] == programs[1]
