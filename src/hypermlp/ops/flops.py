"""What torch's FlopCounterMode counts for our operators: two for each multiply-add, only slots that exist.

torch.utils.flop_counter imports a compiler, so it is not imported here: formulas are registered when somebody else imports it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hypermlp.ops.registered import SPEC_TYPES, Call, Inputs

COUNTER = "torch.utils.flop_counter"
ARGUMENTS = len(Inputs._fields) + len(SPEC_TYPES) + 1  # of a call, flattened
FORMULAS: dict[str, Callable[..., int]] = {}


def formula(*names: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    def keep(count: Callable[..., int]) -> Callable[..., int]:
        FORMULAS.update(dict.fromkeys(names, count))
        return count

    return keep


def pairs(call: Call) -> int:
    """Pairs of a row and a slot that it sees, over the batch; without values in the spans, as if each row were one sequence."""
    q, k, spans, window = call.inputs.q, call.inputs.k, call.inputs.spans, call.spec.block_size
    sizes = [(q.shape[1], k.shape[1])] * q.shape[0]
    if spans is not None and not spans.is_meta and type(spans) is Tensor:
        sizes = [(r1 - r0, c1 - c0) for _, r0, r1, c0, c1 in spans.tolist()]
    if not call.spec.causal:
        return sum(rows * slots for rows, slots in sizes)
    return sum(sum(min(slots - row, window) for row in range(rows)) for rows, slots in sizes)


def widths(call: Call) -> tuple[int, int, int, int]:
    """Multiply-adds for each pair: scores, R1, R2, readout."""
    i = call.inputs
    r1 = 0 if i.left1 is None else 2 * i.q.shape[2] * i.left1.shape[2]
    r2 = 0 if i.left2 is None else 2 * i.v.shape[2] * i.left2.shape[2]
    return i.q.shape[2] * i.q.shape[3], r1, r2, i.v.shape[2] * i.v.shape[3]


@formula("native", "chunked", "triton")
def mix(*arguments: Any, **_: Any) -> int:
    call = Call.from_flat(arguments)
    return 2 * pairs(call) * sum(widths(call))


@formula("native_backward", "chunked_backward", "triton_backward")
def mix_backward(*arguments: Any, **_: Any) -> int:
    """Two products for each of the forward's, and all but the readout once more; the call comes after what was saved."""
    call = Call.from_flat(arguments[-ARGUMENTS:])
    scores, r1, r2, readout = widths(call)
    return 2 * pairs(call) * (3 * (scores + r1 + r2) + 2 * readout)


@formula("convs")
def convs(x: Tensor, wk: Tensor, wv: Tensor, *_: Any, **__: Any) -> int:
    return 2 * x.shape[0] * x.shape[1] * (wk.numel() + wv.numel())


@formula("convs_backward")
def convs_backward(d_yk: Tensor, d_yv: Tensor, x: Tensor, wk: Tensor, wv: Tensor, *_: Any, **__: Any) -> int:
    return 2 * convs(x, wk, wv)


@formula("selective_scan")
def selective_scan(x: Tensor, delta: Tensor, A: Tensor, *_: Any, **__: Any) -> int:
    """For each state: decay and add, times B, times C."""
    return 6 * x.shape[0] * x.shape[1] * A.numel()


@formula("selective_scan_backward")
def selective_scan_backward(d_y: Tensor, d_last: Tensor, marks: Tensor, inputs: Sequence[Tensor], *_: Any, **__: Any) -> int:
    """Two products for each of the forward's, and the states once more."""
    return 3 * selective_scan(*inputs)


@formula("scan")
def scan(g: Tensor, *_: Any, **__: Any) -> int:
    return 2 * g.numel()


@formula("scan_backward")
def scan_backward(d_h: Tensor, *_: Any, **__: Any) -> int:
    return 4 * d_h.numel()


def register_formulas(counter: ModuleType) -> None:
    for name, count in FORMULAS.items():
        operator = getattr(torch.ops.hypermlp, name, None)
        if operator is not None and operator not in counter.flop_registry:
            counter.register_flop_formula(operator, get_raw=True)(count)


class ImportWatch(MetaPathFinder):
    """Registers the formulas when the counter is imported, and then stops watching."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                register_formulas(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def watch() -> None:
    """Have the counter know our operators, now or when it is imported."""
    if COUNTER in sys.modules:
        register_formulas(sys.modules[COUNTER])
    elif not any(isinstance(finder, ImportWatch) for finder in sys.meta_path):
        sys.meta_path.insert(0, ImportWatch())
