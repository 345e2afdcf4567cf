"""Seeded faults of the operator are noticed as docs/theory.md says, and no check is blind to them without a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hypermlp.ops import dispatch
from hypermlp.theory import STATEMENTS, Instance
from hypermlp.theory.faults import FAULTS, JUNK, notices, seeded
from hypermlp.theory.setting import own_context

DOCUMENT = (Path(__file__).parents[2] / "docs" / "theory.md").read_text()
CHECKED = [number for number, entry in STATEMENTS.items() if entry.check is not None]
CHEAP = ["2.1", "2.4", "2.6 (iv)", "B.2", "C.6", "C.8", "D.5", "E.2", "F.1", "H.2"]  # together they notice every fault


def documented() -> dict[str, list[str]]:
    """Fault → statements that notice it, from the document's table."""
    section = DOCUMENT.split("## Which faults are noticed")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][2:]
    found = {name: numbers.split(", ") for name, _, numbers in rows}
    assert all(len(found[name]) == int(count) for name, count, _ in rows)
    return found


NOTICED = documented()


def faults_of(number: str) -> list[str]:
    return [name for name, numbers in NOTICED.items() if number in numbers]


def test_every_fault_is_in_the_table_and_noticed() -> None:
    assert list(NOTICED) == list(FAULTS)
    assert len(FAULTS) >= 20
    assert all(NOTICED.values())
    assert {number for numbers in NOTICED.values() for number in numbers} <= set(CHECKED)


@pytest.mark.parametrize("name", list(FAULTS))
def test_a_fault_changes_the_layer(name: str) -> None:
    case = Instance(2)
    layer, X = case.layer(attn_kind="glu" if "scale" in name else "relu"), case.normal(9, 6)
    right, rows = own_context(layer, X), layer(X.flip(0)[None], impl="chunked")
    with seeded(name):
        wrong, wrong_rows = own_context(layer, X), layer(X.flip(0)[None], impl="chunked")
    gap = max(float((wrong - right).abs().max() / right.abs().max()), float((wrong_rows - rows).abs().max()))
    assert gap > 1e-4
    torch.testing.assert_close(own_context(layer, X), right)  # and is gone afterwards
    assert dispatch.compute.__module__ == "hypermlp.ops.dispatch"


@pytest.mark.parametrize("number", CHECKED)
def test_no_check_is_blind_without_a_reason(number: str) -> None:
    entry, known = STATEMENTS[number], faults_of(number)
    assert bool(entry.blind) == (set(known) <= {JUNK}), "a reason is given where nothing but junk is noticed, and only there"
    if known and not entry.needs:  # what needs a package is run once, in test_theory.py
        assert notices(entry, known[CHECKED.index(number) % len(known)])


@pytest.mark.parametrize("number", CHEAP)
def test_rows_of_cheap_statements_are_as_documented(number: str) -> None:
    assert [name for name in FAULTS if notices(STATEMENTS[number], name)] == faults_of(number)


def test_cheap_statements_notice_every_fault() -> None:
    assert {name for number in CHEAP for name in faults_of(number)} == set(FAULTS)
