"""The native kernel compiled for other processors and by another compiler; what happens when memory is short in a worker."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import processors
import pytest
import torch
from torch import Tensor

from helpers import make_problem
from hypermlp.mixers.decode import lay_out
from hypermlp.ops import native
from hypermlp.ops.native import kernels
from hypermlp.ops.native.layer import WholeCall
from hypermlp.ops.parameters import LayerParameters
from hypermlp.ops.registered import Inputs, flatten_mixing


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", processors.VARIANTS)
def test_variant(name: str) -> None:
    variant = processors.VARIANTS[name]
    obstacle = variant.obstacle()
    if obstacle is not None:
        pytest.skip(obstacle)
    with processors.elsewhere(variant) as driver:
        found = processors.differences()
        assert {what: error for what, error in found.items() if not error <= processors.limit(what)} == {}
        if name in POOLS:
            failures = {what: fail_each_allocation(driver, run, name == "GOMP") for what, run in calls().items()}
            assert min(failures.values()) > 0, failures


POOLS = ("SSE2", "GOMP")  # threads of the standard library, and a pool like torch's
MOST = 24  # allocations that fail, of one call


def calls() -> dict[str, Callable[[], object]]:
    """One call each of everything that has workers."""
    torch.set_num_threads(2)
    layer = processors.make_layer()
    p = LayerParameters._make(None if t is None else t.detach() for t in layer.tensors())
    x, shape, wanted = torch.randn(4, 96, 64), layer.shape(), LayerParameters._make(t is not None for t in p)
    joined, made = native.project.forward(x, None, p)
    whole = WholeCall(p, shape)
    y, kept = whole.forward(x)
    problem = make_problem(T=60, L=60).to(torch.float32)
    mixings = (*flatten_mixing(problem.routing, False), *flatten_mixing(problem.reading, True))
    inputs = Inputs(problem.q, problem.k, problem.v, *mixings, None)
    o, rho = kernels.forward(inputs, problem.spec, None)
    E, N = torch.rand(2, 32, 256), torch.rand(2, 32, 16)
    scanned = native.kernels.scan_inputs(E, E, -torch.rand(16, 256), N, N, torch.zeros(2, 16, 256), None)
    ends = native.kernels.scan_forward(scanned, marks=True)
    k, v = torch.randn(4, 9, 4, 32), torch.randn(4, 9, 2, 32)
    spans = torch.tensor([[b, 0, 1, 0, 9] for b in range(4)])
    decoding = lay_out(layer)
    past = torch.zeros(4, 3, 64)
    decoding.attach(k, v, past)
    assert p.conv_k is not None
    assert p.conv_v is not None
    return {
        "project forward": lambda: native.project.forward(x, None, p),
        "project backward": lambda: native.project.backward(made, joined, x, None, p, wanted),
        "scan forward": lambda: native.kernels.scan_forward(scanned, marks=True),
        "scan backward": lambda: native.kernels.scan_backward(ends[0], ends[1], scanned, ends[2]),
        "layer forward": lambda: whole.forward(x),
        "layer backward": lambda: whole.backward(y, x, kept, wanted),
        "step": lambda: (past.zero_(), decoding.run(x[:, :1], spans, 0)),  # which joins the past
        "operator backward": lambda: kernels.backward(o, o, rho, inputs, problem.spec, None),
        "convolutions backward": lambda: native.kernels.convs_backward(x, x, x, p.conv_k, p.conv_v, None),
    }


def fail_each_allocation(driver: processors.Driver, run: Callable[[], object], always: bool) -> int:
    """One allocation of a call after the other fails, the workers' too: how many calls ended in a MemoryError, and no process.

    always: all do; a thread of the standard library that cannot be started is done without.
    """
    exact, failures = tensors_of(run()), 0
    for n in range(MOST):
        driver.failing, raised = n, True
        with contextlib.suppress(MemoryError):
            run()
            raised = False
        assert raised or not (driver.failed_in == 2 or (always and driver.failed_in)), (
            f"allocation {n} failed, and the call did not"
        )
        failures += raised
        if not driver.failed_in:
            assert not raised
            break
    driver.failing = -1
    for found, expected in zip(tensors_of(run()), exact, strict=True):  # the process goes on
        assert torch.equal(found, expected)
    return failures


def tensors_of(made: object) -> list[Tensor]:
    if isinstance(made, Tensor):
        return [made.clone()]
    return [t for part in made for t in tensors_of(part)] if isinstance(made, (tuple, list)) else []
