"""Every fast implementation equals the dense reference in values and all gradients, with uninitialised memory poisoned."""

from __future__ import annotations

import pytest
import torch

from helpers import assert_same, each_fast_impl, make_problem, precision, run_problem

pytestmark = pytest.mark.usefixtures("poisoned")

L = 20
SIZES = [(T, 130) for T in (1, 2, 63, 64, 65, 129)] + [(T, L) for T in (L - 1, L, L + 1, 2 * L + 3)]
FITTING = [(T, length) for T, length in SIZES if length >= T]  # the identity layout has no sliding window

OPTIONS = {
    "no R1": {"op1": False},
    "no R2": {"op2": False},
    "neither": {"op1": False, "op2": False},
    "no diagonal": {"diag": False},
    "no shortcut": {"shortcut": False},
    "low rank alone": {"diag": False, "shortcut": False},
    "norm before the relu": {"norm": "l2"},
    "no norm": {"norm": "none"},
}
LAYOUTS = {
    "offset": {},
    "identity": {"aligner": "identity"},
    "bidirectional": {"aligner": "identity", "causal": False},
}
each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
each_kind = pytest.mark.parametrize("kind", ["glu", "relu"])

# [batch entry, row begin, row end, slot begin, slot end]
PACKED = [[0, 0, 5, 0, 5], [0, 5, 6, 5, 6], [0, 6, 40, 6, 40], [1, 3, 30, 3, 30]]  # the second entry has holes
WITH_PAST = [[0, 0, 3, 0, 30], [0, 3, 9, 30, 40], [1, 2, 9, 5, 12]]  # rows are the last of their slots


def compare(problem: object, impl: str, chunk: int | None) -> None:
    """In float64 to rounding; an implementation in float32 against the float64 result of the same numbers."""
    dtype = precision(impl)
    problem = problem.to(dtype)
    found, expected = run_problem(problem, impl, chunk), run_problem(problem.to(torch.float64))
    values, gradients = (1e-9, 1e-9) if dtype == torch.float64 else (1e-5, 1e-4)
    assert_same(found.pop("o"), expected.pop("o"), values)
    assert_same(found, expected, gradients)


def test_uninitialised_memory_is_poisoned() -> None:
    like = torch.zeros(3)
    for fresh in (torch.empty(3), like.new_empty(3), torch.empty_like(like)):
        assert fresh.isnan().all()


@each_fast_impl
@each_kind
@pytest.mark.parametrize("T, length", SIZES)
def test_sizes_by_lag(T: int, length: int, kind: str, impl: str, chunk: int | None) -> None:
    compare(make_problem(T, L=length, kind=kind), impl, chunk)


@each_fast_impl
@each_kind
@pytest.mark.parametrize("T, length", FITTING)
def test_sizes_in_the_identity_layout(T: int, length: int, kind: str, impl: str, chunk: int | None) -> None:
    compare(make_problem(T, L=length, kind=kind, aligner="identity"), impl, chunk)


@each_fast_impl
@each_kind
@each_layout
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options: dict, layout: dict, kind: str, impl: str, chunk: int | None) -> None:
    length = 20 if layout == {} else 37
    compare(make_problem(37, L=length, kind=kind, **layout, **options), impl, chunk)


@each_fast_impl
@each_kind
@each_layout
def test_one_set_of_factors_for_all_heads(layout: dict, kind: str, impl: str, chunk: int | None) -> None:
    """An expanded tensor, as the layer passes it with per_head=False."""
    problem = make_problem(23, L=30, kind=kind, **layout)

    def shared(mixing: object) -> object:
        one = {name: getattr(mixing, name)[:1].expand_as(getattr(mixing, name)) for name in ("A", "B", "diag")}
        return mixing._replace(**one)

    compare(problem.replace(routing=shared(problem.routing), reading=shared(problem.reading)), impl, chunk)


@each_fast_impl
@each_kind
@pytest.mark.parametrize("T, S", [(1, 1), (1, 19), (1, 50), (6, 19), (6, 20), (6, 50), (25, 50)])
def test_more_slots_than_rows(T: int, S: int, kind: str, impl: str, chunk: int | None) -> None:
    compare(make_problem(T, S, L=20, kind=kind), impl, chunk)


@each_fast_impl
@each_kind
@pytest.mark.parametrize("T, S", [(1, 1), (1, 19), (6, 19), (19, 20)])
def test_more_slots_than_rows_in_the_identity_layout(T: int, S: int, kind: str, impl: str, chunk: int | None) -> None:
    compare(make_problem(T, S, L=20, kind=kind, aligner="identity"), impl, chunk)


@each_fast_impl
@each_kind
@each_layout
def test_spans(layout: dict, kind: str, impl: str, chunk: int | None) -> None:
    length = 20 if layout == {} else 40
    compare(make_problem(40, L=length, kind=kind, spans=torch.tensor(PACKED), **layout), impl, chunk)


@each_fast_impl
@each_kind
def test_spans_with_a_past(kind: str, impl: str, chunk: int | None) -> None:
    compare(make_problem(9, 40, L=20, kind=kind, spans=torch.tensor(WITH_PAST)), impl, chunk)
