"""Our extension of the layer: the readout normalised per head, and a swish as its gate. Off, nothing of it is there."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from helpers import TOLERANCE, assert_same, each_impl, make_config, make_layer, precision, randn, run_layer
from hypermlp import HyperGLU
from hypermlp.mixers import build_mixer

BOTH = {"readout_norm": True, "readout_swish": True}
OPTIONS = {
    "both": BOTH,
    "norm": {"readout_norm": True},
    "swish": {"readout_swish": True},
    "norm, no gate": {"readout_norm": True, "use_vo_gate": False},
    "swish, open gates": {"readout_swish": True, "gate_act": "none"},
    "relu, by place, biased": {**BOTH, "attn_kind": "relu", "aligner_kind": "identity", "bias": True},
}
each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def bare(layer: HyperGLU) -> HyperGLU:
    """The layer with these weights whose output is what the heads read, with nothing behind it."""
    width = layer.config.n_embd
    found = HyperGLU(layer.config.replace(readout_norm=False, readout_swish=False, use_vo_gate=False, vo_rank=width)).double()
    found.load_state_dict({k: v for k, v in layer.state_dict().items() if k.partition(".")[0] not in ("norm_vo", "gate_vo")})
    with torch.no_grad():
        found.o.weight.copy_(torch.eye(width))
        if found.o.bias is not None:
            found.o.bias.zero_()
    return found


@each_option
def test_readouts_are_normed_gated_and_projected(options: dict) -> None:
    layer, x = make_layer(**options), randn(2, 13, 16)
    o = bare(layer)(x).unflatten(-1, (2, 8))
    if layer.norm_vo is not None:
        o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer.norm_vo.weight
    o = o.flatten(2)
    if layer.gate_vo is not None:
        g = layer.gate_vo(x)
        o = o * (g * torch.sigmoid(g) if layer.config.readout_swish else torch.sigmoid(g))
    assert_same(layer(x), F.linear(o, layer.o.weight, layer.o.bias))


@each_impl
def test_every_implementation_computes_it(impl: str, chunk: int | None) -> None:
    dtype = precision(impl)
    x, d_y = randn(2, 37, 16), randn(2, 37, 16, seed=1)  # longer than the window
    expected = run_layer(make_layer(**BOTH), x, d_y, impl="dense")
    found = run_layer(make_layer(dtype=dtype, **BOTH), x.to(dtype), d_y.to(dtype), impl=impl, chunk_T=chunk)
    assert_same(found, expected, TOLERANCE[dtype])


def test_it_begins_with_a_weight_of_one_and_changes_no_other_draw() -> None:
    plain, ours = HyperGLU(make_config()), HyperGLU(make_config(**BOTH))
    for layer in (plain, ours):
        layer.reset_parameters(torch.Generator().manual_seed(1))
    state = ours.state_dict()
    assert torch.equal(state.pop("norm_vo.weight"), torch.ones(8))
    assert state.keys() == plain.state_dict().keys()
    assert all(torch.equal(state[name], p) for name, p in plain.state_dict().items())


def test_it_is_a_mixer_of_the_registry() -> None:
    layer = build_mixer("hyperglu_normed", 16, 24, init="decays")
    assert isinstance(layer, HyperGLU)
    assert layer.config == HyperGLU(n_embd=16, n_head=2, block_size=24, init="decays", **BOTH).config


def test_it_is_none_of_the_authors_options() -> None:
    for call in (lambda layer: layer.authors_state_dict(), lambda layer: layer.load_authors_state_dict({})):
        with pytest.raises(ValueError, match="neither readout_norm nor readout_swish"):
            call(make_layer(**BOTH))
    with pytest.raises(ValueError, match="it needs use_vo_gate=True"):
        make_config(readout_swish=True, use_vo_gate=False)
