"""Projections and readout, or a whole layer, as nodes of autograd (ops/layer.py): the plain steps, however differentiated."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from helpers import assert_same, make_layer, randn, run_layer
from hypermlp import HyperGLU
from hypermlp.ops import layer as nodes
from hypermlp.ops import native

OPTIONS = {
    "usual": {},
    "biases": {"bias": True},
    "no convolutions": {"use_kv_conv": False},
    "relu": {"attn_kind": "relu"},
    "shared factors": {"op1_per_head": False, "op2_per_head": False},
    "no norm": {"attn_norm": "none"},
}


def inputs(width: int = 16) -> tuple[Tensor, Tensor]:
    return randn(2, 13, width, dtype=torch.float32), randn(2, 13, width, seed=1, dtype=torch.float32)


def small(**options: object) -> HyperGLU:
    return make_layer(dtype=torch.float32, block_size=9, **options)


@pytest.fixture(params=["whole", "fused"])
def whole(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether layers of whole panels go in one call."""
    if request.param == "fused":
        monkeypatch.setattr(native, "MOST_TOKENS", -1)
    return request.param == "whole"


@pytest.mark.parametrize("impl", ["chunked", "native"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_nodes_equal_the_reference(options: dict, impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, (x, d_y), calls = small(**options), inputs(), []
    project = nodes.project
    monkeypatch.setattr(native, "MOST_TOKENS", -1)
    monkeypatch.setattr(nodes, "project", lambda *a, **k: calls.append(1) or project(*a, **k))
    found = run_layer(layer, x, d_y, impl=impl)
    assert calls
    assert_same(found, run_layer(layer, x, d_y, impl="dense"), 2e-5)


@pytest.mark.parametrize("impl", ["chunked", "native"])
def test_packed_and_padded(impl: str) -> None:
    layer, (x, d_y) = small(), inputs()
    for case in ({"attention_mask": torch.tensor([[0, 1] * 6 + [1], [1] * 9 + [0] * 4])}, {"cu_seqlens": [0, 2, 9, 13]}):
        rows = 1 if "cu_seqlens" in case else 2
        one, other = (run_layer(layer, x[:rows], d_y[:rows], impl=i, **case) for i in (impl, "dense"))
        assert_same(one, other, 2e-5)


def test_backward_twice_and_checkpointed(whole: bool) -> None:
    layer, (x, d_y) = make_layer(dtype=torch.float32, block_size=9, **PANELS), inputs(64)
    expected = run_layer(layer, x, d_y, impl="native")
    leaf = x.clone().requires_grad_()
    y = layer(leaf, impl="native")
    first = torch.autograd.grad(y, leaf, d_y, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(y, leaf, d_y)[0])
    assert torch.equal(first, expected["dx"])
    again = checkpoint(lambda x: layer(x, impl="native"), leaf, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(again, leaf, d_y)[0], first)


def test_frozen_parameters_get_no_gradient_and_change_none(whole: bool) -> None:
    layer, (x, d_y) = make_layer(dtype=torch.float32, block_size=9, bias=True, **PANELS), inputs(64)
    expected = run_layer(layer, x, d_y, impl="native")
    names = [name for name, _ in layer.named_parameters()]
    for frozen in (names[::2], names[1::2]):
        for name, p in layer.named_parameters():
            p.requires_grad_(name not in frozen).grad = None
        layer(x, impl="native").backward(d_y)
        for name, p in layer.named_parameters():
            assert p.grad is None if name in frozen else torch.allclose(p.grad, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"use_vo_gate": False}, {"bias": True}, {"op1_use_diag": False}])
def test_second_derivatives(options: dict, whole: bool) -> None:
    layer, (x, d_y) = make_layer(dtype=torch.float32, block_size=9, **PANELS, **options), inputs(64)
    found = {}
    for impl in ("native", "chunked", "dense"):
        leaf = x.clone().requires_grad_()
        (d_x,) = torch.autograd.grad(layer(leaf, impl=impl), leaf, d_y, create_graph=True)
        wanted = [leaf, *(p for p in layer.parameters() if p is not layer.o.bias)]
        found[impl] = dict(enumerate(torch.autograd.grad(d_x.square().sum(), wanted, allow_unused=True)))
    for impl in ("native", "chunked"):
        assert_same(found[impl], found["dense"], 1e-3)


PANELS = {"n_embd": 64, "qk_rank": 64, "vo_rank": 64, "op1_rank": 16, "op2_rank": 32}  # whole ones with any vector length
BLOCKS = {
    "usual": {},
    "biases": {"bias": True},
    "no convolutions": {"use_kv_conv": False},
    "three taps": {"conv_kernel_size": 3},
    "relu": {"attn_kind": "relu", "op1_shortcut": False},
    "no diagonals": {"op1_use_diag": False, "op2_use_diag": False, "op2_shortcut": False},
    "no norm": {"op2_rank": 16, "attn_norm": "none"},
}


@pytest.mark.parametrize("options", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("threads", [1, 3])
def test_blocks_of_rows_equal_the_reference(options: dict, threads: int, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer(dtype=torch.float32, block_size=64, **{**PANELS, **options})
    calls, run = [], nodes.run_whole
    monkeypatch.setattr(nodes, "run_whole", lambda *a: calls.append(1) or run(*a))
    assert native.fits(torch.empty(1, 1, 64), layer.tensors())
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for (B, T), bounds in (((2, 101), None), ((1, 101), [0, 47, 49, 101]), ((3, 2), None), ((2, 0), None)):
            x, d_y = (randn(B, T, 64, seed=n, dtype=torch.float32) for n in range(2))
            found, expected = (run_layer(layer, x, d_y, impl=i, cu_seqlens=bounds) for i in ("native", "dense"))
            assert_same(found, expected, 2e-5)
    finally:
        torch.set_num_threads(before)
    assert len(calls) == 3 * whole


def test_no_whole_layer_where_somebody_listens_or_parameters_lie_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "run_whole", lambda *a: pytest.fail("called"))
    x, _ = inputs(64)
    heard: list[object] = []
    for listen in (
        lambda layer: layer.op2.register_forward_hook(lambda *a: heard.append(1)),
        lambda layer: layer.o.register_forward_hook(lambda *a: heard.append(1)),
        lambda layer: setattr(layer.op1, "A", nn.Parameter(layer.op1.A.mT.contiguous().mT)),
    ):
        layer = make_layer(dtype=torch.float32, block_size=9, **PANELS)
        expected = layer(x, impl="dense").detach()
        listen(layer)
        assert_same(layer(x, impl="native"), expected, 2e-5)
    assert len(heard) == 2


def test_the_way_back_through_the_readouts_gate() -> None:
    d_y, o, g = (randn(2, 5, 6, seed=n, dtype=torch.float32) for n in range(3))
    g[0, 0] = torch.tensor([-200.0, 200.0, -20.0, 20.0, 0.0, -1e-6])
    o, g = o.requires_grad_(), g.requires_grad_()
    y = o * torch.sigmoid(g)
    d_o, d_g = torch.autograd.grad(y, (o, g), d_y)
    found = native.kernels.ungate(d_y.clone(), y.detach(), g.detach())
    for got, want in zip(found, (d_o, d_g), strict=True):
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-6)
