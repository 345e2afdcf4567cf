"""hypermlp::chunked and its kin are well-behaved torch operators: schema, fake tensors, autograd registration, dispatch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers import make_problem, randn
from hypermlp.ops.registered import flatten

CASES = {
    "glu": {"T": 9, "L": 6},
    "relu, no diagonal": {"T": 5, "L": 8, "kind": "relu", "diag": False, "shortcut": False},
    "no R1, packed": {"T": 5, "L": 8, "op1": False, "spans": torch.tensor([[0, 0, 2, 0, 2], [1, 0, 5, 0, 5]])},
    "identity, no R2": {"T": 5, "L": 5, "aligner": "identity", "op2": False},
}


def arguments(problem: object) -> tuple[object, ...]:
    leaves = {name: t.float().requires_grad_() for name, t in problem.leaves().items()}
    p = problem.with_leaves(leaves)
    s = p.spec
    operators: tuple[Tensor | None, ...] = flatten(p).differentiable[3:]
    detached = [None if t is None else t.detach().requires_grad_() for t in operators]
    return (p.q, p.k, p.v, *detached, p.spans, s.kind, s.norm, s.aligner, s.causal, s.block_size, s.eps, 4)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_opcheck(case: dict) -> None:
    torch.library.opcheck(torch.ops.hypermlp.chunked.default, arguments(make_problem(**case)))


@pytest.mark.parametrize("case", [case for name, case in CASES.items() if "identity" not in name])
def test_opcheck_native(case: dict) -> None:
    torch.library.opcheck(torch.ops.hypermlp.native.default, arguments(make_problem(**case)))


@pytest.mark.parametrize("use", ["", "native"])
def test_opcheck_convolutions(use: str) -> None:
    x, wk, wv = (randn(*s, dtype=torch.float32).requires_grad_() for s in ((2, 9, 5), (5, 4), (5, 4)))
    torch.library.opcheck(torch.ops.hypermlp.convs.default, (x, wk, wv, None, None, use))
