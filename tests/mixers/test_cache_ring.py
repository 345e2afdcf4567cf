"""A window of slots is a ring: every token costs the same, nothing moves, and whatever is done to a cache stays exact."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers import assert_same, error, make_layer, randn
from hypermlp import HyperGLU
from hypermlp.cache import Cache, CacheSpec
from hypermlp.mixers import Mixer, SoftmaxAttention
from hypermlp.ops import native

WIDTH = 16
WINDOWS = (1, 2, 3, 7, 8, 9)
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 0.02}
each_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda t: str(t).removeprefix("torch."))

# What decodes, and by which route and implementation.
LAYERS: dict[str, tuple[dict[str, object], str, str]] = {
    "step": ({"dtype": torch.float32}, "step", "native"),
    "step in bfloat16": ({"dtype": torch.bfloat16}, "step", "native"),
    "shared heads": ({"dtype": torch.float32, "op1_per_head": False}, "fused", "native"),
    "chunked": ({"dtype": torch.float64}, "fused", "chunked"),
    "modules": ({"dtype": torch.float32, "use_rope": True}, "modules", "native"),
}
each_layer = pytest.mark.parametrize("name", [*LAYERS, "softmax"])


def decoder(name: str, window: int) -> Mixer:
    if name == "softmax":
        return SoftmaxAttention(WIDTH, 2, use_kv_conv=True).eval()
    return make_layer(block_size=window, **LAYERS[name][0]).eval()


def tokens_for(mixer: Mixer, batch: int, count: int) -> Tensor:
    return randn(batch, count, WIDTH, dtype=next(mixer.parameters()).dtype)


# Every token costs the same


def changed_places(before: Tensor, after: Tensor) -> list[list[int]]:
    """Of each row."""
    return [(a != b).flatten(1).any(1).nonzero()[:, 0].tolist() for a, b in zip(before, after, strict=True)]


@each_layer
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("drafts", [1, 3])
def test_a_step_writes_its_own_slots_and_nothing_else(name: str, window: int, drafts: int) -> None:
    """Over several windows, in rows of different lengths; and no memory is taken anew."""
    mixer = decoder(name, window)
    x = tokens_for(mixer, 3, 12 * window + 120)
    cache = mixer.new_cache(3, max_len=10**4 if name == "softmax" else 10**9)
    with torch.no_grad():
        mixer(x[:, :5], cache=cache, attention_mask=torch.tensor([[1] * 5, [0, 0, 1, 1, 1], [0, 0, 0, 0, 1]]))
        if name != "softmax":
            assert mixer.explain(x[:, :1], cache=cache)[:2] == LAYERS[name][1:]
        stored = {**cache.slots, "inputs": cache.inputs}
        for part in x[:, 5:].split(drafts, dim=1):
            before, seen, tail = {name: t.clone() for name, t in stored.items()}, cache.seen, cache.tail
            mixer(part, cache=cache)
            assert {n: t.data_ptr() for n, t in {**cache.slots, "inputs": cache.inputs}.items()} == {
                n: t.data_ptr() for n, t in stored.items()
            }
            for kind, t in stored.items():
                begins = [tail] * 3 if kind == "inputs" else seen
                own = [sorted((begin + i) % t.shape[1] for i in range(part.shape[1])) for begin in begins]
                assert changed_places(before[kind], t) == own, kind
    assert cache.lengths.tolist() == [x.shape[1], x.shape[1] - 2, x.shape[1] - 4]


@each_layer
@pytest.mark.parametrize("drafts", [1, 3, 20])
def test_what_a_step_reads_is_read_where_it_lies(name: str, drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mixer, copies = decoder(name, 9), []
    copied = Cache._in_time_order
    monkeypatch.setattr(Cache, "_in_time_order", lambda self, *given: (copies.append(1), copied(self, *given))[1])
    cache, x = mixer.new_cache(2), tokens_for(mixer, 2, 200)
    with torch.no_grad():
        for part in x.split(drafts, dim=1):
            mixer(part, cache=cache)
    assert not copies


def bytes_copied(run: Callable[[], object]) -> int:
    """By torch's operators on float32, counted by the profiler."""
    with torch.profiler.profile(record_shapes=True, profile_memory=True) as profile:
        run()
    events = list(profile.events())
    copied = sum(4 * math.prod(event.input_shapes[0]) for event in events if event.name == "aten::copy_")
    return copied + sum(event.self_cpu_memory_usage for event in events if event.name == "aten::cat")


@pytest.mark.parametrize("name", ["step", "softmax"])
def test_a_step_copies_one_token(name: str) -> None:
    """Past several windows: the token's own, and the last inputs where they go around."""
    mixer, batch, window = decoder(name, 40), 2, 40
    cache, x = mixer.new_cache(batch, max_len=1000), tokens_for(mixer, batch, 5 * window)
    slot = 4 * batch * sum(t[0, 0].numel() for t in cache.slots.values())
    own = 4 * batch * WIDTH + (slot if name == "softmax" else 0)  # the kernel of a step writes slots itself
    history = 4 * batch * WIDTH * 3
    with torch.no_grad():
        mixer(x[:, : 3 * window], cache=cache)
        found = [bytes_copied(lambda part=part: mixer(part, cache=cache)) for part in x[:, 3 * window :].split(1, dim=1)]
    assert own <= min(found)
    assert max(found) <= own + 2 * history + slot < window * slot / 4


def test_room_for_a_stream_is_there_at_once() -> None:
    mixer = make_layer(block_size=50)
    assert mixer.new_cache(1, max_len=10**9).room == 50 + mixer.cache_spec().rewind
    assert mixer.new_cache(1, max_len=10**9, rewind=0).room == 50
    assert mixer.new_cache(1, max_len=30).room == 30
    assert SoftmaxAttention(WIDTH, 2).new_cache(1, max_len=300).room == 300


@pytest.mark.parametrize("window", [*WINDOWS, 64, 1000, 4096])
def test_a_ring_takes_less_than_a_window_that_moves(window: int) -> None:
    """It had room for window/8 slots more, so that it seldom moved."""
    spec = HyperGLU(n_embd=8, n_head=1, block_size=window).cache_spec()
    moving = window - 1 + spec.rewind + max(1, window // 8)
    assert Cache.new(spec, 1, max_len=10**9, dtype=torch.float32, device=torch.device("meta")).room <= moving


# It is exact, wherever in the ring the window lies


@pytest.mark.parametrize("size", [1, 2, 7])
@pytest.mark.parametrize("window", [1, 2, 3, 40])
@pytest.mark.parametrize("name", ["step", "step in bfloat16", "shared heads"])
def test_bits_do_not_depend_on_where_the_window_lies(name: str, window: int, size: int) -> None:
    """A stream that began earlier has its window elsewhere; the last tokens see the same slots."""
    mixer = decoder(name, window)
    room, reach = window + mixer.cache_spec().rewind, window + size
    x = tokens_for(mixer, 1, room + 4 + reach)
    found = []
    with torch.no_grad():
        for begin in range(0, room, max(1, room // 11)):
            cache = mixer.new_cache(1)
            mixer(x[:, begin:-reach], cache=cache)
            for part in x[:, -reach:-size].split(1, dim=1):  # all that is seen: products of another shape may round otherwise
                mixer(part, cache=cache)
            found.append(mixer(x[:, -size:], cache=cache))
    assert all(torch.equal(y, found[0]) for y in found)


class Rows:
    """What a cache must know, kept as whole sequences: each operation on it is done here too."""

    def __init__(self, layer: HyperGLU, batch: int, rewind: int) -> None:
        self.layer, self.dtype = layer, layer.q.weight.dtype
        self.cache = layer.new_cache(batch, rewind=rewind)
        self.rows: list[list[Tensor]] = [[] for _ in range(batch)]
        self.longest = [0] * batch  # tokens that a row has had at most, since its last crop to nothing

    def feed(self, x: Tensor, real: Tensor) -> None:
        y = self.layer(x, attention_mask=real, cache=self.cache)
        for b, row in enumerate(self.rows):
            own = x[b, real[b]]
            row.extend(own)
            if len(own):
                assert_same(y[b, real[b]], self.layer(torch.stack(row)[None])[0, -len(own) :], TOLERANCE[self.dtype])
            assert (y[b, ~real[b]] == 0).all()
            self.longest[b] = max(self.longest[b], len(row))

    def crop(self, back: list[int]) -> None:
        lengths = [max(0, len(row) - n) for row, n in zip(self.rows, back, strict=True)]
        self.cache.crop(lengths)
        self.rows = [row[:n] for row, n in zip(self.rows, lengths, strict=True)]
        self.longest = [most if n else 0 for most, n in zip(self.longest, lengths, strict=True)]

    def reorder(self, index: list[int]) -> None:
        self.cache.reorder(index)
        self.rows, self.longest = [list(self.rows[i]) for i in index], [self.longest[i] for i in index]

    def restack(self) -> None:
        self.cache = Cache.stack([self.cache.select([b]) for b in range(len(self.rows))])

    def reload(self) -> None:
        other = self.layer.new_cache(1, rewind=self.cache.rewind)
        other.load_state_dict(self.cache.state_dict())
        self.cache = other


@each_dtype
@pytest.mark.parametrize("batch", [1, 3])
@given(data=st.data())
def test_whatever_is_done_to_a_cache(dtype: torch.dtype, batch: int, data: st.DataObject) -> None:
    """Chunks of all sizes, ragged; crop, reorder, stack, save and load; windows of one slot and more."""
    window, rewind = data.draw(st.sampled_from([1, 2, 3, 8, 9])), data.draw(st.sampled_from([0, 1, 4]))
    kept = Rows(make_layer(dtype=dtype, block_size=window).eval(), batch, rewind)
    with torch.no_grad():
        for seed in range(data.draw(st.integers(2, 8))):
            size = data.draw(st.sampled_from([1, 1, 1, 2, window, window + 1, 3 * window + 2]))
            ragged = data.draw(st.booleans())
            real = torch.rand(batch, size, generator=torch.Generator().manual_seed(seed)) < (0.6 if ragged else 2)
            kept.feed(randn(batch, size, WIDTH, seed=seed, dtype=dtype), real)
            action = data.draw(st.sampled_from(["go on", "crop", "reorder", "stack", "reload", "empty"]))
            if action == "crop":
                most = [rewind - (longest - len(row)) for row, longest in zip(kept.rows, kept.longest, strict=True)]
                kept.crop([data.draw(st.integers(0, max(0, n))) for n in most])
            elif action == "reorder":
                kept.reorder(data.draw(st.lists(st.integers(0, batch - 1), min_size=batch, max_size=batch)))
            elif action == "empty":
                kept.crop([data.draw(st.sampled_from([0, 10**6])) for _ in range(batch)])
            elif action != "go on":
                (kept.restack if action == "stack" else kept.reload)()


@each_dtype
@pytest.mark.parametrize("window", [*WINDOWS, 15, 16, 17])
@pytest.mark.parametrize("sizes", [[1], [2, 1], [5], [40, 1, 1], [3, 60]], ids=str)
def test_streams_longer_than_the_ring(dtype: torch.dtype, window: int, sizes: list[int]) -> None:
    layer = make_layer(dtype=dtype, block_size=window)
    x, cache = randn(1, 260, WIDTH, dtype=dtype), layer.new_cache(1)
    found, at = [], 0
    with torch.no_grad():
        expected = layer(x)
        while at < x.shape[1]:
            size = sizes[len(found) % len(sizes)]
            found.append(layer(x[:, at : at + size], cache=cache))
            at += size
        exact = copy.deepcopy(layer).double()(x.double())
    y = torch.cat(found, 1)
    if dtype is torch.bfloat16 and window == 1:  # jumps where the only slot's gate changes its sign; a step rounds less
        assert error(y, exact) <= max(1.1 * error(expected, exact), TOLERANCE[dtype])
    else:
        assert_same(y, expected, TOLERANCE[dtype])


def test_crop_goes_back_all_of_rewind_wherever_the_window_lies() -> None:
    layer, x = make_layer(block_size=6), randn(1, 120, WIDTH)
    expected, cache = layer(x), layer.new_cache(1, rewind=9)
    for at in range(x.shape[1]):
        layer(x[:, at : at + 1], cache=cache)
        back = min(9, at)
        earlier = cache.clone()
        earlier.crop(at + 1 - back)
        assert_same(layer(x[:, at + 1 - back : at + 1], cache=earlier), expected[:, at + 1 - back : at + 1])
    with pytest.raises(ValueError, match="cannot crop"):
        cache.crop(x.shape[1] - 10)


def test_a_failed_step_in_a_full_ring_takes_nothing_that_crop_may_go_back_to(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer(dtype=torch.float32, block_size=6, use_kv_conv=False).eval()
    x, cache, real = randn(1, 80, WIDTH, dtype=torch.float32), layer.new_cache(1, rewind=5), native.decode.LayerCall.run

    def fail_late(*given: object) -> Tensor:
        real(*given)  # the slot is written
        raise MemoryError

    with torch.no_grad():
        expected = layer(x)
        for part in x[:, :50].split(1, dim=1):
            layer(part, cache=cache)
        with monkeypatch.context() as m:
            m.setattr(native.decode.LayerCall, "run", fail_late)
            with pytest.raises(MemoryError):
                layer(x[:, 60:61], cache=cache)
        assert cache.lengths.tolist() == [50]
        with pytest.raises(ValueError, match="rolled out of the window"):
            cache.crop(44)  # the oldest slot was overwritten
        cache.crop(45)
        assert_same(torch.cat([layer(part, cache=cache) for part in x[:, 45:].split(1, 1)], 1), expected[:, 45:], 1e-5)


# Handling


def test_rows_are_cropped_each_to_its_own_length() -> None:
    layer, x, more = make_layer(block_size=8), randn(3, 30, WIDTH), randn(3, 4, WIDTH, seed=1)
    cache = layer.new_cache(3)
    layer(x, cache=cache)
    cache.crop([30, 12, 0])
    assert cache.lengths.tolist() == [30, 12, 0]
    found = layer(more, cache=cache)
    for row, length in enumerate((30, 12, 0)):
        assert_same(found[row], layer(torch.cat([x[row, :length], more[row]])[None])[0, length:])
    for wrong in ([1, 2], [1, 2, -1], -1):
        with pytest.raises(ValueError, match="at least 0, one for all 3 rows or one for each"):
            cache.crop(wrong)


def test_an_emptied_cache_goes_back_as_a_new_one_does() -> None:
    layer, x = make_layer(block_size=8), randn(1, 60, WIDTH)
    cache = layer.new_cache(1, rewind=5)
    layer(x, cache=cache)
    cache.crop(0)
    layer(x[:, :5], cache=cache)
    cache.crop(1)
    assert_same(layer(x[:, 1:], cache=cache), layer(x)[:, 1:])


def test_a_cache_made_in_inference_mode_is_cropped_outside_it() -> None:
    for mixer in (make_layer(block_size=8), SoftmaxAttention(WIDTH, 2, use_kv_conv=True).double()):
        x = randn(1, 30, WIDTH)
        with torch.inference_mode():
            cache = mixer.new_cache(1)
            mixer(x, cache=cache)
        cache.crop(2)
        cache.crop(0)
        assert_same(mixer(x, cache=cache), mixer(x).detach())


@pytest.mark.parametrize("rewinds", [(0, 20), (20, 0)])
def test_a_state_goes_on_in_a_cache_of_another_size(rewinds: tuple[int, int]) -> None:
    layer, x = make_layer(block_size=8, use_kv_conv=False), randn(2, 90, WIDTH)
    cache, other = (layer.new_cache(n, rewind=rewind) for n, rewind in zip((2, 1), rewinds, strict=True))
    found = [layer(part, cache=cache) for part in x[:, :50].split(7, dim=1)]
    other.load_state_dict(cache.state_dict())
    found += [layer(part, cache=other) for part in x[:, 50:].split(3, dim=1)]
    assert_same(torch.cat(found, 1), layer(x))


class Windowed(SoftmaxAttention):
    """A user's own mixer, which knows nothing of rings: softmax attention over the last slots, by its cache alone."""

    def cache_spec(self) -> CacheSpec:
        return replace(super().cache_spec(), window=5)


def test_a_mixer_that_knows_nothing_of_rings_gets_slots_in_time_order() -> None:
    mixer, x = Windowed(WIDTH, 2, use_rope=False).double(), randn(2, 60, WIDTH)
    cache = mixer.new_cache(2, rewind=3)
    for at in range(x.shape[1]):
        y = mixer(x[:, at : at + 1], cache=cache)
        assert_same(y[:, 0], mixer(x[:, max(0, at - 4) : at + 1])[:, -1])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
