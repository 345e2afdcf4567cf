"""Studies on tasks in a document: which numbers of the records stand where."""

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hypermlp.cli import app
from hypermlp.report.markdown import fill
from hypermlp.report.page import build_page
from hypermlp.report.task_document import document_blocks, picture
from hypermlp.verdicts.folders import read_studies
from hypermlp.verdicts.judged import judge_folder
from made_up import mad, write


def run(mixer: str, task: str, scores: dict[str, float], trivial: float, seed: int, **fields: Any) -> dict[str, Any]:
    """A run with these accuracies by evaluation set; its score is that of the last set."""
    sets = {name: {"accuracy": score, "loss": 1.0, "rows": 4, "slices": {}} for name, score in scores.items()}
    last = list(scores.values())[-1]
    metrics = {"step": 400, "accuracy": last, "loss": 1.0, "validation_loss": 1.0, "sets": sets}
    below = {"accuracy": trivial, "sets": dict.fromkeys(scores, trivial)}
    worse = {"accuracy": 0.0, "sets": dict.fromkeys(scores, 0.0)}
    more = {
        "metrics": metrics,
        "baselines": {"worse": worse, "better": below},
        "measure": "accuracy",
        "kind": "tasks",
        **fields,
    }
    return mad(mixer, task, 100 * last, seed, setting="", **more)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ways = {way: {"sets": {"longer": value}} for way, value in {"hold": 0.1, "decay": 0.2, "fresh": 0.3}.items()}
    plan = {"study": "tasks", "width": 64, "depth": 2, "batch": 8, "steps": {"x": 400}}
    parity = [run("S-p", "parity", {"as trained": 0.9, "longer": 0.5 + seed / 10}, 0.5, seed) for seed in (0, 1)]
    parity.append(run("hyperglu", "parity", {"as trained": 1.0, "longer": 0.75}, 0.5, 0, ways=ways))
    write(tmp_path / "parity", parity, {**plan, "task": "parity"})
    write(tmp_path / "mqar", [run("S-p", "mqar", {"4": 0.2, "8": 0.4, "16": 0.6}, 0.01, 0)], {**plan, "task": "mqar"})
    return tmp_path


def test_means_over_seeds_trivial_answers_and_ways(folder: Path) -> None:
    blocks = document_blocks(read_studies(folder))
    assert blocks["scores"].splitlines() == [
        "| mixer | MQAR | Parity: as trained | Parity: longer |",
        "| --- | ---: | ---: | ---: |",
        "| S-p | 60.0 | 90.0 | 55.0 |",
        "| G-cg-q-12o (HyperGLU) | – | 100.0 | 75.0 |",
        "| *best trivial answer* | 1.0 | 50.0 | 50.0 |",
    ]
    assert blocks["beyond"].splitlines()[2:] == ["| Parity: longer | G-cg-q-12o (HyperGLU) | 75.0 | 10.0 | 20.0 | 30.0 |"]
    assert blocks["rates"].splitlines()[-1] == "| G-cg-q-12o (HyperGLU) | – | 0.001 |"


def test_copying_is_shown_by_length(tmp_path: Path) -> None:
    runs = [run("S-p", "copy", {"16 letters": 0.5, "32 letters": 0.0}, 0.0, seed) for seed in (0, 1)]
    runs[1]["metrics"]["sets"]["32 letters"]["loss"] = 4.0
    write(tmp_path, runs, {"study": "tasks", "task": "copy", "width": 64, "depth": 2})
    assert document_blocks(read_studies(tmp_path))["losses"].splitlines() == [
        "| mixer | Copy: 16 letters | Copy: 32 letters |",
        "| --- | ---: | ---: |",
        "| S-p | 1.00 | 2.50 |",
    ]


def test_the_command_shows_the_scores_and_writes_the_page(folder: Path) -> None:
    done = CliRunner().invoke(app, ["study", "report", str(folder)])
    assert done.exit_code == 0, done.output
    assert "trivial baselines: worse 0.0, better 50.0" in done.output
    assert "more lags, untrained" in (folder / "report.html").read_text()


def test_a_task_that_is_not_in_the_registry_is_reported(tmp_path: Path) -> None:
    """A user's own: its file need not be there any more."""
    write(tmp_path, [run("S-p", "own", {"[test]": 0.25}, 0.125, 0)], {"study": "tasks", "task": "own", "width": 64, "depth": 2})
    done = CliRunner().invoke(app, ["study", "report", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "25.0" in done.output
    assert "trivial baselines: worse 0.0, better 12.5" in done.output
    assert "[test]" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("task", ["own", "forecast"])
def test_settings_that_name_different_things_stand_on_one_page(task: str, tmp_path: Path) -> None:
    runs = [run("S-p", task, {"test": 0.5}, 0.1, 0) for _ in range(2)]
    for record, setting in zip(runs, ("a.csv,lookback=8", "b.csv,lookback=8,horizon=2"), strict=True):
        record |= {"setting": f"{task}/{setting}", "key": setting}
    write(tmp_path, runs, {"study": "tasks", "task": task, "width": 64, "depth": 2})
    text = build_page(judge_folder(tmp_path))
    assert "a.csv" in text
    assert "b.csv" in text


def test_a_measure_other_than_accuracy_has_its_curve_and_each_slice_once(tmp_path: Path) -> None:
    """Forecasts: names of channels stand apart, too."""
    names = [f"airport {i} wind_speed" for i in range(12)]
    record = run(
        "S-p", "forecast", {"test": 0.5}, 0.1, 0, measure="mse", curve=[{"step": 5, "mse": 0.75}, {"step": 9, "mse": 0.25}]
    )
    part = {"mse": 0.5, "mae": 0.6, "rows": 4}
    record["metrics"]["sets"]["test"] = {**part, "slices": {"channel": dict.fromkeys(names, part)}}
    record["metrics"]["mse"] = record["baselines"]["better"]["mse"] = record["baselines"]["worse"]["mse"] = 0.5
    write(tmp_path, [record], {"study": "tasks", "task": "forecast", "width": 64, "depth": 2})
    text = build_page(judge_folder(tmp_path))
    assert re.findall(r"<figcaption>(.*?)</figcaption>", text) == [
        "test: mse by channel",
        "test: mae by channel",
        "Forecast (one seed)",
    ]
    assert "Mse on the validation set" in text
    assert len(re.findall(r"<text [^>]*>airport", text)) == 2 * 2


def test_the_picture_has_every_run(folder: Path) -> None:
    mqar, parity = picture(read_studies(folder)).axes
    assert [len(line.get_xdata()) for line in mqar.lines] == [1, 2]  # the run, and the line of the trivial answer
    assert [len(line.get_xdata()) for line in parity.lines] == [3, 2, 3, 2]
    assert [label.get_text() for label in parity.get_yticklabels()] == ["S-p", "HyperGLU"]


def test_blocks_are_written_between_their_marks() -> None:
    text = "a\n<!-- one -->\n\nold\n\n<!-- end -->\nb\n<!-- two --><!-- end -->"
    assert fill(text, {"one": "1", "two": "2"}) == "a\n<!-- one -->\n\n1\n\n<!-- end -->\nb\n<!-- two -->\n\n2\n\n<!-- end -->"
    with pytest.raises(KeyError, match="two"):
        fill(text, {"one": "1"})
