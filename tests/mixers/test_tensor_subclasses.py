"""Compiled code reads plain tensors only: subclasses, odd strides and other types take the path that works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers import assert_same, make_layer, randn
from hypermlp import HyperGLU
from hypermlp.ops.native import bindings


class Quantised(Tensor):
    """A weight in 8 bits that says it is float32 on the CPU and has no memory of its own, like those of torchao."""

    whole: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, weight: Tensor) -> Quantised:
        return Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype, device=weight.device)

    def __init__(self, weight: Tensor) -> None:
        self.scale = weight.abs().amax(1, keepdim=True) / 127
        self.whole = (weight / self.scale).round().to(torch.int8)

    def numbers(self) -> Tensor:
        return self.whole.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, *bias = args
            return F.linear(x, weight.numbers(), *bias, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]
        raise NotImplementedError(f"{func} of a quantised weight")


def quantise(layer: HyperGLU) -> HyperGLU:
    for module in layer.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(Quantised(module.weight.detach()), requires_grad=False)
    return layer


def dequantise(layer: HyperGLU) -> HyperGLU:
    for module in layer.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.numbers())
    return layer


@pytest.mark.parametrize("length", [1, 3, 8, 200])
def test_quantised_weights(length: int) -> None:
    """What segfaulted, gave zeros, or gave NotImplementedError, by length."""
    layer, x = quantise(make_layer(dtype=torch.float32).eval()), randn(1, length, 16, dtype=torch.float32)
    with torch.no_grad():
        found, cache = layer(x), layer.new_cache(1)
        steps = torch.cat([layer(part, cache=cache) for part in x.split(1, dim=1)], dim=1)
        expected = dequantise(layer)(x)
    assert expected.norm() > 0.1
    assert_same(found, expected, 1e-5)
    assert_same(steps, expected, 1e-5)


def odd(weight: Tensor) -> Tensor:
    """The same numbers two floats apart."""
    return torch.stack([weight.detach(), torch.full_like(weight, float("nan"))], -1).flatten(-2)[..., ::2]


@pytest.mark.parametrize("length", [1, 8, 40])
def test_parameters_of_odd_strides(length: int) -> None:
    layer, x = make_layer(dtype=torch.float32, bias=True).eval(), randn(2, length, 16, dtype=torch.float32)
    expected = layer(x, impl="dense").detach()
    for module in layer.modules():
        for name, p in list(module._parameters.items()):
            if p is not None:
                module._parameters[name] = nn.Parameter(odd(p))
                assert not module._parameters[name].is_contiguous() or p.shape[-1] == 1
    with torch.no_grad():
        cache = layer.new_cache(2)
        assert_same(layer(x), expected, 1e-5)
        assert_same(torch.cat([layer(part, cache=cache) for part in x.split(1, dim=1)], dim=1), expected, 1e-5)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, dtype=torch.float64),
        torch.zeros(4)[::2],
        torch.zeros(3, device="meta"),
        torch.zeros(3).to_sparse(),
        torch.zeros(3).as_subclass(type("Mine", (Tensor,), {})),
        torch.imag(torch.conj(torch.zeros(3, dtype=torch.complex64))),
    ],
    ids=["type", "stride", "device", "layout", "subclass", "negated"],
)
def test_no_address_of_anything_else(tensor: Tensor) -> None:
    with pytest.raises((ValueError, RuntimeError)):
        bindings.pointer(tensor, tensor.shape)


def test_a_subclass_as_input_takes_the_dense_path() -> None:
    layer, x = make_layer(dtype=torch.float32), randn(2, 9, 16, dtype=torch.float32)
    mine = x.as_subclass(type("Mine", (Tensor,), {}))
    for impl in ("native", "chunked"):
        assert_same(layer(mine, impl=impl).as_subclass(Tensor), layer(x, impl="dense"), 1e-5)
