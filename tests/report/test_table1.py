"""The grid of Table 1."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from hypermlp.paper import tables as paper
from hypermlp.report.table1 import Row, columns, grid, legend, show_table1, table1_markdown, thresholds
from hypermlp.report.terminal import new_console
from hypermlp.verdicts.estimates import signed
from hypermlp.verdicts.folders import read_studies
from hypermlp.verdicts.results import AVERAGE, LOSS, Results
from made_up import language, mad, write


def study_of(folder: Path, *halves: list[dict[str, object]]) -> Results:
    for name, records in zip(("mad", "language"), halves, strict=False):
        write(folder / name, records)
    (study,) = read_studies(folder)
    return study


def cells(row: Row) -> dict[str | float, tuple[str, str, float | None]]:
    return {cell.column.key: (cell.text, cell.paper_text, cell.shift) for cell in row.cells}


def test_measured_numbers_beside_the_papers(tmp_path: Path) -> None:
    mads = [mad("S-pc", task, value + seed, seed) for task in paper.TASKS for seed, value in ((0, 60), (1, 62), (2, 64))]
    mads += [mad("S-p", task, 50, seed) for task in paper.TASKS for seed in range(4)]
    study = study_of(tmp_path, mads, [language("S-pc", 3.0, seed) for seed in range(3)])
    rival, row = grid(study)
    found = cells(row)
    assert found["compression"] == ("63.0 [60.0–66.0]", "51.6", None)  # gains are over S-pc itself
    assert found[AVERAGE] == ("63.0 [60.0–66.0]", "80.2", None)
    assert found[LOSS] == ("3.000", "3.047", None)
    assert row.parameters_text == "80.0k"
    shift = 50 - 63 - (44.69 - 51.62)  # gains, not levels: 13 points behind S-pc, where the paper has 6.9
    assert cells(rival)["compression"] == ("50.0 ± 0.0", "44.7", pytest.approx(shift))
    assert legend(study) == (
        "Accuracy in percent: mean over 3 or 4 seeds, with the range where there are two or three, with half of the 95 % "
        "confidence interval (±) where there are more. Loss in nats: mean over 3 seeds, with the range where there are two or "
        "three."
    )


def test_gains_at_the_ceiling_are_not_compared(tmp_path: Path) -> None:
    tasks = ("memorization", "noisy-recall")
    study = study_of(tmp_path, [mad(label, task, 100) for label in ("S-pc", "R-cg-q") for task in tasks])
    assert [cell.shift for row in grid(study) for cell in row.cells] == [None] * 6


def test_missing_cells(tmp_path: Path) -> None:
    records = [mad("S", "compression", 50, 0), mad("S", "memorization", 50, 0), mad("gla", "compression", 40, 0)]
    records += [mad("S", "compression", 50, 0, setting="vocab_size=32")]
    ours, rival = grid(study_of(tmp_path, records))
    assert cells(ours)[AVERAGE] == ("50.0", "32.2", None)  # the paper's of the same tasks
    assert cells(rival) == {key: ("–", "–", None) for key in ("compression", "memorization", AVERAGE)}
    assert [cell.finished for cell in rival.cells] == ["1 of 2 runs", "", ""]
    assert [column.title for column in columns(study_of(tmp_path))][-1] == "MAD average of 2"


def test_rows_outside_the_budget_say_on_which_side(tmp_path: Path) -> None:
    records = [mad("S", "compression", 1), mad("R-12!", "compression", 1, parameters=100_000)]
    records += [mad("G-12!", "compression", 1, parameters=60_000)]
    plain, over, under = sorted(grid(study_of(tmp_path, records)), key=lambda row: "SRG".index(row.mixer[0]))
    assert (plain.outside, over.outside, under.outside) == ("", "above the budget", "below the budget")
    assert over.parameters_text == "100.0k (×1.25)"


def test_thresholds_follow_the_papers_rule(tmp_path: Path) -> None:
    ours = study_of(tmp_path / "paper", [language(label, row.loss) for label, row in paper.TABLE1.items()])
    assert thresholds(ours) == paper.THRESHOLDS
    assert all(column.comparable for column in columns(ours))
    other = study_of(tmp_path / "other", [language("S", 1.62), language("S-p", 1.41)])
    assert thresholds(other) == (1.8, 1.7, 1.6, 1.5)
    rivals = study_of(tmp_path / "rivals", [language("S", 1.62), language("S-p", 1.41), language("mamba", 1.0)])
    assert thresholds(rivals) == thresholds(other), "levels that the table's labels reach"
    assert thresholds(study_of(tmp_path / "alone", [language("mamba", 1.0)])) == (1.3, 1.2, 1.1, 1.0)
    assert [cell.shift for row in grid(other) for cell in row.cells] == [None] * 10  # another scale
    # Losses from 0.5 above the end in steps of 0.1: S-p is at 1.91, 1.81, 1.71, 1.61, 1.51, 1.41.
    reached = [cell.measured and cell.measured.mean for cell in grid(other)[1].cells]
    assert reached[1:] == [3, 4, 5, 6]
    assert [cell.text for cell in grid(other)[0].cells][-1] == "–"  # S stays above 1.5


def test_signs() -> None:
    assert [signed(value, 1) for value in (0.04, -0.04, 1.26, -1.26)] == ["0.0", "0.0", "+1.3", "−1.3"]


def test_markdown(tmp_path: Path) -> None:
    records = [mad("G-cg-q-12o", "compression", 50), mad("gla", "compression", 40)]
    assert table1_markdown(study_of(tmp_path, records)) == "\n".join(
        [
            "| mixer | parameters | Compression |",
            "| --- | ---: | ---: |",
            "| G-cg-q-12o (HyperGLU) | 80.0k | 50.0 (49.6) |",
            "| gla (Gated linear attention) | 80.0k | 40.0 |",
        ]
    )


@pytest.mark.parametrize("width", [50, 80, 110])
def test_terminal(tmp_path: Path, width: int) -> None:
    study = study_of(tmp_path, [mad("S-pc", "compression", 60)], [language("S-pc", 3.1), language("gla", 3.2)])
    console = new_console(width=width, file=io.StringIO())
    show_table1(console, study)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    for text in (
        "60.0",
        "(51.6)",
        "3.100",
        "Gated linear attention",
        "one seed, no range or interval",
        "on another scale than the paper's",
    ):
        assert text in shown
    assert "(3.047)" not in shown, "the paper's loss is of another scale, as the line below the table says"
    assert "…" not in shown
