"""Softmax attention with every option: equal to the formula, and lawful."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from helpers import assert_same, perturb, randn, run_layer
from hypermlp.cache import Cache
from hypermlp.mixers import SoftmaxAttention

WIDTH, T = 16, 13
OPTIONS: dict[str, dict[str, object]] = {
    "default": {},
    "plain": {"use_rope": False},
    "c": {"use_rope": False, "use_kv_conv": True},
    "g": {"use_rope": False, "use_qk_gate": True, "use_vo_gate": True},
    "m1": {"use_qk_gate": True},
    "m2": {"use_vo_gate": True},
    "q": {"qk_rank": 4},
    "v": {"vo_rank": 6},
    "norm": {"use_qk_norm": True},
    "four heads": {"n_head": 4},
    "all": {"use_kv_conv": True, "use_qk_gate": True, "use_vo_gate": True, "use_qk_norm": True, "qk_rank": 8, "vo_rank": 10},
}
each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
LAWFUL = {name: OPTIONS[name] for name in ("plain", "c", "g", "q", "v", "all")}
each_lawful = pytest.mark.parametrize("options", LAWFUL.values(), ids=LAWFUL)


def make(dtype: torch.dtype = torch.float64, **options: object) -> SoftmaxAttention:
    layer = SoftmaxAttention(WIDTH, **options).to(dtype)
    perturb(layer)
    return layer


def convolved(x: Tensor, weight: Tensor) -> Tensor:
    """y[t] = Σ_j w[W−1−j] x[t−j]."""
    taps = weight.shape[1]
    rows = [sum(weight[:, taps - 1 - j] * x[:, t - j] for j in range(min(taps, t + 1))) for t in range(x.shape[1])]
    return torch.stack(rows, 1)


def rotated(x: Tensor) -> Tensor:
    """Pairs (even, odd) of each head (B T H K) as complex numbers, turned by position · 10000^(−2i/K)."""
    time, half = x.shape[1], x.shape[3] // 2
    frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(time)[:, None] * frequency
    turned = (
        torch.view_as_complex(x.unflatten(-1, (half, 2)).contiguous()) * torch.polar(torch.ones_like(angle), angle)[:, None]
    )
    return torch.view_as_real(turned).flatten(-2)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def naive(layer: SoftmaxAttention, x: Tensor) -> Tensor:
    """The formula, row by row and head by head."""
    p, H = dict(layer.named_parameters()), layer.n_head
    x_k = convolved(x, p["conv_k.weight"]) if "conv_k.weight" in p else x
    x_v = convolved(x, p["conv_v.weight"]) if "conv_v.weight" in p else x
    q, k, v = x @ p["q.weight"].mT, x_k @ p["k.weight"].mT, x_v @ p["v.weight"].mT
    if "norm_q.weight" in p:
        q, k = (rms(t.unflatten(-1, (H, -1)), p[f"norm_{name}.weight"]).flatten(2) for t, name in ((q, "q"), (k, "k")))
    if layer.use_rope:
        q, k = (rotated(t.unflatten(-1, (H, -1))).flatten(2) for t in (q, k))
    if "gate_qk.weight" in p:
        q = q * torch.sigmoid(x @ p["gate_qk.weight"].mT + p["gate_qk.bias"])
    heads = []
    for qh, kh, vh in zip(q.chunk(H, -1), k.chunk(H, -1), v.chunk(H, -1), strict=True):
        rows = []
        for t in range(x.shape[1]):
            weights = torch.softmax((qh[:, t : t + 1] @ kh[:, : t + 1].mT) / math.sqrt(kh.shape[-1]), -1)
            rows.append(weights @ vh[:, : t + 1])
        heads.append(torch.cat(rows, 1))
    o = torch.cat(heads, -1)
    if "gate_vo.weight" in p:
        o = o * torch.sigmoid(x @ p["gate_vo.weight"].mT + p["gate_vo.bias"])
    return o @ p["o.weight"].mT


class Naive(nn.Module):
    def __init__(self, layer: SoftmaxAttention) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return naive(self.layer, x)


@each_option
@pytest.mark.parametrize("time", [1, T])
def test_equals_the_formula(options: dict, time: int) -> None:
    layer, x, d_y = make(**options), randn(2, time, WIDTH), randn(2, time, WIDTH, seed=1)
    found = run_layer(layer, x, d_y)
    expected = {name.removeprefix("layer."): t for name, t in run_layer(Naive(layer), x, d_y).items()}
    assert_same(found, expected)


@each_option
def test_long_float32_inputs_take_the_joined_and_native_ways(options: dict) -> None:
    layer, x, d_y = make(**options), randn(2, 150, WIDTH), randn(2, 150, WIDTH, seed=1)
    exact = run_layer(layer, x, d_y)
    found = run_layer(layer.float(), x.float(), d_y.float())
    assert_same(found, {name: t.float() for name, t in exact.items()}, 1e-5)


@each_lawful
def test_future_never_changes_the_past(options: dict) -> None:
    layer, x = make(**options), randn(2, T, WIDTH)
    changed = x.clone()
    changed[:, 6:] = 5 * randn(2, T - 6, WIDTH, seed=1)
    assert_same(layer(changed)[:, :6], layer(x)[:, :6])
    assert (layer(changed)[:, 6:] != layer(x)[:, 6:]).any()


@each_lawful
def test_padding_changes_nothing(options: dict) -> None:
    layer, x, d_y = make(**options), randn(3, T, WIDTH), randn(3, T, WIDTH, seed=1)
    real = torch.tensor([[0] * 5 + [1] * 8, [1] * 7 + [0] * 6, [1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1, 0, 1]]).bool()
    found = run_layer(layer, x, d_y, attention_mask=real)
    for b, r in enumerate(real):
        alone = run_layer(layer, x[b : b + 1, r], d_y[b : b + 1, r])
        for key in ("y", "dx"):
            assert_same(found[key][b, r], alone[key][0])
            assert (found[key][b, ~r] == 0).all()


@each_lawful
@pytest.mark.parametrize("traced", [False, True], ids=["by document", "with a mask"])
def test_packed_documents_are_computed_alone(options: dict, traced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x, d_y, bounds = make(**options), randn(1, T, WIDTH), randn(1, T, WIDTH, seed=1), [0, 4, 5, T]
    parts = [run_layer(layer, x[:, a:b], d_y[:, a:b]) for a, b in pairwise(bounds)]
    monkeypatch.setattr("torch.compiler.is_compiling", lambda: traced)
    found = run_layer(layer, x, d_y, cu_seqlens=torch.tensor(bounds))
    for name, values in found.items():
        pieces = [part[name] for part in parts]
        assert_same(values, torch.cat(pieces, 1) if name in ("y", "dx") else sum(pieces), where=name)


def test_no_documents() -> None:
    assert make()(randn(1, 0, WIDTH), cu_seqlens=torch.tensor([0])).shape == (1, 0, WIDTH)


def test_packing_needs_no_quadratic_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = []
    original = torch.nn.functional.scaled_dot_product_attention

    def watch(*tensors: Tensor, **options: object) -> Tensor:
        masks.append(options["attn_mask"])
        return original(*tensors, **options)

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", watch)
    make()(randn(1, T, WIDTH), cu_seqlens=torch.tensor([0, 4, T]))
    assert masks == [None, None]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
def test_one_graph(packed: bool) -> None:
    layer, x = make(torch.float32, **OPTIONS["all"]), randn(1, T, WIDTH, dtype=torch.float32)
    inputs = {"cu_seqlens": torch.tensor([0, 4, T])} if packed else {}
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_same(compiled(x, **inputs), layer(x, **inputs), 1e-5)


def feed(layer: nn.Module, x: Tensor, sizes: list[int], cache: Cache) -> Tensor:
    return torch.cat([layer(part, cache=cache) for part in x.split(sizes, dim=1)], dim=1)


@each_lawful
@pytest.mark.parametrize("sizes", [[1] * 40, [40], [3, 1, 1, 0, 17, 18]], ids=lambda s: f"{len(s)}")
def test_any_split_equals_one_forward(options: dict, sizes: list[int]) -> None:
    layer, x = make(**options), randn(2, 40, WIDTH)
    assert_same(feed(layer, x, sizes, layer.new_cache(2)), layer(x))


@each_lawful
def test_ragged_chunks_equal_each_sequence_alone(options: dict) -> None:
    layer, x = make(**options), randn(3, 30, WIDTH)
    real = randn(3, 30, seed=2) > -0.3
    cache = layer.new_cache(3)
    parts = ((0, 9), (9, 10), (10, 27), (27, 30))
    y = torch.cat([layer(x[:, a:b], attention_mask=real[:, a:b], cache=cache) for a, b in parts], 1)
    for row in range(3):
        assert_same(y[row, real[row]], layer(x[row : row + 1, real[row]])[0])


@each_lawful
@pytest.mark.parametrize("length", [0, 1, 8, 39])
def test_crop_is_as_if_the_rest_had_never_come(options: dict, length: int) -> None:
    layer, x, more = make(**options), randn(2, 40, WIDTH), randn(2, 5, WIDTH, seed=1)
    cache, fresh = layer.new_cache(2, rewind=39), layer.new_cache(2, rewind=39)
    layer(x, cache=cache)
    cache.crop(length)
    layer(x[:, :length], cache=fresh)
    assert_same(layer(more, cache=cache), layer(more, cache=fresh))


def test_crop_refuses_what_the_convolutions_have_forgotten() -> None:
    layer = make(**OPTIONS["c"])
    cache = layer.new_cache(1)
    layer(randn(1, 40, WIDTH), cache=cache)
    with pytest.raises(ValueError, match=r"cannot crop by 33 tokens.*kept for 32"):
        cache.crop(7)


def test_narrow_queries_and_keys_make_a_small_cache() -> None:
    assert make(qk_rank=4).new_cache(1, max_len=8).nbytes == 8 * (4 + WIDTH) * 8


@pytest.mark.parametrize("quantised", [False, True])
def test_a_part_of_the_heads_decodes_with_a_cache_of_its_own_size(quantised: bool) -> None:
    """As transformers' tensor parallelism leaves a layer with quantised weights: rows of q, k and v, columns of o."""
    layer, x = make().float(), randn(1, T, WIDTH, dtype=torch.float32)
    for name in ("q", "k", "v", "o"):
        weight = layer.get_submodule(name).weight.detach()
        half = weight[:, : WIDTH // 2] if name == "o" else weight[: WIDTH // 2]
        layer.get_submodule(name).weight = nn.Parameter(half.as_subclass(Codes if quantised else Tensor), requires_grad=False)
    cache = layer.new_cache(1, max_len=T)
    assert cache.slots["k"].shape[2] == 1
    assert_same(torch.cat([layer(part, cache=cache) for part in x.split(1, 1)], 1), layer(x), 1e-5)


class Codes(Tensor):
    """Weights of another type, as torchao's are."""


def test_parameters() -> None:
    assert sum(p.numel() for p in make().parameters()) == 4 * WIDTH**2
    found = {name: tuple(p.shape) for name, p in make(**OPTIONS["all"]).named_parameters()}
    assert found == {
        "q.weight": (8, 16),
        "k.weight": (8, 16),
        "v.weight": (10, 16),
        "o.weight": (16, 10),
        "conv_k.weight": (16, 4),
        "conv_v.weight": (16, 4),
        "gate_qk.weight": (8, 16),
        "gate_qk.bias": (8,),
        "gate_vo.weight": (10, 16),
        "gate_vo.bias": (10,),
        "norm_q.weight": (4,),
        "norm_k.weight": (4,),
    }


@pytest.mark.parametrize(
    "options, message",
    [
        ({"qk_rank": 6}, r"qk_rank \(6\) must be divisible by 2 \* n_head \(2\); try 4 or 8"),
        ({"qk_rank": 5, "use_rope": False}, r"qk_rank \(5\) must be divisible by n_head \(2\); try 4 or 6"),
        ({"vo_rank": 7}, r"vo_rank \(7\) must be divisible by n_head \(2\); try 6 or 8"),
        ({"vo_rank": 0}, r"vo_rank \(0\) must be a whole number of at least 1"),
    ],
)
def test_impossible_ranks_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SoftmaxAttention(WIDTH, **options)
