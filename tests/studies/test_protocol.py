"""A study is registered: its protocol is older than its records, every record says which, and changes are shown."""

import datetime
import json
import os
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hypermlp import provenance
from hypermlp.files import read_json
from hypermlp.report.page import write_report
from hypermlp.report.words import claim_words
from hypermlp.studies import engine
from hypermlp.studies.cost import StudyCost, measure_costs
from hypermlp.studies.folder import Folder
from hypermlp.studies.mad import TaskStudy
from hypermlp.studies.protocol import PACKAGED, digest, find_protocol, load_protocol, read_protocol
from hypermlp.studies.study import GROWS
from hypermlp.verdicts.claims import NOT_RUN, SUPPORTED, Verdict, judge_claims
from hypermlp.verdicts.folders import read_studies
from hypermlp.verdicts.predictions import predictions
from hypermlp.verdicts.registration import (
    JUDGING,
    MARK,
    VERSIONS,
    commit_of,
    deviations,
    differences,
    enter,
    judging_code,
    other_judge,
    read_versions,
    registered_version,
    registration_problems,
)
from made_up import PROTOCOL

ROOT = Path(__file__).parents[2]
STEPS = "{memorization = 12, compression = 12}"


def run(text: str, out: Path, path: Path) -> list[dict[str, Any]]:
    """As `hypermlp study run` does it; the numbers of the records are made up."""
    rules = read_protocol(text)
    rules.check()
    path.write_text(text)
    enter(out, path, rules)
    (study,) = rules.studies.values()
    return study.run(out / "mad", rules.mixers, seeds=rules.seeds, marks={MARK: rules.digest})


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
    path.write_text(PROTOCOL)
    commit(path)
    records = run(PROTOCOL, out, path)
    assert {record[MARK] for record in records} == {digest(PROTOCOL)}
    assert registration_problems(out) == []
    (study,) = read_studies(out)
    assert study.terms.interval == "bootstrap"
    (claim,) = judge_claims(study)
    assert claim.verdict == Verdict(SUPPORTED)
    assert [item.task for item in predictions(study)] == ["memorization"]
    page = write_report(out).read_text()
    assert "<h1>a small one</h1>" in page
    assert "at memorisation" in page
    assert "Nothing was changed after it was registered." in page
    assert digest(PROTOCOL) in page

    run(PROTOCOL, out, path)  # again: the same version
    assert len(read_versions(out)) == 1
    changed = PROTOCOL.replace('expect = "level"', 'expect = "more"').replace("seeds = 5\n\n[mad]", "seeds = 6\n\n[mad]")
    run(changed, out, path)
    ((version, lines),) = deviations(read_versions(out))
    assert version.records == 14
    assert lines == ["seeds: 5 → 6", 'comparisons 1.expect: "level" → "more"', "this version was not committed"]
    (problem,) = registration_problems(out)
    assert "2 runs were made with the version of" in problem
    assert f"({digest(changed)}), which was not committed" in problem
    (study,) = read_studies(out)
    assert judge_claims(study)[0].verdict == Verdict(SUPPORTED), "what is expected is what was registered"
    assert study.seeds == [0, 1, 2, 3, 4], "nor do seeds count that came later"
    page = write_report(out).read_text()
    assert "1 deviation from the protocol after it was registered" in page
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
    two = PROTOCOL.replace('["memorization"]\nscale', '["memorization", "compression"]\nscale').replace(
        "{memorization = 12}", STEPS
    )
    run(two.replace('on = ["memorization"]', 'on = ["memorization", "average"]'), tmp_path / "out", path)
    (study,) = read_studies(tmp_path / "out")
    assert judge_claims(study)[0].verdict == Verdict(SUPPORTED)
    lines = tmp_path / "out" / "mad" / "runs.jsonl"
    records = [line for line in lines.read_text().splitlines(keepends=True) if not is_final(line, "compression", seed=4)]
    lines.write_text("".join(records))
    (study,) = read_studies(tmp_path / "out")
    (claim,) = judge_claims(study)
    assert claim_words(claim) == "not run: MAD average"
    assert [item.verdict and item.verdict.word for item in claim.evidence] == [SUPPORTED, NOT_RUN]
    lines.write_text("".join(line for line in records if not is_final(line, "compression")))
    (study,) = read_studies(tmp_path / "out")
    assert study.score("S", "average") is None
    assert judge_claims(study)[0].verdict.word == NOT_RUN
    assert "… not run" in write_report(tmp_path / "out").read_text()


def is_final(line: str, task: str, seed: int | None = None) -> bool:
    record = json.loads(line)
    return record["phase"] == "final" and record["task"] == task and seed in (None, record["seed"])


def test_what_was_not_registered_is_told(tmp_path: Path, made_up: None) -> None:
    path, out = tmp_path / "it" / "protocol.toml", tmp_path / "out"
    path.parent.mkdir()
    run(PROTOCOL, out, path)
    (problem,) = registration_problems(out)
    assert "14 runs were made with the version of" in problem
    assert "which was not committed" in problem
    assert "Not registered beforehand" in write_report(out).read_text()
    line = json.loads((out / VERSIONS).read_text())
    cases: list[tuple[dict[str, Any], str]] = [
        ({"committed": "2999-01-01T00:00:00+00:00"}, "after the first start"),
        ({"committed": "2000-01-01T00:00:00+00:00", "text": PROTOCOL + " "}, "has the digest"),
        ({"committed": "2000-01-01T00:00:00+00:00", "records": 3}, "there were 3 runs before"),
        ({"committed": "2000-01-01T00:00:00+00:00", "digest": digest("x"), "text": "x"}, "runs are of another protocol"),
    ]
    for changes, problem in cases:
        (out / VERSIONS).write_text(json.dumps({**line, **changes}) + "\n")
        assert any(problem in found for found in registration_problems(out))
    assert registration_problems(tmp_path) == [f"{tmp_path} has no {VERSIONS}"]


class Registered:
    """A committed protocol that was started and stopped before its first record: where every way around it begins."""

    def __init__(self, tmp_path: Path) -> None:
        self.path, self.out = tmp_path / "it" / "protocol.toml", tmp_path / "out"
        self.path.parent.mkdir()
        self.path.write_text(PROTOCOL)
        commit(self.path)
        enter(self.out, self.path, read_protocol(PROTOCOL))

    def found(self) -> tuple[list[list[str]], list[str], str]:
        """Deviations, problems, and the page."""
        changes = [lines for _, lines in deviations(read_versions(self.out))]
        return changes, registration_problems(self.out), write_report(self.out).read_text()


LOOSE = PROTOCOL.replace('expect = "level"', 'expect = "more"')
CHANGE = 'comparisons 1.expect: "level" → "more"'


def test_an_edit_between_the_start_and_the_first_record_is_a_deviation(tmp_path: Path, made_up: None) -> None:
    study = Registered(tmp_path)
    run(LOOSE, study.out, study.path)
    assert [version.records for version in read_versions(study.out)] == [0, 0]
    changes, (problem,), page = study.found()
    assert changes == [[CHANGE, "this version was not committed"]]
    assert f"14 runs were made with the version of {read_versions(study.out)[1].date} ({digest(LOOSE)})" in problem
    assert "1 deviation from the protocol" in page
    assert "not committed" in page


def test_an_edit_that_is_committed_before_the_first_record_is_the_protocol(tmp_path: Path, made_up: None) -> None:
    study = Registered(tmp_path)
    study.path.write_text(LOOSE)
    enter(study.out, study.path, read_protocol(LOOSE))  # started too early,
    commit(study.path)
    run(LOOSE, study.out, study.path)  # and again
    versions = read_versions(study.out)
    assert [version.commit is None for version in versions] == [False, True, False]
    assert registered_version(versions) == versions[2]
    assert study.found()[:2] == ([], [])


def test_a_commit_after_the_runs_comes_too_late(tmp_path: Path, made_up: None) -> None:
    path, out = tmp_path / "it" / "protocol.toml", tmp_path / "out"
    path.parent.mkdir()
    run(PROTOCOL, out, path)
    later = "2999-01-01T00:00:00+00:00"
    commit(path)
    enter(out, path, read_protocol(PROTOCOL))
    first, second = read_versions(out)
    assert (first.commit, second.commit is None) == (None, False)
    lines = [json.dumps(vars(replace(version, date=date))) for version, date in ((first, first.date), (second, later))]
    (out / VERSIONS).write_text("\n".join(lines) + "\n")  # its clock has seconds, and the test none of them
    assert any("14 runs were made with the version of" in problem for problem in registration_problems(out))


def test_other_code_that_judges_is_a_deviation_and_is_told_when_it_judges(
    tmp_path: Path, made_up: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = Registered(tmp_path)
    run(PROTOCOL, study.out, study.path)
    assert study.found()[:2] == ([], [])
    before = judging_code()
    monkeypatch.setattr("hypermlp.verdicts.registration.JUDGING", ("studies/scores.py",))
    assert judging_code() != before
    changes, problems, page = study.found()
    assert (changes, problems) == ([], []), "the runs are those that were registered"
    (start,) = json.loads((study.out / "mad" / "plan.json").read_text())["starts"]
    known = f"{before}, which commit {start['commit']} has" if start["commit"] else before  # an installed package has none
    assert other_judge(study.out) == known
    assert f"Judged by other code ({judging_code()}) than was registered ({known})" in page
    run(PROTOCOL, study.out, study.path)
    assert study.found()[0] == [[f"the code that judges: {before} → {judging_code()}"]]


def test_the_ceiling_is_registered(tmp_path: Path, made_up: None) -> None:
    study = Registered(tmp_path)
    run(PROTOCOL, study.out, study.path)
    (before,) = read_studies(study.out)
    assert before.bound(["S", "R"], "memorization") == ""  # about 50 %
    run(PROTOCOL.replace("[terms]", "[terms]\nceiling = 40.0"), study.out, study.path)
    (after,) = read_studies(study.out)
    assert after.bound(["S", "R"], "memorization") == "", "a ceiling that came later judges nothing"
    assert study.found()[0] == [["terms.ceiling: nothing → 40.0", "this version was not committed"]]


@pytest.mark.parametrize("cut", [1, 40, -2, -1])
def test_a_cut_tail_of_the_versions_loses_no_registration(cut: int, tmp_path: Path, made_up: None) -> None:
    """What a kill leaves of the last line, of which no run can have begun."""
    study = Registered(tmp_path)
    path = study.out / VERSIONS
    whole = path.read_bytes()
    study.path.write_text(LOOSE)
    commit(study.path)
    enter(study.out, study.path, read_protocol(LOOSE))
    second = path.read_bytes().removeprefix(whole)
    path.write_bytes(whole + second[:cut])
    run(LOOSE, study.out, study.path)
    assert [version.digest for version in read_versions(study.out)] == [digest(PROTOCOL), digest(LOOSE)]
    assert study.found()[:2] == ([], [])


def test_a_damaged_version_is_told(tmp_path: Path, made_up: None) -> None:
    study = Registered(tmp_path)
    run(PROTOCOL, study.out, study.path)
    path = study.out / VERSIONS
    path.write_bytes(b"\0\0\n" + path.read_bytes())
    assert study.found()[1] == ["1 of the lines in protocols.jsonl are damaged: versions may be missing"]
    enter(study.out, study.path, read_protocol(PROTOCOL))
    assert path.read_bytes().startswith(b"\0\0\n"), "what cannot be read is not thrown away"


def test_only_changes_of_the_source_make_a_checkout_dirty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, results = tmp_path / "src" / "hypermlp" / "provenance.py", tmp_path / "results" / "runs.jsonl"
    for path in (source, results):
        path.parent.mkdir(parents=True)
        path.write_text("as committed")
    commit(tmp_path / "all")
    monkeypatch.setattr(provenance, "__file__", str(source))
    clean = provenance.commit()
    assert clean is not None
    assert not clean.endswith("+")
    results.write_text("another run")
    assert provenance.commit() == clean
    (source.parent / "new.py").write_text("")
    assert provenance.commit() == f"{clean}+"
    (source.parent / "new.py").unlink()
    source.write_text("changed")
    assert provenance.commit() == f"{clean}+"


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


# Written before whole claims were judged with Holm's correction; a registered protocol keeps its terms.
MEASURE_BY_MEASURE = {"table1", "compression"}


@pytest.mark.parametrize("path", sorted(PACKAGED.glob("*.toml")), ids=lambda path: path.stem)
def test_protocols_of_the_package_can_be_run(path: Path) -> None:
    protocol = read_protocol(find_protocol(path.stem).read_text())
    protocol.check()
    assert protocol.seeds >= protocol.terms.seeds
    assert protocol.terms.interval == ("bootstrap" if path.stem in MEASURE_BY_MEASURE else "holm")
    assert all((study.search is None) != (study.given is None) for study in protocol.studies.values())


@pytest.mark.parametrize(
    "old, new, message",
    [
        ('title = "a small one"', "", "^mine.toml: title must be given"),
        ("seeds = 5\n\n[mad]", "seed = 5\n\n[mad]", r"^mine.toml: name \('seed'\) must be one of"),
        ("seeds = 5\n\n[mad]", 'seeds = "x"\n\n[mad]', r"^mine.toml: seeds \('x'\) must be a whole number"),
        ("seeds = 5\n\n[mad]", "seeds = 0\n\n[mad]", r"^mine.toml: \[mad\]: seeds \(0\) must be at least 1"),
        ('["S", "R"]', '["S", "softmaxx"]', r"^mine.toml: \[mad\]: .*softmaxx"),
        ("width = 16", "width = 16.5", r"^mine.toml: \[mad\]: width \(16.5\) must be a whole number"),
        ("width = 16", "width = true", r"^mine.toml: \[mad\]: width \(True\) must be a whole number"),
        ("{memorization = 12}", "{memorization = 0.5}", r"\[mad\]: steps.memorization \(0.5\) must be a whole number"),
        ("{memorization = 12}", "{compression = 12}", r"\[mad\]: steps must be given for every task; memorization has none"),
        ("vocab_size = 16", "vocabulary = 16", r"\[mad\]: name in changes.memorization \('vocabulary'\) must be one of"),
        ("changes = {memorization", "changes = {memorisation", r"\[mad\]: task in changes \('memorisation'\)"),
        ('worse = "R"', 'worse = "T"', r"^mine.toml: \[\[comparisons\]\] 1 \('R is as good as S'\): mixer \('T'\)"),
        ('on = ["memorization"]', 'on = ["recall"]', r"\[\[comparisons\]\] 1 .*: measure \('recall'\)"),
        ('on = ["memorization"]', 'on = "memorization"', r"\[\[comparisons\]\] 1: on \('memorization'\) must be a list"),
        ('expect = "level"', 'expect = "better"', r"^mine.toml: \[\[comparisons\]\] 1: expect \('better'\)"),
        ('interval = "bootstrap"', "ceiling = 0", r"^mine.toml: \[terms\]: .* ceiling above 0"),
        ("[mad]", "[mad", "^mine.toml: it is not TOML"),
        ("rungs", "steps", r"^mine.toml: \[mad\]: search: name \('steps'\) must be one of 'rates', 'rungs'"),
        ("[1.0]", "1.0", r"^mine.toml: \[mad\]: search: rungs \(1.0\) must be a list, each entry a number"),
    ],
)
def test_mistakes_in_a_protocol_name_the_file_and_the_section(old: str, new: str, message: str, tmp_path: Path) -> None:
    assert old in PROTOCOL
    (tmp_path / "mine.toml").write_text(PROTOCOL.replace(old, new, 1))
    with pytest.raises(ValueError, match=message):
        load_protocol(tmp_path / "mine.toml")
    with pytest.raises(ValueError, match=r"protocol \(a file, or a name\) \('nobody'\)"):
        find_protocol("nobody")


def test_costs_are_measured_by_a_few_steps() -> None:
    rules = read_protocol(PROTOCOL)
    study = rules.studies["mad"]
    assert isinstance(study, TaskStudy)
    (cost,) = measure_costs(study, ["S"], 5)
    assert (cost.steps, cost.looks, cost.runs) == (12, 12, 5 + 2)
    assert cost.per_step > 0
    (cost,) = measure_costs(replace(study, search=None, rates=(1e-3, 2e-3, 4e-3), decays=(0.0, 0.1)), ["S"], 5)
    assert cost.runs == 5 * 3 * 2
    assert StudyCost("S", "", 10, 0.5, 1.0, 3, 2.0).seconds == 2 * (5 + 3)


def test_nobody_can_stop_where_it_looks_best(tmp_path: Path, made_up: None) -> None:
    """Two seeds would do for a verdict; five were registered, so all of them are waited for."""
    text = PROTOCOL.replace('"bootstrap"\nseeds = 5', '"bootstrap"\nseeds = 2')
    assert read_protocol(text).terms.seeds == 2
    run(text, tmp_path / "out", tmp_path / "protocol.toml")
    lines = tmp_path / "out" / "mad" / "runs.jsonl"
    whole = lines.read_text()
    lines.write_text("".join(line for line in whole.splitlines(keepends=True) if not is_final(line, "memorization", seed=4)))
    for expected in (NOT_RUN, SUPPORTED):
        (study,) = read_studies(tmp_path / "out")
        assert [claim.verdict.word for claim in judge_claims(study)] == [expected]
        lines.write_text(whole)


def test_words_of_protocols_that_were_registered_before_are_read(tmp_path: Path) -> None:
    old = PROTOCOL.replace("mixers = ", "contestants = ")
    assert "contestants" in old
    assert read_protocol(old).mixers == read_protocol(old.replace("contestants", "mixers")).mixers == ("S", "R")


REGISTERED = sorted(plan.parent for plan in (ROOT / "results").glob("*/*/plan.json") if (plan.parents[1] / VERSIONS).exists())


@pytest.mark.parametrize("half", REGISTERED, ids=lambda half: "/".join(half.parts[-2:]))
def test_a_study_of_results_goes_on_with_its_protocol(half: Path, tmp_path: Path) -> None:
    """Plans that were written by earlier versions of this program say less, and mean the same."""
    study = read_protocol(read_versions(half.parent)[-1].text).studies[half.name]
    (tmp_path / "plan.json").write_text((half / "plan.json").read_text())
    old = read_json(tmp_path / "plan.json")["plan"]
    with Folder(tmp_path) as folder:
        folder.begin({**study.numbers(), "models": old["models"]}, grows=GROWS, **study.absent)
    assert read_json(tmp_path / "plan.json")["plan"] == old
    changed = {**replace(study, precision="bfloat16").numbers(), "models": old["models"]}
    with Folder(tmp_path) as folder, pytest.raises(ValueError, match="precision was 'float32', not 'bfloat16'"):
        folder.begin(changed, grows=GROWS, **study.absent)


def test_a_file_that_git_does_not_look_at_is_not_committed_as_it_is(tmp_path: Path) -> None:
    study = Registered(tmp_path)
    git = partial(subprocess.run, cwd=study.path.parent, check=True)
    for hidden in ("--assume-unchanged", "--skip-worktree"):
        git(["git", "update-index", hidden, study.path.name])
        study.path.write_text(LOOSE)
        status = git(["git", "status", "--porcelain"], capture_output=True, text=True)
        assert status.stdout == "", "git sees no change"
        assert commit_of(study.path, LOOSE) == (None, None)
        study.path.write_text(PROTOCOL)
        assert commit_of(study.path, PROTOCOL)[0] is not None
        git(["git", "update-index", hidden.replace("--", "--no-"), study.path.name])


def test_a_file_that_changes_while_it_is_read_is_not_committed_as_it_is(tmp_path: Path) -> None:
    """What runs is the text that was read; the file may be as committed again a moment later."""
    study = Registered(tmp_path)
    assert commit_of(study.path, PROTOCOL)[0] is not None
    assert commit_of(study.path, LOOSE) == (None, None)
    link = tmp_path / "link.toml"
    link.symlink_to(study.path)
    assert commit_of(link, PROTOCOL) == commit_of(study.path, PROTOCOL)
    study.path.write_bytes(PROTOCOL.replace("\n", "\r\n").encode())
    commit(study.path)
    assert commit_of(study.path, study.path.read_text())[0] is not None, "line ends are no change"


def test_settings_that_a_later_version_adds_to_a_task_do_not_count(tmp_path: Path, made_up: None) -> None:
    """They are in the folder, and a mean over the settings of a task would have them."""
    study = Registered(tmp_path)
    run(PROTOCOL, study.out, study.path)
    (before,) = read_studies(study.out)
    lines, score = study.out / "mad" / "runs.jsonl", {"accuracy": 0.9, "loss": 1.0, "validation_loss": 0.1}
    more = [
        {**record, MARK: "another", "setting": f"{record['setting']},k=1", "key": f"{record['key']}k", "metrics": score}
        for record in map(json.loads, lines.read_text().splitlines())
        if record["phase"] == "final"
    ]
    lines.write_text(lines.read_text() + "".join(json.dumps(record) + "\n" for record in more))
    (after,) = read_studies(study.out)
    assert after.table == before.table
    assert judge_claims(after)[0].verdict == judge_claims(before)[0].verdict


def test_versions_that_are_gone_are_told(tmp_path: Path, made_up: None) -> None:
    """Without them the paper's claims would be judged in place of those that were registered, and nobody would know."""
    study = Registered(tmp_path)
    run(PROTOCOL, study.out, study.path)
    (study.out / VERSIONS).unlink()
    (found,) = read_studies(study.out)
    assert found.objections == (
        f"Its runs say that they are registered ({digest(PROTOCOL)}), and protocols.jsonl is gone: see its history.",
    )
    assert "protocols.jsonl is gone" in write_report(study.out).read_text()
    enter(study.out, study.path, read_protocol(PROTOCOL))  # and started again
    assert "there were 14 runs before the first version" in study.found()[1]


def test_numbers_that_verdicts_take_from_elsewhere_are_registered_too() -> None:
    """The scores of guessing, and the paper's."""
    names = {path.as_posix() for name in JUDGING for path in PACKAGED.parents[1].glob(name)}
    package = PACKAGED.parents[1].as_posix()
    assert {f"{package}/{name}" for name in ("tasks/mad_settings.py", "paper/tables.py", "verdicts/paper.toml")} < names
