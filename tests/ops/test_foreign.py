"""Arguments reach the kernels of others as they take them: plain functions of their public signatures give our results."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from hypermlp.mixers import Mixer, build_mixer
from hypermlp.ops import foreign

# ---- plain functions of the signatures, from the equations ----


def loop(
    q: Tensor, k: Tensor, v: Tensor, scale: float, state: Tensor | None, g: Tensor, a: Tensor, b: Tensor
) -> tuple[Tensor, Tensor]:
    """S ← diag(e^g) S + b (aᵀ S) + k vᵀ, o = scale Sᵀ q, token by token; everything B T H ·."""
    S = q.new_zeros(q.shape[0], q.shape[2], k.shape[-1], v.shape[-1]) if state is None else state.to(q.dtype)
    o = []
    for t in range(q.shape[1]):
        removed = torch.einsum("bhk,bhkv->bhv", a[:, t], S)
        S = g[:, t].exp()[..., None] * S + b[:, t, :, :, None] * removed[:, :, None] + k[:, t, :, :, None] * v[:, t, :, None]
        o.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(o, 1), S


def chunk_simple_gla(q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False):
    g = torch.zeros_like(q) if g is None else g[..., None].expand_as(q)
    return loop(q, k, v, default(scale, q), initial_state, g, 0 * q, 0 * q)


def chunk_gla(q, k, v, g, scale=None, initial_state=None, output_final_state=False):
    return loop(q, k, v, default(scale, q), initial_state, g, 0 * q, 0 * q)


def chunk_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False):
    """The value stored under a key is corrected after the decay."""
    decay = g[..., None].expand_as(k)
    key = beta[..., None] * k
    return loop(q, key, v, default(scale, q), initial_state, decay, -decay.exp() * k, key)


def chunk_kda(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False):
    key = beta[..., None] * k
    return loop(q, key, v, default(scale, q), initial_state, g, -g.exp() * k, key)


def chunk_delta_rule(q, k, v, beta, scale=None, initial_state=None, output_final_state=False):
    return chunk_gated_delta_rule(q, k, v, torch.zeros_like(beta), beta, scale, initial_state)


def chunk_dplr_delta_rule(q, k, v, a, b, gk, scale=None, initial_state=None, output_final_state=False):
    return loop(q, k, v, default(scale, q), initial_state, gk, a, b)


def chunk_gsa(q, k, v, s, g=None, scale=None, initial_state=None, output_final_state=False):
    first, second = initial_state or (None, None)
    keys = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], s.shape[3]) if first is None else first.to(q.dtype)
    p = []
    for t in range(q.shape[1]):
        keys = keys * g[:, t, :, None].exp() + k[:, t, :, :, None] * s[:, t, :, None]
        p.append((default(scale, q) * torch.einsum("bhk,bhkm->bhm", q[:, t], keys)).softmax(-1))
    o, values = loop(torch.stack(p, 1), s, v, 1.0, second, g, 0 * s, 0 * s)
    return o, (keys, values)


def parallel_path_attn(q, k, v, w, beta, g=None, scale=None):
    """Every key is turned by each later token."""
    rows, turned = [], k[:, :0]
    for t in range(q.shape[1]):
        along = torch.einsum("bhk,bjhk->bjh", w[:, t], turned) * beta[:, t, None]
        turned = torch.cat([turned - along[..., None] * w[:, t, None], k[:, t : t + 1]], 1)
        scores = default(scale, q) * torch.einsum("bhk,bjhk->bhj", q[:, t], turned)
        rows.append(torch.einsum("bhj,bjhv->bhv", scores.softmax(-1), v[:, : t + 1]))
    return torch.stack(rows, 1), turned


def fused_recurrent_hgrn(x, g, initial_state=None, output_final_state=False):
    h, states = torch.zeros_like(x[:, 0]) if initial_state is None else initial_state.to(x.dtype), []
    for t in range(x.shape[1]):
        h = g[:, t].exp() * h + x[:, t]
        states.append(h)
    return torch.stack(states, 1), h


def selective_scan_fn(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False):
    """u and delta are B E T, A E N, B and C B N T; the last state is B E N."""
    h, y = u.new_zeros(*u.shape[:2], A.shape[1]), []
    for t in range(u.shape[2]):
        h = (delta[:, :, t, None] * A).exp() * h + (delta[:, :, t] * u[:, :, t])[..., None] * B[:, None, :, t]
        y.append((h * C[:, None, :, t]).sum(-1))
    return torch.stack(y, 2), h


def default(scale: float | None, q: Tensor) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


PLAIN: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        *(chunk_simple_gla, chunk_gla, chunk_delta_rule, chunk_gated_delta_rule, chunk_dplr_delta_rule, chunk_gsa),
        *(chunk_kda, parallel_path_attn, fused_recurrent_hgrn, selective_scan_fn),
    )
}
SERVED = {
    "linear": "chunk_simple_gla", "retnet": "chunk_simple_gla", "mamba2": "chunk_simple_gla", "gla": "chunk_gla",
    "hgrn2": "chunk_gla", "deltanet": "chunk_delta_rule", "gated_deltanet": "chunk_gated_delta_rule",
    "rwkv7": "chunk_dplr_delta_rule", "gsa": "chunk_gsa", "path": "parallel_path_attn", "hgrn": "fused_recurrent_hgrn",
    "mamba": "selective_scan_fn", "kda": "chunk_kda",
}  # fmt: skip


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """As on a GPU with everything installed, in float64; returns the calls."""
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def find(name: str) -> Callable[..., Any]:
        def record(*arguments: Any, **options: Any) -> Any:
            calls.append((name, arguments, options))
            exact = [t.double() if isinstance(t, Tensor) else t for t in arguments]
            return PLAIN[name](*exact, **{k: t.double() if isinstance(t, Tensor) else t for k, t in options.items()})

        return record

    monkeypatch.setattr(foreign, "find", find)
    monkeypatch.setattr(foreign, "on_gpu", lambda x: True)
    monkeypatch.setattr(foreign, "HALF", (torch.float64,))
    return calls


def make(name: str) -> Mixer:
    torch.manual_seed(0)
    layer = build_mixer(name, 64, 16).double()
    for p in layer.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return layer


def gradients(layer: Mixer, x: Tensor, **options: Any) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    y = layer(leaf, **options)
    layer.zero_grad()
    (y * torch.linspace(-1, 1, 64, dtype=x.dtype)).sum().backward()
    assert leaf.grad is not None
    return [y.detach(), leaf.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", SERVED)
def test_a_rival_served_by_a_kernel_computes_what_our_own_code_does(
    name: str, called: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = make(name), torch.randn(2, 9, 64, dtype=torch.float64)
    mask = torch.ones(2, 9)
    mask[1, :3] = 0
    for options in ({}, {"attention_mask": mask}):
        called.clear()
        found = gradients(layer, x, **options)
        assert [call[0] for call in called] == [SERVED[name]]
        monkeypatch.setenv(foreign.SWITCH, "own")
        want = gradients(layer, x, **options)
        monkeypatch.delenv(foreign.SWITCH)
        assert len(called) == 1  # the switch turns it off
        for a, b in zip(found, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)  # decays and states go in float32


@pytest.mark.parametrize("name", sorted(set(SERVED) - {"path"}))
def test_states_pass_in_and_out(name: str, called: list[Any]) -> None:
    layer, x = make(name), torch.randn(2, 12, 64, dtype=torch.float64)
    cache = layer.new_cache(2, max_len=12)
    with torch.no_grad():
        parts = torch.cat([layer(part, cache=cache) for part in x.split([5, 6, 1], 1)], 1)
    # Mamba's kernel takes no state, and single tokens are ours.
    assert [call[0] for call in called] == [SERVED[name]] * (0 if name == "mamba" else 2)
    torch.testing.assert_close(parts, layer(x), rtol=1e-4, atol=1e-5)


def test_our_own_code_serves_everything_else(called: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = make("gla"), torch.randn(1, 9, 64, dtype=torch.float64)
    layer(x, cu_seqlens=[0, 4, 9])
    torch.func.vmap(lambda x: layer(x[None])[0])(x)
    layer.float()(x.float())
    monkeypatch.setattr(foreign, "on_gpu", lambda x: x.is_cuda)
    layer.double()(x)
    assert called == []
    monkeypatch.setenv(foreign.SWITCH, "theirs")
    with pytest.raises(ValueError, match="HYPERMLP_KERNELS"):
        foreign.kernel("chunk_gla", x, None)


# ---- the package itself, where it is installed ----

installed = pytest.mark.skipif(find_spec("fla") is None, reason="flash-linear-attention is not installed")


def package(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that there is no GPU
        return import_module(name)


@installed
@pytest.mark.parametrize("name", sorted(set(SERVED) - {"mamba"}))
def test_the_calls_fit_the_installed_signatures(name: str, called: list[Any]) -> None:
    make(name)(torch.randn(2, 9, 64, dtype=torch.float64))
    ((function, arguments, options),) = called
    real = inspect.unwrap(getattr(package(foreign.WHERE[function]), function))
    bound = inspect.signature(real).bind(*arguments, **options)
    ours = inspect.signature(PLAIN[function]).bind(*arguments, **options)
    assert {k: v for k, v in bound.arguments.items() if k != "kwargs"}.keys() == ours.arguments.keys()


@installed
def test_the_plain_functions_are_those_of_the_package() -> None:
    torch.manual_seed(0)
    q, k, v, gk = (torch.randn(2, 7, 3, 4) for _ in range(4))
    gk, g, beta = -gk.abs(), -torch.rand(2, 7, 3), torch.rand(2, 7, 3)
    naive = {name: package(f"fla.ops.{name}.naive") for name in ("gla", "simple_gla", "gated_delta_rule", "gsa", "kda")}
    pairs = [
        (naive["gla"].naive_recurrent_gla(q, k, v, gk, output_final_state=True), chunk_gla(q, k, v, gk)),
        (naive["simple_gla"].naive_recurrent_simple_gla(q, k, v, g, output_final_state=True), chunk_simple_gla(q, k, v, g)),
        (
            naive["gated_delta_rule"].naive_recurrent_gated_delta_rule(q, k, v, beta, g, output_final_state=True),
            chunk_gated_delta_rule(q, k, v, g, beta),
        ),
        (naive["kda"].naive_recurrent_kda(q, k, v, gk, beta, output_final_state=True), chunk_kda(q, k, v, gk, beta)),
        (
            naive["gsa"].naive_recurrent_gsa(q, k, v, k, gk, scale=1.0, output_final_state=True)[:1],
            chunk_gsa(q, k, v, k, gk, scale=1.0)[:1],
        ),
    ]
    for theirs, ours in pairs:
        for a, b in zip(theirs, ours, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
