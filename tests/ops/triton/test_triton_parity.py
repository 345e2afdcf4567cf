"""The Triton kernels, run by Triton's interpreter, equal the dense reference in values and all gradients.

Scratch and outputs are filled with NaN first. On a GPU the same kernels run compiled: `hypermlp gpu check` repeats the
comparison there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from helpers import Problem, make_problem, randn
from interpreter import assert_parity, errors, flips, half_problem, patched_once, rms, run, tile_sizes, wide_problem

pytestmark = pytest.mark.usefixtures("poisoned", "quick")

SMALL = {"B": 1, "H": 1}
OPTIONS = {
    "everything": {},
    "no R1": {"op1": False},
    "no R2": {"op2": False},
    "neither": {"op1": False, "op2": False},
    "no diagonal": {"diag": False},
    "no shortcut": {"shortcut": False},
    "low rank alone": {"diag": False, "shortcut": False},
    "norm before the relu": {"norm": "l2"},
    "no norm": {"norm": "none"},
}
OF_ACTIVATION = ("everything", "norm before the relu", "no norm")  # the sweep has the others with both activations
# [batch entry, row begin, row end, slot begin, slot end]
PACKED = [[0, 0, 5, 0, 5], [0, 5, 6, 5, 6], [0, 6, 30, 6, 30], [1, 3, 20, 3, 20]]  # the second entry has holes
WITH_PAST = [[0, 0, 3, 0, 30], [0, 3, 9, 30, 40], [1, 2, 9, 5, 12]]  # rows are the last of their slots
SHARED = [[0, 0, 4, 0, 9], [0, 4, 9, 3, 20]]  # two sequences begin with the same slots
each_kind = pytest.mark.parametrize("kind", ["glu", "relu"])
each_type = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def of_type(dtype: torch.dtype) -> Callable[..., Problem]:
    return make_problem if dtype == torch.float32 else half_problem


@pytest.fixture
def quick() -> Iterator[None]:
    with patched_once():
        yield


@pytest.mark.parametrize("kind, name", [*(("glu", name) for name in OPTIONS), *(("relu", name) for name in OF_ACTIVATION)])
def test_options(kind: str, name: str) -> None:
    assert_parity(make_problem(19, L=24, kind=kind, **SMALL, **OPTIONS[name]))


@pytest.mark.parametrize("T, L", [(1, 16), (2, 40), (16, 40), (17, 40), (33, 40), (24, 10)])
def test_sizes(T: int, L: int) -> None:
    assert_parity(make_problem(T, L=L, **SMALL))


@pytest.mark.parametrize("T, S", [(1, 1), (1, 19), (6, 50), (18, 35)])
def test_more_slots_than_rows(T: int, S: int) -> None:
    assert_parity(make_problem(T, S, L=20, **SMALL))


@pytest.mark.parametrize("M, N", [(16, 32), (32, 16), (32, 32)])
def test_tiles(M: int, N: int) -> None:
    with tile_sizes(M, N):
        assert_parity(make_problem(40, L=33, **SMALL))


@each_type
@pytest.mark.parametrize("spans, T, S", [(PACKED, 30, 30), (WITH_PAST, 9, 40), (SHARED, 9, 20)])
def test_spans(spans: list, T: int, S: int, dtype: torch.dtype) -> None:
    assert_parity(of_type(dtype)(T, S, L=20, B=2, H=1, spans=torch.tensor(spans)), dtype)


@each_kind
@each_type
def test_batch_and_heads(kind: str, dtype: torch.dtype) -> None:
    assert_parity(of_type(dtype)(20, L=32, kind=kind, B=1), dtype)


def test_one_set_of_factors_for_all_heads() -> None:
    """An expanded tensor, as the layer passes it with per_head=False."""
    problem = make_problem(12, L=10, B=1)

    def shared(mixing: object) -> object:
        one = {name: getattr(mixing, name)[:1].expand_as(getattr(mixing, name)) for name in ("A", "B", "diag")}
        return mixing._replace(**one)

    assert_parity(problem.replace(routing=shared(problem.routing), reading=shared(problem.reading)))


@each_type
@pytest.mark.parametrize("K, V, R", [(48, 130, 17), (20, 64, 5)])
def test_widths_of_several_pieces(K: int, V: int, R: int, dtype: torch.dtype) -> None:
    problem = wide_problem(18, K, V, R, L=12, **SMALL)
    problem = problem.replace(routing=problem.routing._replace(A=0.4 * problem.routing.A, B=0.4 * problem.routing.B))
    assert_parity(problem, dtype)


@pytest.mark.parametrize("K, V", [(20, 260), (300, 20)])
def test_widths_in_a_loop(K: int, V: int) -> None:
    assert_parity(wide_problem(18, K, V, 5, L=12, **SMALL))


@pytest.mark.parametrize("kind, name", [("glu", "everything"), ("glu", "no R1"), ("glu", "no R2"), ("relu", "no norm")])
def test_bfloat16(kind: str, name: str) -> None:
    assert_parity(half_problem(33, L=40, kind=kind, **SMALL, **OPTIONS[name]), torch.bfloat16)


def test_float16_has_the_range_of_bfloat16() -> None:
    """Scores of thousands, whose products do not fit into float16."""
    p = make_problem(17, L=20, **SMALL)
    p = p.replace(q=300 * p.q, v=0.1 * p.v)
    found = errors(p, torch.float16)
    assert max(found.values()) <= 2e-2


@pytest.mark.parametrize("B, T, S", [(0, 5, 5), (2, 0, 0), (1, 0, 7)])
def test_nothing_to_do(B: int, T: int, S: int) -> None:
    for name, error in errors(make_problem(T, S, B=B), torch.float32).items():
        assert error == 0, name


def test_flips_are_rare_and_carry_the_error() -> None:
    """Where rounding turns a gate's sign the gradient jumps: with such rows the error is many times what it is without."""
    problem = half_problem(40, L=40, **SMALL).to(torch.bfloat16)
    flipped = flips(problem).any(-1).transpose(1, 2)  # B T H
    assert 0 < flips(problem).double().mean() < 0.05
    d_o = randn(*problem.q.shape[:2], *problem.v.shape[2:], seed=99)
    found, expected = run(problem, "triton", d_o), run(problem.to(torch.float64), "dense", d_o)
    rows = flipped.repeat_interleave(2, 2)[..., None]  # both routing heads of a head
    everywhere = rms(found["d q"], expected["d q"])
    without = rms(torch.where(rows, 0, found["d q"]), torch.where(rows, 0, expected["d q"]))
    print(f"gates that flip: {flips(problem).sum()} of {flips(problem).numel()}; error {everywhere:.1e}, without {without:.1e}")
    assert without <= 1e-2
    assert without <= everywhere


@pytest.mark.sweep
@each_kind
@each_type
@pytest.mark.parametrize("M, N", [(16, 16), (32, 16), (16, 32), (64, 32)])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("T, S, L", [(1, 1, 130), (63, 63, 130), (65, 65, 130), (129, 129, 130), (43, 43, 20), (25, 50, 20)])
def test_sweep(T: int, S: int, L: int, options: dict, M: int, N: int, dtype: torch.dtype, kind: str) -> None:
    with tile_sizes(M, N):
        assert_parity(of_type(dtype)(T, S, L=L, kind=kind, **options), dtype)
