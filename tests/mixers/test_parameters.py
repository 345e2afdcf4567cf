"""Initial values (appendix L) and the authors' parameter names."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from helpers import make_layer, seeded
from hypermlp import HyperGLU, HyperGLUConfig

LAYERS = {
    "glu": {},
    "relu": {"attn_kind": "relu"},
    "one set of factors": {"op1_per_head": False, "op2_per_head": False},
    "one head": {"n_head": 1},
    "one head, relu, one set": {"n_head": 1, "attn_kind": "relu", "op1_per_head": False, "op2_per_head": False},
    "square factors": {"block_size": 3, "op1_rank": 3, "op2_rank": 3, "op1_per_head": False},
    "biased": {"bias": True},
    "no convolution": {"use_kv_conv": False},
    "bare": {"use_op1": False, "use_op2": False, "use_qk_gate": False, "use_vo_gate": False, "use_kv_conv": False},
    "no diagonal": {"op1_use_diag": False, "op2_use_diag": False},
}
each_layer = pytest.mark.parametrize("changes", LAYERS.values(), ids=LAYERS)


def test_initial_statistics() -> None:
    config = HyperGLUConfig(n_embd=256, n_head=2, block_size=512, bias=True, op1_init_std=0.1, op2_init_std=0.02)
    layer = HyperGLU(config)
    layer.reset_parameters(seeded(0))
    for name, p in layer.named_parameters():
        if name.endswith(("bias", "diag")):
            assert (p == 0).all(), name
            continue
        std = 0.1 if name in ("op1.A", "op1.B") else 0.02
        spread = std / math.sqrt(p.numel())  # of the mean; that of the standard deviation is smaller by √2
        assert abs(p.mean().item()) < 5 * spread, name
        assert abs(p.std().item() - std) < 5 * spread, name
        assert p.abs().max() > 2 * std, name  # a normal law has tails, a uniform one ends at √3 std


def test_generator_determines_everything() -> None:
    layer = make_layer()
    layer.reset_parameters(seeded(1))
    first = {name: p.clone() for name, p in layer.state_dict().items()}
    layer.reset_parameters(seeded(2))
    assert not torch.equal(layer.state_dict()["q.weight"], first["q.weight"])
    torch.manual_seed(5)
    before = torch.get_rng_state()
    layer.reset_parameters(seeded(1))
    assert torch.equal(torch.get_rng_state(), before)  # the global generator is left alone
    for name, p in layer.state_dict().items():
        assert torch.equal(p, first[name]), name


@each_layer
def test_authors_names_are_lossless(changes: dict) -> None:
    layer, other = make_layer(1, **changes), make_layer(2, **changes)
    state = layer.authors_state_dict()
    assert len(state) == len(layer.state_dict())
    other.load_authors_state_dict(state)
    for name, p in layer.state_dict().items():
        assert torch.equal(other.state_dict()[name], p), name
    for name, value in other.authors_state_dict().items():
        assert torch.equal(value, state[name]), name


@each_layer
def test_authors_state_is_a_copy(changes: dict) -> None:
    layer = make_layer(**changes)
    before = snapshot(layer)
    for value in layer.authors_state_dict().values():
        assert not value.requires_grad
        value.zero_()
    assert_unchanged(layer, before)


@pytest.mark.parametrize("changes", [LAYERS["glu"], LAYERS["one set of factors"]], ids=["per head", "one set"])
def test_authors_shapes(changes: dict) -> None:
    state = make_layer(**changes).authors_state_dict()
    heads1, heads2 = ((4,), (2,)) if changes == {} else ((), ())
    assert state["op.mix.U"].shape == (*heads1, 24, 3)
    assert state["op.mix.Vt"].shape == (*heads1, 3, 24)
    assert state["op.mix.d"].shape == (*heads1, 24)
    assert state["op2.mix.U"].shape == (*heads2, 24, 2)
    assert state["op2.mix.Vt"].shape == (*heads2, 2, 24)
    assert state["conv1.conv.weight"].shape == (16, 1, 4)


def snapshot(layer: HyperGLU) -> dict[str, Tensor]:
    return {name: p.clone() for name, p in layer.state_dict().items()}


def assert_unchanged(layer: HyperGLU, before: dict[str, Tensor]) -> None:
    for name, p in layer.state_dict().items():
        assert torch.equal(p, before[name]), name


def without_q(state: dict[str, Tensor]) -> None:
    del state["q.weight"]


def with_more(state: dict[str, Tensor]) -> None:
    state["attn_dropout"] = torch.zeros(1)


def misshapen(state: dict[str, Tensor]) -> None:
    state["v.weight"] = state["v.weight"][:-1]


@pytest.mark.parametrize(
    "spoil, message",
    [
        (without_q, r"missing \['q.weight'\], unknown \[\]; the configuration must have the options it was trained with"),
        (with_more, r"missing \[\], unknown \['attn_dropout'\]"),
        (misshapen, r"v.weight has shape \(15, 16\); this configuration needs \(16, 16\)"),
    ],
)
def test_misfit_is_refused_and_nothing_changes(spoil: object, message: str) -> None:
    layer = make_layer(1)
    before = snapshot(layer)
    state = make_layer(2).authors_state_dict()
    spoil(state)
    with pytest.raises(ValueError, match=message):
        layer.load_authors_state_dict(state)
    assert_unchanged(layer, before)
