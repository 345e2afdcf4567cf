"""Every statement holds on fresh instances, every control breaks it, every counterexample refutes the printed form."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hypermlp.theory import STATEMENTS, Instance, numbered, run, select
from hypermlp.theory.appendix_i import aggregate
from hypermlp.theory.numbered import NUMBERED
from hypermlp.theory.registry import FAILS, HOLDS, LISTED, NOT_RUN, PROOF_ONLY, TOOTHLESS, errors, listed
from hypermlp.theory.search import climb, on_sphere
from hypermlp.theory.setting import (
    activations,
    atoms,
    element,
    formula,
    heads,
    hidden,
    measured_atoms,
    measured_mixing,
    own_context,
    read,
)

EXAMPLES = ["example 1", "example 2", "example 3"]
CHECKED = sorted(number for number, entry in STATEMENTS.items() if entry.check is not None)


PAPER = """
Theorem 2.1 (Heads (of any kind)). *Assume a scalar.* As Lemma C.1 says.

Proof sketch. See Lemma C.1, Prop. E.1 and Propositions G.3–G.4. \\square

Theorem 2.1 and Lemma C.1 are not numbered again here, nor is (Lemma C.2).

**Lemma C.1** (A gate). Nothing.

Definition D.8 (A kernel). J.

Takeaway. Theorem 2.1 belongs to nobody.

Example 1: half-planes (in \\mathbb{R}^2). Let d = 2.
"""


def test_numbered_statements_are_read_off_a_text() -> None:
    found = numbered.extract(PAPER)
    assert [(s.kind, s.number, s.title) for s in found] == [
        ("Theorem", "2.1", "Heads (of any kind)"),
        ("Lemma", "C.1", "A gate"),
        ("Definition", "D.8", "A kernel"),
        ("Example", "example 1", "half-planes (in \\mathbb{R}^2)"),
    ]
    assert [s.cites for s in found] == [("C.1", "E.1", "G.3", "G.4"), (), (), ()]


def test_every_number_of_the_paper_is_checked_or_says_why_not() -> None:
    assert len(NUMBERED) == 72
    assert all(other in NUMBERED for entry in NUMBERED.values() for other in entry.cites)
    unchecked = {}
    for number, entry in NUMBERED.items():
        found = select([number])
        assert {s.kind for s in found} == {entry.kind}, number
        if not any(s.check for s in found):
            assert all(s.says and s.unchecked in LISTED for s in found), number
            unchecked[number] = entry.kind
        assert entry.checkable or number in unchecked
    kinds = {"B.1": "Assumption", "C.4": "Assumption", "D.1": "Assumption"}
    assert unchecked == {**kinds, "D.8": "Definition", "E.3": "Definition", "E.5": "Remark"}
    parts = {s.number.partition(" (")[0] for s in select([])}
    assert parts == set(NUMBERED), "an entry that the paper does not number"


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
    proofs = [entry for entry in select([]) if entry.unchecked == PROOF_ONLY]
    assert {entry.number for entry in proofs} == {"C.9 (ii)", "D.3 (ii)", "D.7 (ii)"}
    assert all(run(entry).verdict == entry.unchecked for entry in select([]) if entry.check is None)
    with pytest.raises(ValueError, match="unchecked must be one of"):
        listed("Z.1", "Remark", "", says="", unchecked="too hard")


@pytest.mark.parametrize("number", ["D.2", "D.3", "D.4", "D.5", "D.6", "D.7", "D.11", "E.6", "E.8", "E.9", "E.10"])
def test_bounds_are_nearly_reached(number: str) -> None:
    found = run(STATEMENTS[number], instances=2)
    assert 1 - 1e-9 < found.slack < 4
    assert found.slack < 1.3 or number in ("D.3", "D.6"), "no longer near equality"


def test_ascent_finds_the_largest_singular_value() -> None:
    case = Instance(1)
    M = case.normal(6, 6)
    x = climb(lambda y: (y @ M).norm(), case.normal(6), lambda y: on_sphere(y, 2.0), steps=200)
    assert float((x @ M).norm()) == pytest.approx(2 * float(torch.linalg.matrix_norm(M, 2)), rel=1e-3)


def test_mixing_lowers_the_number_of_active_noise_slots() -> None:
    """What the paper says after I.3, with p = −1 and B zero outside two slots."""
    case = Instance(3)
    plain, mixed = case.layer(n_head=1, use_op1=False, use_op2=False), case.layer(n_head=1, use_op2=False)
    aggregate(mixed, plain)
    x, noise = case.normal(1, 6), case.normal(200, 12, 6)
    counts = [(hidden(layer, x.expand(200, -1), noise)[:, 0] > 0).double().sum(1).mean() for layer in (plain, mixed)]
    assert float(counts[0]) == pytest.approx(6, abs=0.5)
    assert float(counts[1]) == pytest.approx(1, abs=0.2)


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
    case = Instance(5)
    options = {"use_op1": op1, "use_op2": op2, "use_qk_gate": gates, "use_vo_gate": gates, "attn_kind": kind}
    layer, X = case.layer(**options), case.normal(9, 6)
    out = own_context(layer, X)
    torch.testing.assert_close(formula(layer, X[0], X), out, rtol=0, atol=1e-12)
    torch.testing.assert_close(read(layer, X[:1], X)[0], out, rtol=0, atol=1e-12)
    found = heads(layer, X[0], X)
    torch.testing.assert_close(hidden(layer, X[:1], X)[0, 0], found[0].alpha, rtol=0, atol=1e-12)
    weights = torch.stack([head.strength * head.alpha.relu() / head.rho for head in found])
    torch.testing.assert_close(activations(layer, X[:1], X)[0], weights, rtol=0, atol=1e-12)


def test_probes_give_the_equations() -> None:
    """R1, R2, atoms and Ψ read off the operator are those of the equations."""
    case = Instance(6)
    layer, X = case.layer(), case.normal(7, 6)
    for g, head in enumerate(heads(layer, X[0], X)):
        torch.testing.assert_close(measured_mixing(layer, 1, X[0], 7, g), head.R1, rtol=0, atol=1e-12)
        torch.testing.assert_close(measured_mixing(layer, 2, X[0], 7, g), head.R2, rtol=0, atol=1e-12)
        torch.testing.assert_close(measured_atoms(layer, X[0], X, g), atoms(head), rtol=0, atol=1e-12)
    one, u, v = case.layer(n_head=1), case.normal(4, 6), case.normal(4, 6)
    head = heads(one, X[0], X)[0]
    expected = torch.relu(u @ (head.x @ head.L1))[:, None] * (v @ head.L2.T)
    torch.testing.assert_close(element(one, X[0].expand(4, -1), u, v), expected, rtol=0, atol=1e-12)
