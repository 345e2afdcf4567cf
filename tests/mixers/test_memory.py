"""What the layer keeps between forward and backward is linear in the sequence and little more than its own activations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers import make_layer, randn
from hypermlp import HyperGLU

LENGTH = 512
EVERY_SAVE, EVERY_STORAGE = 0, 1
each_impl = pytest.mark.parametrize("impl", ["chunked", "native"])
SIZES = {"n_embd": 32, "qk_rank": 16, "block_size": 2 * LENGTH, "op1_rank": 4, "op2_rank": 4}


def saved_bytes(layer: HyperGLU, T: int, impl: str) -> tuple[int, int]:
    """Bytes that autograd keeps for backward, parameters apart: every save counted, and every storage once."""
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    saves: list[Tensor] = []  # kept alive, so that no address is used twice

    def pack(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in parameters:
            saves.append(x)
        return x

    x = randn(1, T, 32, dtype=torch.float32).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        layer(x, impl=impl)
    storages = {s.untyped_storage().data_ptr(): s.untyped_storage().nbytes() for s in saves}
    return sum(s.numel() * s.element_size() for s in saves), sum(storages.values())


def activation_bytes(layer: HyperGLU, T: int) -> int:
    """x and y, q, k, v and o, two gates, two controls, in float32."""
    c = layer.config
    mixing = c.routing_heads * c.op1_rank + c.n_head * c.op2_rank
    return 4 * T * (2 * c.n_embd + 3 * c.qk_rank + 3 * c.vo_rank + mixing)


@each_impl
def test_saved_bytes_are_linear(impl: str) -> None:
    layer = make_layer(dtype=torch.float32, **SIZES)
    for short, long in zip(saved_bytes(layer, LENGTH, impl), saved_bytes(layer, 2 * LENGTH, impl), strict=True):
        assert long / short < 2.2


@each_impl
@pytest.mark.parametrize("count", [EVERY_SAVE, EVERY_STORAGE], ids=["every save", "every storage"])
@pytest.mark.parametrize("T", [LENGTH, 2 * LENGTH])
def test_saved_bytes_are_few(T: int, count: int, impl: str) -> None:
    layer = make_layer(dtype=torch.float32, **SIZES)
    assert saved_bytes(layer, T, impl)[count] < 3 * activation_bytes(layer, T)


def test_reference_is_quadratic() -> None:
    layer = make_layer(dtype=torch.float32, **SIZES)
    for short, long in zip(saved_bytes(layer, LENGTH, "dense"), saved_bytes(layer, 2 * LENGTH, "dense"), strict=True):
        assert long / short > 3
    assert saved_bytes(layer, LENGTH, "dense")[EVERY_STORAGE] > 3 * activation_bytes(layer, LENGTH)
