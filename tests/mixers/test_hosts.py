"""Mixers as layers of other people's models: what zoology, mad-lab and x_transformers do to a layer that they make."""

import importlib

import pytest
import torch
from torch import nn

from helpers import assert_same
from hypermlp.mixers import MIXERS
from hypermlp.mixers.hosts import HostLayer, XTransformersLayer, replace_attention

WIDTH, LENGTH, T = 16, 12, 7


def begin(module: nn.Module) -> None:
    """As these hosts begin all linear layers."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


@pytest.mark.parametrize("name", sorted(MIXERS))
def test_a_host_makes_it_by_name_and_leaves_its_beginning(name: str) -> None:
    place, _, attribute = "hypermlp.mixers.hosts.HostLayer".rpartition(".")
    kind = getattr(importlib.import_module(place), attribute)
    torch.manual_seed(0)
    layer = kind(d_model=WIDTH, layer_idx=3, mixer=name, max_length=LENGTH)
    before = {key: p.detach().clone() for key, p in layer.named_parameters()}
    host = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.RMSNorm(WIDTH), layer))
    changed = host[0].weight.detach().clone()
    host.apply(begin)
    assert not torch.equal(host[0].weight, changed)
    assert_same(dict(layer.named_parameters()), before, 0)
    x = torch.randn(2, T, WIDTH)
    assert_same(host[1](x), layer.mixer(host[1][0](x)), 0)
    assert layer.state_size(LENGTH) > 0
    torch.manual_seed(0)
    assert_same(dict(kind(dim=WIDTH, max_length=LENGTH, mixer=name).named_parameters()), before, 0)


def test_the_width_is_given_once() -> None:
    for given in ({}, {"d_model": 8, "dim": 8}):
        with pytest.raises(ValueError, match="give the width once, as d_model"):
            HostLayer(max_length=4, **given)


def test_a_call_with_arguments_for_attention() -> None:
    """As x_transformers calls its attention; masks of padding it takes, what works on scores it refuses."""
    layer, x = XTransformersLayer(WIDTH, max_length=LENGTH), torch.randn(2, T, WIDTH)
    mask = torch.ones(2, T, dtype=torch.bool)
    mask[0, 4:] = False
    nothing = dict.fromkeys(("attn_mask", "rel_pos", "rotary_pos_emb", "cache", "mem", "prev_attn", "context_mask"))
    assert_same(layer(x, mask=mask, causal=None, **nothing), layer.mixer(x, attention_mask=mask), 0)
    for refused in ({"cache": object()}, {"rotary_pos_emb": x}, {"causal": False}):
        with pytest.raises(ValueError, match="generate with cache_kv=False"):
            layer(x, **refused)
    with pytest.raises(ValueError, match=r"has no self-attention of x_transformers; give a model with a Decoder"):
        replace_attention(nn.Sequential(), max_length=4)
