"""Recorded runs can be made again: the same job on the same machine gives the same bits, and a change is told."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hypermlp.cli import app
from hypermlp.studies.executors import LocalPool
from hypermlp.studies.language import language_study
from hypermlp.studies.mad import task_study
from hypermlp.studies.repeat import CHANGED, EQUAL, FAILED, ROUNDING, Repeated, choose_runs, conditions, read_runs, repeat
from hypermlp.studies.search import Search
from hypermlp.studies.study import Study
from hypermlp.studies.tasks import scaled_studies


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny run of each kind: one of MAD's with a search, one of a task's setting with changes, a language model."""
    out: Path = tmp_path_factory.mktemp("runs")
    search = Search(rates=(1e-3, 3e-3), rungs=(0.5, 1.0), widen=0)
    studies: dict[str, Study] = {
        "mad": task_study("clean", "quick", ["in-context-recall"], steps=4, width=16, examples=64, search=search),
        **scaled_studies(["copy"], "quick", steps=2, width=16),
        "language": language_study("quick"),
    }
    for name, study in studies.items():
        study.run(out / name, ["hyperglu"], executor=LocalPool(1))
    return out


def test_each_kind_of_run_gives_the_same_bits_again(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*.json*")}
    runs = list(read_runs(folder))
    assert {one.study.kind for one in runs} == {"mad", "tasks", "language"}
    assert all("phase" not in one.record or one.record["phase"] == "final" for one in runs)
    again = repeat(runs, executor=LocalPool(1))
    assert [one.outcome for one in again] == [EQUAL] * len(runs)
    assert [one.first for one in again] == [0.0] * len(runs)
    assert {path: path.read_bytes() for path in folder.rglob("*.json*")} == before
    now = conditions()
    assert all(not one.causes(now) for one in again)


def test_a_run_that_is_not_the_same_is_told_from_one_that_is_rounded(folder: Path) -> None:
    run = next(iter(read_runs(folder / "mad")))
    first, *later = run.record["curve"]

    def outcome(**changed: float) -> str:
        """Of the run, had it given this at its first evaluation."""
        record = {**run.record, "curve": [{**first, **changed}, *later]}
        return Repeated(replace(run, record=record), run.record).outcome

    assert outcome() == EQUAL
    assert outcome(loss=math.nextafter(first["loss"], 2)) == ROUNDING
    assert outcome(loss=first["loss"] * 1.0009) == ROUNDING
    assert outcome(loss=first["loss"] * 1.0011) == CHANGED
    scores = {**run.record, "metrics": {**run.record["metrics"], "accuracy": 0.123}}
    assert Repeated(replace(run, record=scores), run.record).outcome == ROUNDING, "it may have grown from the last bit"
    assert Repeated(replace(run, record={**run.record, "curve": [first]}), run.record).outcome == ROUNDING
    assert Repeated(run, {**run.record, "error": "it broke"}).outcome == FAILED
    older = Repeated(replace(run, start={**run.start, "commit": "abc", "kernel": None}), run.record)
    assert older.causes(conditions()).keys() == {"commit", "kernel"}


def test_the_command_tells_what_changed(folder: Path, tmp_path: Path) -> None:
    lines = (folder / "language" / "runs.jsonl").read_text().splitlines()
    record = json.loads(lines[0])
    record["curve"][0]["loss"] *= 2
    (tmp_path / "runs.jsonl").write_text(json.dumps(record) + "\n")
    plan = json.loads((folder / "language" / "plan.json").read_text())
    plan["starts"][0]["torch"] = "1.0"
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    done = CliRunner().invoke(app, ["study", "repeat", str(tmp_path), "--json"])
    assert done.exit_code == 1, done.output
    (table,) = json.loads(done.stdout)
    assert [row["outcome"] for row in table["rows"]] == ["changed"]
    assert "torch 1.0, now" in done.stderr
    done = CliRunner().invoke(app, ["study", "repeat", str(tmp_path / "nothing")])
    assert done.exit_code == 1
    assert "no finished runs that can be made again" in str(done.exception)


def test_runs_are_taken_from_the_whole_folder(folder: Path) -> None:
    runs = list(read_runs(folder))
    assert choose_runs(runs * 4, 3) == [(runs * 4)[0], (runs * 4)[len(runs) * 4 // 3], (runs * 4)[len(runs) * 8 // 3]]
    assert choose_runs(runs, 100) == runs
