"""The native kernel beyond what every implementation is tested for: its functions, its threads, its companions."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers import assert_same, gates, make_problem, randn, run_problem
from hypermlp.ops import native, pointwise
from hypermlp.ops.native import library
from hypermlp.ops.registered import flatten


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_kernel_is_there() -> None:
    assert library().handle is not None, library().reason


# Elementary functions


def elementary(kind: int, x: np.ndarray) -> np.ndarray:
    y = np.empty_like(x)
    pointers = [a.ctypes.data_as(ctypes.c_void_p) for a in (x, y)]
    assert library().handle.hm_math(ctypes.c_int64(kind), ctypes.c_int64(len(x)), *pointers) == 0
    return y


def everywhere() -> np.ndarray:
    """Floats over the whole range: dense around zero, and every exponent of both signs."""
    dense = np.linspace(-90, 90, 200_001)
    wide = np.geomspace(1e-38, 3e38, 20_001)
    return np.concatenate([dense, wide, -wide, [0.0, -0.0]]).astype(np.float32)


@pytest.mark.parametrize("kind, exact", [(1, lambda x: np.logaddexp(0, x)), (2, lambda x: np.exp(-np.logaddexp(0, -x)))])
def test_softplus_and_sigmoid_are_accurate_over_all_floats(kind: int, exact: object) -> None:
    x = everywhere()
    found, expected = elementary(kind, x).astype(np.float64), exact(x.astype(np.float64))
    finite = expected < 3e38
    error = np.abs(found - expected)[finite] / np.maximum(expected[finite], 1e-30)
    assert error[expected[finite] > 2e-38].max() < 1e-6
    assert np.abs(found - expected)[finite & (expected <= 2e-38)].max(initial=0) < 1e-37


@pytest.mark.parametrize("kind, low, high", [(1, 0.0, np.inf), (2, 0.0, 1.0)])
def test_infinities_have_their_limits_and_nan_stays_nan(kind: int, low: float, high: float) -> None:
    found = elementary(kind, np.array([-np.inf, np.inf, np.nan] * 7, dtype=np.float32))
    assert (found[0::3] == low).all()
    assert (found[1::3] == high).all()
    assert np.isnan(found[2::3]).all()


# Threads


CASES = {
    "plain": {"T": 300, "L": 300, "B": 2},
    "one head": {"T": 270, "L": 270, "B": 1, "H": 1},
    "window": {"T": 300, "L": 70, "B": 1},
    "decoding": {"T": 1, "S": 900, "L": 900, "B": 1},
    "packed": {
        "T": 200,
        "L": 90,
        "B": 1,
        "spans": torch.tensor([[0, 0, 3, 0, 3], [0, 3, 150, 3, 150], [0, 160, 200, 160, 200]]),
    },
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("count", [2, 3, 5])
def test_threads_change_no_output_and_gradients_only_by_rounding(case: dict[str, object], count: int) -> None:
    problem = make_problem(**case).to(torch.float32)
    torch.set_num_threads(1)
    one = run_problem(problem, "native")
    torch.set_num_threads(count)
    many, again = run_problem(problem, "native"), run_problem(problem, "native")
    assert torch.equal(one["o"], many["o"])
    assert_same(many, one, 1e-5)
    for name in many:
        assert torch.equal(many[name], again[name]), f"{name} is not reproducible"


@pytest.mark.parametrize("name", ["plain", "one head", "window", "packed"])
@pytest.mark.parametrize("ranks", [(3, 2), (16, 32)], ids=["few", "whole panels"])
@pytest.mark.parametrize("count", [1, 3, 5])
def test_the_gradient_of_v_takes_the_place_of_that_of_o(name: str, ranks: tuple[int, int], count: int) -> None:
    problem = make_problem(**CASES[name], ranks=ranks).to(torch.float32)
    torch.set_num_threads(count)
    leaves = {leaf: t.clone().requires_grad_() for leaf, t in problem.leaves().items()}
    p = problem.with_leaves(leaves)
    o = native.kernels.mix_owned(flatten(p), p.spec)
    d_o = randn(*o.shape, seed=99, dtype=o.dtype)
    found = torch.autograd.grad(o, list(leaves.values()), d_o)
    assert found[2].data_ptr() == d_o.data_ptr()
    found = {"o": o.detach(), **{f"d {leaf}": g for leaf, g in zip(leaves, found, strict=True)}}
    assert_same(found, run_problem(problem), 2e-5)


@pytest.mark.parametrize("L", [1090, 191], ids=["all slots", "window"])
def test_long_contexts_of_narrow_layers_equal_the_reference(L: int) -> None:
    """Their strips are higher, and most tiles are read where they lie."""
    problem = make_problem(1090, L=L, B=1, H=1)
    assert_same(run_problem(problem.to(torch.float32), "native"), run_problem(problem), 1e-4)


def test_a_row_is_bitwise_independent_of_its_batch() -> None:
    problem = make_problem(T=150, L=150, B=4).to(torch.float32)
    together = problem.mix("native")
    for b in range(4):
        leaves = {n: t[b : b + 1] if n in ("q", "k", "v") or n.endswith("control") else t for n, t in problem.leaves().items()}
        assert torch.equal(problem.with_leaves(leaves).mix("native")[0], together[b])


def test_strided_inputs_are_read_where_they_lie() -> None:
    problem = make_problem(T=40, L=40).to(torch.float32)

    def apart(x: Tensor) -> Tensor:
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 3), float("nan"))
        wide[..., 2 : 2 + x.shape[-1]] = x
        return wide[..., 2 : 2 + x.shape[-1]]

    leaves = {n: apart(t) if t.dim() == 4 else t for n, t in problem.leaves().items()}
    assert torch.equal(problem.with_leaves(leaves).mix("native"), problem.mix("native"))
    backwards = {n: t.flip(-1).flip(-1) for n, t in problem.leaves().items()}
    assert torch.equal(problem.with_leaves(backwards).mix("native"), problem.mix("native"))


# Companions


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("shape", [(0, 5, 4), (2, 0, 4), (1, 1, 1), (2, 3, 5), (3, 29, 16), (1, 100, 7)], ids=str)
@pytest.mark.parametrize("taps", [1, 2, 4, 7])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_convolutions_equal_the_plain_ones(shape: tuple[int, int, int], taps: int, packed: bool, count: int) -> None:
    torch.set_num_threads(count)
    B, T, C = shape
    position = (torch.arange(T) % 6)[None] if packed else None
    results = []
    for impl, dtype in (("dense", torch.float64), ("chunked", torch.float64), ("native", torch.float32)):
        x, wk, wv = (randn(*s, seed=i, dtype=dtype).requires_grad_() for i, s in enumerate([shape, (C, taps), (C, taps)]))
        yk, yv = pointwise.convs(x, wk, wv, position, impl=impl)
        d_k, d_v = randn(B, T, C, seed=7, dtype=dtype), randn(B, T, C, seed=8, dtype=dtype)
        grads = torch.autograd.grad((yk, yv), (x, wk, wv), (d_k, d_v))
        results.append({"yk": yk, "yv": yv, "dx": grads[0], "dwk": grads[1], "dwv": grads[2]})
    assert_same(results[1], results[0], 1e-12)
    assert_same(results[2], results[0], 1e-5)


@pytest.mark.parametrize("impl", ["dense", "chunked", "native"])
def test_convolution_goes_on_from_its_history(impl: str) -> None:
    x, wk, wv = randn(2, 20, 5, dtype=torch.float32), randn(5, 4, seed=1).float(), randn(5, 4, seed=2).float()
    whole = pointwise.convs(x, wk, wv, impl=impl)
    parts = pointwise.convs(x[:, 9:], wk, wv, None, x[:, 6:9], impl=impl)
    for full, part in zip(whole, parts, strict=True):
        assert_same(part, full[:, 9:], 1e-6)


def test_gates_equal_the_plain_ones_on_strided_slices() -> None:
    y = randn(2, 9, 40)
    sizes = [11, 11, 10, 8]
    expected_in = y.clone().requires_grad_()
    expected = gates(expected_in, sizes, impl="dense")
    found_in = y.float().requires_grad_()
    found = gates(found_in, sizes, impl="native")
    weights = [randn(*e.shape, seed=i) for i, e in enumerate(expected)]
    sum((e * w).sum() for e, w in zip(expected, weights, strict=True)).backward()
    sum((f * w.float()).sum() for f, w in zip(found, weights, strict=True)).backward()
    for f, e in zip((*found, found_in.grad), (*expected, expected_in.grad), strict=True):
        assert_same(f, e, 1e-6)


def test_gate_equals_the_plain_one() -> None:
    results = []
    for impl, dtype in (("dense", torch.float64), ("native", torch.float32)):
        x, g = (randn(2, 5, 7, seed=i, dtype=dtype).requires_grad_() for i in range(2))
        y = pointwise.gate(x, g, impl=impl)
        y.backward(randn(2, 5, 7, seed=2, dtype=dtype))
        results.append({"y": y, "dx": x.grad, "dg": g.grad})
    assert_same(results[1], results[0], 1e-6)
