"""Where HyperGLU stands: which verdict and which numbers of a study are printed and drawn."""

from pathlib import Path

import pytest

from hypermlp.report.evidence import RIVALS, evidence_markdown, longer_markdown, picture, standing_markdown
from hypermlp.report.table1 import table1_markdown
from hypermlp.verdicts.folders import read_studies
from hypermlp.verdicts.results import Results
from made_up import language, mad, write


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
        "|  | HyperGLU | S-pc | HyperGLU is | Gated DeltaNet | HyperGLU is |",
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
