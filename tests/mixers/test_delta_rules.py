"""DeltaNet, Gated DeltaNet, Kimi Delta Attention and RWKV-7 against loops over time written from their equations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers import assert_same, gradients, perturb, randn, run_layer
from hypermlp.mixers.deltanet import DeltaNet
from hypermlp.mixers.gated_deltanet import GatedDeltaNet
from hypermlp.mixers.kda import KimiDeltaAttention
from hypermlp.mixers.recurrent import RecurrentMixer
from hypermlp.mixers.rwkv7 import RWKV7

WIDTH, H, T = 16, 2, 70
MIXERS: dict[str, type[Any]] = {
    "deltanet": DeltaNet,
    "gated_deltanet": GatedDeltaNet,
    "kda": KimiDeltaAttention,
    "rwkv7": RWKV7,
}
SIGNED = ("deltanet", "gated_deltanet", "rwkv7")  # those whose eigenvalues may be negative
each_mixer = pytest.mark.parametrize("name", MIXERS)


# A sequence x (T C) goes in, y (T C) comes out; one head and one token at a time.


def convolved(x: Tensor, weight: Tensor) -> Tensor:
    taps = weight.shape[1]
    rows = [sum(weight[:, taps - 1 - j] * x[t - j] for j in range(taps) if t >= j) for t in range(len(x))]
    return F.silu(torch.stack(rows))


def l2(x: Tensor) -> Tensor:
    return x / (x.square().sum() + 1e-6).sqrt()


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean() + 1e-5).sqrt() * weight


def deltanet(m: DeltaNet, x: Tensor) -> Tensor:
    return m.o(delta_rule(m, x, torch.zeros(len(x), H, dtype=x.dtype), WIDTH))


def gated_deltanet(m: GatedDeltaNet, x: Tensor) -> Tensor:
    g = -m.A_log.exp() * torch.log1p((m.decay(x) + m.dt_bias).exp())
    z = m.gate(x)
    return m.o(delta_rule(m, x, g, 12) * z * torch.sigmoid(z))


def kda(m: KimiDeltaAttention, x: Tensor) -> Tensor:
    rate = torch.log1p((x @ m.decay_in.weight.T @ m.decay_out.weight.T + m.dt_bias).exp())
    g = -m.A_log.exp() * torch.stack(rate.chunk(H, dim=1), 1)  # T H K
    gate = torch.sigmoid(x @ m.gate_in.weight.T @ m.gate_out.weight.T + m.gate_out.bias)
    return m.o(delta_rule(m, x, g[..., None], WIDTH) * gate)


def delta_rule(m: Any, x: Tensor, g: Tensor, key_width: int) -> Tensor:
    """Normalised readouts (T V) of S ← e^g S, S ← S + β k (v − Sᵀ k)ᵀ; g (T H) or (T H K 1)."""
    mixed, beta = convolved(m.qkv(x), m.conv.weight), (2 if getattr(m, "negative", False) else 1) * torch.sigmoid(m.beta(x))
    q, k, v = mixed[:, :key_width], mixed[:, key_width : 2 * key_width], mixed[:, 2 * key_width :]
    outputs = []
    for h in range(H):
        Q, K, V = (t.chunk(H, dim=1)[h] for t in (q, k, v))
        S, rows = x.new_zeros(K.shape[1], V.shape[1]), []
        for t in range(len(x)):
            key = l2(K[t])
            S = g[t, h].exp() * S
            S = S + beta[t, h] * torch.outer(key, V[t] - S.T @ key)
            rows.append(rms(S.T @ l2(Q[t]) / K.shape[1] ** 0.5, m.norm.weight))
        outputs.append(torch.stack(rows))
    return torch.cat(outputs, 1)


def rwkv7(m: RWKV7, x: Tensor) -> Tensor:
    before = torch.cat([torch.zeros_like(x[:1]), x[:-1]])
    xr, xw, xk, xv, xa, xg = (x + (before - x) * mu for mu in m.shift)
    r, k, v = xr @ m.r.weight.T, xk @ m.k.weight.T, xv @ m.v.weight.T
    w = -(-torch.tensor(0.5, dtype=x.dtype)).exp() * torch.sigmoid(
        torch.tanh(xw @ m.w[0].weight.T) @ m.w[2].weight.T + m.w[2].bias
    )
    a = torch.sigmoid(xa @ m.a[0].weight.T @ m.a[1].weight.T + m.a[1].bias)
    gate = torch.sigmoid(xg @ m.g[0].weight.T) @ m.g[2].weight.T
    kappa, k = k * m.remove_scale, k * (1 + (a - 1) * m.write_scale)
    a = a * (1 + w.exp()) if m.negative else a
    outputs = []
    for h in range(H):
        R, W, K, V, A, removed = (t.chunk(H, dim=1)[h] for t in (r, w, k, v, a, kappa))
        weight, bias = m.norm.weight.chunk(H)[h], m.norm.bias.chunk(H)[h]
        S, rows = x.new_zeros(K.shape[1], V.shape[1]), []
        for t in range(len(x)):
            direction = l2(removed[t])
            transition = torch.diag(W[t].exp()) - torch.outer(direction * A[t], direction)
            S = transition @ S + torch.outer(K[t], V[t])
            o = S.T @ R[t]
            o = (o - o.mean()) / (o.var(correction=0) + 1e-5 * len(o)).sqrt() * weight + bias
            rows.append(o + (R[t] * K[t] * m.bonus[h]).sum() * V[t])
        outputs.append(torch.stack(rows))
    return (torch.cat(outputs, 1) * gate) @ m.o.weight.T


EQUATIONS: dict[str, Callable[..., Tensor]] = {
    "deltanet": deltanet,
    "gated_deltanet": gated_deltanet,
    "kda": kda,
    "rwkv7": rwkv7,
}


@pytest.mark.parametrize(
    "name, options",
    [
        *((name, {"value_width": width}) for name in MIXERS for width in (None, 2, 22)),
        *((name, {"negative": True}) for name in SIGNED),
    ],
)
def test_layers_follow_their_equations(name: str, options: dict[str, Any]) -> None:
    mixer = perturb(MIXERS[name](WIDTH, H, **options).double())
    x, d_y = randn(1, T, WIDTH), randn(1, T, WIDTH, seed=1)
    found = run_layer(mixer, x, d_y)
    mixer.zero_grad()
    x = x.requires_grad_()
    y = EQUATIONS[name](mixer, x[0])[None]
    y.backward(d_y)
    assert_same(found, {"y": y.detach(), "dx": x.grad, **gradients(mixer)})


@pytest.mark.parametrize("name", SIGNED)
def test_transitions_with_negative_eigenvalues_reach_minus_one_and_never_expand(name: str) -> None:
    """S_t = A S_{t−1} + …: the eigenvalues of A, from a state that held the identity."""
    K, lowest = 6 if name == "gated_deltanet" else 8, {}
    for negative in (False, True):
        mixer = perturb(MIXERS[name](8, 1, value_width=K, negative=negative).double())
        found = []
        for seed in range(20):
            x = 20 * randn(1, 1, 8, seed=seed)
            ends = []
            for S in (torch.eye(K, dtype=x.dtype), torch.zeros(K, K, dtype=x.dtype)):
                cache = mixer.new_cache(1)
                cache.states["S"].copy_(S)
                mixer(x, cache=cache)
                ends.append(cache.states["S"][0, 0])
            found.append(torch.linalg.eigvals(ends[0] - ends[1]))
        values = torch.cat(found)
        assert (values.imag.abs() < 1e-6).all()
        assert (values.real.abs() < 1 + 1e-6).all()
        lowest[negative] = values.real.min()
    assert lowest[False] > -0.46, "RWKV-7's least decay is e^(−e^(−1/2)) = 0.545, and α is below 1"
    assert lowest[True] < -0.6


@each_mixer
def test_single_precision_and_autocast_stay_close(name: str) -> None:
    exact = perturb(MIXERS[name](WIDTH).double())
    single = MIXERS[name](WIDTH)
    single.load_state_dict(exact.state_dict())
    x = randn(2, T, WIDTH)
    expected = exact(x)
    assert_same(single(x.float()), expected, 1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        y = single(x.float())
    assert y.dtype == torch.bfloat16
    assert_same(y, expected, 0.05)


@each_mixer
@pytest.mark.parametrize("width, n_head", [(10, 1), (10, 2), (14, 2), (12, 3)])
def test_parameters_grow_with_the_value_width(name: str, width: int, n_head: int) -> None:
    counts = []
    for value_width in range(n_head, 10 * n_head, n_head):
        mixer: RecurrentMixer = MIXERS[name](width, n_head, value_width=value_width)
        assert mixer(torch.randn(1, 5, width)).shape == (1, 5, width)
        counts.append(sum(p.numel() for p in mixer.parameters()))
    assert counts == sorted(set(counts))


@pytest.mark.parametrize(
    "name, low, high", [("deltanet", 4, 4.05), ("gated_deltanet", 6, 6.1), ("kda", 5, 5.1), ("rwkv7", 4, 4.7)]
)
def test_parameters_as_published(name: str, low: float, high: float) -> None:
    with torch.device("meta"):
        count = sum(p.numel() for p in MIXERS[name](1024, 4).parameters())
    assert low <= count / 1024**2 <= high


@each_mixer
def test_a_value_width_that_heads_cannot_share_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"value_width \(7\) must be divisible by n_head \(2\); try 6 or 8"):
        MIXERS[name](WIDTH, 2, value_width=7)
    with pytest.raises(ValueError, match=r"value_width \(0\)"):
        MIXERS[name](WIDTH, 2, value_width=0)


@pytest.mark.parametrize("name", ["deltanet", "kda", "rwkv7"])
def test_a_width_that_heads_cannot_share_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"width \(15\) must be divisible by n_head \(2\)"):
        MIXERS[name](15, 2)


def test_gated_deltanet_begins_with_the_published_decays() -> None:
    torch.manual_seed(0)
    mixer = GatedDeltaNet(64, 64)
    A, dt = mixer.A_log.exp(), F.softplus(mixer.dt_bias)
    assert (A > 0).all()
    assert (A <= 16).all()
    assert A.max() > 8
    assert (dt >= 0.99e-3).all()
    assert (dt <= 0.101).all()
    assert dt.median() < 0.03, "log-uniform"


def test_rwkv7_forgets_between_slowly_and_fast() -> None:
    mixer, seen = RWKV7(64), []
    mixer.w.register_forward_hook(lambda module, args, out: seen.append(out))
    mixer(torch.zeros(1, 1, 64))
    decay = torch.exp(-(torch.tensor(-0.5).exp()) * torch.sigmoid(seen[0]))
    assert decay.max() > 0.999
    assert 0.85 < decay.min() < 0.95


@each_mixer
def test_empty_inputs(name: str) -> None:
    mixer = MIXERS[name](WIDTH)
    assert mixer(torch.zeros(0, 5, WIDTH)).shape == (0, 5, WIDTH)
    assert mixer(torch.zeros(2, 0, WIDTH)).shape == (2, 0, WIDTH)
    cache = mixer.new_cache(2)
    assert mixer(torch.zeros(2, 0, WIDTH), cache=cache).shape == (2, 0, WIDTH)
    assert cache.lengths.tolist() == [0, 0]
