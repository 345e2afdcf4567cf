"""Verdicts are computed, and can go either way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from made_up import language, mad, write

from hypermlp.experiments import paper
from hypermlp.report.findings import CONFIRMED, REFUTED, UNKNOWN, findings, predictions
from hypermlp.report.study import AVERAGE, LOSS, Study, read_studies

Change = Callable[[str, str], float]  # what is added to the paper's number, by label and measure


def make_study(folder: Path, seeds: int = 3, change: Change = lambda label, measure: 0, noise: float = 0.0) -> Study:
    """The paper's Table 1 as if it had been measured, with changes; noise: of odd seeds, in points."""
    mads, languages = [], []
    for label, row in paper.TABLE1.items():
        sign = 1 if "12" in label else -1  # so that it does not cancel between labels
        for seed in range(seeds):
            extra = noise * sign * (seed % 2)
            mads += [mad(label, t, row.accuracy[t] + change(label, t) + extra, seed) for t in paper.TASKS]
            languages.append(language(label, row.loss + change(label, LOSS) + extra / 100, seed))
    write(folder / "mad", mads)
    write(folder / "language", languages)
    (study,) = read_studies(folder)
    return study


def verdicts(study: Study) -> list[str]:
    return [item.verdict for item in findings(study)]


def test_the_rules_confirm_the_papers_own_numbers(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    assert verdicts(study) == [CONFIRMED] * 6
    first = findings(study)[0].evidence
    assert [(e.measure, e.better, e.worse) for e in first] == [(AVERAGE, "S-pc", "R-pc"), (LOSS, "S-pc", "R-pc")]
    assert first[0].gain is not None
    assert first[0].gain.mean == pytest.approx(first[0].paper, abs=0.01)


def test_the_papers_own_numbers_fail_two_of_its_predictions(tmp_path: Path) -> None:
    found = {item.task: item for item in predictions(make_study(tmp_path))}
    assert {task: item.verdict for task, item in found.items()} == {
        "compression": CONFIRMED,
        "noisy-recall": REFUTED,  # nothing left to gain
        "fuzzy-recall": CONFIRMED,
        "selective-copying": CONFIRMED,
        "in-context-recall": CONFIRMED,
        "memorization": REFUTED,  # gains where none was expected
    }
    gain = found["compression"].evidence.gain
    assert gain is not None
    assert gain.mean == pytest.approx((49.20 - 36.49 + 49.60 - 38.56) / 2)
    assert found["noisy-recall"].evidence.note == "no room to gain: 100.0 % without mixing"


@pytest.mark.parametrize(
    "number, label, measure, amount",
    [
        (1, "S-pc", "compression", 30.0),  # five points of the average
        (1, "R-pc", LOSS, 0.05),
        (2, "R-cg-q", "fuzzy-recall", 90.0),
        (2, "R-cg-q-12o", LOSS, 0.2),
        (3, "G-12!", "fuzzy-recall", 150.0),  # seven points below G-12o! are no collapse
        (3, "R-12!", LOSS, -1.25),
        (4, "G-cg-q-1o", "memorization", 30.0),
        (4, "R-cg-q-1o", LOSS, -0.1),
        (5, "S-c-v", "compression", 10.0),
        (6, "R-cg-q-12o", LOSS, -0.1),
        (6, "S-pc", "fuzzy-recall", 25.0),
    ],
)
def test_each_finding_can_fail(tmp_path: Path, number: int, label: str, measure: str, amount: float) -> None:
    study = make_study(tmp_path, change=lambda a, b: amount if (a, b) == (label, measure) else 0)
    assert verdicts(study)[number - 1] == REFUTED


def test_what_is_not_judged_does_not_decide(tmp_path: Path) -> None:
    """VO against QK is judged on compression alone."""
    study = make_study(tmp_path, change=lambda a, b: 50.0 if (a, b) == ("S-c-v", "memorization") else 0)
    assert verdicts(study)[4] == CONFIRMED


@pytest.mark.parametrize("noise, verdict", [(3.0, REFUTED), (30.0, UNKNOWN)])
def test_a_gain_within_the_noise_is_not_confirmed(tmp_path: Path, noise: float, verdict: str) -> None:
    """And much noise tells nothing."""
    study = make_study(tmp_path, noise=noise, change=lambda a, b: 10.0 if a in ("R-cg-q", "G-cg-q") and b != LOSS else 0)
    two = findings(study)[1].evidence[0]
    assert two.gain is not None
    assert two.gain.mean > 0 > two.gain.low
    assert two.status == verdict
    assert {item.task: item.verdict for item in predictions(study)}["compression"] == verdict


def test_noise_on_one_side_of_zero_does_not_excuse(tmp_path: Path) -> None:
    study = make_study(tmp_path, noise=30.0, change=lambda a, b: 200.0 if a == "R-cg-q" and b != LOSS else 0)
    assert findings(study)[1].evidence[0].status == REFUTED


def test_one_seed_is_not_enough(tmp_path: Path) -> None:
    study = make_study(tmp_path, seeds=1)
    assert verdicts(study) == [UNKNOWN] * 6
    assert [item.verdict for item in predictions(study)] == [UNKNOWN] * 6


def test_labels_that_were_not_run(tmp_path: Path) -> None:
    records = [mad(label, task, 50, seed) for label in ("S-pc", "R-pc") for task in paper.TASKS for seed in range(2)]
    (study,) = read_studies(write(tmp_path, records))
    assert verdicts(study) == [CONFIRMED, *[UNKNOWN] * 5]
    assert [item.verdict for item in predictions(study)] == [UNKNOWN] * 6


def test_language_runs_alone_are_enough_for_most(tmp_path: Path) -> None:
    records = [language(label, row.loss, seed) for label, row in paper.TABLE1.items() for seed in range(2)]
    (study,) = read_studies(write(tmp_path, records))
    assert verdicts(study) == [CONFIRMED] * 4 + [UNKNOWN, CONFIRMED]  # the fifth is about a MAD task


def test_gains_of_one_family_do_where_the_other_was_not_run(tmp_path: Path) -> None:
    labels = {"G-cg-q": 50.0, "G-cg-q-12o": 60.0}
    records = [mad(label, "compression", y, seed) for label, y in labels.items() for seed in range(2)]
    (study,) = read_studies(write(tmp_path, records))
    item = next(item for item in predictions(study) if item.task == "compression")
    assert item.verdict == CONFIRMED
    assert item.evidence.gain is not None
    assert item.evidence.gain.mean == pytest.approx(10)
    assert item.evidence.paper == pytest.approx(49.60 - 38.56)


def test_high_must_be_above_low(tmp_path: Path) -> None:
    def change(label: str, measure: str) -> float:
        return 60.0 if measure == "in-context-recall" and label.endswith("12o") else 0

    found = {item.task: item.verdict for item in predictions(make_study(tmp_path, change=change))}
    assert found["compression"] == REFUTED
    assert found["in-context-recall"] == REFUTED
