"""Where HyperGLU stands: which verdict and which numbers of a study are printed and drawn."""

import json
from pathlib import Path

import pytest

from hypermlp.report.evidence import RIVALS, evidence_markdown, longer_markdown, picture, standing_markdown, verdicts_markdown
from hypermlp.report.page import write_report
from hypermlp.report.table1 import table1_markdown
from hypermlp.report.words import corrected_words
from hypermlp.studies.protocol import digest
from hypermlp.verdicts.folders import read_studies
from hypermlp.verdicts.judged import judge_folder
from hypermlp.verdicts.registration import MARK, VERSIONS
from hypermlp.verdicts.results import Results
from made_up import PROTOCOL, language, mad, write


@pytest.fixture
def study(tmp_path: Path) -> Results:
    """Five seeds: ahead of softmax attention on copying, behind on language; Gated DeltaNet has no language runs."""
    copying, losses = [], []
    for seed in range(5):
        scores = {"G-cg-q-12o": 80 + seed, "S-pc": 30, "gated_deltanet": 80 + seed}
        copying += [mad(mixer, "selective-copying", score, seed) for mixer, score in scores.items()]
        losses += [language("G-cg-q-12o", 1.6 + seed / 1000, seed), language("S-pc", 1.5, seed)]
    write(tmp_path / "mad", copying)
    write(tmp_path / "language", losses)
    (found,) = read_studies(tmp_path)
    return found


def test_the_table_says_where_it_is_ahead_level_and_behind(study: Results) -> None:
    assert evidence_markdown(study).splitlines() == [
        "|  | HyperGLU | softmax attention, S-pc | HyperGLU is | Gated DeltaNet | HyperGLU is |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| Language, loss in nats | 1.602 | 1.500 | behind, −0.102 ± 0.002 | – | – |",
        "| Selective copying, % | 82.0 | 30.0 | ahead, +52.0 ± 2.0 | 82.0 | level, 0.0 ± 0.0 |",
    ]


def test_a_first_look_has_plain_names_and_no_intervals(study: Results) -> None:
    assert standing_markdown(study).splitlines() == [
        "|  | HyperGLU | softmax attention | HyperGLU is | Gated DeltaNet | HyperGLU is |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| Language, loss in nats | 1.602 | 1.500 | behind | – | – |",
        "| Selective copying, % | 82.0 | 30.0 | ahead | 82.0 | level |",
    ]


def read_longer(folder: Path, scores: dict[str, float]) -> Results:
    """Copying once more, with 6,000 steps."""
    records = [mad(mixer, "selective-copying", score, seed) for mixer, score in scores.items() for seed in range(5)]
    write(folder / "longer", records, {"steps": {"selective-copying": 6000}})
    return next(found for found in read_studies(folder) if found.folders == ("longer",))


def test_a_task_that_was_trained_longer_stands_behind_the_first_study_of_it(study: Results, tmp_path: Path) -> None:
    longer = read_longer(tmp_path, {"G-cg-q-12o": 90, "S-pc": 90})
    rows = evidence_markdown(study, longer).splitlines()
    assert rows[-1] == "| Selective copying, 6,000 steps, % | 90.0 | 90.0 | level, 0.0 ± 0.0 | – | – |"
    assert len(picture(study, longer).axes) == 3
    assert "MAD average" not in table1_markdown(longer)


def test_longer_runs_are_judged_alone_and_in_the_place_of_the_shorter(study: Results, tmp_path: Path) -> None:
    longer = read_longer(tmp_path, {"G-cg-q-12o": 90, "S-pc": 95})
    claim = "HyperGLU is ahead of softmax attention"
    (line,) = [line for line in longer_markdown(study, longer).splitlines() if line.startswith(f"| {claim} |")]
    assert line == (
        f"| {claim} | contradicted: G-cg-q-12o − S-pc −5.0 ± 0.0 (paper +8.2) | contradicted | contradicted | −5.0 ± 0.0 |"
    )


def test_the_picture_has_every_gain(study: Results) -> None:
    losses, copying = picture(study).axes
    assert [label.get_text() for label in losses.get_yticklabels()][:2] == ["S-pc", "Gated DeltaNet"]
    assert len(losses.get_yticks()) == len(RIVALS)
    assert [line.get_color() for line in losses.lines[1:]] == ["tab:red"] * 2  # its interval, its mean
    assert [line.get_color() for line in copying.lines[1:]] == ["tab:green"] * 2 + ["0.35"] * 2


def test_a_registered_claim_has_both_verdicts_and_says_what_its_seeds_cannot_show(tmp_path: Path) -> None:
    """Registered with the bootstrap and judged alone; by t with Holm's correction one of two measures is not shown."""
    text = PROTOCOL.replace('["memorization"]\nscale', '["memorization", "compression"]\nscale')
    text = text.replace("{memorization = 12}", "{memorization = 12, compression = 12}")
    text = text.replace('expect = "level"\non = ["memorization"]', 'expect = "more"\non = ["memorization", "compression"]')
    version = {"digest": digest(text), "text": text, "date": "2026-01-02T03:04:05+00:00", "commit": "abc", "committed": None}
    gains = {"memorization": (1.0, 7.0, 6.0, 9.0, 3.0), "compression": (0.5, 9.0, 0.0, 5.0, 9.0)}
    marks = {MARK: digest(text)}
    records = [mad("S", task, 50 + gain[seed], seed, **marks) for task, gain in gains.items() for seed in range(5)]
    records += [mad("R", task, 50, seed, **marks) for task in gains for seed in range(5)]
    write(tmp_path / "mad", records)
    (tmp_path / VERSIONS).write_text(json.dumps({**version, "records": 0}) + "\n")
    ((judged,),) = [judge_folder(tmp_path)]
    (claim,) = judged.claims
    assert [item.verdict and item.verdict.word for item in claim.evidence] == ["supported", "supported"]
    assert claim.verdict.word == "supported"
    assert corrected_words(claim) == "by Student’s t with Holm: undecided: supported on some of its measures, 1 of 2"
    page = write_report(tmp_path).read_text()
    assert "By Student’s t with Holm: undecided: supported on some of its measures, 1 of 2" in page
    assert "its p is never below 2/32 = 0.0625" in page
    assert "by sign flips 0.0625; bootstrap" in page
    lines = verdicts_markdown(judged.results).splitlines()
    assert lines[0].split(" | ")[1:3] == ["verdict here", "by Student’s t with Holm"]
    assert "| supported | undecided: supported on some of its measures, 1 of 2 |" in lines[2]


def test_the_validation_loss_comes_first_and_the_training_samples_beside(tmp_path: Path) -> None:
    losses = {"G-cg-q-12o": (1.5, 1.9), "S-pc": (1.6, 1.7)}
    runs = [
        language(mixer, loss, seed, final={"loss": loss, "validation_loss": validation})
        for mixer, (loss, validation) in losses.items()
        for seed in range(4)
    ]
    (study,) = read_studies(write(tmp_path, runs))
    heads, _, *rows = table1_markdown(study).splitlines()
    assert heads.split(" | ")[2:4] == ["Validation loss", "Training sample"]
    assert any("| 1.900 ± 0.000 | 1.500 ± 0.000" in row for row in rows)
    (line,) = evidence_markdown(study).splitlines()[2:]
    assert line.startswith("| Language, validation loss in nats | 1.900 | 1.700 | behind")
    assert "1.900, softmax attention 1.700 nats of validation loss" in write_report(tmp_path).read_text()
