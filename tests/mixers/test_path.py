"""PaTH attention against its recurrence, one token after another, and against the public reference."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers import assert_same, gradients, perturb, randn, run_layer
from hypermlp.mixers.path import PathAttention
from hypermlp.ops import path
from hypermlp.ops.path import PathInputs, path_attention

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it looks for a GPU
    from fla.ops.path_attn.naive import naive_path_attn

WIDTH = 16


def build(dtype: torch.dtype = torch.float64, **changes: int) -> PathAttention:
    mixer = PathAttention(WIDTH, **changes).to(dtype)
    perturb(mixer)
    return mixer


def token_by_token(inputs: PathInputs) -> Tensor:
    """Every token turns all keys before it, adds its own, and looks at them."""
    q, k, v, w, beta = inputs
    held, o = k[:, :0], []
    for t in range(q.shape[1]):
        along = (held * w[:, t, None]).sum(-1, keepdim=True)
        held = torch.cat([held - beta[:, t, None, :, None] * along * w[:, t, None], k[:, t : t + 1]], 1)
        logits = torch.einsum("bhk,bshk->bsh", q[:, t], held) / q.shape[-1] ** 0.5
        o.append(torch.einsum("bsh,bshv->bhv", logits.softmax(1), v[:, : t + 1]))
    return torch.stack(o, 1)


def formula(mixer: PathAttention, x: Tensor) -> Tensor:
    H, T = mixer.n_head, x.shape[1]

    def heads(y: Tensor) -> Tensor:
        return y.unflatten(-1, (H, -1))

    padded = F.pad(x @ mixer.w_down.weight.T @ mixer.w_up.weight.T, (0, 0, 2, 0))
    directions = heads(F.silu(sum(padded[:, j : j + T] * mixer.conv.weight[:, j] for j in range(3))))
    w = directions / (directions.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    beta = 2 / (1 + torch.exp(-(x @ mixer.beta.weight.T + mixer.beta.bias)))
    q, k, v = (heads(x @ linear.weight.T) for linear in (mixer.q, mixer.k, mixer.v))
    return token_by_token(PathInputs(q, k, v, w, beta)).flatten(2) @ mixer.o.weight.T


def run_formula(mixer: PathAttention, x: Tensor, d_y: Tensor) -> dict[str, Tensor]:
    mixer.zero_grad()
    x = x.clone().requires_grad_()
    y = formula(mixer, x)
    y.backward(d_y)
    assert x.grad is not None
    return {"y": y.detach(), "dx": x.grad, **gradients(mixer)}


def make_inputs(T: int, dtype: torch.dtype = torch.float64, K: int = 5, V: int = 3) -> PathInputs:
    q, k, w = (randn(2, T, 2, K, seed=seed, dtype=dtype) for seed in range(3))
    v, beta = randn(2, T, 2, V, seed=3, dtype=dtype), 2 * torch.sigmoid(randn(2, T, 2, seed=4, dtype=dtype))
    return PathInputs._make(t.requires_grad_() for t in (q, k, v, F.normalize(w, dim=-1), beta))


def run(o: Tensor, inputs: PathInputs) -> dict[str, Tensor]:
    found = torch.autograd.grad(o, inputs, randn(*o.shape, seed=9, dtype=o.dtype))
    return {"o": o, **dict(zip(PathInputs._fields, found, strict=True))}


# Values and gradients


@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 130])
def test_equals_its_formula(T: int) -> None:
    mixer, x, d_y = build(), randn(2, T, WIDTH), randn(2, T, WIDTH, seed=1)
    assert_same(run_layer(mixer, x, d_y), run_formula(mixer, x, d_y))


@pytest.mark.parametrize("n_head, value_width", [(1, 1), (2, 2), (2, 6), (2, 40), (4, 12)])
def test_any_heads_and_values(n_head: int, value_width: int) -> None:
    mixer, x, d_y = build(n_head=n_head, value_width=value_width), randn(2, 9, WIDTH), randn(2, 9, WIDTH, seed=1)
    assert_same(run_layer(mixer, x, d_y), run_formula(mixer, x, d_y))


@pytest.mark.parametrize("chunks", range(1, 18))
def test_any_number_of_chunks(chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path, "CHUNK", 2)
    inputs = make_inputs(2 * chunks - 1)
    assert_same(run(path_attention(inputs), inputs), run(token_by_token(inputs), inputs))


@pytest.mark.parametrize("T", [1, 65, 200])
def test_agrees_with_the_public_reference(T: int) -> None:
    inputs = make_inputs(T, torch.float32, K=8, V=8)
    expected = naive_path_attn(*inputs, g=torch.zeros(2, T, 2), scale=8**-0.5)
    assert_same(run(path_attention(inputs), inputs), run(expected, inputs), 1e-5)


@pytest.mark.parametrize("bias", [-1000.0, -30.0, 30.0, 1000.0])
@pytest.mark.parametrize("scale", [0.0, 1e-12, 1.0])
def test_gradients_are_finite_at_the_ends(bias: float, scale: float) -> None:
    """No turn at all, mirrors, and directions that vanish."""
    mixer = build(torch.float32)
    with torch.no_grad():
        mixer.beta.bias.fill_(bias)
        mixer.w_up.weight.mul_(scale)
    found = run_layer(mixer, randn(1, 140, WIDTH, dtype=torch.float32), randn(1, 140, WIDTH, seed=1, dtype=torch.float32))
    assert all(t.isfinite().all() for t in found.values())


def test_single_precision_is_stable_over_many_mirrors() -> None:
    mixer = build()
    with torch.no_grad():
        mixer.beta.bias.fill_(30.0)
    x = randn(1, 700, WIDTH)
    assert_same(build_like(mixer)(x.float()), mixer(x), 1e-5)


def build_like(mixer: PathAttention) -> PathAttention:
    single = PathAttention(WIDTH)
    single.load_state_dict(mixer.state_dict())
    return single


def test_without_turns_it_is_plain_attention() -> None:
    inputs = make_inputs(130)
    q, k, v = (t.transpose(1, 2) for t in inputs[:3])
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    assert_same(path_attention(inputs._replace(beta=torch.zeros_like(inputs.beta))), expected)


# Memory


def saved_bytes(T: int) -> int:
    sizes: list[int] = []

    def pack(x: Tensor) -> Tensor:
        sizes.append(x.numel() * x.element_size())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        build(torch.float32)(randn(1, T, WIDTH, dtype=torch.float32).requires_grad_())
    return sum(sizes)


def test_training_memory_is_linear_but_for_one_level_a_doubling() -> None:
    assert saved_bytes(2048) < 2.2 * saved_bytes(1024)


# Decoding


@pytest.mark.parametrize("sizes", [[200], [130, 1, 69], [1, 64, 65, 70]], ids=str)
def test_prompts_of_many_chunks(sizes: list[int]) -> None:
    mixer, x = build(), randn(2, 200, WIDTH)
    cache = mixer.new_cache(2)
    found = torch.cat([mixer(part, cache=cache) for part in x.split(sizes, dim=1)], 1)
    assert_same(found, mixer(x))


def test_ragged_prompts_of_many_chunks() -> None:
    mixer, x, real = build(), randn(3, 150, WIDTH), randn(3, 150, seed=1) > -0.5
    real[1, 3:] = False
    cache = mixer.new_cache(3)
    prompt = mixer(x, attention_mask=real, cache=cache)
    more = mixer(x[:, :4], cache=cache)
    for row in range(3):
        expected = mixer(torch.cat([x[row, real[row]], x[row, :4]])[None])[0]
        assert_same(torch.cat([prompt[row, real[row]], more[row]]), expected)


def test_held_keys_do_not_gather_rounding() -> None:
    mixer, x = build(torch.bfloat16), randn(1, 64, WIDTH, dtype=torch.bfloat16)
    cache = mixer.new_cache(1)
    assert cache.slots["k"].dtype == torch.float32
    found = torch.cat([mixer(part, cache=cache) for part in x.split(1, dim=1)], 1)
    assert found.dtype == torch.bfloat16
    assert_same(found, mixer(x), 0.02)


# Parameters


def test_parameters_begin_small_and_grow_with_the_values() -> None:
    torch.manual_seed(0)
    mixer = PathAttention(256)
    for linear in (mixer.q, mixer.k, mixer.v, mixer.o, mixer.w_down, mixer.w_up):
        assert linear.weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert sum(p.numel() for p in mixer.parameters()) == 4 * 256**2 + 2 * 32 * 256 + 3 * 256 + 2 * 257
    counts = [sum(p.numel() for p in PathAttention(WIDTH, value_width=n).parameters()) for n in range(2, 40, 2)]
    assert counts == sorted(set(counts))


def test_refusals_name_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"width \(15\) must be divisible by n_head \(2\); try 14 or 16"):
        PathAttention(15)
    with pytest.raises(ValueError, match=r"value_width \(0\) must be a whole number of at least 1"):
        PathAttention(WIDTH, value_width=0)
