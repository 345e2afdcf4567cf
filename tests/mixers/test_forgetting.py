"""Forgetting attention against its formula, written out, and against the public reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers import assert_same, gradients, perturb, randn, run_layer
from hypermlp.mixers.forgetting import ForgettingAttention

WIDTH, H = 16, 2


def build(**changes: int) -> ForgettingAttention:
    return perturb(ForgettingAttention(WIDTH, H, **changes).double())


def formula(mixer: ForgettingAttention, x: Tensor) -> Tensor:
    """One pair of tokens after the other: the decay of each token in between, multiplied."""
    T, K = x.shape[1], WIDTH // H
    kept = torch.sigmoid(x @ mixer.forget.weight.T + mixer.forget.bias)  # B T H
    q, k, v = (x @ layer.weight.T for layer in (mixer.q, mixer.k, mixer.v))
    heads = []
    for h in range(H):
        Q, Ks, V = (t.chunk(H, -1)[h] for t in (q, k, v))
        rows = []
        for i in range(T):
            e = [(Q[:, i] * Ks[:, j]).sum(-1) / K**0.5 for j in range(i + 1)]
            weight = torch.stack([e[j].exp() * kept[:, j + 1 : i + 1, h].prod(-1) for j in range(i + 1)], -1)  # B i+1
            rows.append(((weight / weight.sum(-1, keepdim=True))[..., None] * V[:, : i + 1]).sum(1))
        heads.append(torch.stack(rows, 1))
    return torch.cat(heads, -1) @ mixer.o.weight.T


@pytest.mark.parametrize("T, value_width", [(1, None), (2, None), (23, None), (23, 6), (23, 30)])
def test_equals_its_formula(T: int, value_width: int | None) -> None:
    mixer = build() if value_width is None else build(value_width=value_width)
    x, d_y = randn(2, T, WIDTH), randn(2, T, WIDTH, seed=1)
    found = run_layer(mixer, x, d_y)
    mixer.zero_grad()
    x = x.requires_grad_()
    y = formula(mixer, x)
    y.backward(d_y)
    assert_same(found, {"y": y.detach(), "dx": x.grad, **gradients(mixer)})


def test_equals_the_public_reference() -> None:
    naive = pytest.importorskip("fla.ops.forgetting_attn.naive", reason="flash-linear-attention is not installed")
    mixer, x = build(), randn(2, 40, WIDTH)
    with torch.no_grad():
        q, slots = mixer.project(mixer.prepare(x))
        o = naive.naive_forgetting_attn(q, slots["k"], slots["v"], slots["g"][..., 0]).double()
        assert_same(mixer(x), mixer.o(o.flatten(2)), 1e-5)


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-4), (torch.bfloat16, 0.03)])
def test_strong_decays_leave_what_follows_exact(dtype: torch.dtype, bound: float) -> None:
    """After 200 tokens that forget nearly everything the sum of decays is near −4000, off by 8 in bfloat16."""
    exact = build()
    with torch.no_grad():
        exact.forget.weight.zero_()
        exact.forget.weight[:, 0] = 1
        exact.forget.bias.zero_()
    x = 0.5 * randn(1, 260, WIDTH)
    x[:, :200, 0], x[:, 200:, 0] = -20, 3
    x = x.to(dtype).double()
    exact = exact.to(dtype).double()
    rounded = ForgettingAttention(WIDTH, H).to(dtype)
    rounded.load_state_dict(exact.state_dict())
    with torch.no_grad():
        expected = exact(x)[:, 200:]
        assert_same(rounded(x.to(dtype))[:, 200:], expected, bound)
        cache = rounded.new_cache(1)
        steps = [rounded(part, cache=cache) for part in x.to(dtype).split([230, *[1] * 30], dim=1)]
        assert_same(torch.cat(steps, 1)[:, 200:], expected, bound)


def test_a_width_that_heads_cannot_share_is_refused() -> None:
    with pytest.raises(ValueError, match=r"width \(15\) must be divisible by n_head \(2\)"):
        ForgettingAttention(15, 2)
