"""The search: halving, ties, ends of the grid, and that it needs nothing but the records to go on."""

import logging
import math
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from hypermlp.mixers import build_mixer
from hypermlp.report.page import write_report
from hypermlp.report.progress import outcome as told
from hypermlp.studies import engine
from hypermlp.studies.executors import LocalPool
from hypermlp.studies.folder import Folder, read_lines
from hypermlp.studies.language import LanguageStudy
from hypermlp.studies.mad import TaskStudy
from hypermlp.studies.search import FIRST_SEED, Outcome, Place, Search, read_search, settle
from hypermlp.studies.worker import RunContext, checkpoint_key
from hypermlp.verdicts.folders import read_studies

HALVING = Search(rates=(1.0, 2.0, 4.0, 8.0), rungs=(0.25, 0.5, 1.0), keep=0.5, widen=2, level=0.01)


def follow(search: Search, loss: Callable[[float, float], float]) -> tuple[Outcome, list[list[tuple[float, float]]]]:
    """The whole search where `loss` is what a rate has at a rung, and what was run in which order."""
    scores: dict[tuple[float, float], float] = {}
    phases = []
    while (found := settle(search, scores)).missing:
        assert not set(found.missing) & scores.keys()
        phases.append(list(found.missing))
        scores |= {place: loss(*place) for place in found.missing}
    return found, phases


def distance(best: float) -> Callable[[float, float], float]:
    return lambda rate, rung: 2 - rung + abs(math.log2(rate / best))


def test_the_best_half_continues_from_rung_to_rung() -> None:
    found, phases = follow(HALVING, distance(2.2))
    assert phases == [
        [(rate, 0.25) for rate in (1.0, 2.0, 4.0, 8.0)],
        [(2.0, 0.5), (4.0, 0.5)],
        [(2.0, 1.0)],
    ]
    assert (found.rate, found.end, found.ties, found.widened) == (2.0, "", (), 0)
    assert found.reached(4.0) == 0.5
    assert HALVING.runs == 4 * 0.25 + 2 * 0.25 + 1 * 0.5


def test_runs_that_are_level_with_the_last_one_kept_continue_and_are_told_as_ties() -> None:
    found, phases = follow(HALVING, lambda rate, rung: 2.6 if rung < 1 else {4.0: 1.0, 2.0: 1.005}.get(rate, 2.0))
    assert [len(phase) for phase in phases] == [4, 4, 4]  # on a plateau nobody is hopeless
    assert (found.rate, found.ties) == (4.0, (2.0,))


@pytest.mark.parametrize(
    "best, rate, end, added", [(16, 16, "", 2), (8, 8, "", 1), (100, 32, "highest", 2), (0.01, 0.25, "lowest", 2)]
)
def test_a_best_rate_at_the_end_of_the_grid_widens_it(best: float, rate: float, end: str, added: int) -> None:
    found, phases = follow(HALVING, distance(best))
    assert (found.rate, found.end, found.widened) == (rate, end, added)
    assert all(len(phase) == 1 for phase in phases[3:])
    assert follow(replace(HALVING, widen=0), distance(best))[0].end == ("lowest" if best < 1 else "highest")


def test_a_rate_beyond_the_grid_is_stopped_where_it_is_hopeless() -> None:
    found, phases = follow(HALVING, lambda rate, rung: math.inf if rate > 8 else 10 - rate)
    assert phases[-1] == [(16.0, 0.25)]
    assert (found.rate, found.end) == (8.0, "")


def test_losses_that_are_not_finite() -> None:
    assert follow(HALVING, lambda rate, rung: 1.0 if rate == 1 else math.inf)[0].rate in (0.25, 0.5, 1.0)
    found, _ = follow(replace(HALVING, widen=0), lambda rate, rung: math.inf)
    assert (found.rate, found.end) == (1.0, "lowest")
    assert follow(replace(HALVING, widen=0, level=0), lambda rate, rung: math.inf)[0].rate == 1.0


def test_the_mean_of_all_seeds_decides_and_failures_have_no_score() -> None:
    search = Search(rates=(1.0, 2.0), rungs=(1.0,), seeds=2, widen=0)

    def record(rate: float, seed: int, score: float | None, **fields: Any) -> dict[str, Any]:
        base = {"phase": "search", "mixer": "m", "setting": "s", "lr": rate, "rung": 1.0, "seed": FIRST_SEED + seed}
        return {**base, "score": score, "error": None, **fields}

    records = [record(1.0, 0, 1.0), record(1.0, 1, 3.0), record(2.0, 0, 1.5), record(2.0, 1, 1.5)]
    assert read_search(search, records)[Place("m", "s")].rate == 2.0
    assert read_search(search, records[:3])[Place("m", "s")].missing == ((2.0, 1.0),)
    failed = [*records[:3], record(2.0, 1, None, error="killed")]
    assert read_search(search, failed)[Place("m", "s")].rate == 1.0
    assert read_search(search, [{**records[0], "phase": "final"}]) == {}


@pytest.mark.parametrize(
    "numbers, message",
    [
        ({"rates": (2.0, 1.0)}, "must be above 0 and rise"),
        ({"rates": (1.0,)}, "no step to widen it by"),
        ({"rungs": (0.5,)}, "must be shares of the steps that rise to 1"),
        ({"keep": 0.0}, r"keep \(0.0\) must be above 0"),
    ],
)
def test_searches_that_cannot_be_are_refused(numbers: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Search(**numbers)
    with pytest.raises(ValueError, match="a search has the numbers rates, rungs"):
        Search.from_plan({"speed": 3})
    assert Search.from_plan(HALVING.to_plan()) == HALVING


# ---- in a study ----

STUDY = TaskStudy(
    protocol="clean",
    tasks=("memorization",),
    scale="baseline",
    width=16,
    depth=1,
    batch=16,
    examples=64,
    tests=32,
    epochs=None,
    steps={"memorization": 12},
    decays=(0.1,),
    changes={"memorization": {"vocab_size": 16, "seq_len": 8}},
    search=Search(rates=(1e-4, 1e-2), rungs=(0.25, 1.0), widen=1),
)


class Quiet:
    """A pipe that nobody listens to."""

    def send(self, message: Any) -> None: ...
    def recv(self) -> Any: ...
    def poll(self) -> bool:
        return False


class Here:
    """The engine without processes: jobs run here, one by one, until `limit` of them are done or `accident` happens."""

    def __init__(self, limit: int = 1000, accidents: int = 0) -> None:
        self.limit, self.accidents = limit, accidents

    def run(self, folder: Folder, jobs: Sequence[Any], work: Any, **options: Any) -> list[dict[str, Any]]:
        marks, retry, nobody = options.get("marks", {}), options.get("retry_failed", False), lambda record: None
        start = engine.Engine(folder, jobs, work, LocalPool(1), retry, 60, marks, options.get("follow"), nobody)
        while start.todo:
            job = start.todo.popleft()
            if self.limit == 0:
                raise KeyboardInterrupt
            self.limit -= 1
            if self.accidents:
                self.accidents -= 1
                outcome: dict[str, Any] = {"error": "killed"}
            else:
                context = RunContext(Quiet(), folder.checkpoint(checkpoint_key(job)), every=math.inf)
                outcome = {"error": None, **work(job, context)}
            start._finish(engine.Worker(None, run=engine.Running(job)), outcome)  # type: ignore[arg-type]
        return [folder.records[job.key] for job in jobs]


def run_here(
    study: Any, out: Path, monkeypatch: pytest.MonkeyPatch, here: Here, mixers: Sequence[str] = ("S",), **options: Any
) -> Any:
    monkeypatch.setattr(engine, "run", here.run)
    return study.run(out, mixers, seeds=2, **options)


TIMES = ("seconds", "tokens_per_second", "start")


def timeless(records: Any) -> list[dict[str, Any]]:
    return [{name: value for name, value in record.items() if name not in TIMES} for record in records]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The study, run at once."""
    out = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        return out, run_here(STUDY, out, patch, Here())


def test_one_contest_is_finished_before_the_next_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a study that is stopped has something to show. Started again, it first does what was decided before."""
    with pytest.raises(KeyboardInterrupt):
        run_here(STUDY, tmp_path, monkeypatch, Here(limit=6), ("S", "R"))
    run_here(STUDY, tmp_path, monkeypatch, Here(), ("S", "R"))
    lines, _ = read_lines(tmp_path / "runs.jsonl")
    turns = [(mixer, phase) for (mixer, phase), _ in groupby(lines, key=lambda line: (line["mixer"], line["phase"]))]
    assert turns == [("S", "search"), ("S", "final"), ("R", "search"), ("R", "final")]


def test_a_study_searches_then_trains_with_fresh_seeds_and_resumes_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: Any
) -> None:
    out, records = undisturbed
    lines, _ = read_lines(out / "runs.jsonl")
    trials = [line for line in lines if line["phase"] == "search"]
    assert [line["phase"] for line in lines] == ["search"] * len(trials) + ["final"] * 2
    assert [record["seed"] for record in records] == [0, 1]
    assert {trial["seed"] for trial in trials} == {FIRST_SEED}
    assert {(trial["step"], trial["rung"]) for trial in trials} == {(3, 0.25), (12, 1.0)}
    assert all("metrics" not in trial for trial in trials)  # the test set is looked at by the runs that count alone
    assert all(trial["score"] == trial["curve"][-1]["loss"] for trial in trials)
    assert {record["lr"] for record in records} == {0.01} or len(trials) > 3
    assert list((out / "checkpoints").glob("*/*")) == []
    for _ in lines[1:]:  # stopped after every run
        with pytest.raises(KeyboardInterrupt):
            run_here(STUDY, tmp_path / "b", monkeypatch, Here(1))
    again = run_here(STUDY, tmp_path / "b", monkeypatch, Here())
    assert timeless(again) == timeless(records)
    assert timeless(read_lines(tmp_path / "b" / "runs.jsonl")[0]) == timeless(lines)


THREE = replace(STUDY, search=Search(rates=(1e-3, 1e-2), rungs=(0.25, 0.5, 1.0), keep=1.0, widen=0))


@pytest.mark.parametrize("lost", [0, 1, 2, 3])
def test_a_rung_that_lost_its_line_is_measured_again_at_the_same_step(
    lost: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its checkpoint is that of a later rung by then."""
    caplog.set_level(logging.INFO)
    with pytest.raises(KeyboardInterrupt):
        run_here(THREE, tmp_path, monkeypatch, Here(limit=4))  # both rates to the second rung
    path = tmp_path / "runs.jsonl"
    before = read_lines(path)[0]
    assert [(line["lr"], line["step"]) for line in before] == [(1e-3, 3), (1e-2, 3), (1e-3, 6), (1e-2, 6)]
    lines = path.read_bytes().splitlines(keepends=True)
    lines[lost] = lines[lost][:50] + b"\n"
    path.write_bytes(b"".join(lines))
    with pytest.raises(KeyboardInterrupt):
        run_here(THREE, tmp_path, monkeypatch, Here(limit=1))
    after = {line["key"]: line for line in read_lines(path)[0]}
    assert timeless(after[line["key"]] for line in before) == timeless(before)
    assert ("starts over to measure it again" in caplog.text) == (lost < 2)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_damaged_tails_anywhere_in_a_study_lose_nothing_and_change_no_number(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: Any
) -> None:
    """Stopped between rungs, one file of each kind in the folder is cut in turn; then the study goes on from there."""
    stopped = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        run_here(STUDY, stopped, monkeypatch, Here(limit=2))
    kinds = {path.name: path.relative_to(stopped) for path in stopped.rglob("*") if path.is_file() and path.stat().st_size}
    assert kinds.keys() > {"plan.json", "runs.jsonl", "progress.json", "complete.json"}  # and tensors
    for name, path in kinds.items():
        out = tmp_path / name
        shutil.copytree(stopped, out)
        data = (out / path).read_bytes()
        (out / path).write_bytes(data[: int(share * len(data))])
        if name == "plan.json":  # without it nobody knows what the runs have in common: it is not guessed
            with pytest.raises(ValueError, match=r"plan.json is not JSON .*; restore it"):
                run_here(STUDY, out, monkeypatch, Here())
            assert (out / "runs.jsonl").read_bytes() == (stopped / "runs.jsonl").read_bytes()
            (out / path).write_bytes(data)
        assert timeless(run_here(STUDY, out, monkeypatch, Here())) == timeless(undisturbed[1])
        scores, expected = (
            {line["key"]: (line.get("score"), line.get("step")) for line in read_lines(folder / "runs.jsonl")[0]}
            for folder in (out, undisturbed[0])
        )
        assert scores == expected


def test_a_killed_worker_decides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: Any) -> None:
    assert timeless(run_here(STUDY, tmp_path, monkeypatch, Here(accidents=2))) == timeless(undisturbed[1])


def test_the_page_and_the_terminal_tell_of_the_search(tmp_path: Path, undisturbed: Any) -> None:
    shutil.copytree(undisturbed[0], tmp_path, dirs_exist_ok=True)
    (study,) = read_studies(tmp_path)
    assert study.seeds == [0, 1]
    assert {place.mixer for place in study.searches} == {"S"}
    text = write_report(tmp_path).read_text()
    assert "1 search." in text
    assert 'class="chosen"' in text
    trial = study.searched[0]
    assert f"search, validation loss {trial['score']:.4f} after 3 steps" in told(trial)
    runs = read_lines(tmp_path / "runs.jsonl")[0]
    (tmp_path / "runs.jsonl").write_text("")
    with Folder(tmp_path) as folder:
        for record in runs[:2]:  # while it searches
            folder.append(record)
    assert "under way" in write_report(tmp_path).read_text()


def test_language_models_are_searched_too_and_a_plan_without_a_search_is_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers: dict[str, Any] = {"width": 16, "depth": 1, "length": 16, "batch": 2, "steps": 4, "evaluations": 2, "sample": 1}
    study = LanguageStudy(lr=1e-3, search=Search(rates=(1e-3, 1e-2), rungs=(0.5, 1.0), widen=0), **numbers)
    records = run_here(study, tmp_path / "a", monkeypatch, Here())
    found = read_search(study.search, read_lines(tmp_path / "a" / "runs.jsonl")[0])[Place("S", "")]  # type: ignore[arg-type]
    assert {record["lr"] for record in records} == {found.rate}
    assert "lr" not in study.numbers()
    old = replace(study, search=None)
    assert "search" not in old.numbers()
    assert old.numbers()["lr"] == 1e-3
    (first, _) = run_here(old, tmp_path / "b", monkeypatch, Here())
    assert first["key"] == "language/S/seed=0"
    assert "phase" not in first


def test_allocations_of_ranks_are_searched_at_equal_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search = Search(rates=(1e-3, 1e-2), rungs=(1.0,), widen=0, ranks=(4,))
    assert search.variants("G-cg-q-12o") == ["G-cg-q-12o", "G-cg-q-12o@4"]
    assert [search.variants(name) for name in ("S-pc", "R-12o!", "R-cg-q", "gla")] == [
        ["S-pc"],
        ["R-12o!"],
        ["R-cg-q"],
        ["gla"],
    ]
    study = replace(STUDY, search=search, steps={"memorization": 2}, changes={"memorization": {"vocab_size": 16, "seq_len": 4}})
    records = run_here(study, tmp_path, monkeypatch, Here(), ("hyperglu", "S"))
    lines, _ = read_lines(tmp_path / "runs.jsonl")
    tried = {(line["mixer"], line["lr"]): line for line in lines if line["phase"] == "search"}
    assert len(tried) == 6
    counts = [line["parameters"] for line in tried.values()]
    assert max(counts) <= 1.01 * min(counts)
    best = min((line["score"], mixer, rate) for (mixer, rate), line in tried.items() if mixer != "S")
    ours = [record for record in records if record["mixer"] == "hyperglu"]
    assert [(record.get("variant", "hyperglu"), record["lr"]) for record in ours] == [best[1:]] * 2
    (found,) = read_studies(tmp_path)
    assert found.mixers == ["S", "G-cg-q-12o"]
    assert [(record["seed"], record["mixer"]) for record in found.mad if record["mixer"] != "S"] == [
        (0, "G-cg-q-12o"),
        (1, "G-cg-q-12o"),
    ]
    assert "these ranks were chosen" in write_report(tmp_path).read_text()
    runs = tmp_path / "runs.jsonl"
    runs.write_text(runs.read_text().replace("hyperglu", "removed"))
    (found,) = read_studies(tmp_path)  # of a mixer that is no longer registered
    assert [record["seed"] for record in found.mad if record["mixer"] == "removed"] == [0, 1]


def test_a_study_resumes_without_a_contestant_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its runs and its place in the plan stay."""
    study = replace(STUDY, search=Search(rates=(1e-3, 1e-2), rungs=(1.0,), widen=0), steps={"memorization": 2})
    run_here(study, tmp_path, monkeypatch, Here(), ("R", "S"))
    for name in ("runs.jsonl", "plan.json"):
        path = tmp_path / name
        path.write_text(path.read_text().replace('"R"', '"removed"').replace("/R/", "/removed/"))
    before = {record["key"]: record for record in read_lines(tmp_path / "runs.jsonl")[0]}
    records = run_here(study, tmp_path, monkeypatch, Here(), ("S", "R-p"))
    after = {record["key"]: record for record in read_lines(tmp_path / "runs.jsonl")[0]}
    assert before.items() <= after.items()
    assert {record["mixer"] for record in records} == {"S", "R-p"}
    assert {record["mixer"] for key, record in after.items() if key not in before} == {"R-p"}
    with Folder(tmp_path) as folder:
        (models,) = folder.plan["models"].values()
    assert set(models) == {"removed", "S", "R-p"}
    plan = tmp_path / "plan.json"
    plan.write_text(re.sub(r'("inner": )\d+', r"\g<1>400", plan.read_text()))  # as if it had been larger
    assert run_here(study, tmp_path, monkeypatch, Here(), ("S", "R-p")) == records
    with pytest.raises(ValueError, match=r"the largest model on .* has changed, so S, R-p would have"):
        run_here(study, tmp_path, monkeypatch, Here(), ("S", "R-p", "S-p"))


def test_ranks_behind_a_name() -> None:
    plain, wider = build_mixer("G-cg-q-12o", 64, 32), build_mixer("G-cg-q-12o@8", 64, 32)
    assert [(m.config.op1_rank, m.config.op2_rank, m.config.qk_rank) for m in (plain, wider)] == [(16, 16, 16), (8, 8, 32)]  # type: ignore[union-attr]
    assert build_mixer("hyperglu@2", 64, 32).config.qk_rank == 64  # type: ignore[union-attr]
    for name in ("S-pc@8", "R-12o!@8", "gla@8", "G-cg-q-12o@x"):
        with pytest.raises(ValueError, match="NAME@RANK is for labels"):
            build_mixer(name, 64, 32)


def test_a_search_needs_a_validation_split() -> None:
    with pytest.raises(ValueError, match="a search needs a validation split and one weight decay"):
        replace(STUDY, protocol="faithful")
