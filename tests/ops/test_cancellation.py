"""Gradients that cancel: with few slots the row norm takes away nearly all of the gate's gradient; rounding must not stay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers import Problem, make_problem, randn


def gradients(problem: Problem, impl: str, d_o: Tensor) -> dict[str, Tensor]:
    leaves = {name: t.clone().requires_grad_() for name, t in problem.leaves().items()}
    o = problem.with_leaves(leaves).mix(impl)
    return dict(zip(leaves, torch.autograd.grad(o, list(leaves.values()), d_o.to(o.dtype)), strict=True))


def error_of(problem: Problem, impl: str) -> float:
    """The worst gradient of scores and routing, against float64."""
    d_o = randn(*problem.q.shape[:2], *problem.v.shape[2:], seed=7)
    exact, found = gradients(problem.to(torch.float64), "dense", d_o), gradients(problem, impl, d_o)
    return max(float((found[name].double() - exact[name]).norm()) for name in ("q", "k", "R1.A", "R1.B", "R1.diag"))


@pytest.mark.parametrize("impl", ["native", "chunked"])
@pytest.mark.parametrize("kind", ["glu", "relu"])
def test_documents_of_one_token_with_large_scores(impl: str, kind: str) -> None:
    spans = torch.tensor([[b, t, t + 1, t, t + 1] for b in range(2) for t in range(11)])
    problem = make_problem(kind=kind, spans=spans).to(torch.float32)
    problem = problem.replace(q=1e4 * problem.q)
    assert error_of(problem, impl) <= 4 * error_of(problem, "dense") + 1e-6


@pytest.mark.parametrize("impl", ["native", "chunked"])
@pytest.mark.parametrize("T", [1, 2, 6])
def test_half_precision_with_keys_of_one_number(impl: str, T: int) -> None:
    """All scores of a row are multiples of one number, so that q has no gradient at all."""
    problem = make_problem(kind="relu", T=T).to(torch.bfloat16)
    problem = problem.replace(q=problem.q[..., :1], k=problem.k[..., :1])
    assert error_of(problem, impl) <= 2 * error_of(problem, "dense") + 1e-2
