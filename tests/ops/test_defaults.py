"""Torch's default type and device are the user's; no result may depend on them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from helpers import assert_same, make_layer, randn, run_layer


@pytest.fixture
def double_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("double_by_default")
@pytest.mark.parametrize("impl", ["chunked", "native"])
def test_the_default_type_changes_nothing(impl: str) -> None:
    layer = make_layer(dtype=torch.float32, block_size=150)
    x, d_y = randn(2, 150, 16, dtype=torch.float32), randn(2, 150, 16, seed=1, dtype=torch.float32)
    found = run_layer(layer, x, d_y, impl=impl)
    assert {value.dtype for value in found.values()} == {torch.float32}
    assert_same(found, run_layer(layer, x, d_y, impl="dense"), 2e-4)
    cache = layer.new_cache(2)
    steps = torch.cat([layer(part, cache=cache, impl=impl) for part in x.split([140, 1, 1, 2, 6], dim=1)], dim=1)
    assert_same(steps, found["y"], 1e-5)


@pytest.mark.parametrize("impl", ["chunked", "native"])
def test_the_default_device_changes_nothing(impl: str) -> None:
    layer, x = make_layer(dtype=torch.float32, block_size=150), randn(2, 150, 16, dtype=torch.float32)
    expected = run_layer(layer, x, x, impl=impl)
    with torch.device("meta"):
        assert_same(run_layer(layer, x, x, impl=impl), expected, 1e-6)
        cache = layer.new_cache(2)
        steps = [layer(part, cache=cache, impl=impl) for part in x.split([140, 1, 1, 2, 6], dim=1)]
        cache.crop(130)
        assert cache.lengths.tolist() == [130, 130]
    assert_same(torch.cat(steps, dim=1), expected["y"], 1e-5)
