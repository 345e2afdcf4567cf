"""The Triton kernels as compiled programs: cases, their execution by hypermlp.testing.ptx, errors against the reference.

Functions here run in the child process of compiled.py, which compiles kernels; those of mutations.py may run in either.
Letters as in helpers.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import torch
from torch import Tensor

from helpers import Problem, gates, make_layer, randn, run_layer
from hypermlp.ops import pointwise
from hypermlp.ops.triton import device
from interpreter import errors, half_problem, rms, run, wide_problem

# Relative rms errors against float64: bfloat16, float16 as bfloat16, float32 as TF32 whose products cut off 13 bits.
BOUND = {"bfloat16": 7e-3, "float16": 1.2e-2, "float32": 7e-3}


@dataclass(frozen=True)
class Case:
    """A call of the operator: sizes and options of helpers.make_problem, and the device that it is cut for."""

    T: int = 70
    S: int | None = None
    L: int = 70
    dtype: str = "bfloat16"
    widths: tuple[int, int, int] = (16, 32, 16)  # K, V, R
    spans: tuple[tuple[int, ...], ...] | None = None
    cut: bool = False  # into several chunks, sections of heads and splits
    options: dict = field(default_factory=lambda: {"B": 1, "H": 2})

    def problem(self) -> Problem:
        spans = None if self.spans is None else torch.tensor(self.spans)
        make = half_problem if self.widths == (16, 32, 16) else (lambda T, **o: wide_problem(T, *self.widths, **o))
        problem = make(self.T, S=self.S, L=self.L, spans=spans, **{"B": 1, "H": 2, **self.options})
        if make is not half_problem and problem.routing is not None:
            smaller = problem.routing._replace(A=0.4 * problem.routing.A, B=0.4 * problem.routing.B)
            problem = problem.replace(routing=smaller)
        return problem


@contextmanager
def emulated(arch: int, cut: bool = False, order: object = "together") -> Iterator[object]:
    """Kernels are executed as on a GPU of this architecture; cut: one with many processors and a small cache."""
    from hypermlp.ops.triton import work
    from hypermlp.testing.ptx.emulator import Emulator

    emulator = Emulator(arch, order)
    with ExitStack() as stack:
        if cut:
            emulator.limits = lambda name: device.Limits(arch, 100, 1 << 12)
            for name in ("LEAST_SCRATCH", "LEAST_TILES", "FAIR_SHARES"):
                stack.enter_context(patch.object(work, name, 1))
        stack.enter_context(patch.object(device, "tf32_allowed", lambda: True))
        stack.enter_context(device.replaced(emulator))
        yield emulator


def operator_errors(case: Case, arch: int) -> dict[str, float]:
    """Of the readout and of every gradient."""
    with emulated(arch, case.cut):
        return errors(case.problem(), getattr(torch, case.dtype))


def operator_values(case: Case, arch: int, order: object) -> dict[str, Tensor]:
    problem = case.problem().to(getattr(torch, case.dtype))
    d_o = randn(*problem.q.shape[:2], *problem.v.shape[2:], seed=99)
    with emulated(arch, case.cut, order):
        return run(problem, "triton", d_o)


def kernels_of(case: Case, arch: int) -> set[str]:
    """Names of the kernels that ran."""
    problem = case.problem().to(getattr(torch, case.dtype))
    d_o = randn(*problem.q.shape[:2], *problem.v.shape[2:], seed=99)
    with emulated(arch, case.cut) as emulator:
        run(problem, "triton", d_o)
        return {name for name, *_ in emulator.launches}


def decode_error(case: Case, arch: int, parts: int = 128) -> float:
    """One row per sequence, no gradients; what lies in no span is zero."""
    from hypermlp.ops.triton import stepping

    problem = case.problem().to(getattr(torch, case.dtype))
    with emulated(arch), patch.object(stepping, "MOST_PARTS", parts), torch.no_grad():
        return rms(problem.mix("triton"), problem.to(torch.float64).mix("dense"))


def replayed_errors(arch: int) -> list[float]:
    """The launches of one decoding step, made again as a CUDA graph makes them, while the spans on the device grow."""
    spans = torch.tensor([[0, 0, 1, 3, 10], [1, 0, 1, 0, 40], [2, 0, 0, 5, 5]])
    problem = Case(1, S=80, L=60, spans=None, options={"B": 3, "H": 2}).problem().to(torch.bfloat16)
    problem = problem.replace(spans=spans)
    found, launches = [], []
    with emulated(arch) as emulator, torch.no_grad():
        start = emulator.start
        emulator.start = lambda *given: (launches.append(given), start(*given))
        o = problem.mix("triton")
        for step in range(3):
            if step:
                spans[:2, 4] += 17  # in place: the graph reads the same memory
                for given in launches:
                    start(*given)
            found.append(rms(o, problem.to(torch.float64).mix("dense")))
    return found


def companion_errors(dtype: str, arch: int) -> dict[str, float]:
    """Convolutions and gates, values and gradients, with documents and with a history."""
    kind = getattr(torch, dtype)
    shapes = ((2, 37, 70), (70, 4), (70, 4), (2, 37, 70))
    given = [randn(*shape, seed=n, dtype=kind) for n, shape in enumerate(shapes)]
    position, history = torch.arange(37)[None] % 9, randn(2, 3, 70, seed=9, dtype=kind)
    calls = {
        "convs": lambda impl, x, wk, wv, g: pointwise.convs(x, wk, wv, impl=impl),
        "convs of documents": lambda impl, x, wk, wv, g: pointwise.convs(x, wk, wv, position, impl=impl),
        "gate": lambda impl, x, wk, wv, g: (pointwise.gate(x, g, impl=impl),),
        "gates": lambda impl, x, wk, wv, g: gates(x, [20, 20, 17, 13], impl=impl),
    }

    def results(call: object, impl: str, kind: torch.dtype) -> list[Tensor]:
        leaves = [t.detach().clone().to(kind).requires_grad_() for t in given]
        made = call(impl, *leaves)
        d_made = [randn(*y.shape, seed=50 + n, dtype=getattr(torch, dtype)).to(kind) for n, y in enumerate(made)]
        grads = torch.autograd.grad(made, leaves, d_made, allow_unused=True)
        return [*(y.detach() for y in made), *(g for g in grads if g is not None)]

    with emulated(arch):
        found = {
            name: max(map(rms, results(call, "triton", kind), results(call, "dense", torch.float64)))
            for name, call in calls.items()
        }
        with torch.no_grad():
            x, wk, wv, _ = given
            made = pointwise.convs(x, wk, wv, None, history, impl="triton")
            exact = pointwise.convs(x.double(), wk.double(), wv.double(), None, history.double(), impl="dense")
            found["convs with a history"] = max(map(rms, made, exact))
    return found


def layer_errors(arch: int) -> dict[str, float]:
    """A training step of a layer, all of it in Triton kernels, and tokens decoded against rows of different length."""
    layer, exact = (make_layer(dtype=t, n_head=1, block_size=20) for t in (torch.float32, torch.float64))
    x = randn(1, 29, 16, dtype=torch.float32)
    with emulated(arch):
        found = run_layer(layer, x, torch.ones_like(x), impl="triton")
        expected = run_layer(exact, x.double(), torch.ones_like(x).double(), impl="dense")
        cache = layer.new_cache(2)
        mask = torch.tensor([[1] * 9, [0] * 4 + [1] * 5])
        tokens = torch.cat([x[:, :9], x[:, :9]])
        layer(tokens, cache=cache, attention_mask=mask, impl="triton")
        steps = [layer(torch.stack([x[0, 9 + n], x[0, 9 + n]])[:, None], cache=cache, impl="triton") for n in range(3)]
        alone = exact(x.double()[:, 4:12], impl="dense")
    made = {name: rms(value, expected[name]) for name, value in found.items()}
    made["decoded"] = rms(torch.cat(steps, 1)[0], exact(x.double(), impl="dense")[0, 9:12])
    made["decoded, shorter row"] = rms(torch.cat(steps, 1)[1], alone[0, 5:])
    return made
