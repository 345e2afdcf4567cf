"""Differential attention against its formula, written out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from helpers import assert_same, gradients, perturb, randn, run_layer
from hypermlp.mixers.differential import DifferentialAttention

WIDTH = 16


def build(**changes: int) -> DifferentialAttention:
    mixer = DifferentialAttention(WIDTH, **changes).double()
    perturb(mixer)
    return mixer


def turn(x: Tensor) -> Tensor:
    """Rotary embedding of x (B T K) as multiplication of complex numbers."""
    _, T, K = x.shape
    angle = torch.arange(T)[:, None] * 10000.0 ** (-torch.arange(0, K, 2, dtype=torch.float64) / K)
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(torch.ones_like(angle), angle)
    return torch.view_as_real(turned).flatten(-2)


def formula(mixer: DifferentialAttention, x: Tensor, layer: int = 1) -> Tensor:
    """One head after another, with whole matrices."""
    H, T = mixer.n_head, x.shape[1]
    K = WIDTH // (2 * H)
    start = 0.8 - 0.6 * math.exp(-0.3 * (layer - 1))
    (q1, q2), (k1, k2) = mixer.lambda_q, mixer.lambda_k
    strength = torch.exp(q1 @ k1) - torch.exp(q2 @ k2) + start
    q, k = (x @ mixer.q.weight.T).split(K, -1), (x @ mixer.k.weight.T).split(K, -1)
    values = (x @ mixer.v.weight.T).chunk(H, -1)
    later = torch.ones(T, T).triu(1).bool()

    def softmax_map(i: int) -> Tensor:
        return (turn(q[i]) @ turn(k[i]).mT / math.sqrt(K)).masked_fill(later, float("-inf")).softmax(-1)

    o = [(softmax_map(h) - strength * softmax_map(H + h)) @ values[h] for h in range(H)]
    normed = [t / (t.square().mean(-1, keepdim=True) + 1e-5).sqrt() * mixer.norm * (1 - start) for t in o]
    return torch.cat(normed, -1) @ mixer.o.weight.T


def run_formula(mixer: DifferentialAttention, x: Tensor, d_y: Tensor, layer: int) -> dict[str, Tensor]:
    mixer.zero_grad()
    x = x.clone().requires_grad_()
    y = formula(mixer, x, layer)
    y.backward(d_y)
    assert x.grad is not None
    return {"y": y.detach(), "dx": x.grad, **gradients(mixer)}


@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 130])
def test_equals_its_formula(T: int) -> None:
    mixer, x, d_y = build(), randn(2, T, WIDTH), randn(2, T, WIDTH, seed=1)
    assert_same(run_layer(mixer, x, d_y), run_formula(mixer, x, d_y, 1))


@pytest.mark.parametrize("n_head, value_width, layer", [(1, 1, 1), (2, 2, 2), (2, 6, 5), (2, 40, 1), (4, 12, 12)])
def test_any_heads_values_and_layer(n_head: int, value_width: int, layer: int) -> None:
    mixer = build(n_head=n_head, value_width=value_width, layer=layer)
    x, d_y = randn(2, 9, WIDTH), randn(2, 9, WIDTH, seed=1)
    assert_same(run_layer(mixer, x, d_y), run_formula(mixer, x, d_y, layer))


def test_strength_begins_near_its_place_in_the_model() -> None:
    assert [round(DifferentialAttention(WIDTH, layer=n).lambda_init, 4) for n in (1, 2, 3, 28)] == [0.2, 0.3555, 0.4707, 0.7998]
    mixer = DifferentialAttention(WIDTH, layer=3)
    with torch.no_grad():
        mixer.lambda_q.zero_()
    assert mixer.strength().item() == pytest.approx(mixer.lambda_init)


def test_parameters_begin_as_published_and_grow_with_the_values() -> None:
    torch.manual_seed(0)
    mixer = DifferentialAttention(256)
    for weight in (mixer.q.weight, mixer.k.weight, mixer.v.weight, mixer.o.weight):
        assert weight.shape == (256, 256)
        assert weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert torch.cat([mixer.lambda_q, mixer.lambda_k]).std().item() == pytest.approx(0.1, rel=0.2)
    assert (mixer.norm == 1).all()
    counts = [sum(p.numel() for p in DifferentialAttention(WIDTH, value_width=n).parameters()) for n in range(2, 40, 2)]
    assert counts == sorted(set(counts))


def test_refusals_name_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"width \(18\) must be divisible by 4 \* n_head \(2\).*try 16 or 24"):
        DifferentialAttention(18)
    with pytest.raises(ValueError, match=r"value_width \(7\) must be divisible by n_head \(2\); try 6 or 8"):
        DifferentialAttention(WIDTH, value_width=7)
    with pytest.raises(ValueError, match=r"layer \(0\) must be at least 1"):
        DifferentialAttention(WIDTH, layer=0)


def saved_bytes(T: int) -> int:
    sizes: list[int] = []

    def pack(x: Tensor) -> Tensor:
        sizes.append(x.numel() * x.element_size())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        build()(randn(1, T, WIDTH).requires_grad_())
    return sum(sizes)


def test_training_memory_is_linear() -> None:
    assert saved_bytes(1024) < 2.01 * saved_bytes(512)


def test_crop_goes_back_exactly() -> None:
    mixer, x = build(), randn(2, 30, WIDTH)
    cache = mixer.new_cache(2)
    mixer(x[:, :20], cache=cache)
    cache.crop(7)
    assert_same(mixer(x[:, 7:], cache=cache), mixer(x)[:, 7:])
