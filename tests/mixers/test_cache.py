"""The cache is exact: any way of feeding a sequence gives what one full forward gives, for every mixer and variant."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from helpers import assert_same, make_layer, perturb, randn, run_layer
from hypermlp import HyperMLP
from hypermlp.cache import Cache
from hypermlp.mixers import DISTINCT, MIXERS, Mixer, SoftmaxAttention, build_mixer
from hypermlp.mixers.labels import TABLE1, Label

L, WIDTH = 12, 16
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
REGISTERS = "hyperglu+registers=3"
each_mixer = pytest.mark.parametrize("name", [*sorted(MIXERS), REGISTERS])
# Labels in the place layout have no cache: their parameters shift whenever the input grows.
WITH_CACHE = [
    *sorted(DISTINCT),
    REGISTERS,
    *(label for label in TABLE1 if Label.parse(label).lag or not re.search("[12]", label)),
]
ONE_WAY = sorted(name for name in MIXERS if build_mixer(name, WIDTH, L).new_cache(1).one_way)
each_mixer_that_goes_back = pytest.mark.parametrize("name", [*sorted(set(MIXERS) - set(ONE_WAY)), REGISTERS])
each_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])

VARIANTS: dict[str, dict[str, object]] = {
    "default": {},
    "relu": {"attn_kind": "relu"},
    "rope": {"use_rope": True},
    "no conv": {"use_kv_conv": False},
    "long conv": {"conv_kernel_size": 7},
    "conv of one tap": {"conv_kernel_size": 1},
    "plain": {"use_op1": False, "use_op2": False, "use_qk_gate": False, "use_vo_gate": False},
    "op1": {"use_op2": False},
    "op2, no diagonal": {"use_op1": False, "op2_use_diag": False},
    "no shortcut, no norm": {"op1_shortcut": False, "op2_shortcut": False, "attn_norm": "none"},
    "l2, shared heads, bias": {"attn_norm": "l2", "op1_per_head": False, "op2_per_head": False, "bias": True},
    "open gates": {"gate_act": "none"},
}
each_variant = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())


def hyper(dtype: torch.dtype = torch.float64, **changes: object) -> Mixer:
    return make_layer(dtype=dtype, block_size=L, **changes)


def registered(name: str, dtype: torch.dtype = torch.float64) -> Mixer:
    mixer = build_mixer(name, WIDTH, L).to(dtype)
    perturb(mixer)
    return mixer


def feed(mixer: nn.Module, x: Tensor, sizes: list[int], cache: Cache) -> Tensor:
    return torch.cat([mixer(part, cache=cache) for part in x.split(sizes, dim=1)], dim=1)


def splits(total: int) -> st.SearchStrategy[list[int]]:
    """Ways to cut `total` tokens into chunks, empty ones included."""
    cuts = st.lists(st.integers(0, total), max_size=8).map(sorted)
    return cuts.map(lambda c: [b - a for a, b in zip([0, *c], [*c, total], strict=True)])


# Splits


@pytest.mark.parametrize("name", WITH_CACHE)
@each_dtype
@given(sizes=splits(5 * L))
def test_any_split_equals_one_forward(name: str, dtype: torch.dtype, sizes: list[int]) -> None:
    mixer, x = registered(name, dtype), randn(2, 5 * L, WIDTH, dtype=dtype)
    assert_same(feed(mixer, x, sizes, mixer.new_cache(2)), mixer(x), TOLERANCE[dtype])


@each_variant
@each_dtype
@pytest.mark.parametrize(
    "sizes", [[1] * 5 * L, [5 * L], [L - 1, 1, 1, L, L + 1, 2 * L - 2], [3] * 20], ids=lambda s: f"{len(s)}"
)
def test_every_variant_splits_exactly(variant: dict[str, object], dtype: torch.dtype, sizes: list[int]) -> None:
    mixer, x = hyper(dtype, **variant), randn(2, 5 * L, WIDTH, dtype=dtype)
    assert_same(feed(mixer, x, sizes, mixer.new_cache(2)), mixer(x), TOLERANCE[dtype])


@pytest.mark.parametrize("chunk", [1, 4, 7])
def test_chunks_that_cross_the_strip_height(chunk: int) -> None:
    mixer, x = hyper(), randn(2, 40, WIDTH)
    cache = mixer.new_cache(2)
    found = torch.cat([mixer(part, cache=cache, chunk_T=chunk) for part in x.split([5, 13, 22], dim=1)], dim=1)
    assert_same(found, mixer(x))


def test_every_implementation_continues_the_same_cache() -> None:
    mixer, x = hyper(), randn(2, 30, WIDTH)
    cache = mixer.new_cache(2)
    parts = [mixer(x[:, :10], cache=cache, impl="dense"), mixer(x[:, 10:], cache=cache, impl="chunked")]
    assert_same(torch.cat(parts, 1), mixer(x))


# Padding and ragged batches


@each_mixer
@given(data=st.data())
def test_ragged_chunks_equal_each_sequence_alone(name: str, data: st.DataObject) -> None:
    mixer, cache = registered(name), registered(name).new_cache(3)
    x = randn(3, 40, WIDTH)
    masks, found = [], []
    for a, b in ((0, 9), (9, 10), (10, 27), (27, 40)):
        real = torch.tensor(data.draw(st.lists(st.booleans(), min_size=3 * (b - a), max_size=3 * (b - a)))).reshape(3, b - a)
        masks.append(real)
        found.append(mixer(x[:, a:b], attention_mask=real, cache=cache))
    y, real = torch.cat(found, 1), torch.cat(masks, 1)
    assert cache.lengths.tolist() == real.sum(1).tolist()
    for row in range(3):
        assert_same(y[row, real[row]], mixer(x[row : row + 1, real[row]])[0])
        assert (y[row, ~real[row]] == 0).all()


@each_mixer
def test_left_padded_prompt_then_decoding(name: str) -> None:
    mixer, x = registered(name), randn(2, 20, WIDTH)
    mask = torch.ones(2, 8)
    mask[0, :5] = 0
    cache = mixer.new_cache(2)
    prompt = mixer(x[:, :8], attention_mask=mask, cache=cache)
    steps = [mixer(x[:, t : t + 1], cache=cache) for t in range(8, 20)]
    y = torch.cat([prompt, *steps], 1)
    assert_same(y[0, 5:], mixer(x[:1, 5:])[0])
    assert_same(y[1], mixer(x[1:])[0])


# Handling a cache commutes with going on


@each_mixer
@pytest.mark.parametrize("seen", [0, 1, 7, L, 2 * L + 3])
def test_clone_select_reorder_stack_save_and_load_commute_with_going_on(name: str, seen: int, tmp_path: Path) -> None:
    mixer, x, more = registered(name), randn(3, seen, WIDTH), randn(3, L + 2, WIDTH, seed=1)
    cache = mixer.new_cache(3)
    mixer(x, cache=cache)
    expected = mixer(more, cache=cache.clone())
    order = [2, 0, 0, 1]

    assert_same(mixer(more[order], cache=cache.select(order)), expected[order])
    beams = cache.clone()
    beams.reorder(torch.tensor(order))
    assert_same(mixer(more[order], cache=beams), expected[order])

    joined = Cache.stack([cache.select([1]), cache.select([2, 0])])
    assert_same(mixer(more[[1, 2, 0]], cache=joined), expected[[1, 2, 0]])

    save_file(cache.state_dict(), tmp_path / "prompt.safetensors")
    elsewhere = mixer.new_cache(1)
    elsewhere.load_state_dict(load_file(tmp_path / "prompt.safetensors"))
    assert_same(mixer(more, cache=elsewhere), expected)
    assert cache.lengths.tolist() == [seen] * 3, "the original must not move"


@each_mixer
def test_caches_of_different_lengths_stack(name: str) -> None:
    mixer, x, more = registered(name), randn(2, 3 * L, WIDTH), randn(2, 9, WIDTH, seed=1)
    short, long = mixer.new_cache(1), mixer.new_cache(1)
    mixer(x[:1, :4], cache=short)
    mixer(x[1:], cache=long)
    expected = torch.cat([mixer(more[:1], cache=short.clone()), mixer(more[1:], cache=long.clone())])
    assert_same(mixer(more, cache=Cache.stack([short, long])), expected)


@each_mixer_that_goes_back
@given(data=st.data())
def test_crop_is_as_if_the_rest_had_never_come(name: str, data: st.DataObject) -> None:
    mixer, x, more = registered(name), randn(2, 3 * L, WIDTH), randn(2, 5, WIDTH, seed=1)
    seen = data.draw(st.integers(0, 3 * L))
    length = data.draw(st.integers(max(0, seen - 32), seen))
    cache, fresh = mixer.new_cache(2), mixer.new_cache(2)
    mixer(x[:, :seen], cache=cache)
    cache.crop(length)
    again = data.draw(st.integers(max(0, seen - 32), length))  # and once more, from there
    cache.crop(again)
    mixer(x[:, :again], cache=fresh)
    assert cache.lengths.tolist() == [again] * 2
    assert_same(mixer(more, cache=cache), mixer(more, cache=fresh))


def test_speculative_decoding_after_the_window_has_rolled() -> None:
    mixer, x = hyper(), randn(1, 8 * L, WIDTH)
    expected, cache, position = mixer(x), mixer.new_cache(1), 0
    while position < 8 * L:
        draft = x[:, position : position + 5].clone()
        draft[:, 3:] += 1  # two guesses were wrong
        mixer(draft, cache=cache)
        kept = min(3, 8 * L - position)
        cache.crop(position + kept)
        position += kept
        last = cache.clone()
        last.crop(position - 1)
        assert_same(mixer(x[:, position - 1 : position], cache=last), expected[:, position - 1 : position])


def test_crop_refuses_what_has_rolled_out_and_changes_nothing() -> None:
    mixer = hyper(use_kv_conv=False)
    cache = mixer.new_cache(1, rewind=2)
    mixer(randn(1, 4 * L, WIDTH), cache=cache)
    expected = mixer(randn(1, 2, WIDTH, seed=1), cache=cache.clone())
    with pytest.raises(ValueError, match="rolled out of the window of 12; clone the cache"):
        cache.crop(L)
    assert_same(mixer(randn(1, 2, WIDTH, seed=1), cache=cache), expected)


def test_a_short_window_can_be_cropped_anywhere() -> None:
    mixer, x, more = make_layer(block_size=128), randn(1, 128, WIDTH), randn(1, 5, WIDTH, seed=1)
    for length in (1, 2, 60, 127):
        cache, fresh = mixer.new_cache(1), mixer.new_cache(1)
        mixer(x, cache=cache)
        cache.crop(length)
        mixer(x[:, :length], cache=fresh)
        assert_same(mixer(more, cache=cache), mixer(more, cache=fresh))


def test_crop_refuses_what_the_convolutions_have_forgotten_and_names_the_cure() -> None:
    mixer = make_layer(block_size=100)
    cache = mixer.new_cache(1, rewind=4)
    mixer(randn(1, 50, WIDTH), cache=cache)
    cache.crop(46)
    with pytest.raises(ValueError, match=r"cannot crop by 1 tokens.*kept for 4; make the cache with new_cache\(…, rewind=1\)"):
        cache.crop(45)
    roomy = mixer.new_cache(1, rewind=40)
    mixer(randn(1, 50, WIDTH), cache=roomy)
    roomy.crop(10)
    assert roomy.lengths.tolist() == [10]


@pytest.mark.parametrize("name", ONE_WAY)
def test_what_cannot_go_back_refuses_to_and_changes_nothing(name: str) -> None:
    mixer, x, more = registered(name), randn(2, 9, WIDTH), randn(2, 4, WIDTH, seed=1)
    cache = mixer.new_cache(2)
    mixer(x, cache=cache)
    expected = mixer(more, cache=cache.clone())
    with pytest.raises(ValueError, match=r"cannot crop to 5 tokens: .* cannot be undone; clone the cache"):
        cache.crop(5)
    cache.crop(9)
    assert_same(mixer(more, cache=cache), expected)


@each_mixer
@pytest.mark.parametrize("length", [1, L, 40 * L])
def test_state_size_is_what_decoding_keeps(name: str, length: int) -> None:
    mixer = registered(name)
    cache = mixer.new_cache(3, max_len=length)
    assert mixer.state_size(3, length) == cache.nbytes
    mixer(randn(3, min(length, 2 * L), WIDTH), cache=cache)
    if length <= L:
        assert mixer.state_size(3, length) == cache.nbytes, "it must not grow while it is filled"


@each_mixer
def test_crop_to_nothing_is_always_possible(name: str) -> None:
    mixer, x = registered(name), randn(1, 5 * L, WIDTH)
    cache = mixer.new_cache(1)
    mixer(x, cache=cache)
    cache.crop(0)
    assert_same(mixer(x, cache=cache), mixer(x))


# Batches


@each_mixer
def test_a_row_does_not_depend_on_its_batch(name: str) -> None:
    mixer, x = registered(name, torch.float32), randn(4, 20, WIDTH, dtype=torch.float32)
    sizes = [9, 1, 1, 9]
    together = feed(mixer, x, sizes, mixer.new_cache(4))
    for row in range(4):
        assert_same(feed(mixer, x[row : row + 1], sizes, mixer.new_cache(1))[0], together[row], 1e-6)


# Bounds


@pytest.mark.parametrize("size", [1, 5, L + 3])
def test_bytes_never_exceed_the_bound_over_ten_windows(size: int) -> None:
    mixer = hyper()
    cache = mixer.new_cache(2)
    slot = sum(t[0, 0].numel() * t.element_size() for t in cache.slots.values())
    fixed = cache.nbytes - 2 * cache.room * slot
    bound = fixed + 2 * slot * (L + cache.rewind)
    for part in randn(2, 10 * L, WIDTH).split(size, dim=1):
        mixer(part, cache=cache)
        assert cache.nbytes <= bound
    assert cache.lengths.tolist() == [10 * L] * 2


def test_room_for_max_len_is_there_at_once_and_grows_if_it_must() -> None:
    mixer, x = make_layer(block_size=64), randn(1, 60, WIDTH)
    cache = mixer.new_cache(1, max_len=20)
    before = cache.nbytes
    found = feed(mixer, x, [20, 40], cache)
    assert cache.room == 60
    assert before < cache.nbytes
    assert_same(found, mixer(x))


# Errors and edges


@each_mixer
def test_first_tokens_have_their_gradients_and_later_ones_refuse_them(name: str) -> None:
    mixer, x, d_y = registered(name), randn(2, 7, WIDTH), randn(2, 7, WIDTH, seed=1)
    expected, cache = run_layer(mixer, x, d_y), mixer.new_cache(2)
    assert_same(run_layer(mixer, x, d_y, cache=cache), expected)
    assert not any(t.requires_grad for t in (cache.inputs, *cache.slots.values(), *cache.states.values()))
    longer = torch.cat([x, randn(2, 1, WIDTH, seed=2)], 1)
    later = mixer(longer[:, 7:], cache=cache)
    assert_same(later, mixer(longer)[:, 7:])
    with pytest.raises(ValueError, match="without a cache"):
        later.sum().backward()
    with torch.no_grad():
        assert not mixer(x, cache=mixer.new_cache(2)).requires_grad


def test_empty_batches_and_chunks() -> None:
    mixer = hyper()
    assert mixer(randn(0, 5, WIDTH), cache=mixer.new_cache(0)).shape == (0, 5, WIDTH)
    cache = mixer.new_cache(2)
    assert mixer(randn(2, 0, WIDTH), cache=cache).shape == (2, 0, WIDTH)
    assert cache.lengths.tolist() == [0, 0]


@pytest.mark.parametrize("changes", [{"aligner_kind": "identity"}, {"aligner_kind": "identity", "do_masking": False}])
def test_layouts_without_a_consistent_extension_have_no_cache(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="identity layout has no cache"):
        hyper(**changes).new_cache(1)


def test_a_cache_that_does_not_fit_is_refused_with_the_reason() -> None:
    mixer, x = hyper(), randn(2, 3, WIDTH)
    with pytest.raises(ValueError, match="the cache has 3 rows and x 2"):
        mixer(x, cache=mixer.new_cache(3))
    for other in (SoftmaxAttention(WIDTH, 2), make_layer(block_size=L + 1), hyper(use_kv_conv=False)):
        with pytest.raises(ValueError, match="make it with this layer's new_cache"):
            mixer(x, cache=other.new_cache(2))
    with pytest.raises(ValueError, match="cache or cu_seqlens, not both"):
        mixer(x[:1], cache=mixer.new_cache(1), cu_seqlens=torch.tensor([0, 3]))
    with pytest.raises(ValueError, match="different layers cannot be stacked"):
        Cache.stack([mixer.new_cache(1), SoftmaxAttention(WIDTH, 2).new_cache(1)])
    with pytest.raises(ValueError, match="at least one cache"):
        Cache.stack([])
    with pytest.raises(ValueError, match=r"rows \(\[0, 5\]\)"):
        mixer.new_cache(2).select([0, 5])
    with pytest.raises(ValueError, match="this cache needs"):
        mixer.new_cache(2).load_state_dict(SoftmaxAttention(WIDTH, 2).new_cache(2).state_dict())
    with pytest.raises(ValueError, match="batch_size"):
        mixer.new_cache(-1)


def test_half_precision_cache_serves_a_float_layer() -> None:
    mixer, x = hyper(torch.float32), randn(1, 20, WIDTH, dtype=torch.float32)
    cache = mixer.new_cache(1, dtype=torch.bfloat16)
    y = feed(mixer, x, [1] * 20, cache)
    assert y.dtype == torch.float32
    assert_same(y, mixer(x), 0.05)


def test_autocast_keeps_its_type_in_every_step() -> None:
    mixer, x = hyper(torch.float32), randn(2, 9, WIDTH, dtype=torch.float32)
    cache = mixer.new_cache(2)
    with torch.autocast("cpu", torch.bfloat16):
        parts = [mixer(part, cache=cache) for part in x.split([4, 1, 1, 3], dim=1)]
    assert {part.dtype for part in parts} == {torch.bfloat16}
    assert_same(torch.cat(parts, 1).float(), mixer(x), 0.05)


def test_hypermlp_caches_too() -> None:
    layer = HyperMLP(hyper().config).double()
    perturb(layer)
    x = randn(1, 30, WIDTH)
    assert_same(feed(layer, x, [11, 19], layer.new_cache(1)), layer(x))
