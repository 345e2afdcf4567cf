"""The native kernel on bfloat16 tensors, which it reads and writes as they are: the float64 results of the same numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from helpers import Problem, gates, make_problem, randn, run_problem
from hypermlp.ops import native, plain, pointwise

HALF = torch.bfloat16
VALUES = 6e-3  # norm-wise; half a unit in the last place of bfloat16 is 4e-3
GRADIENTS = 2.5e-2  # of the operator

# T, S, L, K, V; then other arguments of make_problem
CASES = {
    "one row": (1, 1, 1, 1, 1, {}),
    "few rows": (3, 70, 70, 9, 17, {}),
    "odd widths": (37, 37, 37, 3, 5, {}),
    "an odd panel": (101, 101, 101, 17, 33, {"kind": "relu"}),
    "several strips": (213, 213, 213, 48, 65, {}),
    "window": (150, 150, 31, 16, 32, {}),
    "with a past": (97, 211, 150, 7, 40, {}),
    "no operators": (61, 61, 61, 5, 12, {"op1": False, "op2": False}),
    "no norm": (50, 50, 50, 12, 12, {"norm": "none"}),
    "packed": (
        200,
        200,
        90,
        8,
        31,
        {"B": 1, "spans": torch.tensor([[0, 0, 3, 0, 3], [0, 3, 150, 3, 150], [0, 161, 200, 161, 200]])},
    ),
}


def relative(found: Tensor, exact: Tensor, largest: float) -> float:
    return float((found.detach().double() - exact).norm() / exact.norm().clamp(min=1e-3 * largest))


def assert_near(found: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    largest = max(float(t.norm()) for t in exact.values())
    for name, value in found.items():
        assert value.dtype == HALF, name
        error = relative(value, exact[name], largest)
        assert error <= (VALUES if name == "o" else GRADIENTS), f"{name}: {error:.1e}"


def problem_of(T: int, S: int, L: int, K: int, V: int, options: dict) -> Problem:
    """Without a learned diagonal, since 1 + diag would be rounded before the kernel sees it."""
    made = make_problem(T, S, L, diag=False, **options)
    wide = {"q": randn(*made.q.shape[:3], K, seed=5), "k": randn(*made.k.shape[:3], K, seed=6)}
    return made.replace(**wide, v=randn(*made.v.shape[:3], V, seed=7)).to(HALF)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_operator(case: tuple) -> None:
    problem = problem_of(*case)
    assert_near(run_problem(problem, "native"), run_problem(problem.to(torch.float64)))


def test_strided_tensors_are_read_where_they_lie() -> None:
    problem = problem_of(*CASES["several strips"])
    joined = torch.cat([t.flatten(2) for t in (problem.q, problem.k, problem.v)], dim=2)
    q, k, v = joined.split([problem.q[0, 0].numel(), problem.k[0, 0].numel(), problem.v[0, 0].numel()], dim=2)
    strided = problem.replace(q=q.view_as(problem.q), k=k.view_as(problem.k), v=v.view_as(problem.v))
    assert torch.equal(strided.mix("native"), problem.mix("native"))


def test_mixed_types_are_computed_as_before() -> None:
    problem = problem_of(*CASES["odd widths"])
    mixed = problem.replace(k=problem.k.float())
    assert relative(mixed.mix("native"), problem.to(torch.float64).mix(), 0) <= VALUES


def compare(plain: Callable[..., object], fast: Callable[..., object], *inputs: Tensor) -> None:
    """Outputs and gradients of functions of bfloat16 tensors; the plain one gets the same numbers in float64."""
    found = []
    for function, dtype in ((fast, HALF), (plain, torch.float64)):
        leaves = [t.to(dtype).requires_grad_() for t in inputs]
        outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        d = [randn(*y.shape, seed=i).to(HALF).to(dtype) for i, y in enumerate(outputs)]
        found.append([*outputs, *torch.autograd.grad(outputs, leaves, d)])
    for got, want in zip(*found, strict=True):
        assert got.dtype == HALF
        assert relative(got, want.detach(), 0) <= VALUES


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape, taps", [((2, 1, 1), 4), ((2, 13, 5), 4), ((1, 67, 33), 4), ((3, 40, 16), 3), ((2, 9, 7), 1)])
def test_convolutions(shape: tuple[int, int, int], taps: int, packed: bool) -> None:
    inputs = (randn(*shape).to(HALF), *(randn(shape[2], taps, seed=s).to(HALF) for s in (1, 2)))
    position = torch.arange(shape[1])[None] % 7 if packed else None
    dense, ours = (lambda *t, impl=impl: pointwise.convs(*t, position, impl=impl) for impl in ("dense", "native"))
    compare(dense, ours, *inputs)


def test_convolution_goes_on_from_its_history() -> None:
    x, wk, wv = randn(2, 30, 19).to(HALF), randn(19, 4, seed=1).to(HALF), randn(19, 4, seed=2).to(HALF)
    whole = pointwise.convs(x, wk, wv, impl="native")
    parts = pointwise.convs(x[:, 9:], wk, wv, None, x[:, 6:9], impl="native")
    for one, part in zip(whole, parts, strict=True):
        assert torch.equal(one[:, 9:], part)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (19, 19, 3, 5), (64, 64, 32, 16)])
def test_gates(sizes: tuple[int, ...]) -> None:
    y = (3 * randn(2, 23, sum(sizes))).to(HALF)
    compare(lambda y: plain.gates_forward(y, sizes), lambda y: gates(y, sizes, impl="native"), y)
    x, g = (3 * randn(2, 23, sizes[0], seed=s).to(HALF) for s in (1, 2))
    compare(plain.gate_forward, lambda x, g: pointwise.gate(x, g, impl="native"), x, g)


def test_way_back_through_the_readouts_gate() -> None:
    o, g, d = (randn(2, 23, 3 * 37, seed=s).to(HALF) for s in range(3))
    y = plain.gate_forward(o, g)
    d_o, d_g = native.kernels.ungate(d.clone(), y, g)
    exact = d.double() * torch.sigmoid(g.double())
    assert relative(d_o, exact, 0) <= VALUES
    assert relative(d_g, d.double() * y.double() * torch.sigmoid(-g.double()), 0) <= VALUES


def test_rounding_is_torchs() -> None:
    """To the nearest, ties to even, infinities and NaN included."""
    x = torch.tensor([1.0, 1.00390625, 1.01171875, 3.3e38, 3.4e38, float("inf"), float("nan"), -0.0, 1e-40]).repeat(9)
    one = torch.ones(81, 1)
    yk, _ = native.kernels.convs_forward(x.view(1, 1, -1), one, one, None, None)
    assert torch.equal(yk.view(-1).nan_to_num(7), x.nan_to_num(7)), "float32 keeps its bits"
    half = x.to(HALF)
    yk, _ = native.kernels.convs_forward(half.view(1, 1, -1), one.to(HALF), one.to(HALF), None, None)
    assert torch.equal(yk.view(-1).isnan(), half.isnan())
    assert torch.equal(yk.view(-1).nan_to_num(7), half.nan_to_num(7))
    scaled, _ = native.kernels.convs_forward(half.view(1, 1, -1), 1.00390625 * one, one, None, None)
    exact = (half.float() * 1.00390625).to(HALF)
    assert torch.equal(scaled.view(-1).nan_to_num(7), exact.nan_to_num(7))
