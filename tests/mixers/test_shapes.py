"""Every mixer runs where there are shapes and no numbers: the meta device, and exported graphs for any length."""

from __future__ import annotations

import pytest
import torch
from torch.export import Dim, export

from helpers import assert_same, make_layer, randn
from hypermlp.mixers import MIXERS, build_mixer


@pytest.mark.parametrize("name", [*MIXERS, "G-12!", "S-pcg-q"])
def test_the_meta_device(name: str) -> None:
    with torch.device("meta"):
        mixer = build_mixer(name, 16, 24)
        x = torch.randn(2, 20, 16, requires_grad=True)
        assert mixer(x).shape == x.shape
        assert mixer(x, attention_mask=torch.ones(2, 20)).shape == x.shape
        packed = mixer(x[:1], cu_seqlens=torch.tensor([0, 5, 20]))
        packed.sum().backward()
        assert packed.shape == (1, 20, 16)
        if name != "G-12!":  # no cache
            cache = mixer.new_cache(2)
            assert mixer(x, cache=cache).shape == x.shape
            assert mixer(x[:, :1], cache=cache).shape == (2, 1, 16)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("impl", ["native", "chunked"])
def test_one_exported_graph_for_every_length_and_batch(impl: str) -> None:
    layer = make_layer(dtype=torch.float32, impl_default=impl).eval()
    sizes = {"x": {0: Dim("B", max=64), 1: Dim("T", min=2, max=4096)}}
    program = export(layer, (torch.zeros(2, 40, 16),), dynamic_shapes=sizes).module()
    for batch, length in ((2, 2), (2, 8), (2, 9), (2, 127), (2, 128), (3, 300), (1, 5)):
        x = randn(batch, length, 16, dtype=torch.float32)
        assert_same(program(x), layer(x), 1e-5)
