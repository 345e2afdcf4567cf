"""torch.compile and torch.func see the same layer as eager execution."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers import assert_same, make_layer, make_problem, over, randn, run_layer
from hypermlp.mixers import DISTINCT, build_mixer

# The tracer instantiates autograd functions.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

T = 9
OPTIONS = {
    "plain": {},
    "padded": {"attention_mask": torch.tensor([[0] * 4 + [1] * 5, [1] * 9])},
    "packed": {"cu_seqlens": torch.tensor([0, 3, 9])},
}
each_impl = over([("dense", None), ("chunked", 4), ("native", None), ("auto", None)])


def compare_compiled(backend: str, options: dict, impl: str, chunk: int | None) -> None:
    layer = make_layer(dtype=torch.float32)
    batch = 1 if "cu_seqlens" in options else 2
    x, d_y = (randn(batch, T, 16, seed=s, dtype=torch.float32) for s in (1, 2))
    expected = run_layer(layer, x, d_y, impl=impl, chunk_T=chunk, **options)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    y = compiled(leaf, impl=impl, chunk_T=chunk, **options)
    y.backward(d_y)
    found = {"y": y.detach(), "dx": leaf.grad, **{name: p.grad for name, p in layer.named_parameters()}}
    assert_same(found, expected, 1e-5)


@pytest.mark.usefixtures("fresh_compiler")
def test_generated_code() -> None:
    compare_compiled("inductor", {}, "chunked", 4)


@pytest.mark.usefixtures("fresh_compiler")
@each_impl
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_one_graph(options: dict, impl: str, chunk: int | None) -> None:
    compare_compiled("aot_eager", options, impl, chunk)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", [*DISTINCT, "rwkv7_neg"])
def test_every_mixer_trains_compiled(name: str) -> None:
    mixer = build_mixer(name, 16, 4)  # short: the loops within a chunk are unrolled into the graph
    x, d_y = (randn(2, 4, 16, seed=s, dtype=torch.float32) for s in (1, 2))
    expected = run_layer(mixer, x, d_y)
    mixer.zero_grad()
    found = run_layer(torch.compile(mixer, backend="aot_eager"), x, d_y)
    assert_same({key.removeprefix("_orig_mod."): value for key, value in found.items()}, expected, 1e-5)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", ["hyperglu", "softmax"])
def test_one_graph_serves_all_lengths(name: str) -> None:
    mixer = build_mixer(name, 16, 24)
    compiled = torch.compile(mixer, backend="eager", fullgraph=True, dynamic=True)
    for length in (8, 11):
        x = randn(2, length, 16, seed=length, dtype=torch.float32)
        assert_same(compiled(x), mixer(x), 1e-6)  # both in float32, by different products


def test_vmap_over_the_batch() -> None:
    layer, x = make_layer(), randn(3, T, 16)
    found = torch.func.vmap(lambda row: layer(row[None], impl="dense")[0])(x)
    assert_same(found, layer(x, impl="dense"))


def test_forward_mode_agrees_with_reverse_mode() -> None:
    layer, x, tangent, d_y = make_layer(), *(randn(2, T, 16, seed=s) for s in range(3))
    y, d_forward = torch.func.jvp(lambda x: layer(x, impl="dense"), (x,), (tangent,))
    found = run_layer(layer, x, d_y, impl="dense")
    assert_same(y, found["y"])
    assert_same((d_forward * d_y).sum(), (found["dx"] * tangent).sum())


@each_impl
def test_functional_call(impl: str, chunk: int | None) -> None:
    layer, other, x = make_layer(1), make_layer(2), randn(2, T, 16)
    options = {"impl": impl, "chunk_T": chunk}
    found = torch.func.functional_call(layer, dict(other.named_parameters()), (x,), options)
    assert_same(found, other(x, **options))


@pytest.mark.parametrize("kind", ["glu", "relu"])
def test_second_derivatives_of_the_reference(kind: str) -> None:
    problem = make_problem(3, L=4, B=1, H=1, kind=kind)
    names = list(problem.leaves())

    def readout(*tensors: Tensor) -> Tensor:
        return problem.with_leaves(dict(zip(names, tensors, strict=True))).mix("dense")

    assert torch.autograd.gradgradcheck(readout, [t.requires_grad_() for t in problem.leaves().values()])
