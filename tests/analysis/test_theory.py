"""Every statement holds on fresh instances, every control breaks it, every counterexample refutes the printed form."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hypermlp.analysis.theory import STATEMENTS, Case, run, select
from hypermlp.analysis.theory.registry import FAILS, HOLDS, NOT_RUN, PROOF_ONLY, TOOTHLESS, errors
from hypermlp.analysis.theory.setting import activations, formula, heads, hidden, own_context, read

# What the paper numbers: statements, the remarks that claim something, examples.
PARTS = {
    "2": [1, 2, 3, 4, 5, 6],
    "B": [2],
    "C": [1, 2, 3, *range(5, 17)],
    "D": [2, 3, 4, 6, 7, 9, 10, 11],
    "E": [1, 2, 6, 7, 8],
    "F": [1, 3, 4, 5],
    "G": [1, 2, 3, 4, 5],
    "H": [1, 3, 4, 5, 6, 7, 8, 10, 11],
    "I": [1, 2, 3],
}
NUMBERED = [f"{part}.{n}" for part, numbers in PARTS.items() for n in numbers]
EXAMPLES = ["example 1", "example 2", "example 3"]
CHECKED = sorted(number for number, entry in STATEMENTS.items() if entry.check is not None)


def test_nothing_is_left_out() -> None:
    for number in [*NUMBERED, *EXAMPLES]:
        assert any(entry.check is not None for entry in select([number])), number


@pytest.mark.parametrize("number", CHECKED)
def test_statement_holds_and_its_control_does_not(number: str) -> None:
    entry = STATEMENTS[number]
    assert entry.says
    assert entry.control
    found = run(entry, instances=2)
    assert found.error <= entry.tolerance, "the statement fails"
    assert found.control > entry.tolerance, "the control passes"
    assert all(error > entry.tolerance for error in found.printed), "a counterexample is none"
    assert len(found.printed) == len(entry.printed)
    assert found.verdict == HOLDS


def test_what_cannot_be_computed_is_called_that() -> None:
    open_ones = [entry for entry in select([]) if entry.check is None]
    assert {entry.number for entry in open_ones} == {"C.9 (ii)", "D.3 (ii)", "D.7 (ii)"}
    assert all(run(entry).verdict == PROOF_ONLY for entry in open_ones)


def test_verdicts_can_fail() -> None:
    entry = STATEMENTS["C.1"]
    assert run(replace(entry, check=lambda case: 1.0)).verdict == FAILS
    assert run(replace(entry, check=lambda case: float("nan"))).verdict == FAILS
    assert run(replace(entry, check=lambda case: 0.0)).verdict == TOOTHLESS
    good = replace(entry, check=lambda case: float(case.broken))
    assert run(good).verdict == HOLDS
    weak = replace(STATEMENTS["C.12"].printed[0], check=lambda case: 0.0)
    assert run(replace(good, printed=(weak,))).verdict == TOOTHLESS


def test_a_missing_package_is_named_with_its_cure() -> None:
    found = run(replace(STATEMENTS["C.1"], needs="no_such_package"))
    assert found.verdict == NOT_RUN
    assert found.reason == "needs no_such_package: pip install no_such_package"


def test_instances_are_fresh_and_reproducible() -> None:
    entry = STATEMENTS["C.14"]
    assert entry.check is not None
    first, second = (list(errors(entry, entry.check, 4)) for _ in range(2))
    assert first == second
    assert len(set(first)) == 4


def test_selection() -> None:
    assert [entry.number for entry in select(["C.1"])] == ["C.1"]
    assert [entry.number for entry in select(["2.6"])] == ["2.6 (i)", "2.6 (ii)", "2.6 (iii)", "2.6 (iv)"]
    assert [entry.number for entry in select(["example"])] == EXAMPLES
    numbers = [entry.number for entry in select(["c"])]
    assert numbers[:2] == ["C.1", "C.2"]
    assert numbers[-1] == "C.16"
    with pytest.raises(ValueError, match=r"no statement 'Z.1'; known are 2\.1, 2\.2"):
        select(["Z.1"])


@pytest.mark.parametrize("kind", ["relu", "glu"])
@pytest.mark.parametrize("op1, op2, gates", [(True, True, True), (False, True, False), (True, False, True)])
def test_equations_give_the_real_layer(kind: str, op1: bool, op2: bool, gates: bool) -> None:
    case = Case(5)
    options = {"use_op1": op1, "use_op2": op2, "use_qk_gate": gates, "use_vo_gate": gates, "attn_kind": kind}
    layer, X = case.layer(**options), case.normal(9, 6)
    out = own_context(layer, X)
    torch.testing.assert_close(formula(layer, X[0], X), out, rtol=0, atol=1e-12)
    torch.testing.assert_close(read(layer, X[:1], X)[0], out, rtol=0, atol=1e-12)
    found = heads(layer, X[0], X)
    torch.testing.assert_close(hidden(layer, X[:1], X)[0, 0], found[0].alpha, rtol=0, atol=1e-12)
    weights = torch.stack([head.strength * head.alpha.relu() / head.rho for head in found])
    torch.testing.assert_close(activations(layer, X[:1], X)[0], weights, rtol=0, atol=1e-12)
