"""The Triton kernels executed as compiled for sm_80 and sm_89, on a CPU, equal the dense reference in values and gradients.

Triton's interpreter runs the Python of a kernel; here runs what Triton makes of it (hypermlp.testing.ptx), with checks of
bounds, alignment, uninitialised memory and races, which show in any order of warps. All cases run for sm_80, a core of them for
sm_89, and some for sm_90, whose products are another kind.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from compiled import in_child
from executed import (
    BOUND,
    Case,
    companion_errors,
    decode_error,
    kernels_of,
    layer_errors,
    operator_errors,
    operator_values,
    replayed_errors,
)
from interpreter import rms

# [batch entry, row begin, row end, slot begin, slot end]
PACKED = ((0, 0, 5, 0, 5), (0, 5, 6, 5, 6), (0, 6, 70, 6, 70), (1, 3, 20, 3, 20))  # the second entry has holes
WITH_PAST = ((0, 0, 3, 0, 70), (0, 3, 9, 70, 90), (1, 2, 9, 5, 12))  # rows are the last of their slots
SHARED = ((0, 0, 4, 0, 9), (0, 4, 9, 3, 70))  # two sequences begin with the same slots
TWO = {"B": 2, "H": 1}

CASES = {
    "bfloat16": Case(),
    "float16": Case(dtype="float16", options={"H": 1}),
    "float32": Case(T=40, L=40, dtype="float32", options={"H": 1}),
    "ReLU": Case(options={"kind": "relu", "H": 1}),
    "ReLU, float32, one head": Case(T=40, L=40, dtype="float32", options={"kind": "relu", "H": 1}),
    "norm before the ReLU": Case(options={"norm": "l2", "H": 1}),
    "no norm": Case(options={"norm": "none", "H": 1}),
    "no R1": Case(options={"op1": False, "H": 1}),
    "no R2": Case(options={"op2": False, "H": 1}),
    "no mixing": Case(options={"op1": False, "op2": False, "H": 1}),
    "no mixing, no norm, ReLU": Case(options={"op1": False, "op2": False, "norm": "none", "kind": "relu", "H": 1}),
    "no diagonal": Case(options={"diag": False, "H": 1}),
    "no shortcut": Case(options={"shortcut": False, "H": 1}),
    "low rank alone": Case(options={"diag": False, "shortcut": False, "H": 1}),
    "window": Case(L=20, options={"H": 1}),
    "window, float32": Case(L=13, T=40, dtype="float32", options={"H": 1}),
    "more slots than rows": Case(T=20, S=90, options={"H": 1}),
    "one row": Case(T=1, L=16, dtype="float32", options={"norm": "none", "B": 3}),
    "documents": Case(spans=PACKED, L=40, options=TWO),
    "documents, float32": Case(spans=PACKED, L=40, dtype="float32", options=TWO),
    "with a past": Case(T=9, S=90, L=60, spans=WITH_PAST, options=TWO),
    "shared slots": Case(T=9, S=70, L=60, spans=SHARED, options={"B": 1, "H": 1}),
    "cut": Case(T=66, cut=True),
    "cut, float32": Case(T=50, L=40, dtype="float32", cut=True),
    "cut, no R2, documents": Case(spans=PACKED, L=40, cut=True, options={"B": 2, "H": 1, "op2": False}),
    "widths of several pieces": Case(T=20, L=20, widths=(48, 300, 17), options={"H": 1}),
    "many pieces": Case(T=20, L=20, widths=(20, 520, 33), options={"H": 1}),
    "wide keys": Case(T=20, L=20, widths=(136, 64, 5), options={"H": 1}),
    "widths of several pieces, float32": Case(T=20, L=20, widths=(24, 140, 17), dtype="float32", options={"H": 1}),
}
STEPS = {
    "ragged": Case(1, S=70, L=60, spans=((0, 0, 1, 3, 53), (1, 0, 1, 0, 70)), options={"B": 2}),
    "rows in one": Case(3, S=70, L=60, spans=((0, 0, 1, 3, 53), (1, 2, 3, 0, 70)), options={"B": 2}),
    "around": Case(1, S=70, L=60, spans=((0, 0, 1, 60, 115), (1, 0, 1, 69, 139)), options={"B": 2}),
    "whole": Case(1, S=70, L=60, options={"B": 2}),
    "float32": Case(1, S=70, L=90, dtype="float32", options={"B": 2}),
    "float16": Case(1, S=70, L=90, dtype="float16", options={"B": 2}),
    "ReLU, no norm": Case(1, S=70, L=60, options={"kind": "relu", "norm": "none"}),
    "no R1": Case(1, S=70, L=60, options={"op1": False}),
    "no R2": Case(1, S=70, L=60, options={"op2": False}),
    "no mixing": Case(1, S=70, L=60, options={"op1": False, "op2": False}),
    "no shortcut": Case(1, S=70, L=60, options={"shortcut": False}),
    "wide": Case(1, S=70, L=60, widths=(48, 200, 17)),
}
CORE = ("bfloat16", "float16", "float32", "ReLU", "no R1", "no R2", "documents", "cut")
HOPPER = ("float32", "no R1", "cut", "widths of several pieces")
each_arch = pytest.mark.parametrize("arch", [80, 89])


Note = Callable[[str, object], None]  # pytest's record_property


def assert_small(found: dict[str, float], bound: float, note: Note, what: str) -> None:
    """Every error within the bound; the worst goes into the table that ends the run."""
    worst = max(found, key=lambda name: found[name])
    assert found[worst] <= bound, f"{worst}: {found[worst]:.2e} > {bound:.0e}"
    note("executed", f"{what:58} {len(found):2} values  worst {found[worst]:.1e}  bound {bound:.1e}")


@pytest.mark.parametrize("arch, name", [*((80, n) for n in CASES), *((89, n) for n in CORE), *((90, n) for n in HOPPER)])
def test_operator(name: str, arch: int, record_property: Note) -> None:
    case = CASES[name]
    found = in_child(operator_errors, case, arch)
    assert_small(found, BOUND[case.dtype], record_property, f"sm_{arch}, training: {name}")


@pytest.mark.parametrize("arch, name", [*((80, n) for n in STEPS), *((a, n) for a in (89, 90) for n in ("ragged", "no R1"))])
def test_decoding(name: str, arch: int, record_property: Note) -> None:
    case = STEPS[name]
    found = {"o": in_child(decode_error, case, arch)}
    assert_small(found, BOUND[case.dtype], record_property, f"sm_{arch}, decoding: {name}")


def test_decoding_in_many_parts() -> None:
    assert in_child(decode_error, Case(1, S=300, L=300), 80, 2) <= BOUND["bfloat16"]


@each_arch
def test_a_captured_step_follows_the_lengths_on_the_device(arch: int) -> None:
    assert max(in_child(replayed_errors, arch)) <= BOUND["bfloat16"]


@each_arch
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_convolutions_and_gates(dtype: str, arch: int, record_property: Note) -> None:
    found, bound = in_child(companion_errors, dtype, arch), 1e-6 if dtype == "float32" else 6e-3
    assert_small(found, bound, record_property, f"sm_{arch}, convolutions and gates: {dtype}")


@each_arch
def test_a_layer(arch: int, record_property: Note) -> None:
    assert_small(in_child(layer_errors, arch), BOUND["float32"], record_property, f"sm_{arch}, a whole layer: float32")


@pytest.mark.parametrize("arch, name", [(80, "window"), (89, "float32"), (80, "cut, float32")])
def test_the_same_bits_in_every_order(name: str, arch: int) -> None:
    """Sums have one order, whichever warp or program comes first: one after another, in reverse, at random."""
    first, *others = (in_child(operator_values, CASES[name], arch, order) for order in ("forward", "reverse", 3))
    for other in others:
        for key, value in first.items():
            assert torch.equal(value, other[key]), key


@pytest.mark.parametrize("name", ["more slots than rows", "float32"])
def test_the_interpreter_agrees(name: str) -> None:
    case = CASES[name]
    found = in_child(operator_values, case, 80, "together")
    from executed import randn, run  # in this process, which interprets

    problem = case.problem().to(getattr(torch, case.dtype))
    d_o = randn(*problem.q.shape[:2], *problem.v.shape[2:], seed=99)
    interpreted = run(problem, "triton", d_o)
    assert rms(found["o"], interpreted["o"]) <= BOUND[case.dtype]
    assert rms(found["d v"], interpreted["d v"]) <= BOUND[case.dtype]


def test_every_kernel_ran() -> None:
    ran = set().union(*(in_child(kernels_of, CASES[name], 80) for name in ("cut", "bfloat16")))
    assert ran == {
        "forward_u", "forward_w", "row_product", "row_sum", "backward_rows", "backward_dw", "backward_h", "backward_control",
        "backward_parameters", "backward_dz", "slot_product",
    }  # fmt: skip


@pytest.mark.sweep
@each_arch
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["glu", "relu"])
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize(
    "options", [{}, {"op1": False}, {"op2": False}, {"norm": "none"}, {"diag": False}, {"shortcut": False}]
)
@pytest.mark.parametrize("T, S, L", [(1, 1, 130), (63, 63, 130), (65, 65, 130), (129, 129, 130), (43, 43, 20), (25, 50, 20)])
def test_sweep_of_executed_kernels(
    T: int, S: int, L: int, options: dict, cut: bool, kind: str, dtype: str, arch: int, record_property: Note
) -> None:
    case = Case(T, S, L, dtype, cut=cut, options={"kind": kind, "H": 2, **options})
    assert_small(in_child(operator_errors, case, arch), BOUND[dtype], record_property, f"sm_{arch}, sweep: {case}")
