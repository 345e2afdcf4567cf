"""Every way of differentiating in torch agrees with the gradients of training, whichever implementation computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from helpers import assert_same, make_layer, over, perturb, randn
from hypermlp.mixers import DISTINCT, build_mixer
from hypermlp.mixers.base import Mixer

T = 9
Layer = Callable[[Tensor], Tensor]
each_fast = over([("chunked", 4), ("native", None), ("auto", None)])


def make_pair(impl: str, chunk: int | None) -> tuple[Layer, Layer, float]:
    """The layer by an implementation and by the oracle, and how near they must be."""
    layer = make_layer(dtype=torch.float32)
    return lambda x: layer(x, impl=impl, chunk_T=chunk), lambda x: layer(x, impl="dense"), 1e-4


def inputs() -> tuple[Tensor, Tensor]:
    return randn(2, T, 16, dtype=torch.float32), randn(2, T, 16, seed=1, dtype=torch.float32)


def dual_output(layer: Layer, x: Tensor, tangent: Tensor) -> Tensor:
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, tangent))).tangent
    assert found is not None
    return found


WAYS: dict[str, Callable[[Layer, Tensor, Tensor], object]] = {
    "jvp": lambda layer, x, t: dict(enumerate(torch.func.jvp(layer, (x,), (t,)))),
    "jacfwd": lambda layer, x, t: torch.func.jacfwd(lambda row: layer(row[None, None])[0, 0])(x[0, 0]),
    "jacrev": lambda layer, x, t: torch.func.jacrev(lambda row: layer(row[None, None])[0, 0])(x[0, 0]),
    "hessian": lambda layer, x, t: torch.func.hessian(lambda row: layer(row[None]).square().sum())(x[0, :2]),
    "grad": lambda layer, x, t: torch.func.grad(lambda x: (layer(x) * t).sum())(x),
    "vjp": lambda layer, x, t: torch.func.vjp(layer, x)[1](t)[0],
    "vmap": lambda layer, x, t: torch.func.vmap(lambda row: layer(row[None])[0])(x),
    "gradient per example": lambda layer, x, t: torch.func.vmap(
        torch.func.grad(lambda row, t: (layer(row[None])[0] * t).sum())
    )(x, t),
    "forward_ad": dual_output,
    "functional.jvp": lambda layer, x, t: torch.autograd.functional.jvp(layer, x, t)[1],
}


@each_fast
@pytest.mark.parametrize("way", WAYS)
def test_every_transform_equals_that_of_the_reference(way: str, impl: str, chunk: int | None) -> None:
    fast, dense, tolerance = make_pair(impl, chunk)
    expected = WAYS[way](dense, *inputs())
    assert_same(WAYS[way](fast, *inputs()), expected, tolerance)
    norm = max(float(t.detach().norm()) for t in (expected.values() if isinstance(expected, dict) else [expected]))
    assert norm > 0.1, "a comparison of zeros proves nothing"


def second_order(layer: Layer, x: Tensor, tangent: Tensor, parameters: list[Tensor]) -> dict[str, Tensor]:
    """Gradients of a gradient penalty."""
    x = x.clone().requires_grad_()
    (d_x,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    found = torch.autograd.grad((d_x * tangent).sum(), [x, *parameters], allow_unused=True)
    return {str(i): torch.zeros(()) if g is None else g for i, g in enumerate(found)}


@each_fast
@pytest.mark.parametrize("length", [T, 150])
def test_gradient_penalty(length: int, impl: str, chunk: int | None) -> None:
    """Projections are joined and gated in one pass from 256 tokens on, apart below."""
    layer = make_layer(dtype=torch.float32)
    x, tangent = (randn(2, length, 16, seed=s, dtype=torch.float32) for s in (1, 2))
    parameters = list(layer.parameters())
    expected = second_order(lambda x: layer(x, impl="dense"), x, tangent, parameters)
    assert_same(second_order(lambda x: layer(x, impl=impl, chunk_T=chunk), x, tangent, parameters), expected, 1e-3)


@pytest.mark.parametrize("kind", ["glu", "relu"])
def test_second_derivatives_of_strips(kind: str) -> None:
    layer, x = make_layer(attn_kind=kind, n_embd=4, qk_rank=4, op1_rank=2, op2_rank=1), randn(1, 3, 4).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: layer(x, impl="chunked", chunk_T=2), [x])


def slope(f: Callable[[Tensor], Tensor], x: Tensor, tangent: Tensor, step: float = 1e-7) -> Tensor:
    return (f(x + step * tangent) - f(x - step * tangent)) / (2 * step)


def gradient(mixer: Mixer, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(mixer(x).square().sum(), x)[0]


@pytest.mark.parametrize("length", [6, 70])
@pytest.mark.parametrize("name", DISTINCT)
def test_every_mixer_has_forward_mode_and_second_derivatives(name: str, length: int) -> None:
    """They equal difference quotients of the values and of the gradients of training."""
    mixer = build_mixer(name, 16, 80).double()
    if name in ("hyperglu", "hypermlp", "relu"):
        perturb(mixer)
    x, tangent = randn(1, length, 16), randn(1, length, 16, seed=1)
    expected = slope(mixer, x, tangent)
    assert_same(torch.func.jvp(mixer, (x,), (tangent,))[1], expected, 1e-5)
    assert_same(dual_output(mixer, x, tangent), expected, 1e-5)
    leaf = x.clone().requires_grad_()
    (d_x,) = torch.autograd.grad(mixer(leaf).square().sum(), leaf, create_graph=True)
    if name in ("softmax", "gated_softmax", "differential", "forgetting"):  # torch's fused attention refuses
        with pytest.raises(RuntimeError, match="not implemented"):
            torch.autograd.grad((d_x * tangent).sum(), leaf)
        return
    assert_same(torch.autograd.grad((d_x * tangent).sum(), leaf)[0], slope(lambda x: gradient(mixer, x), x, tangent), 1e-5)


@pytest.mark.parametrize("length", [6, 40])
def test_the_selective_scan_in_compiled_code_has_second_derivatives(length: int) -> None:
    mixer = build_mixer("mamba", 8, 80)
    x, tangent = (randn(2, length, 8, seed=s, dtype=torch.float32) for s in (0, 1))
    found = second_order(mixer, x, tangent, list(mixer.parameters()))
    exact = mixer.double()
    expected = second_order(exact, x.double(), tangent.double(), list(exact.parameters()))
    assert_same(found, expected, 1e-4)
