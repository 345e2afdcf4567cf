"""Every floating-point type, and autocast, stays close to the float64 result, forward and backward."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from helpers import SINGLE_PRECISION, error, make_layer, over, randn, run_layer

# Norm-wise relative error of a whole layer with projections, gates and convolutions in that type: of the output, and of the
# gradients, which jump where rounding moves a hidden unit across the kink of the ReLU.
OUTPUT = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
GRADIENT = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 2e-1, torch.float16: 2e-2}
each_impl = over([("dense", None), ("chunked", None), ("chunked", 7), ("native", None)])
each_kind = pytest.mark.parametrize("kind", ["glu", "relu"])


def setting(kind: str) -> tuple[torch.nn.Module, Tensor, Tensor]:
    """A layer, an input and an output gradient that every type can hold exactly."""
    layer = make_layer(attn_kind=kind, n_embd=32, qk_rank=16, block_size=20)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(p.bfloat16().half())
    return layer, randn(2, 33, 32, seed=1).bfloat16().double(), randn(2, 33, 32, seed=2).bfloat16().double()


def assert_close(found: dict[str, Tensor], exact: dict[str, Tensor], dtype: torch.dtype) -> None:
    for name, value in found.items():
        bound = OUTPUT[dtype] if name == "y" else GRADIENT[dtype]
        scale = exact[name].norm().clamp(min=1e-3 * max(g.norm() for g in exact.values()))
        relative = ((value.double() - exact[name]).norm() / scale).item()
        assert relative <= bound, f"{name}: {relative:.1e}"


@each_impl
@each_kind
@pytest.mark.parametrize("dtype", OUTPUT, ids=str)
def test_type(dtype: torch.dtype, kind: str, impl: str, chunk: int | None) -> None:
    layer, x, d_y = setting(kind)
    exact = run_layer(layer, x, d_y, impl="dense")
    if impl in SINGLE_PRECISION and dtype == torch.float64:
        dtype = torch.float32
    lower = copy.deepcopy(layer).to(dtype)
    found = run_layer(lower, x.to(dtype), d_y.to(dtype), impl=impl, chunk_T=chunk)
    assert found["y"].dtype == found["dx"].dtype == dtype
    assert_close(found, exact, dtype)


@each_impl
@each_kind
def test_autocast(kind: str, impl: str, chunk: int | None) -> None:
    layer, x, d_y = setting(kind)
    exact = run_layer(layer, x, d_y, impl="dense")
    single = copy.deepcopy(layer).float()
    with torch.autocast("cpu", torch.bfloat16):
        found = run_layer(single, x.float(), d_y.bfloat16(), impl=impl, chunk_T=chunk)
    assert found["y"].dtype == torch.bfloat16
    assert found["dx"].dtype == torch.float32
    assert_close(found, exact, torch.bfloat16)


def test_types_differ() -> None:
    """The bounds above mean something: half precision does lose digits."""
    layer, x, _ = setting("glu")
    exact, half = layer(x), copy.deepcopy(layer).bfloat16()(x.bfloat16())
    assert error(half, exact) > 1e-4
