"""Rows by the rank of the mixing, and small experiments that enter the document when their runs are there."""

from pathlib import Path

import pytest

from hypermlp.report.evidence import standing_markdown
from hypermlp.report.experiments import EXPERIMENTS, GRID, experiments_markdown, noise_markdown, prepared_markdown
from hypermlp.report.experiments import read_experiments as read
from hypermlp.report.ranks import rank_of, ranked_markdown, row_order
from hypermlp.studies.protocol import find_protocol, load_protocol
from hypermlp.verdicts.folders import read_studies
from hypermlp.verdicts.results import Results
from made_up import language, mad, write
from test_words import long_sentences

GLU, COPY, NOISE = "G-cg-q-12o", "selective-copying", "noisy-recall"


def results(folder: Path, records: list[dict]) -> Results:
    (found,) = read_studies(write(folder, records))
    return found


@pytest.fixture
def searched(tmp_path: Path) -> Results:
    """The search gave HyperGLU rank 8 for copying, and kept its own for noisy recall."""
    copying = [mad(GLU, COPY, 80 + seed, seed, variant=f"{GLU}@8") for seed in range(5)]
    recall = [mad(GLU, NOISE, 90, seed) for seed in range(5)]
    rival = [mad("S-pc", task, 30, seed) for task in (COPY, NOISE) for seed in range(5)]
    return results(tmp_path / "first", [*copying, *recall, *rival])


def cells(table: str, mixer: str) -> list[str]:
    (found,) = (line for line in table.splitlines() if line.startswith(f"| {mixer} "))
    return [cell.strip() for cell in found.split("|")[3:-1]]


def test_a_label_has_its_own_rank_and_another_has_a_row_of_its_own(searched: Results, tmp_path: Path) -> None:
    table = ranked_markdown(searched)
    assert rank_of(searched, GLU, COPY) == "@8"
    assert rank_of(searched, GLU, NOISE) == ""
    assert [cell[:4] for cell in cells(table, f"{GLU} (HyperGLU)")] == ["–", "90.0", "– (9", "– (9"]
    assert [cell[:4] for cell in cells(table, f"{GLU}@8")] == ["–", "–", "82.0", "–"]
    assert cells(table, f"{GLU}, ranks as searched")[-1].startswith("86.0")
    later = results(tmp_path / "later", [mad(GLU, COPY, 70, seed) for seed in range(5)])
    filled = cells(ranked_markdown(searched, [later]), f"{GLU} (HyperGLU)")
    assert [cell[:4] for cell in filled] == ["–", "90.0", "70.0", "80.0"]


def test_the_first_look_has_the_papers_rank_first_where_it_was_run(searched: Results, tmp_path: Path) -> None:
    assert "| Selective copying, HyperGLU@8, % | 82.0 | 30.0 | ahead |" in standing_markdown(searched)
    assert "| Selective copying, % |" not in standing_markdown(searched)
    later = results(tmp_path / "later", [mad(GLU, COPY, 20, seed) for seed in range(5)])
    lines = standing_markdown(searched, at_16=later).splitlines()
    own = lines.index("| Selective copying, % | 20.0 | 30.0 | behind | – | – |")
    assert lines[own + 1].startswith("| Selective copying, HyperGLU@8, % | 82.0 | 30.0 | ahead |")
    assert "| Noisy recall, % | 90.0 | 30.0 | ahead | – | – |" in lines


def test_an_experiment_enters_the_document_with_its_runs(tmp_path: Path) -> None:
    assert read(tmp_path) == {}
    assert experiments_markdown({}) == "None has been run."
    assert all(f"| `{name}` |" in prepared_markdown({}) for name in EXPERIMENTS)
    names = ("G-cg-q", "G-cg-q+registers=16", "G-cg-q+registers=4")
    records = [mad(name, COPY, 40 + i, seed) for i, name in enumerate(names) for seed in range(3)]
    write(tmp_path / "registers" / "mad", records)
    plan = {"study": "language", "width": 64, "depth": 2}
    write(tmp_path / "registers" / "language", [language(n, 2 - i, s) for i, n in enumerate(names) for s in range(3)], plan)
    done = read(tmp_path)
    text = experiments_markdown(done)
    assert list(done) == ["registers"]
    assert "The best means, by chance or not, are those of `G-cg-q+registers=4` (selective copying), " in text
    order = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| G-")]
    assert order == ["| G-cg-q", "| G-cg-q+registers=4", "| G-cg-q+registers=16"]
    assert "`registers`" not in prepared_markdown(done)
    assert prepared_markdown(dict.fromkeys(EXPERIMENTS, done["registers"])) == "None: all have been run."


def test_every_experiment_is_a_protocol_of_the_package_and_its_words_are_short(tmp_path: Path) -> None:
    for name, experiment in EXPERIMENTS.items():
        assert load_protocol(find_protocol(name)).title
        page = tmp_path / f"{name}.md"
        page.write_text(f"Protocol `{name}` compares {experiment.compares}.")
        assert long_sentences(page) == []
    grid = [GRID.sub(r"r\1 h\2 qk\3", mixer) for mixer in load_protocol(find_protocol("ranks")).mixers]
    assert "r4 h2 qk16" in grid
    assert not any("=" in name for name in grid)


def test_noise_stands_at_both_shares(tmp_path: Path) -> None:
    harder = results(tmp_path / "harder", [mad(GLU, NOISE, 90, seed, setting="frac_noise=0.8") for seed in range(3)])
    easier = results(tmp_path / "easier", [mad(GLU, NOISE, 100, seed, setting="frac_noise=0.6") for seed in range(3)])
    assert noise_markdown(harder, easier).splitlines() == [
        "| mixer | Noisy recall, 0.6 of noise | Noisy recall, 0.8 of noise |",
        "| --- | ---: | ---: |",
        f"| {GLU} (HyperGLU) | 100.0 | 90.0 |",
    ]
    assert "0.6" not in noise_markdown(harder, None)


def test_options_stand_behind_their_mixer_in_the_order_of_their_numbers() -> None:
    names = ["gla", "G-cg-q+registers=16", "G-cg-q+registers=4", "G-cg-q-12o@8", "S-pc", "gla*2+S-pc", "G-cg-q", "G-cg-q-12o"]
    ordered = sorted(names, key=row_order)
    assert ordered[:4] == ["S-pc", "G-cg-q", "G-cg-q+registers=4", "G-cg-q+registers=16"]
    assert ordered.index("G-cg-q-12o@8") == ordered.index("G-cg-q-12o") + 1
