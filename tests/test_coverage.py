"""docs/coverage.md says where everything of the paper is: no pointer leads nowhere, numbers are the configurations'."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture(scope="module")
def coverage() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_coverage", DOCS / "make_coverage.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_pointer_leads_somewhere_and_every_number_is_the_papers(coverage: ModuleType) -> None:
    assert coverage.problems() == []


def test_the_page_is_what_the_program_writes(coverage: ModuleType) -> None:
    assert (DOCS / "coverage.md").read_text() == coverage.page(), "python docs/make_coverage.py writes it anew"


@pytest.mark.parametrize(
    "pointer, why",
    [
        ("src/hypermlp/ops/nothing.py", "there is no src"),
        ("src/hypermlp/cache.py:Cash", "defines no Cash"),
        ("theory:C.99", "no statement"),
        ("hypermlp tabel1", "no command"),
        ("hypermlp data prepair", "no command"),
        ("not here:", "a reason"),
    ],
)
def test_a_pointer_that_leads_nowhere_is_found(pointer: str, why: str, coverage: ModuleType) -> None:
    assert why in (coverage.problem(pointer) or "")


def test_a_number_that_differs_is_found(coverage: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = coverage.NUMBERS[0]._replace(paper=3)
    monkeypatch.setattr(coverage, "NUMBERS", [wrong])
    assert coverage.problems() == [f"{wrong.place}, {wrong.what}: 3 in the paper, 2 in {wrong.where}"]


def test_a_number_that_the_paper_rounds_may_differ_by_so_much(coverage: ModuleType) -> None:
    number = coverage.Number("section 3.b", "million parameters", 340, lambda: 347, "340m-15b", 0.025)
    assert number.is_equal
    assert not number._replace(here=lambda: 360).is_equal
    assert not number._replace(within=0).is_equal


def test_a_benchmark_that_is_left_out_is_found(coverage: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "SHOTS", {name: 0 for name in coverage.SHOTS if name != "PIQA"})
    monkeypatch.setattr(coverage, "NUMBERS", [])
    assert coverage.problems() == ["benchmarks of Table 2 differ: {'PIQA'}"]


def test_protocols_say_whether_they_were_run(coverage: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "ROOT", tmp_path)
    assert coverage.protocol("gates")[1] == "not here: the runs of protocol `gates`"
    (tmp_path / "results" / "gates").mkdir(parents=True)
    assert coverage.protocol("gates")[1] == "results/gates"


def test_an_equation_that_is_left_out_is_found(coverage: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "EQUATIONS", coverage.EQUATIONS[:-1])
    assert any("equations are not 1 to 97" in line for line in coverage.problems())
