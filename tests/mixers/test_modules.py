"""Projections are computed together only where nobody could tell: hooks, adapters and parametrisations keep working."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from helpers import assert_same, make_layer, randn, run_layer
from hypermlp.mixers.modules import is_unhooked

PROJECTIONS = ["q", "k", "v", "o", "gate_qk", "gate_vo", "op1.control", "op2.control"]
LONG, SHORT = (2, 150, 16), (2, 3, 16)


class LoRA(nn.Module):
    """A linear layer with a low-rank update beside it, as adapter libraries wrap one."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def replace(layer: nn.Module, name: str, wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    parent, _, leaf = name.rpartition(".")
    owner = layer.get_submodule(parent)
    setattr(owner, leaf, wrap(getattr(owner, leaf)))
    return getattr(owner, leaf)


@pytest.mark.parametrize("impl", ["chunked", "native"])
@pytest.mark.parametrize(
    "changes", [{}, {"bias": True}, {"use_vo_gate": False}, {"use_qk_gate": False}, {"use_rope": True}, {"use_op1": False}]
)
def test_fused_equals_called(impl: str, changes: dict[str, object]) -> None:
    layer = make_layer(dtype=torch.float32, block_size=150, **changes)
    x, d_y = randn(*LONG, dtype=torch.float32), randn(*LONG, seed=1, dtype=torch.float32)
    together = run_layer(layer, x, d_y, impl=impl)
    for name in ("q", "o"):
        layer.get_submodule(name).register_forward_hook(lambda *_: None)  # each module is called as it stands
    assert_same(together, run_layer(layer, x, d_y, impl=impl), 1e-5)


@pytest.mark.parametrize("name", PROJECTIONS)
@pytest.mark.parametrize("shape", [LONG, SHORT], ids=["long", "short"])
def test_a_hook_on_any_projection_is_heard(name: str, shape: tuple[int, int, int]) -> None:
    layer, x = make_layer(dtype=torch.float32, block_size=150), randn(*shape, dtype=torch.float32)
    before, calls = layer(x), []

    def double(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        calls.append(output.shape)
        return 2 * output

    handle = layer.get_submodule(name).register_forward_hook(double)
    assert error_between(layer(x), before) > 1e-3
    cache = layer.new_cache(2)
    with torch.no_grad():
        layer(x[:, :1], cache=cache)
    assert len(calls) == 2
    handle.remove()
    assert torch.equal(layer(x), before)


@pytest.mark.parametrize("name", PROJECTIONS)
def test_an_adapter_on_any_projection_computes_and_trains(name: str) -> None:
    layer = make_layer(dtype=torch.float32, block_size=150)
    x, d_y = randn(*LONG, dtype=torch.float32), randn(*LONG, seed=1, dtype=torch.float32)
    adapter = replace(layer, name, LoRA)
    nn.init.zeros_(adapter.up.weight)
    unchanged = layer(x)
    assert_same(unchanged, make_layer(dtype=torch.float32, block_size=150)(x), 1e-5)
    nn.init.normal_(adapter.up.weight)
    found = run_layer(layer, x, d_y)
    expected = run_layer(layer, x, d_y, impl="dense")
    assert_same(found, expected, 2e-4)
    assert adapter.down.weight.grad.abs().sum() > 0
    stepwise = torch.cat([layer(t, cache=c) for c in [layer.new_cache(2)] for t in x[:, :5].split(1, 1)], 1)
    assert_same(stepwise, found["y"][:, :5], 1e-5)


def test_what_counts_as_unhooked() -> None:
    linear = nn.Linear(3, 4)
    assert is_unhooked(linear)
    assert not is_unhooked(LoRA(linear))
    assert not is_unhooked(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)))
    hooked = nn.Linear(3, 4)
    hooked.register_full_backward_hook(lambda *_: None)
    assert not is_unhooked(hooked)
    patched = nn.Linear(3, 4)
    patched.forward = lambda x: x
    assert not is_unhooked(patched)


def test_a_class_whose_forward_was_replaced_is_not_bypassed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: 2 * original(self, x))
    assert not is_unhooked(nn.Linear(3, 4))


def error_between(a: Tensor, b: Tensor) -> float:
    return float(((a - b).norm() / b.norm()).detach())
