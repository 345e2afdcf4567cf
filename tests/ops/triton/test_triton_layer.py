"""The layer on the Triton kernels: decoding, convolutions and gates, torch.compile, autocast, opcheck, scratch, the choice."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from helpers import assert_same, gates, make_layer, make_problem, randn, run_layer
from hypermlp import ops
from hypermlp.ops import pointwise
from hypermlp.ops.registered import Inputs, flatten
from hypermlp.ops.triton import blocks, device, gradients, launch, operator, stepping, work
from interpreter import patched_once, rms, run

SPANS = [[0, 0, 5, 0, 5], [0, 5, 6, 5, 6], [0, 6, 38, 6, 38]]  # [batch entry, row begin, row end, slot begin, slot end]

pytestmark = pytest.mark.usefixtures("poisoned", "quick")


@pytest.fixture
def quick() -> Iterator[None]:
    with patched_once():
        yield


@pytest.mark.parametrize("options", [{}, {"attn_kind": "relu", "use_op1": False}, {"use_op2": False, "attn_norm": "none"}])
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=["float32", "bfloat16"])
def test_decoding_equals_the_full_forward(options: dict, dtype: torch.dtype, bound: float) -> None:
    """Chunked prefill, then one token after another beyond the window; rows of different length."""
    layer = make_layer(dtype=dtype, n_head=1, block_size=20, **options)
    x = randn(2, 30, 16, dtype=dtype)
    full = make_layer(n_head=1, block_size=20, **options)(x.double(), impl="dense")
    cache = layer.new_cache(2)
    first = layer(x[:, :9], cache=cache, impl="triton")
    mask = torch.ones(2, 17)
    mask[1, :5] = 0  # the second row gets fewer tokens, so spans differ
    padded = torch.cat([x[:, 9:26][:1], torch.cat([x[1:, :5], x[1:, 9:21]], 1)])
    second = layer(padded, cache=cache, attention_mask=mask, impl="triton")
    steps = [layer(torch.stack([x[0, 26 + n], x[1, 21 + n]])[:, None], cache=cache, impl="triton") for n in range(3)]
    found = torch.cat([first, second, *steps], 1)
    assert rms(found[0], full[0, :29]) < bound
    assert rms(torch.cat([found[1, :9], found[1, 14:]]), full[1, :24]) < bound


def test_decode_kernels_in_many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepping, "MOST_PARTS", 2)  # so that a part is several tiles
    spans = torch.tensor([[0, 0, 1, 3, 53], [1, 2, 3, 0, 70]])
    problem = make_problem(3, 70, L=60, spans=spans)
    found, expected = problem.to(torch.float32).mix("triton"), problem.mix("dense")
    assert rms(found, expected) < 1e-6
    assert (found[0, 1:] == 0).all()


@pytest.mark.parametrize("T, begin, end", [(1, 60, 115), (1, 69, 139), (2, 60, 80), (9, 50, 100)])
def test_slots_that_go_around(T: int, begin: int, end: int) -> None:
    """Single tokens read the ring where it lies, several a copy."""
    spans = torch.tensor([[0, 0, T, begin, end], [1, 0, T, 3, 70]])
    problem = make_problem(T, 70, L=60, spans=spans)
    with torch.no_grad():
        assert rms(problem.to(torch.float32).mix("triton"), problem.mix("dense")) < 1e-6


def test_the_gradients_of_a_ring_are_refused() -> None:
    problem = make_problem(5, 20, L=9, B=1, spans=torch.tensor([[0, 0, 5, 12, 27]])).to(torch.float32)
    with pytest.raises(ValueError, match="spans go around 20 slots"):
        run(problem, "triton", randn(1, 5, 2, 4, dtype=torch.float32))


@pytest.mark.parametrize("packed", [False, True])
def test_a_training_step(packed: bool) -> None:
    """Convolutions, gates and the operator, all by Triton kernels."""
    options: dict = {"cu_seqlens": torch.tensor([0, 7, 8, 19])} if packed else {}
    layer, x = make_layer(dtype=torch.float32, n_head=1), randn(1, 19, 16, dtype=torch.float32)
    found = run_layer(layer, x, torch.ones_like(x), impl="triton", **options)
    exact = run_layer(make_layer(n_head=1), x.double(), torch.ones_like(x).double(), impl="dense", **options)
    assert_same(found, exact, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_convolutions_and_gates(dtype: torch.dtype) -> None:
    x, wk, wv, g = (randn(*s, seed=n, dtype=dtype) for n, s in enumerate(((2, 37, 70), (70, 4), (70, 4), (2, 37, 70))))
    position = torch.arange(37)[None] % 9
    history = randn(2, 3, 70, seed=9, dtype=dtype)
    bound = 1e-6 if dtype == torch.float32 else 6e-3
    calls = {
        "convs": lambda impl, x, wk, wv, g: pointwise.convs(x, wk, wv, impl=impl),
        "packed": lambda impl, x, wk, wv, g: pointwise.convs(x, wk, wv, position, impl=impl),
        "gate": lambda impl, x, wk, wv, g: (pointwise.gate(x, g, impl=impl),),
        "gates": lambda impl, x, wk, wv, g: gates(x, [20, 20, 17, 13], impl=impl),
    }
    for name, call in calls.items():
        results = []
        for impl, kind in (("triton", dtype), ("dense", torch.float64)):
            leaves = [t.detach().clone().to(kind).requires_grad_() for t in (x, wk, wv, g)]
            made = call(impl, *leaves)
            d_made = [randn(*y.shape, seed=50 + n, dtype=dtype).to(kind) for n, y in enumerate(made)]
            grads = torch.autograd.grad(made, leaves, d_made, allow_unused=True)
            results.append([*made, *(g for g in grads if g is not None)])
        assert max(rms(a, b) for a, b in zip(*results, strict=True)) < bound, name
    found = pointwise.convs(x, wk, wv, None, history, impl="triton")
    for a, b in zip(
        found, pointwise.convs(x.double(), wk.double(), wv.double(), None, history.double(), impl="dense"), strict=True
    ):
        assert rms(a, b) < bound


def operator_arguments(**options: object) -> tuple[object, ...]:
    p = make_problem(**options).to(torch.float32)
    tensors = flatten(p).differentiable
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in tensors]
    s = p.spec
    return (*leaves, p.spans, s.kind, s.norm, s.aligner, s.causal, s.block_size, s.eps, None)


@pytest.mark.parametrize("options", [{"T": 5, "L": 4}, {"T": 3, "L": 8, "kind": "relu", "op1": False}])
def test_opcheck(options: dict) -> None:
    assert operator.mix is not None  # registers hypermlp::triton
    torch.library.opcheck(torch.ops.hypermlp.triton.default, operator_arguments(B=1, H=1, **options))


def test_opcheck_convolutions() -> None:
    x, wk, wv = (randn(*s, dtype=torch.float32).requires_grad_() for s in ((2, 9, 5), (5, 4), (5, 4)))
    torch.library.opcheck(torch.ops.hypermlp.convs.default, (x, wk, wv, None, None, "triton"))


def test_a_compiled_step_runs_the_decode_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody differentiates, a traced call is an operator of its own, which decodes single tokens."""
    steps: list[int] = []
    monkeypatch.setattr(operator, "decode", lambda *given: steps.append(1) or stepping.decode(*given))
    problem = make_problem(1, 9, L=8, B=2, H=1).to(torch.float32)
    compiled = torch.compile(lambda q: problem.replace(q=q).mix("triton"), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert rms(compiled(problem.q), problem.to(torch.float64).mix("dense")) < 1e-6
    assert steps
    flat = operator_arguments(T=1, S=5, L=4, B=1, H=1)
    detached = [t.detach() if isinstance(t, torch.Tensor) else t for t in flat]
    torch.library.opcheck(torch.ops.hypermlp.triton_infer.default, tuple(detached))


def test_compile_and_autocast() -> None:
    layer, x = make_layer(dtype=torch.float32, n_head=1, impl_default="triton"), randn(1, 9, 16, dtype=torch.float32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert rms(compiled(x).detach(), layer(x).detach()) < 1e-6
    with torch.autocast("cpu", torch.bfloat16):
        assert rms(layer(x).detach(), layer(x.double().float(), impl="dense").detach()) < 2e-2


class Sized(device.Device):
    """Triton's interpreter with the sizes of a larger device."""

    def __init__(self, processors: int, cache_bytes: int) -> None:
        self.sizes = device.Limits(0, processors, cache_bytes)

    def limits(self, device: str) -> object:
        return self.sizes


@pytest.fixture
def small_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratches may be as small as a device's cache asks for, and a split one tile."""
    for name in ("LEAST_SCRATCH", "LEAST_TILES", "FAIR_SHARES"):
        monkeypatch.setattr(work, name, 1)


@pytest.mark.usefixtures("small_scratch")
def test_the_scratch_is_bounded_and_its_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks the gradients of slots are added up in float32; the scratch is never more than was asked for, or one block."""
    problem = make_problem(40, L=40, B=1, H=1).to(torch.float32)
    d_o = randn(1, 40, 1, 4, seed=99, dtype=torch.float32)
    whole = run(problem, "triton", d_o)
    sizes = []
    original = gradients.Scratch.__init__

    def counted(self: object, call: object, cells: int) -> None:
        original(self, call, cells)
        sizes.append(sum(p.numel() for p in self.plane.values()) * 4)

    monkeypatch.setattr(gradients.Scratch, "__init__", counted)
    limit = 7 * 4 * (16 * (32 + 16) + 16 * (16 + 16) + 2 * blocks.MARGIN)  # two of three row blocks
    with device.replaced(Sized(1, 2 * limit)):
        parts = run(problem, "triton", d_o)
    assert sizes[-1] <= limit
    for name, value in parts.items():
        assert rms(value, whole[name]) < 5e-7, name


@pytest.mark.usefixtures("small_scratch")
@pytest.mark.parametrize("options", [{}, {"op2": False}, {"op1": False, "norm": "none"}, {"kind": "relu", "spans": SPANS}])
@pytest.mark.parametrize("processors, cache", [(100, 1 << 20), (8, 1 << 12)], ids=["split", "split, few heads at once"])
def test_splits_and_sections_change_nothing(options: dict, processors: int, cache: int) -> None:
    """Slots of a row block split among programs, heads computed one after another: the same numbers."""
    spans = {"spans": torch.tensor(options["spans"])} if "spans" in options else {}
    problem = make_problem(40, L=33, B=1, H=3, **{**options, **spans}).to(torch.float32)
    d_o = randn(1, 40, 3, 4, seed=99, dtype=torch.float32)
    whole = run(problem, "triton", d_o)
    splits = []
    with device.replaced(Sized(processors, cache)), pytest.MonkeyPatch.context() as patch:
        for module in (launch, gradients):
            cut = module.split
            patch.setattr(module, "split", lambda *a, cut=cut, **k: splits.append(cut(*a, **k)) or splits[-1])
        parts = run(problem, "triton", d_o)
    assert max(number for _, number in splits) > 1
    for name, value in parts.items():
        assert rms(value, whole[name]) < 2e-6, name


def test_how_work_is_cut() -> None:
    """Programs enough for every processor wherever there are tiles enough; else a scratch of half the cache."""
    limits = device.Limits(89, 142, 96 << 20)

    def cut(batch: int, T: int, heads: int) -> tuple[work.Room, list[blocks.Chunk]]:
        spans = np.array([[b, 0, T, 0, T] for b in range(batch)])
        plan = blocks.Plan(spans.tobytes(), T, 64, 32, "cpu")
        held = work.room(limits, plan, heads, 14)
        return held, blocks.chunk_rows(plan, held.cells, 64, 64)[0]

    for batch, T, heads in ((8, 1024, 2), (1, 4096, 2), (1, 16384, 2), (1, 16384, 16)):
        held, chunks = cut(batch, T, heads)
        assert held.heads * held.cells * 14 <= 64 << 20
        for part in chunks[: len(chunks) // 2]:
            per, splits = work.split(limits, part, held.heads)
            assert part.blocks * held.heads * splits >= work.fill(limits) * 0.8, (batch, T, heads)
            assert per * splits >= part.most_tiles


@pytest.mark.parametrize("T", [1024, 8192])
def test_the_scratch_does_not_grow_with_the_square(T: int) -> None:
    spans = np.array([[0, 0, T, 0, T], [1, 0, T, 0, T]])
    cells = 1 << 20
    chunks, shared = blocks.chunk_rows(blocks.Plan(spans.tobytes(), T, 64, 32, "cpu"), cells, 64, 64)
    assert max(c.cells for c in chunks) <= cells + 2 * blocks.MARGIN
    assert sum(c.blocks for c in chunks) == 2 * T // 64
    assert shared == (T == 8192)


def test_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ops.choose("auto", "cpu").impl != "triton"
    for asked, obstacle in ((("float64",), "for float64"), (("bfloat16", "identity"), "for the identity layout")):
        with pytest.raises(ValueError, match=f'impl="triton" cannot run here: {obstacle}'):
            ops.choose("triton", "cpu", *asked)
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="on cpu: the Triton kernels are for CUDA"):
        ops.choose("triton", "cpu", "bfloat16")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 9))
    assert ops.choose("auto", "cuda", "bfloat16") == ("triton", f"CUDA sm_89, bfloat16, triton {device.installed()}")
    assert "TF32" in ops.choose("auto", "cuda", "float32").reason
    monkeypatch.setattr(device, "tf32_allowed", lambda: True)
    assert ops.choose("auto", "cuda", "float32").impl == "triton"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    assert "8.0" in ops.choose("auto", "cuda", "float16").reason
    monkeypatch.setattr(device, "installed", lambda: None)
    assert "hypermlp[gpu]" in ops.choose("auto", "cuda", "bfloat16").reason


def test_flat_inputs_have_the_order_of_the_schema() -> None:
    assert Inputs._fields[:3] == ("q", "k", "v")
