"""Where HyperGLU stands: which verdict and which numbers of a study are printed and drawn."""

from pathlib import Path

import pytest
from made_up import language, mad, write

from hypermlp.report.evidence import RIVALS, evidence_markdown, picture, verdicts_markdown
from hypermlp.report.folders import read_studies
from hypermlp.report.study import Study
from hypermlp.report.table1 import table1_markdown


@pytest.fixture
def study(tmp_path: Path) -> Study:
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


def test_the_table_says_where_it_is_ahead_level_and_behind(study: Study) -> None:
    assert evidence_markdown(study).splitlines() == [
        "|  | HyperGLU | S-pc | HyperGLU is | Gated DeltaNet | HyperGLU is |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| Language, loss in nats | 1.602 | 1.500 | behind, −0.102 ± 0.002 | – | – |",
        "| Selective copying, % | 82.0 | 30.0 | ahead, +52.0 ± 2.0 | 82.0 | level, 0.0 ± 0.0 |",
    ]


def test_a_task_that_was_trained_longer_stands_behind_the_first_study_of_it(study: Study, tmp_path: Path) -> None:
    records = [mad(mixer, "selective-copying", 90, seed) for mixer in ("G-cg-q-12o", "S-pc") for seed in range(5)]
    write(tmp_path / "longer", records, {"steps": {"selective-copying": 6000}})
    longer = next(found for found in read_studies(tmp_path) if found.folders == ("longer",))
    rows = evidence_markdown(study, longer).splitlines()
    assert rows[-1] == "| Selective copying, 6,000 steps, % | 90.0 | 90.0 | level, 0.0 ± 0.0 | – | – |"
    assert len(picture(study, longer).axes) == 3
    assert not any("Compression" in line for line in verdicts_markdown(longer).splitlines())
    assert "MAD average" not in table1_markdown(longer)


def test_the_picture_has_every_gain(study: Study) -> None:
    losses, copying = picture(study).axes
    assert [label.get_text() for label in losses.get_yticklabels()][:2] == ["S-pc", "Gated DeltaNet"]
    assert len(losses.get_yticks()) == len(RIVALS)
    assert [line.get_color() for line in losses.lines[1:]] == ["tab:red"] * 2  # its interval, its mean
    assert [line.get_color() for line in copying.lines[1:]] == ["tab:green"] * 2 + ["0.35"] * 2
