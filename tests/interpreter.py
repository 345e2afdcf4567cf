"""Triton's kernels on the CPU: the interpreter made faster, tile sizes to test at, and what parity means.

Letters as in helpers.py; M rows and N columns of a tile.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from helpers import Problem, make_mixing, make_problem, randn
from hypermlp.bench.parity import flips
from hypermlp.ops.triton import device, tiles

SINGLE, HALF = 1e-6, 6e-3  # relative rms error against float64: float32, bfloat16


@contextmanager
def patched_once() -> Iterator[None]:
    """Every inner call of a kernel patches the language again, which takes half of the interpreter's time; leave that out."""
    original, patched = interpreter._patch_lang, []

    def patch(fn: object) -> object:
        wanted = [v for v in fn.__globals__.values() if inspect.ismodule(v) and v in (tl, tl.core)]
        if all(module in patched for module in wanted):
            return interpreter._LangPatchScope()
        scope, before = original(fn), list(patched)
        restore = scope.restore
        patched.extend(wanted)

        def undo() -> None:
            patched[:] = before
            restore()

        scope.restore = undo
        return scope

    interpreter._patch_lang = patch
    try:
        yield
    finally:
        interpreter._patch_lang = original


@contextmanager
def tile_sizes(M: int, N: int) -> Iterator[None]:
    before = tiles.INTERPRETED
    tiles.INTERPRETED = (M, N, 4, 1)
    try:
        yield
    finally:
        tiles.INTERPRETED = before


def rms(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖ / ‖expected‖; NaN counts as infinite, and 0 of 0 as 0."""
    assert found.shape == expected.shape, f"{tuple(found.shape)} != {tuple(expected.shape)}"
    difference, norm = (found.double() - expected.double()).norm(), expected.double().norm()
    return 0.0 if difference == 0 else (difference / norm).nan_to_num(nan=float("inf")).item()


def wide_problem(T: int, K: int, V: int, R: int, **options: object) -> Problem:
    """make_problem with other widths."""
    p = make_problem(T, **options)
    (B, _, G, _), S, H, L = p.q.shape, p.k.shape[1], p.v.shape[2], p.spec.block_size
    q, k, v = randn(B, T, G, K, seed=1) / K**0.25, randn(B, S, G, K, seed=2) / K**0.25, randn(B, S, H, V, seed=3)
    kinds = {name: options[name] for name in ("diag", "shortcut") if name in options}
    routing = None if p.routing is None else make_mixing(B, T, G, L, R, 10, **kinds)
    reading = None if p.reading is None else make_mixing(B, T, H, L, R, 20, **kinds)
    return p._replace(q=q, k=k, v=v, routing=routing, reading=reading)


def half_problem(T: int, S: int | None = None, **options: object) -> Problem:
    """A problem of the size of a layer's activations, for types in which it matters."""
    p = wide_problem(T, 16, 32, 16, S=S, **options)

    def smaller(mixing: object) -> object:
        return None if mixing is None else mixing._replace(A=0.4 * mixing.A, B=0.4 * mixing.B)

    return p._replace(routing=smaller(p.routing), reading=smaller(p.reading))


def run(problem: Problem, impl: str, d_o: Tensor) -> dict[str, Tensor]:
    """Readout and the gradient of every tensor that goes in."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in problem.leaves().items()}
    o = problem.with_leaves(leaves).mix(impl)
    found = torch.autograd.grad(o, list(leaves.values()), d_o.to(o.dtype))
    return {"o": o.detach(), **{f"d {name}": g for name, g in zip(leaves, found, strict=True)}}


def errors(problem: Problem, dtype: torch.dtype, impl: str = "triton") -> dict[str, float]:
    """Relative rms errors of values and gradients against the reference in float64, for the same rounded numbers.

    In half precision rows in which the sign of a gate depends on rounding do not count: their gradient jumps.
    """
    rounded = problem.to(dtype)
    d_o = randn(*problem.q.shape[:2], *problem.v.shape[2:], seed=99).to(dtype)
    if dtype != torch.float32 or not device.interpreted():  # executed, float32 is multiplied as TF32
        d_o = torch.where(flips(rounded).any(-1).transpose(1, 2)[..., None], 0, d_o)
    found, expected = run(rounded, impl, d_o), run(rounded.to(torch.float64), "dense", d_o)
    return {name: rms(value, expected[name]) for name, value in found.items()}


def assert_parity(problem: Problem, dtype: torch.dtype = torch.float32) -> None:
    """Within the bound, or twice what the reference loses in the same type where gradients cancel (one slot under a norm)."""
    bound, found = SINGLE if dtype == torch.float32 else HALF, errors(problem, dtype)
    if max(found.values()) <= bound:
        return
    allowed = {name: max(bound, 2 * loss) for name, loss in errors(problem, dtype, "dense").items()}
    for name, error in found.items():
        assert error <= allowed[name], f"{name}: {error:.2e} > {allowed[name]:.1e}"
