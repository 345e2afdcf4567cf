"""What the tests share: the implementations under test, layers and operator inputs in which nothing is trivially zero.

Letters: B batch, T rows, S slots, H heads, G routing heads, K key width, V value width, R mixing rank, L block_size.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hypermlp import HyperGLU, HyperGLUConfig, ops
from hypermlp.ops import plain, pointwise

# Every implementation, with the strip heights it is tested at: one row, odd, the usual, more than any input here.
IMPLS = [
    ("dense", None),
    ("native", None),
    ("chunked", None),
    ("chunked", 1),
    ("chunked", 7),
    ("chunked", 64),
    ("chunked", 1000),
]
SINGLE_PRECISION = ("native",)  # implementations that compute in float32 alone

# Relative error, in the norm, that two orders of the same sums may differ by.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 4e-3}


def digest(values: np.ndarray) -> str:
    """Of whole numbers, whatever their type; the published ones have known digests."""
    return hashlib.sha256(np.ascontiguousarray(values, dtype=np.int64).tobytes()).hexdigest()[:16]


def name_of(impl: str, chunk: int | None) -> str:
    return impl if chunk is None else f"{impl}-{chunk}"


def over(impls: list[tuple[str, int | None]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("impl, chunk", impls, ids=[name_of(*i) for i in impls])


each_impl = over(IMPLS)
each_fast_impl = over([i for i in IMPLS if i[0] != "dense"])


def precision(impl: str) -> torch.dtype:
    """The most exact type in which an implementation computes."""
    return torch.float32 if impl in SINGLE_PRECISION else torch.float64


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64).to(dtype)


def error(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖ relative to ‖expected‖, absolute where that is below one; NaN counts as infinite."""
    assert found.shape == expected.shape, f"{tuple(found.shape)} != {tuple(expected.shape)}"
    found, expected = found.detach().double(), expected.detach().double()
    return ((found - expected).norm() / expected.norm().clamp(min=1)).nan_to_num(nan=float("inf")).item()


def assert_same(found: object, expected: object, tolerance: float = 1e-9, where: str = "") -> None:
    """Compare tensors, or dictionaries of tensors with the same keys."""
    if isinstance(expected, dict):
        assert isinstance(found, dict)
        assert found.keys() == expected.keys()
        for key in expected:
            assert_same(found[key], expected[key], tolerance, str(key))
        return
    if expected is None:
        assert found is None, where
        return
    assert isinstance(found, Tensor)
    assert isinstance(expected, Tensor)
    difference = error(found, expected)
    assert difference <= tolerance, f"{where}: relative error {difference:.2e} > {tolerance:.0e}"


# ---------------------------------------------------------------------------------------------------------------------
# Layers


def perturb(module: nn.Module, seed: int = 0) -> nn.Module:
    """Draw every parameter from N(0, 0.3²), convolutions around the identity, so that every term of the layer counts."""
    generator = seeded(seed)
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
            if "conv" in name and p.dim() == 2:
                p[:, -1] += 1
    return module


def make_config(**changes: object) -> HyperGLUConfig:
    small = {"n_embd": 16, "n_head": 2, "block_size": 24, "qk_rank": 8, "op1_rank": 3, "op2_rank": 2}
    return HyperGLUConfig(**{**small, **changes})


def make_layer(seed: int = 0, dtype: torch.dtype = torch.float64, **changes: object) -> HyperGLU:
    layer = HyperGLU(make_config(**changes)).to(dtype)
    perturb(layer, seed)
    return layer


def run_layer(layer: nn.Module, x: Tensor, d_y: Tensor, **options: object) -> dict[str, Tensor]:
    """Output, input gradient and parameter gradients of one pass."""
    layer.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = layer(x, **options)
    y.backward(d_y)
    assert x.grad is not None
    return {"y": y.detach(), "dx": x.grad, **gradients(layer)}


def gradients(layer: nn.Module) -> dict[str, Tensor]:
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in layer.named_parameters()}


# ---------------------------------------------------------------------------------------------------------------------
# Inputs of the operator


class Problem(ops.MixCall):
    """A call of the operator that tests change and run."""

    def replace(self, **changes: object) -> Problem:
        return self._replace(**changes)

    def with_spec(self, **changes: object) -> Problem:
        return self._replace(spec=replace(self.spec, **changes))

    def mix(self, impl: str = "dense", chunk: int | None = None) -> Tensor:
        return ops.mix(self._replace(chunk=chunk), impl=impl)


def make_mixing(B: int, T: int, H: int, L: int, R: int, seed: int, *, diag: bool = True, shortcut: bool = True) -> ops.Mixing:
    A, C = 0.5 * randn(H, L, R, seed=seed), 0.5 * randn(H, L, R, seed=seed + 1)
    control = torch.sigmoid(randn(B, T, H, R, seed=seed + 2))
    return ops.Mixing(A, C, control, 0.5 * randn(H, L, seed=seed + 3) if diag else None, shortcut)


def make_problem(
    T: int = 11,
    S: int | None = None,
    L: int = 16,
    B: int = 2,
    H: int = 2,
    *,
    kind: str = "glu",
    norm: str = "out_scale",
    aligner: str = "offset",
    causal: bool = True,
    op1: bool = True,
    op2: bool = True,
    diag: bool = True,
    shortcut: bool = True,
    spans: Tensor | None = None,
    ranks: tuple[int, int] = (3, 2),
    seed: int = 0,
) -> Problem:
    S = T if S is None else S
    G, K, V = (2 * H if kind == "glu" else H), 3, 4
    spec = ops.Spec(kind=kind, norm=norm, aligner=aligner, causal=causal, block_size=L, eps=1e-12)
    return Problem(
        randn(B, T, G, K, seed=seed),
        randn(B, S, G, K, seed=seed + 1),
        randn(B, S, H, V, seed=seed + 2),
        make_mixing(B, T, G, L, ranks[0], seed + 10, diag=diag, shortcut=shortcut) if op1 else None,
        make_mixing(B, T, H, L, ranks[1], seed + 20, diag=diag, shortcut=shortcut) if op2 else None,
        spec,
        spans,
    )


def run_problem(problem: Problem, impl: str = "dense", chunk: int | None = None) -> dict[str, Tensor]:
    """Readout and the gradient of every tensor that goes in."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in problem.leaves().items()}
    o = problem.with_leaves(leaves).mix(impl, chunk)
    found = torch.autograd.grad(o, list(leaves.values()), randn(*o.shape, seed=99, dtype=o.dtype))
    return {"o": o.detach(), **{f"d {name}": g for name, g in zip(leaves, found, strict=True)}}


def readout_weights(problem: Problem, impl: str = "dense", chunk: int | None = None) -> Tensor:
    """w (B H T S) in time order, seen from outside: the readout of values that are unit vectors."""
    B, S, H, _ = problem.v.shape
    unit = torch.eye(S, dtype=problem.v.dtype)[None, :, None].expand(B, S, H, S)
    return problem.replace(v=unit).mix(impl, chunk).transpose(1, 2)


# The source of a mixer of a user's own, to be written to a file and named FILE.py:Mine.
OWN_MIXER = """
from torch import nn
from hypermlp.cache import CacheSpec
from hypermlp.mixers import Mixer

class Mine(Mixer):
    def __init__(self, width):
        super().__init__()
        self.width, self.proj = width, nn.Linear(width, width)

    def cache_spec(self):
        return CacheSpec()

    def mix(self, tokens, cache):
        return self.proj(tokens.x)
"""


class Gates(torch.autograd.Function):
    """gates_forward of plain, native or triton with its gradient, as ops/layer.py uses them."""

    @staticmethod
    def forward(ctx: object, y: Tensor, sizes: list[int], use: str) -> tuple[Tensor, ...]:
        ctx.sizes, ctx.use = sizes, use
        ctx.save_for_backward(y)
        return pointwise.kernels(use).gates_forward(y, sizes)

    @staticmethod
    def backward(ctx: object, *d: Tensor) -> tuple[Tensor | None, ...]:
        return pointwise.kernels(ctx.use).gates_backward(*d, *ctx.saved_tensors, ctx.sizes), None, None


def gates(y: Tensor, sizes: list[int], *, impl: str) -> tuple[Tensor, ...]:
    if impl == "dense":
        return plain.gates_forward(y, sizes)
    return Gates.apply(y, sizes, pointwise.kernels_for(impl, y))
