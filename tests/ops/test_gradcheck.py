"""Analytic gradients of the operator against finite differences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers import make_problem

CASES = {
    "glu": {"T": 5, "L": 8},
    "relu": {"T": 5, "L": 8, "kind": "relu"},
    "sliding": {"T": 6, "L": 3, "norm": "l2"},
    "past": {"T": 2, "S": 5, "L": 4, "shortcut": False},
    "identity": {"T": 4, "L": 5, "aligner": "identity", "diag": False},
    "bidirectional": {"T": 4, "L": 4, "aligner": "identity", "causal": False, "kind": "relu"},
    "packed": {"T": 5, "L": 8, "spans": torch.tensor([[0, 0, 2, 0, 2], [0, 2, 5, 2, 5]]), "norm": "none"},
}


@pytest.mark.parametrize("impl, chunk", [("dense", None), ("chunked", 2)])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_finite_differences(case: dict, impl: str, chunk: int | None) -> None:
    problem = make_problem(B=1, H=1, **case)
    names = list(problem.leaves())

    def readout(*tensors: Tensor) -> Tensor:
        return problem.with_leaves(dict(zip(names, tensors, strict=True))).mix(impl, chunk)

    assert torch.autograd.gradcheck(readout, [t.requires_grad_() for t in problem.leaves().values()])
