"""The page as a reader gets it."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hypermlp.paper import tables as paper
from hypermlp.report.charts import Chart, Line, log_axis, nice_ticks, number, numeric_axis, rows_of
from hypermlp.report.opening import deciding
from hypermlp.report.page import write_report
from hypermlp.report.words import gain_words, sentence
from hypermlp.studies.folder import Folder
from hypermlp.studies.mad import task_study, train
from hypermlp.verdicts.claims import judge_claims
from hypermlp.verdicts.estimates import Estimate
from hypermlp.verdicts.folders import read_studies
from hypermlp.verdicts.judged import judge_folder
from made_up import language, mad, write

VOID = {"meta", "line", "path", "polygon", "polyline", "circle"}  # without content, in HTML or as written in the SVG


class Checker(HTMLParser):
    """Collects the text, and fails on tags that do not close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids += [values["id"] or ""] if "id" in values else []
        self.links += [values["href"] or ""] if "href" in values else []
        assert "src" not in values
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["style"], ["script"]):
            self.text.append(data)


def check(page: str) -> str:
    """The page's text, after what holds for every page."""
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    assert not re.search(r"https?:|//[a-z]|@import|url\(", page)
    assert not re.search(r"\b(nan|inf)\b", page)
    assert len(set(checker.ids)) == len(checker.ids)
    assert {link[1:] for link in checker.links} <= set(checker.ids)
    return re.sub(r"\s+", " ", " ".join(checker.text))


def page_of(folder: Path) -> str:
    return check(write_report(folder).read_text())


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Both halves for four labels and a rival, three seeds."""
    labels = ("S-pc", "R-pc", "R-cg-q", "R-cg-q-12o", "R-12!")
    mads = [
        mad(label, task, paper.TABLE1[label].accuracy[task] - seed, seed, parameters=99_000 if "!" in label else 80_000)
        for label in labels
        for task in paper.TASKS
        for seed in range(3)
    ]
    mads += [mad("gla", task, 50, seed, inner=190, seconds=80.0) for task in paper.TASKS for seed in range(3)]
    write(tmp_path / "mad", mads)
    languages = [language(label, paper.TABLE1[label].loss, seed) for label in labels for seed in range(3)]
    write(tmp_path / "language", languages, {"study": "language", "width": 128, "length": 64})
    return tmp_path


def test_every_section_is_there(results: Path) -> None:
    text = page_of(results)
    for title in ("What was found", "Scores", "Learning curves", "Claims", "Predictions"):
        assert title in text
    for title in ("Parameter budgets", "Run times", "Failures", "Provenance", "Runs"):
        assert title in text
    assert "HyperMLP 80.0 %, softmax attention 79.1 % on average over MAD; HyperMLP " in text
    assert "feed-forward widened in 6 of 6 settings, by up to 14" in text
    assert "Every run has a score." in text
    assert "Accuracy against difficulty" not in text  # every task has one setting
    assert "hypermlp made-up" in text


def test_charts_have_a_line_for_every_mixer(results: Path) -> None:
    page = write_report(results, results / "elsewhere" / "page.html").read_text()
    assert page.count("<figure>") == 7
    assert page.count("<polyline") == 6 * 6 + 5
    assert 'class="band"' not in page  # of three seeds the points are shown
    assert page.count('class="seeds"') == 6 * 6 + 5
    assert page.count(">gla</text>") == 6  # every line is named
    assert not (results / "report.html").exists()


def test_times_are_relative_to_softmax_attention(results: Path) -> None:
    text = page_of(results)
    assert "time per step ÷ that of S-pc" in text
    assert re.search(r"gla Gated linear attention 18 80 s 200\.0 2\.00", text)  # 80 s, 400 steps; the others take 40 s


def test_a_study_of_one_seed(tmp_path: Path) -> None:
    write(tmp_path, [mad(label, "compression", 50) for label in ("S-pc", "G-cg-q-12o")])
    text = page_of(tmp_path)
    assert "one seed, no range or interval" in text
    assert "HyperGLU 50.0 %, softmax attention 50.0 % at compression" in text
    assert re.search(r"S-pc is softmax attention, *G-cg-q-12o is HyperGLU *\.", text), (
        "below the charts, whose lines have labels"
    )
    assert "Claims of the paper: ? 2 undecided … 5 not run" in text
    assert "±" not in text


def task_run(task: str, mixer: str, percent: float, **fields: Any) -> dict[str, Any]:
    sets = {"test": {"accuracy": percent / 100, "loss": 1.0, "rows": 8, "slices": {}}}
    metrics = {"step": 10, "accuracy": percent / 100, "loss": 1.0, "validation_loss": 1.0, "sets": sets}
    return mad(mixer, task, percent, kind="tasks", measure="accuracy", metrics=metrics, **fields)


def test_several_tasks_begin_with_a_sentence_and_stand_side_by_side(tmp_path: Path) -> None:
    scores = {"copy": {"G-cg-q-12o": 90, "S-pc": 20, "gla": 1}, "mqar": {"G-cg-q-12o": 99, "S-pc": 98}}
    for task, found in scores.items():
        records = [task_run(task, mixer, percent) for mixer, percent in found.items()]
        write(tmp_path / f"folder-of-{task}", records, {"study": "tasks", "width": 64, "depth": 2})
    text = page_of(tmp_path)
    assert "Over 2 tasks HyperGLU differs most from softmax attention at copy: 90.0 % against 20.0 %." in text
    assert re.search(r"All tasks side by side mixer (Copy MQAR|MQAR Copy)", text)
    assert re.search(r"gla Gated linear attention (– 1\.0|1\.0 –)", text)
    assert "folder-of-copy" not in text.partition("Provenance")[0], "titles, not folders"
    assert re.search(r"Best accuracy: HyperGLU \( ?G-cg-q-12o ?\) 90\.0", text)
    alone = page_of(tmp_path / "folder-of-copy")
    assert "What was found" not in alone, "where no claim can be judged the first sentence says all"
    assert "HyperGLU 90.0 %, softmax attention 20.0 % at copy" in alone


def test_studies_of_one_kind_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    for place, width in (("narrow", 32), ("wide", 64)):
        write(tmp_path / place, [task_run("copy", "S-pc", 20)], {"study": "tasks", "width": width, "depth": 2})
    assert {"Copy (narrow)", "Copy (wide)"} <= set(re.findall(r"Copy \(\w+\)", page_of(tmp_path)))


def test_a_quick_study_has_scores_and_no_verdicts(tmp_path: Path) -> None:
    write(tmp_path, [mad(label, "compression", 50, quick=True) for label in ("S-pc", "G-cg-q-12o")])
    text = page_of(tmp_path)
    assert "too few steps to rank them" in text
    assert "50.0" in text
    for word in ("Claims", "Predictions", "undecided", "HyperGLU 50.0 %, softmax", "colour compares"):
        assert word not in text
    (judged,) = judge_folder(tmp_path)
    assert not judged.claims
    assert not judged.predictions


def test_text_from_results_is_escaped(tmp_path: Path) -> None:
    records = [mad("<i>x</i>", "compression", 50), mad("S", "compression", 0, error="<b>bad</b> & worse", traceback="<u>")]
    write(tmp_path, records)
    page = write_report(tmp_path).read_text()
    for tag in ("<i>", "<b>", "<u>"):
        assert tag not in page
    text = check(page)
    assert "<b>bad</b> & worse" in text
    assert "a <b>CPU</b>" in text


def test_failures_are_listed(tmp_path: Path) -> None:
    records = [
        mad("S", "compression", 50),
        mad("R", "compression", 0, error="RuntimeError: no memory", metrics=None, curve=None, parameters=None),
        mad("G-12!", "compression", 0, metrics=None, stopped="the loss of step 3 is not finite"),
        language("S", 3, final=None, curve=[]),
    ]
    write(tmp_path, records)
    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write("{\n")
    text = page_of(tmp_path)
    assert "RuntimeError: no memory" in text
    assert "the loss of step 3 is not finite" in text
    assert "it has no score" in text
    assert "Left out: 1 line" in text


def test_nothing_but_failures(tmp_path: Path) -> None:
    write(tmp_path, [{"key": "a", "mixer": "S", "task": "compression", "setting": "compression/baseline", "seed": 0}])
    with pytest.raises(ValueError, match="no finished runs"):  # without a protocol it is no run
        write_report(tmp_path)
    write(tmp_path, [mad("S", "compression", 0, error="no", metrics=None, curve=None)])
    text = page_of(tmp_path)
    assert "No run has a score of every task yet." in text
    assert "No run has a curve yet." in text


def test_difficulty_is_drawn_where_it_was_varied(tmp_path: Path) -> None:
    settings = ("baseline", "vocab_size=32", "vocab_size=64", "seq_len=64")
    write(tmp_path, [mad("S", "compression", 50, setting=setting) for setting in settings])
    text = page_of(tmp_path)
    assert "Compression: vocabulary" in text
    assert "Compression: length" in text


def test_studies_that_cannot_be_compared_stand_apart(tmp_path: Path) -> None:
    write(tmp_path / "a", [mad("S", "compression", 50)])
    write(tmp_path / "b", [mad("S", "compression", 50, protocol="faithful")])
    text = page_of(tmp_path)
    assert "What was found Compression Compression, faithful protocol" in text


def test_ticks() -> None:
    assert nice_ticks(0, 100) == [0, 20, 40, 60, 80, 100]
    assert nice_ticks(2.93, 3.31) == pytest.approx([3.0, 3.1, 3.2, 3.3])
    assert [number(tick) for tick in (0, 0.4, 1024, 6400, 20000)] == ["0", "0.4", "1024", "6.4k", "20k"]


def test_real_records(tmp_path: Path) -> None:
    """What the program writes is what the report reads: two models, two seeds, a handful of steps."""
    plan = task_study("clean", "quick", ["in-context-recall"], steps=4, examples=32)
    with Folder(tmp_path) as folder:
        for job in plan.plan_jobs(folder, ["S-pc", "hyperglu"], seeds=2):
            folder.append({"key": job.key, **job.identity, "error": None, **train(job)})
    text = page_of(tmp_path)
    (study,) = read_studies(tmp_path)
    assert study.mixers == ["S-pc", "G-cg-q-12o"]
    assert [score.seeds for mixer in study.mixers if (score := study.score(mixer, "in-context-recall"))] == [2, 2]
    assert "width 32" in text
    assert "Every run has a score." in text
    assert re.search(r"models without ! differ by [01]\.\d% of their parameters at most\.", text)
    largest = max(record["parameters"] for record in study.mad)
    assert f"{largest / 1000:.1f}k" in text


def test_verdicts_on_the_page_are_those_of_the_terminal(results: Path) -> None:
    """And never two of them for one comparison."""
    text = page_of(results).replace(" ", "")
    (study,) = read_studies(results)
    found = [claim for claim in judge_claims(study) if claim.judged]
    assert len(found) == 2
    for claim in found:
        assert f"{claim.verdict.word}{claim.title}{''.join(deciding(claim))}".replace(" ", "") in text
        for item in claim.judged:
            assert gain_words(item).replace(" ", "") in text
            assert gain_words(item).partition(" ")[0] in sentence(claim)


def test_the_labels_are_explained(results: Path) -> None:
    text = page_of(results)
    assert "What the labels mean" in text
    assert "q QK compressed" in text
    assert "no o place layout" in text  # R-12!
    assert "GLU attention" not in text  # no such label was run
    assert "over-parameterised" not in text


def test_captions_name_the_true_number_of_seeds(tmp_path: Path) -> None:
    write(tmp_path, [mad("S", "compression", 50 + seed, seed) for seed in range(2)] + [mad("R", "compression", 50)])
    text = page_of(tmp_path)
    assert "Compression (1 or 2 seeds)" in text
    assert "mean over 1 or 2 seeds" in text
    assert "±" not in text
    write(tmp_path, [mad("S", "compression", 50 + seed, seed) for seed in range(5)])
    assert "52.0 ± 2.0" in page_of(tmp_path)
    assert 'class="band"' in (tmp_path / "report.html").read_text()


def test_wide_tables_say_that_they_scroll(results: Path) -> None:
    assert page_of(results).count("The table scrolls sideways") >= 3


def test_a_logarithmic_axis_has_equal_factors_at_equal_distances() -> None:
    axis = log_axis("operations", 1e12, 1e15, str)
    assert [axis.place(10.0**power) for power in (12, 13, 15)] == pytest.approx([0, 1 / 3, 1])
    assert [tick for tick, _ in axis.ticks] == pytest.approx([1e12, 1e13, 1e14, 1e15])
    assert [tick for tick, _ in log_axis("", 3, 40, str).ticks] == pytest.approx([5, 10, 20])


def test_a_hybrids_name_has_a_row_for_each_mixer_and_a_fitted_curve_no_points() -> None:
    assert rows_of("gated_deltanet+hyperglu") == ["gated_deltanet", "+hyperglu"]
    assert rows_of("gla+S-pc") == ["gla+S-pc"]
    assert rows_of("R-cg-q-12o+op1_rank=4") == ["R-cg-q-12o+op1…"]
    measured = [(float(x), Estimate((y,))) for x, y in ((1, 3.0), (2, 2.0))]
    lines = [
        Line("gated_deltanet+hyperglu", measured, 0, named=False),
        Line("gated_deltanet+hyperglu", measured, 0, fitted=True),
    ]
    svg = Chart("losses", lines, numeric_axis("x", 0, 3), numeric_axis("y", 1, 3)).html()
    assert svg.count("<circle") == 2
    assert svg.count(">+hyperglu</text>") == 1
    assert 'class="s0 fit"' in svg


def test_a_page_of_others_is_replaced_only_by_force(results: Path) -> None:
    (results / "report.html").write_text("mine")
    with pytest.raises(ValueError, match="was not written by hypermlp"):
        write_report(results)
    assert "What was found" in write_report(results, force=True).read_text()
    write_report(results)
