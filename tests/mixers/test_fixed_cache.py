"""A fixed cache gives what one full forward gives, and its steps are one graph without breaks; or it is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers import assert_same, perturb, randn
from hypermlp.cache import Cache
from hypermlp.mixers import MIXERS, Mixer, build_mixer
from hypermlp.mixers.weights import Weights

WIDTH, L, T = 16, 7, 12  # beyond HyperGLU's window
NOT_FIXED = {"path"}
each_mixer = pytest.mark.parametrize("name", sorted(set(MIXERS) - NOT_FIXED))


def layer(name: str, dtype: torch.dtype = torch.float64) -> Mixer:
    return perturb(build_mixer(name, WIDTH, L)).to(dtype).eval()


@each_mixer
@torch.no_grad()
def test_a_fixed_cache_equals_the_full_forward(name: str) -> None:
    mixer, x = layer(name), randn(2, T, WIDTH)
    mask = torch.ones(2, T, dtype=torch.long)
    mask[0, :2] = mask[1, 3] = 0
    expected, whole = mixer(x, attention_mask=mask), mixer(x)
    cache = mixer.new_cache(2, max_len=T, fixed=True)
    parts = [(x[:, a:b], mask[:, a:b]) for a, b in ((0, 6), (6, 7), (7, T))]
    assert_same(torch.cat([mixer(part, attention_mask=own, cache=cache) for part, own in parts], 1), expected)
    assert cache.lengths.tolist() == [T - 2, T - 1]
    cache.clear()
    found = [mixer(x[:, :5], cache=cache), mixer(x[:, 5:9], cache=cache)]
    cache.reorder([1, 0])
    assert_same(torch.cat([*found, mixer(x[:, 9:].flip(0), cache=cache).flip(0)], 1), whole)


@pytest.mark.parametrize("name", ["hyperglu", "softmax", "forgetting", "gated_deltanet", "gsa", "mamba", "retnet", "rwkv7"])
@torch.no_grad()
def test_one_graph_serves_every_token(name: str) -> None:
    mixer, x = layer(name, torch.float32), randn(2, T, WIDTH, dtype=torch.float32)
    expected = mixer(x)
    torch.compiler.reset()

    def step(x: Tensor, cache: Cache) -> Tensor:
        return mixer(x, cache=cache)

    compiled = torch.compile(step, fullgraph=True, dynamic=False, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):  # another cache takes the same graph
            cache = mixer.new_cache(2, max_len=T, fixed=True)
            found = [mixer(x[:, :5], cache=cache), *(compiled(x[:, t : t + 1], cache) for t in range(5, T))]
            assert_same(torch.cat(found, 1), expected, 1e-5)
    if cache.slots:
        with pytest.raises(RuntimeError, match="a fixed cache of 12 tokens is full: make a larger one"):
            compiled(x[:, :1], cache)


def test_what_a_fixed_cache_cannot_do_is_refused() -> None:
    mixer, x = layer("hyperglu"), randn(1, 4, WIDTH)
    with pytest.raises(ValueError, match=r"max_len \(None\) of a fixed cache must be how many tokens it has room for"):
        mixer.new_cache(1, fixed=True)
    cache = mixer.new_cache(1, max_len=5, fixed=True)
    with torch.no_grad():
        mixer(x, cache=cache)
        with pytest.raises(ValueError, match="a fixed cache of 5 tokens is full: make a larger one"):
            mixer(x, cache=cache)
    with pytest.raises(ValueError, match="a fixed cache keeps its 1 rows"):
        cache.reorder([0, 0])
    for act in (lambda: cache.crop(1), cache.clone, cache.state_dict, lambda: cache.select([0])):
        with pytest.raises(ValueError, match="a fixed cache can be filled and reordered alone"):
            act()
    with pytest.raises(ValueError, match="leave fixed unset"):
        layer("path").new_cache(1, max_len=5, fixed=True)
    registered = layer("hyperglu+registers=2")
    with pytest.raises(ValueError, match="registers need a cache that lets them leave the window"), torch.no_grad():
        registered(x, cache=registered.new_cache(1, max_len=5, fixed=True))


def test_gradients_do_not_pass_a_fixed_cache() -> None:
    mixer, x = layer("softmax"), randn(1, 4, WIDTH)
    y = mixer(x, cache=mixer.new_cache(1, max_len=4, fixed=True))
    assert_same(y.detach(), mixer(x).detach())


@pytest.mark.parametrize("name", ["hyperglu", "softmax"])
@torch.no_grad()
def test_weights_have_the_columns_of_the_tokens_that_came(name: str) -> None:
    mixer, x = layer(name), randn(2, 6, WIDTH)
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, :2] = mask[1, 3] = 0
    whole, cache = Weights(), mixer.new_cache(2, max_len=8, fixed=True)
    mixer(x, attention_mask=mask, weights=whole)
    first, last = Weights(), Weights()
    mixer(x[:, :5], attention_mask=mask[:, :5], cache=cache, weights=first)
    mixer(x[:, 5:], cache=cache, weights=last)
    found = torch.cat([first.shown, last.shown], 2)
    assert_same(found[..., :6], whole.shown)
    assert not found[..., 6:].any()
