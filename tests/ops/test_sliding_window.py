"""Beyond block_size the operator is the exact window of the last L slots (Theorem 2.3 with D, A and B zero beyond L)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from helpers import TOLERANCE, Problem, assert_same, each_impl, make_layer, make_problem, precision, randn, run_layer
from helpers import run_problem as run

T, L = 31, 9


class Windows(Problem):
    """The same operator one row at a time, on slices of the slots that the row may see."""

    def mix(self, impl: str = "dense", chunk: int | None = None) -> Tensor:
        return torch.cat([self.window(t).mix(impl, chunk) for t in range(self.q.shape[1])], dim=1)

    def window(self, t: int) -> Problem:
        slots, row = slice(max(0, t - L + 1), t + 1), slice(t, t + 1)
        routing, reading = (m._replace(control=m.control[:, row]) for m in (self.routing, self.reading))
        return Problem(self.q[:, row], self.k[:, slots], self.v[:, slots], routing, reading, self.spec)


@each_impl
@pytest.mark.parametrize("kind", ["glu", "relu"])
def test_row_sees_the_last_slots_alone(kind: str, impl: str, chunk: int | None) -> None:
    problem = make_problem(T, L=L, kind=kind).to(precision(impl))
    windows = Windows(problem.q, problem.k, problem.v, problem.routing, problem.reading, problem.spec)
    assert_same(run(problem, impl, chunk), run(windows), TOLERANCE[precision(impl)])


def extend(layer: nn.Module, length: int) -> dict[str, Tensor]:
    """The layer's parameters for a longer block_size, with D, A and B zero beyond its own."""
    extended = {}
    for name, p in layer.state_dict().items():
        if name.startswith("op") and "control" not in name:
            op = getattr(layer, name[:3])
            older = (p.shape[0], length - p.shape[1], *p.shape[2:])
            p = torch.cat([p.new_full(older, -1.0 if "diag" in name and op.shortcut else 0.0), p], dim=1)
        extended[name] = p
    return extended


@each_impl
@pytest.mark.parametrize("shortcut", [True, False])
@pytest.mark.parametrize("kind", ["glu", "relu"])
def test_layer_equals_its_zero_extension(kind: str, shortcut: bool, impl: str, chunk: int | None) -> None:
    options = {"attn_kind": kind, "op1_shortcut": shortcut, "op2_shortcut": shortcut, "dtype": precision(impl)}
    layer, longer = make_layer(block_size=L, **options), make_layer(block_size=T + 5, **options)
    longer.load_state_dict(extend(layer, T + 5))
    x, d_y = randn(2, T, 16, seed=1, dtype=precision(impl)), randn(2, T, 16, seed=2, dtype=precision(impl))
    found = run_layer(layer, x, d_y, impl=impl, chunk_T=chunk)
    expected = run_layer(longer, x, d_y, impl=impl, chunk_T=chunk)
    shared = {name: g if g.shape == found[name].shape else g[:, -L:] for name, g in expected.items()}
    assert_same(found, shared, TOLERANCE[precision(impl)])
