"""The demo's task is what its docstring draws."""

import pytest
import torch

from hypermlp.data.copying import COPY, IGNORED, NOISE, selective_copying


def test_the_content_is_to_be_repeated_in_order() -> None:
    inputs, targets = selective_copying(50, 20, 4, 9, torch.Generator().manual_seed(0))
    for row, target in zip(inputs.tolist(), targets.tolist(), strict=True):
        content = [token for token in row[:16] if token != NOISE]
        assert row[16:] == [COPY] * 4
        assert target == [IGNORED] * 16 + content
        assert all(2 <= token < 9 for token in content)


def test_the_same_generator_gives_the_same_batch() -> None:
    one, two = (selective_copying(3, 12, 3, 9, torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(one.inputs, two.inputs)


def test_impossible_sizes_are_refused_with_a_remedy() -> None:
    with pytest.raises(ValueError, match=r"length \(5\) must hold n_content \(3\) twice; try 6"):
        selective_copying(1, 5, 3, 9, torch.Generator())
    with pytest.raises(ValueError, match=r"vocabulary \(2\) must be at least 3"):
        selective_copying(1, 10, 3, 2, torch.Generator())
