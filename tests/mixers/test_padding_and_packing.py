"""Padding changes nothing wherever it lies, and a packed document is computed as if alone: values and gradients."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from helpers import TOLERANCE, assert_same, each_impl, make_layer, precision, randn, run_layer

T = 19
MASKS = {
    "left": [[0] * 6 + [1] * 13, [1] * 19, [0] * 18 + [1]],
    "right": [[1] * 13 + [0] * 6, [1] + [0] * 18, [1] * 19],
    "holes": [[1, 1, 0, 0, 0] * 3 + [1] * 4, [0] * 4 + [1] * 5 + [0] * 5 + [1] * 5, [0, 1] * 9 + [0]],
}
DOCUMENTS = [0, 1, 4, 17, 19]
LAYERS = {
    "glu": {},
    "relu": {"attn_kind": "relu"},
    "sliding": {"block_size": 8},
    "rope": {"use_rope": True},
    "identity": {"aligner_kind": "identity"},
    "bidirectional": {"aligner_kind": "identity", "do_masking": False},
    "biased, one set of factors": {"bias": True, "op1_per_head": False, "op2_per_head": False},
}
each_layer = pytest.mark.parametrize("changes", LAYERS.values(), ids=LAYERS)


def sum_of_parts(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Parameter gradients add up over sequences."""
    return {name: sum(p[name] for p in parts) for name in parts[0] if name not in ("y", "dx")}


@each_impl
@each_layer
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_padding(mask: list[list[int]], changes: dict, impl: str, chunk: int | None) -> None:
    dtype = precision(impl)
    layer, real = make_layer(dtype=dtype, **changes), torch.tensor(mask).bool()
    x, d_y = randn(3, T, 16, seed=1, dtype=dtype), randn(3, T, 16, seed=2, dtype=dtype)
    options = {"impl": impl, "chunk_T": chunk}
    found = run_layer(layer, x, d_y, attention_mask=torch.tensor(mask), **options)
    parts = [run_layer(layer, x[b : b + 1, r], d_y[b : b + 1, r], **options) for b, r in enumerate(real)]

    expected = {name: torch.zeros_like(x) for name in ("y", "dx")}
    for name, whole in expected.items():
        for b, r in enumerate(real):
            whole[b, r] = parts[b][name][0]
        assert (found[name][~real] == 0).all(), f"{name} at padding"
    assert_same(found, expected | sum_of_parts(parts), TOLERANCE[dtype])


@each_impl
@each_layer
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_packing(dtype: torch.dtype, changes: dict, impl: str, chunk: int | None) -> None:
    exact = precision(impl)
    layer = make_layer(dtype=exact, **changes)
    x, d_y = randn(1, T, 16, seed=1, dtype=exact), randn(1, T, 16, seed=2, dtype=exact)
    options = {"impl": impl, "chunk_T": chunk}
    found = run_layer(layer, x, d_y, cu_seqlens=torch.tensor(DOCUMENTS, dtype=dtype), **options)
    documents = [slice(a, b) for a, b in pairwise(DOCUMENTS)]
    parts = [run_layer(layer, x[:, d], d_y[:, d], **options) for d in documents]
    expected = {name: torch.cat([p[name] for p in parts], dim=1) for name in ("y", "dx")}
    assert_same(found, expected | sum_of_parts(parts), TOLERANCE[exact])


@each_impl
@pytest.mark.parametrize("changes", [{}, {"aligner_kind": "identity", "do_masking": False}], ids=["lag", "bidirectional"])
@pytest.mark.parametrize("rubbish", [float("nan"), float("inf"), 1e30])
def test_rubbish_in_padding_reaches_nothing(rubbish: float, changes: dict, impl: str, chunk: int | None) -> None:
    dtype = precision(impl)
    layer, mask = make_layer(dtype=dtype, **changes), torch.tensor(MASKS["holes"])
    x, d_y = randn(3, T, 16, seed=1, dtype=dtype), randn(3, T, 16, seed=2, dtype=dtype)
    options = {"attention_mask": mask, "impl": impl, "chunk_T": chunk}
    dirty = x.masked_fill(~mask.bool()[..., None], rubbish)
    assert_same(run_layer(layer, dirty, d_y, **options), run_layer(layer, x, d_y, **options), TOLERANCE[dtype])


@each_impl
def test_nan_stays_in_its_batch_row(impl: str, chunk: int | None) -> None:
    dtype = precision(impl)
    layer, x = make_layer(dtype=dtype), randn(3, T, 16, seed=1, dtype=dtype)
    d_y = randn(3, T, 16, seed=2, dtype=dtype)
    clean = run_layer(layer, x, d_y, impl=impl, chunk_T=chunk)
    x[1, 3] = float("nan")
    found = run_layer(layer, x, d_y, impl=impl, chunk_T=chunk)
    for name in ("y", "dx"):
        assert_same(found[name][[0, 2]], clean[name][[0, 2]], TOLERANCE[dtype])
    assert found["y"][1, 3:].isnan().all()
