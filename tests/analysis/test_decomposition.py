"""The decomposition of a row gives back the layer's output, for every attention, with padding, packing, windows and caches."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers import assert_same, make_layer, perturb, randn
from hypermlp import HyperGLU
from hypermlp.analysis.memory import can_trace, look, trace
from hypermlp.analysis.trace import Memory, Trace
from hypermlp.mixers import MIXERS, build_mixer
from hypermlp.mixers.labels import TABLE1

WIDTH, T, HEADS = 16, 13, 2
NAMES = [name for name in [*sorted(MIXERS), *TABLE1] if can_trace(build_mixer(name, WIDTH, 24))]
CACHED = [name for name in NAMES if name in MIXERS or not re.search("[12]!", name)]  # the identity layout has no cache
each_attention = pytest.mark.parametrize("name", NAMES)
OPTIONS: dict[str, dict[str, Any]] = {
    "relu": {"attn_kind": "relu"},
    "l2": {"attn_norm": "l2"},
    "no norm": {"attn_norm": "none"},
    "rope": {"use_rope": True},
    "bias": {"bias": True},
    "plain gates": {"gate_act": "none"},
    "no diagonal": {"op1_use_diag": False, "op2_use_diag": False},
    "no shortcut": {"op1_shortcut": False, "op2_shortcut": False},
    "low rank alone": {"op1_shortcut": False, "op1_use_diag": False, "op2_shortcut": False, "op2_use_diag": False},
    "shared by heads": {"op1_per_head": False, "op2_per_head": False},
    "R1 alone": {"use_op2": False},
    "R2 alone": {"use_op1": False},
    "sliding window": {"block_size": 5},
    "places": {"aligner_kind": "identity"},
    "bidirectional": {"aligner_kind": "identity", "do_masking": False},
}


def build(name: str) -> nn.Module:
    return perturb(build_mixer(name, WIDTH, 24).double())


def sums(opened: Trace, token: int, batch: int) -> tuple[Tensor, Tensor]:
    """The layer's output at a token (C), once from slots and once from the tokens' own values."""
    heads = [opened.memory(token, head, batch) for head in range(HEADS)]
    for memory in heads:
        check_row(memory)
    by_slot = sum((memory.contributions.sum(0) for memory in heads), opened.bias())
    by_token = sum((memory.token_contributions.sum(0) for memory in heads), opened.bias())
    return by_slot, by_token


def check_row(memory: Memory) -> None:
    """The parts of a row fit each other."""
    for branch in (memory.gate, memory.scale):
        if branch is not None:
            assert_same(branch.R1.apply(branch.z), branch.h)
            assert_same(branch.z @ branch.R1.dense(), branch.h)
    assert_same(memory.a @ memory.R2.dense().mT, memory.w)
    assert_same(memory.R2.dense().mT @ memory.values, memory.v)
    assert_same(memory.shares.sum(), (memory.output != 0).any().double())
    assert (memory.a[~memory.active] == 0).all()
    assert (memory.lag >= 0).all() or memory.lag.min() < 0 <= memory.lag.max()


def assert_adds_up(opened: Trace, expected: Tensor, token: int, batch: int = 0) -> None:
    for found in sums(opened, token, batch):
        assert_same(found, expected[batch, token])


@each_attention
def test_slots_add_up_to_the_output(name: str) -> None:
    layer, x = build(name), randn(2, T, WIDTH)
    y, opened = layer(x), trace(layer, x)
    for token in range(T):
        assert_adds_up(opened, y, token, batch=token % 2)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option_of_the_layer(options: dict[str, Any]) -> None:
    layer, x = make_layer(**options), randn(1, T, WIDTH)
    y, opened = layer(x), trace(layer, x)
    for token in (0, 1, 7, T - 1):
        assert_adds_up(opened, y, token)


@each_attention
def test_padding_is_no_slot(name: str) -> None:
    layer, x = build(name), randn(2, T, WIDTH)
    real = torch.tensor([[0] * 5 + [1] * 8, [1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1, 0, 1]]).bool()
    y, opened = layer(x, attention_mask=real), trace(layer, x, attention_mask=real)
    for batch in range(2):
        places = real[batch].nonzero().flatten().tolist()
        for seen, token in enumerate(places, 1):
            assert_adds_up(opened, y, token, batch)
            memory = opened.memory(token, 0, batch)
            assert set(memory.place.tolist()) <= set(places)
            if is_causal(layer):
                assert memory.place.tolist() == places[:seen]


def is_causal(layer: nn.Module) -> bool:
    return not isinstance(layer, HyperGLU) or layer.spec.causal


def test_a_padding_token_is_refused() -> None:
    mask = torch.tensor([[0, 1, 1]])
    with pytest.raises(ValueError, match="token 0 of row 0 is padding"):
        look(make_layer(), randn(1, 3, WIDTH), 0, 0, attention_mask=mask)


@each_attention
def test_packed_documents_have_pools_of_their_own(name: str) -> None:
    layer, x, bounds = build(name), randn(1, T, WIDTH), torch.tensor([0, 4, 5, T])
    y, opened = layer(x, cu_seqlens=bounds), trace(layer, x, cu_seqlens=bounds)
    for token in range(T):
        assert_adds_up(opened, y, token)
    assert opened.memory(6, 0).place.tolist() == [5, 6]


@pytest.mark.parametrize("name", CACHED)
@pytest.mark.parametrize("held", [1, 9])
def test_cached_slots_have_negative_places(name: str, held: int) -> None:
    layer, x = build(name), randn(2, T, WIDTH)
    y = layer(x)
    cache = layer.new_cache(2)
    layer(x[:, :held], cache=cache)
    before = cache.lengths.tolist()
    opened = trace(layer, x[:, held:], cache=cache)
    for token in (0, T - held - 1):
        assert_adds_up(opened, y[:, held:], token, batch=1)
    memory = opened.memory(0, 0)
    assert memory.place.tolist() == [*range(-held, 0), 0]
    assert memory.lag.tolist() == list(range(held, -1, -1))
    assert cache.lengths.tolist() == before, "the cache is left as it is"


@pytest.mark.parametrize("name", CACHED)
def test_cache_and_padding_together(name: str) -> None:
    layer, x = build(name), randn(2, T, WIDTH)
    cache = layer.new_cache(2)
    layer(x[:, :4], attention_mask=torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]), cache=cache)
    mask = torch.tensor([[1] * 9, [1, 0, 1, 1, 0, 1, 1, 0, 0]])
    y = layer(x[:, 4:], attention_mask=mask, cache=cache.clone())
    opened = trace(layer, x[:, 4:], attention_mask=mask, cache=cache)
    assert_adds_up(opened, y, 8, 0)
    assert_adds_up(opened, y, 6, 1)


def test_window_forgets_and_rolls_in_the_cache() -> None:
    layer, x = make_layer(block_size=6), randn(1, 40, WIDTH)
    y = layer(x)
    assert_adds_up(trace(layer, x), y, 30)
    assert look(layer, x, 30, 1).place.tolist() == list(range(25, 31))
    cache = layer.new_cache(1)
    for token in range(39):
        layer(x[:, token : token + 1], cache=cache)
    assert_adds_up(trace(layer, x[:, 39:], cache=cache), y[:, 39:], 0)


def test_activated_set_is_what_the_relu_leaves() -> None:
    layer, x = make_layer(), randn(1, T, WIDTH)
    memory = look(layer, x, T - 1, 1)
    assert torch.equal(memory.active, memory.h > 0)
    assert 0 < memory.active.sum() < T
    assert_same(memory.rho, (memory.h.square().sum() + 1e-12).sqrt())
    assert memory.scale is not None
    expected = torch.where(memory.active, memory.alpha * nn.functional.softplus(memory.scale.h) / memory.rho, 0)
    assert_same(memory.a, expected)


def test_addresses_are_products_with_the_pools_slots() -> None:
    """h_i = q · u_i: equation (13) in the head's own coordinates, and for PaTH with keys as the token sees them."""
    x = randn(1, T, WIDTH)
    for name in NAMES:
        opened = trace(build(name), x)
        memory = opened.memory(T - 1, 1)
        assert_same(memory.u @ opened.q[0, T - 1, 1], memory.alpha)


def test_without_mixing_equals_a_layer_whose_operators_are_the_identity() -> None:
    layer, x = make_layer(), randn(1, T, WIDTH)
    without = make_layer(use_op1=False, use_op2=False)
    without.load_state_dict({k: v for k, v in layer.state_dict().items() if "op" not in k})
    opened = trace(layer, x)
    found = sum(opened.memory(T - 1, head, mixing=False).output for head in range(HEADS))
    assert_same(found, without(x)[0, T - 1])


def test_softmax_weights_are_positive_and_sum_to_one() -> None:
    memory = look(build("softmax"), randn(1, T, WIDTH), T - 1, 0)
    assert memory.active.all()
    assert (memory.w > 0).all()
    assert_same(memory.w.sum(), torch.ones((), dtype=torch.float64))
    assert_same(memory.w, memory.z.exp() / memory.rho)


@each_attention
def test_many_rows_at_once_equal_single_rows(name: str) -> None:
    layer, x = build(name), randn(1, T, WIDTH)
    opened = trace(layer, x)
    found = opened.rows(range(T), 1)
    for token in range(T):
        memory, here = opened.memory(token, 1), found.exists[token]
        for many, one in ((found.z[0], memory.z), (found.h[0], memory.h), (found.a, memory.a), (found.w, memory.w)):
            assert_same(many[token][here], one)
            assert (many[token][~here] == 0).all()


def test_a_row_costs_as_much_as_its_slots() -> None:
    """No tensor that is made for a row is larger than a few times slots × width, however many tokens there are."""
    layer, x = make_layer(block_size=2000), randn(1, 2000, WIDTH)
    opened, largest = trace(layer, x), 0

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            found = function(*args, **(kwargs or {}))
            if isinstance(found, Tensor) and not found.is_nested and 0 not in found.stride():
                largest = max(largest, found.numel())
            return found

    with Watch():
        opened.memory(1999, 0)
    assert 2000 * WIDTH <= largest <= 2000 * WIDTH * 4


def test_a_mixer_without_slots_is_refused() -> None:
    refused = sorted(set(MIXERS) - set(NAMES))
    assert refused
    for name in refused:
        with pytest.raises(ValueError, match="keeps no slots"):
            look(build_mixer(name, WIDTH, 24), torch.randn(1, 3, WIDTH), 0, 0)


def test_wrong_places_are_named() -> None:
    layer, x = make_layer(), randn(1, T, WIDTH)
    with pytest.raises(ValueError, match=r"head \(2\) must be at least 0 and below the layer's 2 heads"):
        look(layer, x, 0, 2)
    with pytest.raises(ValueError, match=r"token \(13\) must be below 1 and 13"):
        look(layer, x, T, 0)
