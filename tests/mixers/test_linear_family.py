"""Mixers with linear recurrences against loops over time written from their equations, and against a public reference."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers import assert_same, perturb, randn
from hypermlp.mixers.gla import GLA
from hypermlp.mixers.gsa import GSA
from hypermlp.mixers.hgrn import HGRN
from hypermlp.mixers.hgrn2 import HGRN2
from hypermlp.mixers.linear import LinearAttention
from hypermlp.mixers.mamba import Mamba
from hypermlp.mixers.mamba2 import Mamba2
from hypermlp.mixers.recurrent import RecurrentMixer
from hypermlp.mixers.retnet import RetNet
from hypermlp.ops.recurrence import Steps, recurrence
from hypermlp.ops.scan import scan
from hypermlp.ops.slots import slot_scores

WIDTH, H, T = 8, 2, 37
MIXERS: dict[str, type[RecurrentMixer]] = {
    "linear": LinearAttention,
    "retnet": RetNet,
    "gla": GLA,
    "hgrn": HGRN,
    "hgrn2": HGRN2,
    "gsa": GSA,
    "mamba": Mamba,
    "mamba2": Mamba2,
}
each_mixer = pytest.mark.parametrize("name", MIXERS)
BOUNDED = {"hgrn", "hgrn2"}


# One token x (C) at a time, with the state and what the convolution has seen; every function returns the output and the state.


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def linear_token(m: LinearAttention, x: Tensor, S: dict[str, Tensor], t: int) -> tuple[Tensor, dict[str, Tensor]]:
    q, k, v = ((layer.weight @ x).view(H, -1) for layer in (m.q, m.k, m.v))
    q, k = (
        (z @ f.left.weight.T + f.left.bias) * (z @ f.right.weight.T + f.right.bias)
        for z, f in ((q, m.feature_q), (k, m.feature_k))
    )
    new = S["S"] + torch.einsum("hk,hv->hkv", k, v)
    o = torch.einsum("hkv,hk->hv", new, q) / q.shape[1] ** 0.5
    return m.o.weight @ norm(o, m.norm.weight).flatten(), {"S": new}


def turned(x: Tensor, t: int) -> Tensor:
    """Pairs of neighbouring coordinates as complex numbers, turned by t · 10000^(−2i/K)."""
    K = x.shape[-1]
    angle = t * 10000.0 ** (-torch.arange(0, K, 2, dtype=x.dtype) / K)
    return torch.view_as_real(torch.view_as_complex(x.reshape(H, -1, 2)) * torch.polar(torch.ones_like(angle), angle)).flatten(
        1
    )


def retnet_token(m: RetNet, x: Tensor, S: dict[str, Tensor], t: int) -> tuple[Tensor, dict[str, Tensor]]:
    q, k, v = ((layer.weight @ x).view(H, -1) for layer in (m.q, m.k, m.v))
    decay = torch.tensor([1 - 1 / 32, 1 - 1 / 64], dtype=x.dtype)
    new = decay[:, None, None] * S["S"] + torch.einsum("hk,hv->hkv", turned(k, t), v)
    o = torch.einsum("hkv,hk->hv", new, turned(q, t)) / q.shape[1] ** 0.5
    return m.o.weight @ (norm(o, m.norm.weight).flatten() * F.silu(m.gate.weight @ x)), {"S": new}


def gla_token(m: GLA, x: Tensor, S: dict[str, Tensor], t: int) -> tuple[Tensor, dict[str, Tensor]]:
    q, k, v = ((layer.weight @ x).view(H, -1) for layer in (m.q, m.k, m.v))
    decay = torch.sigmoid(m.decay_out.weight @ (m.decay_in.weight @ x) + m.decay_out.bias).view(H, -1) ** (1 / 16)
    new = decay[..., None] * S["S"] + torch.einsum("hk,hv->hkv", k, v)
    o = torch.einsum("hkv,hk->hv", new, q) / q.shape[1] ** 0.5
    return m.o.weight @ (norm(o, m.norm.weight).flatten() * F.silu(m.gate.weight @ x)), {"S": new}


def hgrn_token(m: HGRN, x: Tensor, S: dict[str, Tensor], t: int) -> tuple[Tensor, dict[str, Tensor]]:
    f = m.lower_bound + (1 - m.lower_bound) * torch.sigmoid(m.f.weight @ x)
    h = f * S["h"] + (1 - f) * F.silu(m.i.weight @ x)
    return m.o.weight @ (norm(h, m.norm.weight) * F.silu(m.gate.weight @ x)), {"h": h}


def hgrn2_token(m: HGRN2, x: Tensor, S: dict[str, Tensor], t: int) -> tuple[Tensor, dict[str, Tensor]]:
    f = (m.lower_bound + (1 - m.lower_bound) * torch.sigmoid(m.f.weight @ x)).view(H, -1)
    new = f[..., None] * S["S"] + torch.einsum("hk,hv->hkv", 1 - f, (m.i.weight @ x).view(H, -1))
    o = torch.einsum("hkv,hk->hv", new, F.silu(m.q.weight @ x).view(H, -1)) / f.shape[1] ** 0.5
    return m.o.weight @ norm(o.flatten(), m.norm.weight), {"S": new}


def gsa_token(m: GSA, x: Tensor, S: dict[str, Tensor], t: int) -> tuple[Tensor, dict[str, Tensor]]:
    q, k, v = (F.silu(layer.weight @ x).view(H, -1) for layer in (m.q, m.k, m.v))
    decay = torch.sigmoid(m.f.weight @ x).view(H, -1) ** (1 / 8)
    keys = S["K"] * decay[:, None] + torch.einsum("hk,hm->hkm", k, 1 - decay)
    values = S["V"] * decay[..., None] + torch.einsum("hm,hv->hmv", 1 - decay, v)
    o = torch.einsum("hmv,hm->hv", values, torch.einsum("hkm,hk->hm", keys, q).softmax(-1))
    return m.o.weight @ norm(F.silu(o).flatten(), m.norm.weight), {"K": keys, "V": values}


def convolved(conv: nn.Module, x: Tensor, S: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """SiLU of the convolution's output for x, and the inputs to remember."""
    window = torch.cat([S.get("inputs", x.new_zeros(3, len(x))), x[None]])  # W E
    return F.silu((window.T * conv.weight).sum(1) + conv.bias), window[1:]


def mamba_token(m: Mamba, x: Tensor, S: dict[str, Tensor], t: int) -> tuple[Tensor, dict[str, Tensor]]:
    into, gate = (m.into.weight @ x).chunk(2)
    u, inputs = convolved(m.conv, into, S)
    low, B, C = (m.select.weight @ u).split([m.rank, 16, 16])
    delta = torch.log1p(torch.exp(m.delta.weight @ low + m.delta.bias))
    h = torch.exp(-torch.exp(m.A_log.T) * delta) * S["h"] + torch.outer(B, delta * u)
    return m.o.weight @ ((C @ h + m.D * u) * F.silu(gate)), {"h": h, "inputs": inputs}


def mamba2_token(m: Mamba2, x: Tensor, S: dict[str, Tensor], t: int) -> tuple[Tensor, dict[str, Tensor]]:
    gate, into, delta = (m.into.weight @ x).split([m.inner, m.conv_width, m.n_head])
    mixed, inputs = convolved(m.conv, into, S)
    u, B, C = mixed.split([m.inner, m.head_key_width, m.head_key_width])
    delta = torch.log1p(torch.exp(delta + m.delta_bias))
    # Channel by channel, so that a narrower last head needs no padding here; the state's unused columns stay zero.
    head = torch.arange(m.inner) // m.head_value_width
    new = S["S"].transpose(1, 2).flatten(0, 1)[: m.inner].T  # N E
    new = torch.exp(-torch.exp(m.A_log) * delta)[head] * new + torch.outer(B, delta[head] * u)
    y = norm((C @ new + m.D[head] * u) * F.silu(gate), m.norm.weight)
    N, P = m.head_key_width, m.head_value_width
    kept = F.pad(new, (0, m.n_head * P - m.inner)).view(N, m.n_head, P).transpose(0, 1)
    return m.o.weight @ y, {"S": kept, "inputs": inputs}


TOKEN: dict[str, Callable[..., tuple[Tensor, dict[str, Tensor]]]] = {
    "linear": linear_token,
    "retnet": retnet_token,
    "gla": gla_token,
    "hgrn": hgrn_token,
    "hgrn2": hgrn2_token,
    "gsa": gsa_token,
    "mamba": mamba_token,
    "mamba2": mamba2_token,
}


def assert_follows_the_equations(name: str, mixer: RecurrentMixer) -> None:
    perturb(mixer.double())
    x = randn(2, T, mixer.width)
    cache = mixer.new_cache(2)
    y = mixer(x, cache=cache)
    assert_same(mixer(x), y)
    for row in range(2):
        state = {key: x.new_zeros(shape) for key, shape in mixer.state_shapes().items()}
        for t in range(T):
            expected, state = TOKEN[name](mixer, x[row, t], state, t)
            assert_same(y[row, t], expected, where=f"token {t}")
        assert_same({key: value[row] for key, value in cache.states.items()}, {key: state[key] for key in cache.states})


@each_mixer
@pytest.mark.parametrize("value_width", [None, 2, 6, 12])
def test_outputs_and_states_follow_the_equations(name: str, value_width: int | None) -> None:
    assert_follows_the_equations(name, MIXERS[name](WIDTH, value_width=value_width))


@pytest.mark.parametrize("name", sorted(BOUNDED))
def test_a_lower_bound_keeps_gates_above_it(name: str) -> None:
    assert_follows_the_equations(name, MIXERS[name](WIDTH, lower_bound=0.3))


def test_the_last_head_of_mamba2_may_be_narrower() -> None:
    mixer = Mamba2(WIDTH, value_width=2 * 64 + 6)
    assert (mixer.n_head, mixer.head_value_width) == (3, 64)
    assert_follows_the_equations("mamba2", mixer)


# As published


@pytest.mark.parametrize(
    "name, times",
    [("linear", 5), ("retnet", 8), ("gla", 4), ("hgrn", 4), ("hgrn2", 4), ("gsa", 4), ("mamba", 6), ("mamba2", 6)],
)
def test_parameters_are_about_as_many_as_published(name: str, times: int) -> None:
    count = sum(p.numel() for p in MIXERS[name](1024).parameters())
    assert times * 1024**2 <= count <= 1.1 * times * 1024**2


@each_mixer
def test_parameters_grow_with_the_value_width(name: str) -> None:
    counts = [sum(p.numel() for p in MIXERS[name](16, value_width=size).parameters()) for size in range(2, 300, 2)]
    assert all(a < b for a, b in pairwise(counts))


@each_mixer
def test_bad_sizes_are_refused_with_the_remedy(name: str) -> None:
    with pytest.raises(ValueError, match=r"value_width \(0\) must be a whole number of at least 1"):
        MIXERS[name](WIDTH, value_width=0)
    if name not in ("hgrn", "mamba"):
        with pytest.raises(ValueError, match=r"value_width \(7\) must be divisible by n_head \(2\); try 6 or 8"):
            MIXERS[name](WIDTH, value_width=7)
    if name in BOUNDED:
        with pytest.raises(ValueError, match=r"lower_bound \(1.0\) must be at least 0 and below 1"):
            MIXERS[name](WIDTH, lower_bound=1.0)


def test_mamba_begins_as_published() -> None:
    torch.manual_seed(0)
    mamba, mamba2 = Mamba(64), Mamba2(64)
    assert_same(-mamba.A_log.exp(), -torch.arange(1.0, 17).expand(128, 16), 1e-6)
    assert mamba.rank == 4
    assert (mamba2.n_head, mamba2.head_value_width, mamba2.head_key_width) == (2, 64, 64)
    for bias in (mamba.delta.bias, mamba2.delta_bias):
        assert 1e-3 * 0.999 <= F.softplus(bias).min() <= F.softplus(bias).max() <= 0.1 * 1.001
    assert 1 <= mamba2.A_log.exp().min() <= mamba2.A_log.exp().max() <= 16
    assert (mamba.D == 1).all()
    assert (mamba2.D == 1).all()


# Gates that are fully open or shut

GATE = {"gla": "decay_out", "hgrn": "f", "hgrn2": "f", "gsa": "f", "mamba": "delta", "mamba2": "into"}


@pytest.mark.parametrize("name", GATE)
@pytest.mark.parametrize("level", [-1e4, 1e4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_extreme_gates_have_finite_gradients(name: str, level: float, dtype: torch.dtype) -> None:
    mixer = perturb(MIXERS[name](WIDTH)).to(dtype)
    x = randn(2, 70, WIDTH, dtype=dtype)
    x[..., 0] = level  # one input that every gate looks at with weights of either sign
    with torch.no_grad():
        weight = getattr(mixer, GATE[name]).weight
        weight[: len(weight) // 2, 0] = 1
        weight[len(weight) // 2 :, 0] = -1
    leaf = x.requires_grad_()
    y = mixer(leaf)
    y.square().sum().backward()
    assert y.isfinite().all()
    for key, grad in {"x": leaf.grad, **{n: p.grad for n, p in mixer.named_parameters()}}.items():
        assert grad is not None, key
        assert grad.isfinite().all(), key


@each_mixer
def test_autocast_stays_close(name: str) -> None:
    mixer = perturb(MIXERS[name](WIDTH)).float()
    x = randn(2, T, WIDTH, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = mixer(x)
    assert_same(y.float(), mixer(x), 0.05)


# Slot scores


@pytest.mark.parametrize("length", [1, 31, 33, 100])
def test_slot_scores_with_decays_of_any_strength(length: int) -> None:
    q, k = randn(2, length, H, 3, seed=1), randn(2, length, H, 3, seed=2)
    g, s = -(3 * randn(2, length, H, 4, seed=3)).exp().square(), randn(2, length, H, 4, seed=4)
    begins = (torch.arange(length) % 11 == 5)[None]
    state = randn(2, H, 3, 4, seed=5)
    leaves = [t.requires_grad_() for t in (q, k, s, g, state)]
    found, last = slot_scores(q, k, s, g, state, begins=begins)
    S, expected = state, []
    for t in range(length):
        S = (0 if begins[0, t] else S) * g[:, t, :, None].exp() + k[:, t, :, :, None] * s[:, t, :, None]
        expected.append(torch.einsum("bhkm,bhk->bhm", S, q[:, t]))
    assert_same(found, torch.stack(expected, 1))
    assert_same(last, S)
    weights, of_last = randn(*found.shape, seed=6), randn(*last.shape, seed=7)
    grads = torch.autograd.grad((found * weights).sum() + (last * of_last).sum(), leaves)
    wanted = torch.autograd.grad((torch.stack(expected, 1) * weights).sum() + (S * of_last).sum(), leaves)
    for a, b in zip(grads, wanted, strict=True):
        assert_same(a, b)


# Parity with flash-linear-attention


def reference(module: str, function: str) -> Callable[..., tuple[Tensor, Tensor]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that there is no GPU
        return getattr(import_module(f"fla.ops.{module}.naive"), function)


def assert_parity(ours: Callable[..., object], theirs: Callable[..., object], inputs: list[Tensor]) -> None:
    """Outputs, final states and gradients."""

    def run(function: Callable[..., object]) -> list[Tensor]:
        leaves = [t.float().requires_grad_() for t in inputs]
        o, state = function(*leaves)
        found = [o, *(state if isinstance(state, tuple) else (state,))]
        total = sum((t * randn(*t.shape, seed=50 + i, dtype=torch.float32)).sum() for i, t in enumerate(found))
        return [*found, *torch.autograd.grad(total, leaves)]

    for a, b in zip(run(ours), run(theirs), strict=True):
        assert_same(a, b, 1e-5)


@pytest.mark.parametrize("length", [1, 33, 77])
def test_hgrn_parity(length: int) -> None:
    naive = reference("hgrn", "naive_recurrent_hgrn")
    g, new = -randn(2, length, 6, seed=1).exp(), randn(2, length, 6, seed=2)
    assert_parity(
        lambda x, g, state: scan(g, x, state),
        lambda x, g, state: naive(x, g, initial_state=state, output_final_state=True),
        [new, g, randn(2, 6, seed=3)],
    )


@pytest.mark.parametrize("length", [1, 33, 77])
def test_gsa_parity(length: int) -> None:
    naive = reference("gsa", "naive_recurrent_gsa")
    shape = (2, length, H)
    q, k, v = randn(*shape, 3, seed=1), randn(*shape, 3, seed=2), randn(*shape, 5, seed=3)
    g = F.logsigmoid(randn(*shape, 4, seed=4)) / 8

    def ours(q: Tensor, k: Tensor, v: Tensor, g: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        s = -torch.expm1(g)
        scores, keys = slot_scores(q, k, s, g, keys)
        o, values = recurrence(Steps(scores.softmax(-1), s, v, g), values)
        return o, (keys, values)

    def theirs(q: Tensor, k: Tensor, v: Tensor, g: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return naive(q, k, v, 1 - g.exp(), g, scale=1, initial_state=(keys, values), output_final_state=True)

    assert_parity(ours, theirs, [q, k, v, g, randn(2, H, 3, 4, seed=5), randn(2, H, 4, 5, seed=6)])


@pytest.mark.parametrize("length", [1, 33, 77])
def test_mamba2_parity(length: int) -> None:
    """The core: q = C and k = B, shared by the heads, v = Δ x, g = Δ A, scale 1."""
    naive = reference("simple_gla", "naive_recurrent_simple_gla")
    C, B, x = randn(2, length, 4, seed=1), randn(2, length, 4, seed=2), randn(2, length, H, 5, seed=3)
    delta, state = 0.3 * randn(2, length, H, seed=4).exp(), randn(2, H, 4, 5, seed=5)
    A = -torch.tensor([1.0, 3.0])

    def over(core: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
        def function(C: Tensor, B: Tensor, x: Tensor, delta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            q, k = (t[:, :, None].expand(-1, -1, H, -1) for t in (C, B))
            return core(q, k, delta[..., None] * x, delta * A, state)

        return function

    assert_parity(
        over(lambda q, k, v, g, state: recurrence(Steps(q, k, v, g), state)),
        over(lambda q, k, v, g, state: naive(q, k, v, g, scale=1.0, initial_state=state, output_final_state=True)),
        [C, B, x, delta, state],
    )
