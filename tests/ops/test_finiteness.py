"""Rows without any score, zero inputs and large scores give finite values and gradients in every type."""

from __future__ import annotations

import pytest
import torch

from helpers import (
    SINGLE_PRECISION,
    TOLERANCE,
    assert_same,
    each_impl,
    make_layer,
    make_problem,
    precision,
    randn,
    run_layer,
    run_problem,
)

TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
each_type = pytest.mark.parametrize("dtype", TYPES, ids=str)


def computed(impl: str, dtype: torch.dtype) -> torch.dtype:
    return precision(impl) if impl in SINGLE_PRECISION and dtype == torch.float64 else dtype


@each_impl
@each_type
@pytest.mark.parametrize("norm", ["out_scale", "l2", "none"])
def test_zero_input(norm: str, dtype: torch.dtype, impl: str, chunk: int | None) -> None:
    dtype = computed(impl, dtype)
    layer = make_layer(dtype=dtype, attn_norm=norm)
    x = torch.zeros(2, 9, 16, dtype=dtype)
    found = run_layer(layer, x, torch.ones_like(x), impl=impl, chunk_T=chunk)
    for name, value in found.items():
        assert value.isfinite().all(), name
    assert (found["y"] == 0).all()


@pytest.mark.parametrize("impl, rows", [("chunked", 7), ("native", 96)])
def test_how_far_a_nan_reaches(impl: str, rows: int) -> None:
    """As docs/layer.md says: what sees it, and the rest of a strip on either side."""
    layer, x = make_layer(dtype=torch.float32), randn(2, 400, 16, dtype=torch.float32)
    x[0, 200] = float("nan")
    bad = layer(x, impl=impl, chunk_T=7 if impl == "chunked" else None).isnan().any(-1)
    seen = 200 + layer.config.block_size + layer.config.conv_kernel_size - 2  # the last row that sees it
    assert bad[0, 200 : seen + 1].all()
    assert not bad[0, : 201 - rows].any()
    assert not bad[0, seen + rows :].any()
    assert not bad[1].any()


@each_impl
@each_type
def test_fully_masked_row(dtype: torch.dtype, impl: str, chunk: int | None) -> None:
    dtype = computed(impl, dtype)
    layer = make_layer(dtype=dtype)
    x = randn(2, 9, 16, dtype=dtype)
    mask = torch.ones(2, 9)
    mask[1] = 0
    found = run_layer(layer, x, torch.ones_like(x), attention_mask=mask, impl=impl, chunk_T=chunk)
    for name, value in found.items():
        assert value.isfinite().all(), name
    assert (found["y"][1] == 0).all()
    assert (found["dx"][1] == 0).all()
    assert (found["y"][0] != 0).any()


@each_impl
@pytest.mark.parametrize("kind", ["glu", "relu"])
def test_row_norms_survive_float16(kind: str, impl: str, chunk: int | None) -> None:
    """The scores fit float16 and their squares do not."""
    problem = make_problem(11, kind=kind)
    louder = torch.cat([20 * problem.q[:, :, :2], problem.q[:, :, 2:]], dim=2)
    half = problem.replace(q=louder, k=problem.k * torch.tensor([20.0, 20.0, 1, 1])[: problem.k.shape[2], None]).to(
        torch.float16
    )
    scores = torch.einsum("btgk,bsgk->bgts", half.q.double(), half.k.double())[:, :2]
    assert scores.abs().max() < torch.finfo(torch.float16).max < scores.square().max()
    found, expected = run_problem(half, impl, chunk), run_problem(half.to(torch.float64))
    assert_same(found, expected, TOLERANCE[torch.float16])
