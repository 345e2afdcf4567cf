"""A study is registered: its protocol is older than its records, every record says which, and changes are shown."""

import datetime
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hypermlp.report.claims import LEVEL, SUPPORTED, UNFINISHED, judge_claims
from hypermlp.report.folders import read_studies
from hypermlp.report.page import write_report
from hypermlp.report.predictions import predictions
from hypermlp.studies import engine
from hypermlp.studies.cost import Cost, measure_costs
from hypermlp.studies.mad import TaskStudy
from hypermlp.studies.protocol import (
    MARK,
    PACKAGED,
    VERSIONS,
    deviations,
    differences,
    digest,
    enter,
    find_protocol,
    read_protocol,
    read_versions,
    registration_problems,
)

ROOT = Path(__file__).parents[2]
TEXT = """
title = "a small one"
contestants = ["S", "R"]
seeds = 5

[mad]
protocol = "clean"
tasks = ["memorization"]
scale = "baseline"
width = 16
depth = 1
batch = 16
examples = 64
tests = 32
steps = {memorization = 12}
decays = [0.1]
changes = {memorization = {vocab_size = 16, seq_len = 8}}
search = {rates = [1e-3, 1e-2], rungs = [1.0], widen = 0}

[terms]
interval = "bootstrap"
seeds = 5

[[comparisons]]
title = "R is as good as S"
better = "S"
worse = "R"
expect = "level"
on = ["memorization"]
"""
STEPS = "{memorization = 12, compression = 12}"


def run(text: str, out: Path, path: Path) -> list[dict[str, Any]]:
    """As `hypermlp study run` does it; the numbers of the records are made up."""
    rules = read_protocol(text)
    rules.check()
    path.write_text(text)
    enter(out, path, rules)
    (study,) = rules.studies.values()
    return study.run(out / "mad", rules.contestants, seeds=rules.seeds, marks={MARK: rules.digest})


def commit(path: Path) -> None:
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    who = ["-c", "user.name=somebody", "-c", "user.email=somebody"]
    for arguments in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "a protocol"]):
        subprocess.run(["git", *arguments], cwd=path.parent, check=True, env=environment)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(folder: Any, jobs: Any, work: Any, marks: Any, follow: Any, **options: Any) -> None:
        todo = list(jobs)
        for job in todo:  # which grows
            record = {"key": job.key, **job.identity, **marks, "error": None, "start": folder.start, "seconds": 1.0}
            score = {"accuracy": 0.5 + 0.001 * job.identity["seed"], "validation_loss": 1.0, "loss": 1.0}
            found = {"score": job.rate} if "rung" in job.identity else {"metrics": score, "parameters": 5, "inner": 5}
            if job.key not in folder.records:
                folder.append({**record, "curve": [], "stopped": None, **found})
                todo += follow(folder.records[job.key])

    monkeypatch.setattr(engine, "run", run)


def test_every_record_has_the_digest_and_changes_after_the_first_are_deviations(tmp_path: Path, made_up: None) -> None:
    path, out = tmp_path / "it" / "protocol.toml", tmp_path / "out"
    path.parent.mkdir()
    path.write_text(TEXT)
    commit(path)
    records = run(TEXT, out, path)
    assert {record[MARK] for record in records} == {digest(TEXT)}
    assert registration_problems(out) == []
    (study,) = read_studies(out)
    assert study.terms.interval == "bootstrap"
    (claim,) = judge_claims(study)
    assert claim.verdict == SUPPORTED
    assert [item.task for item in predictions(study)] == ["memorization"]
    page = write_report(out).read_text()
    assert "Best at memorisation within the budget" in page
    assert "Nothing was changed after the first record." in page
    assert digest(TEXT) in page

    run(TEXT, out, path)  # again: the same version
    assert len(read_versions(out)) == 1
    changed = TEXT.replace('expect = "level"', 'expect = "more"').replace("seeds = 5\n\n[mad]", "seeds = 6\n\n[mad]")
    run(changed, out, path)
    ((version, lines),) = deviations(read_versions(out))
    assert version.records == 14
    assert lines == ["seeds: 5 → 6", 'comparisons 1.expect: "level" → "more"']
    assert registration_problems(out) == []  # said, and no secret
    (study,) = read_studies(out)
    assert judge_claims(study)[0].verdict == LEVEL
    page = write_report(out).read_text()
    assert "1 deviation from the protocol after the first record" in page
    assert "seeds: 5 → 6" in page


def test_what_two_protocols_differ_in() -> None:
    claim = {"title": "one", "expect": "more"}
    old = {"contestants": ["S", "R", "gla"], "rates": [1, 2], "comparisons": [claim, {**claim, "title": "two"}]}
    new = {"contestants": ["S", "gla", "mamba"], "rates": [2, 1], "comparisons": [claim], "seeds": 5}
    assert differences(old, new) == [
        'contestants: without "R"',
        'contestants: with "mamba"',
        "rates: [1, 2] → [2, 1]",
        'comparisons: without {"title": "two", "expect": "more"}',
        "seeds: nothing → 5",
    ]
    assert differences(old, old) == []


def test_no_claim_is_supported_before_all_its_runs_are_there(tmp_path: Path, made_up: None) -> None:
    """And the average is that of all tasks that were registered, not of those that are finished."""
    path = tmp_path / "protocol.toml"
    two = TEXT.replace('["memorization"]\nscale', '["memorization", "compression"]\nscale').replace(
        "{memorization = 12}", STEPS
    )
    run(two.replace('on = ["memorization"]', 'on = ["memorization", "average"]'), tmp_path / "out", path)
    (study,) = read_studies(tmp_path / "out")
    assert judge_claims(study)[0].verdict == SUPPORTED
    lines = tmp_path / "out" / "mad" / "runs.jsonl"
    records = [line for line in lines.read_text().splitlines(keepends=True) if not is_final(line, "compression", seed=4)]
    lines.write_text("".join(records))
    (study,) = read_studies(tmp_path / "out")
    (claim,) = judge_claims(study)
    assert claim.words == "not finished: MAD average"
    assert [item.status for item in claim.evidence] == [SUPPORTED, UNFINISHED]
    lines.write_text("".join(line for line in records if not is_final(line, "compression")))
    (study,) = read_studies(tmp_path / "out")
    assert study.score("S", "average") is None
    assert judge_claims(study)[0].verdict == UNFINISHED
    assert "… not finished" in write_report(tmp_path / "out").read_text()


def is_final(line: str, task: str, seed: int | None = None) -> bool:
    record = json.loads(line)
    return record["phase"] == "final" and record["task"] == task and seed in (None, record["seed"])


def test_what_was_not_registered_is_told(tmp_path: Path, made_up: None) -> None:
    path, out = tmp_path / "it" / "protocol.toml", tmp_path / "out"
    path.parent.mkdir()
    run(TEXT, out, path)
    assert registration_problems(out) == ["the first version was not committed when the runs began"]
    assert "Not registered beforehand" in write_report(out).read_text()
    line = json.loads((out / VERSIONS).read_text())
    cases: list[tuple[dict[str, Any], str]] = [
        ({"committed": "2999-01-01T00:00:00+00:00"}, "after the first start"),
        ({"committed": "2000-01-01T00:00:00+00:00", "text": TEXT + " "}, "has the digest"),
        ({"committed": "2000-01-01T00:00:00+00:00", "records": 3}, "there were 3 runs before"),
        ({"committed": "2000-01-01T00:00:00+00:00", "digest": digest("x"), "text": "x"}, "records of other protocols"),
    ]
    for changes, problem in cases:
        (out / VERSIONS).write_text(json.dumps({**line, **changes}) + "\n")
        assert any(problem in found for found in registration_problems(out))
    assert registration_problems(tmp_path) == [f"{tmp_path} has no {VERSIONS}"]


@pytest.mark.parametrize("folder", sorted(path.parent for path in (ROOT / "results").glob(f"*/{VERSIONS}")))
def test_the_registered_studies_here_are_older_than_their_records(folder: Path) -> None:
    """By what the folder holds, and by the history where there is one that reaches back so far."""
    assert registration_problems(folder) == []
    first = read_versions(folder)[0]
    assert first.commit is not None
    shown = subprocess.run(["git", "show", "-s", "--format=%cI", first.commit], cwd=ROOT, capture_output=True, text=True)
    if shown.returncode == 0:
        begun = min(start["date"] for path in folder.glob("*/plan.json") for start in json.loads(path.read_text())["starts"])
        assert shown.stdout.strip() == first.committed
        assert datetime.datetime.fromisoformat(shown.stdout.strip()) < datetime.datetime.fromisoformat(begun)
        paths = subprocess.run(
            ["git", "ls-tree", "-r", "--name-only", first.commit, "src/hypermlp/studies/protocols"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        texts = [
            subprocess.run(["git", "show", f"{first.commit}:{path}"], cwd=ROOT, capture_output=True, text=True).stdout
            for path in paths.stdout.split()
        ]
        assert first.digest in map(digest, texts)


@pytest.mark.parametrize("path", sorted(PACKAGED.glob("*.toml")), ids=lambda path: path.stem)
def test_protocols_of_the_package_can_be_run(path: Path) -> None:
    protocol = read_protocol(find_protocol(path.stem).read_text())
    protocol.check()
    assert protocol.seeds >= protocol.terms.seeds
    assert protocol.terms.interval == "bootstrap"
    assert all(study.search is not None for study in protocol.studies.values())


@pytest.mark.parametrize(
    "old, new, message",
    [
        ('title = "a small one"', "", "missing"),
        ("seeds = 5\n\n[mad]", "seed = 5\n\n[mad]", r"name in protocol \('seed'\) must be one of"),
        ('worse = "R"', 'worse = "T"', r"mixer of the comparison .* \('T'\)"),
        ('on = ["memorization"]', 'on = ["recall"]', r"measure of the comparison .* \('recall'\)"),
        ('expect = "level"', 'expect = "better"', r"expect \('better'\)"),
        ("[mad]", "[mad", "not TOML"),
        ("rungs", "steps", "a search has the numbers"),
    ],
)
def test_mistakes_in_a_protocol(old: str, new: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_protocol(TEXT.replace(old, new, 1)).check()
    with pytest.raises(ValueError, match=r"protocol \(a file, or a name\) \('nobody'\)"):
        find_protocol("nobody")


def test_costs_are_measured_by_a_few_steps() -> None:
    rules = read_protocol(TEXT)
    study = rules.studies["mad"]
    assert isinstance(study, TaskStudy)
    (cost,) = measure_costs(study, ["S"], 5)
    assert (cost.steps, cost.looks, cost.runs) == (12, 12, 5 + 2)
    assert cost.per_step > 0
    assert Cost("S", "", 10, 0.5, 1.0, 3, 2.0).seconds == 2 * (5 + 3)
