"""From a name and options to studies: one way for running, costing and checking."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hypermlp.checks import choose_from
from hypermlp.cli import app, watch
from hypermlp.cli.console import open_console
from hypermlp.mixers.groups import CORE
from hypermlp.studies import catalogue
from hypermlp.studies.catalogue import StudyOptions, new_protocol, plan_study, scales_of, study_names
from hypermlp.studies.cost import measure_costs
from hypermlp.studies.demo import MIXERS, demo_study
from hypermlp.studies.executors import LocalPool
from hypermlp.studies.folder import Folder
from hypermlp.tasks import TASKS

SMALL = ("steps=2", "batch=8", "width=16", "examples=16")


def test_every_listed_name_is_a_study_at_its_scales() -> None:
    for name in study_names():
        for scale in scales_of(name) or (None,):
            if scale == "published" and name in TASKS and TASKS[name].family != "mad" and "published" not in TASKS[name].scales:
                continue
            if (name, scale) in (("table1", "paper"), ("all", "published"), ("copying", "published")) or (
                scale == "published" and name in ("copying-offsets", "pixels")
            ):
                continue  # refused with a reason: no corpus, no published sizes
            plan = plan_study(name, StudyOptions(scale=scale))
            assert plan.studies, name
            assert plan.mixers
            assert plan.quick == (scale == "quick")


def test_names_have_their_studies() -> None:
    assert plan_study("demo").studies == {"": demo_study()}
    assert plan_study("demo").mixers == MIXERS
    assert list(plan_study("table1").studies) == ["mad", "language"]
    assert plan_study("table1").mixers == CORE
    assert list(plan_study("table1", StudyOptions(tasks="language")).studies) == ["language"]
    assert list(plan_study("mqar,copy").studies) == ["mqar", "copy"]
    assert list(plan_study("copying", StudyOptions(tasks="copy,needle")).studies) == ["copy", "needle"]
    registered = plan_study("table1.toml")
    assert registered.protocol is not None
    assert registered.seeds == registered.protocol.seeds


def test_a_search_is_made_where_it_is_asked_for() -> None:
    for name in ("mad", "mqar", "mad,mqar", "table1"):
        searched = plan_study(name, StudyOptions(search=True, scale="quick")).studies.values()
        assert all(study.search is not None for study in searched), name
        plain = plan_study(name, StudyOptions(search=False, scale="quick")).studies.values()
        assert all(study.search is None for study in plain), name
    (study,) = plan_study("mad", StudyOptions(search=True, changes=["lr=1e-2,1e-3"])).studies.values()
    assert study.search is not None
    assert study.search.rates == (1e-3, 1e-2)


@pytest.mark.parametrize("name, changes", [("mad", SMALL), ("mad", (*SMALL, "lr=1e-3,3e-3")), ("mqar", SMALL[:3])])
def test_a_cost_counts_the_runs_that_are_made(name: str, changes: tuple[str, ...], tmp_path: Path) -> None:
    tasks = "memorization" if name == "mad" else None
    plan = plan_study(name, StudyOptions(scale="quick", mixers="S,S-p", tasks=tasks, seeds=3, search=False, changes=changes))
    for part, study in plan.studies.items():
        with Folder(tmp_path / (part or name)) as folder:
            planned = len(study.plan_jobs(folder, plan.mixers, plan.seeds))
        costs = list(measure_costs(study, plan.mixers, plan.seeds))
        assert sum(cost.runs for cost in costs) == planned > 0
    registered = plan_study("compression.toml")
    assert plan_study("labels").protocol == plan_study("labels.toml").protocol is not None
    assert plan_study("compression").protocol is None  # a task has the name
    assert registered.studies["mad"].search is not None


@pytest.mark.parametrize(
    "name, choice, message",
    [
        ("mqarr", StudyOptions(), r"there is no study 'mqarr'; did you mean 'mqar'.*\? hypermlp study list shows all$"),
        ("lables", StudyOptions(), "did you mean 'labels'"),
        ("xyzzy", StudyOptions(), "there is no study 'xyzzy'; hypermlp study list shows all$"),
        ("mqar", StudyOptions(scale="lapto"), "did you mean 'laptop'"),
        ("mad", StudyOptions(tasks="memorisation"), "did you mean 'memorization'"),
        ("mad", StudyOptions(changes=["step=3"]), "mad has no field 'step'.* did you mean 'steps'"),
        ("mqar", StudyOptions(changes=["nois=true"]), "settings of mqar have .*did you mean 'noise'"),
        ("mad", StudyOptions(changes=["init=papr"]), "did you mean 'paper'"),
        ("demo", StudyOptions(mixers="S"), "demo takes no --mixers"),
        ("table1.toml", StudyOptions(seeds=3), "registered study is what its file says"),
        ("tabel1.toml", StudyOptions(), "there is no study 'tabel1.toml'; did you mean 'table1.toml'"),
        ("table1", StudyOptions(tasks="mda"), "did you mean 'mad'"),
    ],
)
def test_mistakes_are_refused_with_what_was_meant(name: str, choice: StudyOptions, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_study(name, choice)


def test_the_nearest_word_is_offered_and_a_far_one_is_not() -> None:
    with pytest.raises(ValueError, match=r"did you mean 'softmax'\?$"):
        choose_from("mixer", "Sofmax", ("softmax", "gla"))
    with pytest.raises(ValueError, match=r"must be one of 'softmax', 'gla'$"):
        choose_from("mixer", "zzz", ("softmax", "gla"))


def test_a_quick_study_ranks_nobody_and_names_who_misses_the_budget(tmp_path: Path) -> None:
    choice = ["--scale", "quick", "--mixers", "S-p,R-12!", "--tasks", "memorization", "--workers", "1"]
    done = CliRunner().invoke(app, ["study", "run", "mad", *SMALL, *choice, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "too short to rank mixers" in done.output
    assert "hypermlp study run mad --scale laptop --seeds 4" in done.output
    told = " ".join(done.output.split())
    assert "Not at the mixer's budget of parameters: R-12!" in told
    assert re.search(r"So whole models differ in size, as parts of the largest: S-p 0\.\d\d;", told)
    equal = [{"mixer": mixer, "parameters": 100, "setting": "one", "budget": "why"} for mixer in ("S-p", "G-cg-q-12o")]
    watch.show_budgets(console := open_console(record=True, width=200), equal)
    assert "Whole models have equal sizes all the same" in console.export_text()
    assert "inconclusive" not in done.output
    assert "too few steps to rank them" in (tmp_path / "report.html").read_text()
    again = CliRunner().invoke(app, ["study", "run", "mad", *SMALL, *choice, "--out", str(tmp_path), "--json"])
    assert "finished before" in again.stderr
    (table,) = json.loads(again.stdout)
    assert {row["mixer"] for row in table["rows"]} >= {"S-p"}


def test_the_demo_has_verdicts_at_its_own_scale_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told: list[Path] = []
    monkeypatch.setattr(watch, "run_study", lambda *arguments, **options: [])
    monkeypatch.setattr(watch, "leave_page", lambda console, folder: told.append(folder))
    monkeypatch.setattr(watch, "write_report", lambda folder: folder / "report.html")
    for quick in (["--quick"], []):
        done = CliRunner().invoke(app, ["demo", *quick, "--out", str(tmp_path / str(len(quick)))])
        assert done.exit_code == 0, done.output
    assert told == [tmp_path / "0"]


def test_a_new_protocol_is_checked_and_a_mistake_is_named_with_file_and_section(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    made = CliRunner().invoke(app, ["study", "new", str(file)])
    assert made.exit_code == 0, made.output
    assert file.read_text() == new_protocol()
    done = CliRunner().invoke(app, ["study", "check", str(file)])
    assert done.exit_code == 0, done.output
    assert "Not committed" in done.output
    again = CliRunner().invoke(app, ["study", "new", str(file)])
    assert "mine.toml exists already; choose another name" in str(again.exception)
    file.write_text(new_protocol().replace("width = 64", 'width = "wide"'))
    wrong = CliRunner().invoke(app, ["study", "check", str(file)])
    assert "mine.toml: [mad]: width ('wide') must be a whole number" in str(wrong.exception)


def test_studies_run_on_what_there_is_unless_told() -> None:
    """All commands that run have the same default."""
    assert StudyOptions().device == "auto"
    assert LocalPool(1).device == LocalPool(1, "auto").device
    assert catalogue.DEFAULT == "laptop"
