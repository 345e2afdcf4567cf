"""Numbers in sentences of README and docs are those of the results: what tables show is generated, sentences are held here."""

from __future__ import annotations

import json
import runpy
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from hypermlp.models.bundled import COPYING
from hypermlp.paper.tables import TABLE1, TABLE2, TABLE5
from hypermlp.report.bench_tables import training_ratios
from hypermlp.report.explore import open_task
from hypermlp.report.ranks import own_name, rank_of
from hypermlp.report.table1 import task_title
from hypermlp.report.task_document import columns
from hypermlp.verdicts.claims import judge_claims
from hypermlp.verdicts.folders import read_studies
from hypermlp.verdicts.results import AVERAGE, VALIDATION, Results

ROOT = Path(__file__).parent.parent
GLU, MLP, PLAIN_GLU, PLAIN_MLP = "G-cg-q-12o", "R-cg-q-12o", "G-cg-q", "R-cg-q"
COPY, NOISE, FUZZY, RECALL = "selective-copying", "noisy-recall", "fuzzy-recall", "in-context-recall"
SOLVED = 98.0  # %


def text(document: str) -> str:
    return " ".join((ROOT / document).read_text().split())


@cache
def study(name: str) -> Results:
    (found,) = read_studies(ROOT / "results" / name)
    return found


def mean(mixer: str, measure: str, name: str = "table1") -> float:
    score = study(name).score(mixer, measure)
    assert score is not None
    return score.mean


def gain(better: str, worse: str, measure: str, name: str = "table1") -> float:
    found = study(name).gain(better, worse, measure)
    assert found is not None
    return abs(found.mean)


def seeds_that_solve(mixer: str, task: str) -> int:
    return sum(value > SOLVED for value in study("table1").values(mixer, task).values())


def said_of_the_first_study() -> list[str]:
    interval = study("table1").gain("R-12!", "R-12o!", AVERAGE)
    assert interval is not None
    low, high = interval.ends(study("table1").terms.interval)
    return [
        f"{gain(MLP, PLAIN_MLP, VALIDATION):.2f} nats for HyperMLP and {gain(GLU, PLAIN_GLU, VALIDATION):.2f} for HyperGLU",
        f"R-pc is {gain('S-pc', 'R-pc', VALIDATION):.2f} nats behind S-pc",
        f"HyperGLU ({mean(GLU, VALIDATION):.3f}) and softmax attention",
        f"(S-pc, {mean('S-pc', VALIDATION):.3f}) cannot be told apart",
        f"Mamba ({mean('mamba', VALIDATION):.3f}) and Gated DeltaNet ({mean('gated_deltanet', VALIDATION):.3f})",
        f"{gain('R-12o!', 'R-12!', VALIDATION):.2f} nats are lost",
        f"{gain(MLP, PLAIN_MLP, AVERAGE):.1f} points on average for HyperMLP "
        f"and {gain(GLU, PLAIN_GLU, AVERAGE):.1f} for HyperGLU",
        f"HyperGLU@8 {mean(GLU, COPY):.0f} %, HyperMLP@8 {mean(MLP, COPY):.0f} %, the same layers without mixing "
        f"{mean(PLAIN_GLU, COPY):.0f} and {mean(PLAIN_MLP, COPY):.0f} %",
        f"ahead of S-pc by {gain(GLU, 'S-pc', AVERAGE):.1f} points on average, through selective copying "
        f"({mean(GLU, COPY):.0f} against {mean('S-pc', COPY):.0f} %)",
        f"HyperMLP@8 {mean(MLP, FUZZY):.0f} %, HyperGLU@8 {mean(GLU, FUZZY):.0f}, S-pc {mean('S-pc', FUZZY):.0f}",
        f"(+{gain(MLP, PLAIN_MLP, FUZZY):.1f} points) and not HyperGLU (−{gain(GLU, PLAIN_GLU, FUZZY):.1f})",
        f"R-12! is {gain('R-12!', 'R-12o!', AVERAGE):.1f} points ahead of R-12o!, "
        f"with an interval from −{abs(low):.1f} to {high:.1f}",
        f"DeltaNet by {gain(GLU, 'deltanet', AVERAGE):.1f} points, of gated linear attention by "
        f"{gain(GLU, 'gla', AVERAGE):.1f} and of Mamba by {gain(GLU, 'mamba', AVERAGE):.1f}",
        f"(R-cg-q {mean(PLAIN_MLP, 'memorization'):.0f} %, G-cg-q {mean(PLAIN_GLU, 'memorization'):.0f} %)",
        f"S-pc solves it with two seeds of five ({mean('S-pc', NOISE):.0f} %)",
    ]


def said_of_longer_compression() -> list[str]:
    def longer(mixer: str) -> str:
        return f"{mean(mixer, 'compression', 'compression'):.0f}"

    def ahead(better: str, worse: str) -> str:
        return f"{gain(better, worse, 'compression', 'compression'):.1f}"

    assert longer("mamba") == longer("gated_deltanet")
    assert longer("gla") == longer("R-12o!")
    assert {int(longer(mixer)) for mixer in ("S-p", "S-pc", "R-c-v", PLAIN_MLP, PLAIN_GLU)} <= {15, 16, 17}
    return [
        f"DeltaNet has {longer('deltanet')} %, R-12! {longer('R-12!')}, Mamba and Gated DeltaNet {longer('mamba')}, "
        f"gated linear attention and R-12o! {longer('gla')}, HyperMLP {longer(MLP)} and HyperGLU {longer(GLU)}",
        f"Mixing gains {ahead(MLP, PLAIN_MLP)} points for HyperMLP and {ahead(GLU, PLAIN_GLU)} for HyperGLU",
        f"HyperGLU is {ahead(GLU, 'S-pc')} points ahead of S-pc",
        f"DeltaNet is {ahead('deltanet', GLU)} points ahead of HyperGLU, Mamba {ahead('mamba', GLU)} and Gated DeltaNet "
        f"{ahead('gated_deltanet', GLU)}",
        f"{ahead('R-12!', 'R-12o!')} points ahead of R-12o!",
    ]


@pytest.mark.parametrize("said", [*said_of_the_first_study(), *said_of_longer_compression()])
def test_what_was_reproduced_says_what_the_records_say(said: str) -> None:
    assert said in text("docs/reproduction.md"), f"docs/reproduction.md should say: {said}"


def test_a_name_without_a_rank_is_the_papers_rank() -> None:
    """HyperGLU in README and in the tables of what was reproduced has no run with another rank."""
    first = study("table1")
    finals = {own_name(run) for run in first.mad if run["mixer"] == GLU}
    assert finals == {GLU, f"{GLU}@8"}
    for task in first.tasks:
        searched = f"{GLU}@8" in {own_name(run) for run in first.mad if run["mixer"] == GLU and run["task"] == task}
        assert rank_of(first, GLU, task) == ("@8" if searched else "")
        row = f"| {task_title(task)}, HyperGLU@8, % |"
        assert all((row in (ROOT / name).read_text()) == searched for name in ("README.md", "docs/reproduction.md"))


def test_noisy_recall_is_solved_without_mixing_and_by_two_seeds_of_softmax_attention() -> None:
    assert seeds_that_solve("S-pc", NOISE) == 2
    assert seeds_that_solve(PLAIN_GLU, NOISE) == seeds_that_solve(PLAIN_MLP, NOISE) == seeds_that_solve(GLU, NOISE) == 5
    assert "Two of its five seeds did, and HyperGLU did without its mixing" in text("README.md")


def test_in_context_recall_is_solved_by_those_that_are_named() -> None:
    convolutions = [mixer for mixer in study("table1").mixers if mixer[1] == "-" and "c" in mixer.split("-")[1]]
    assert len(convolutions) > 5
    assert all(mean(mixer, RECALL) > SOLVED for mixer in [*convolutions, "deltanet"])
    others = [mean(mixer, RECALL) for mixer in ("S-p", "R-12o!", "R-12!", "gla", "mamba")]
    assert f"end at {min(others):.0f} to {max(others):.0f} %" in text("docs/reproduction.md")


@cache
def tasks() -> dict[str, Results]:
    return {found.tasks[0]: found for found in read_studies(ROOT / "results" / "tasks")}


def seeds_of(task: str, mixer: str, column: int = 0) -> list[float]:
    return columns(tasks()[task])[column].values(mixer)


def letter_loss(task: str, mixer: str, rows: str) -> float:
    runs = [run for run in tasks()[task].chosen.values() if run["mixer"] == mixer]
    return fmean(run["metrics"]["sets"][rows]["loss"] for run in runs)


def trivial(task: str) -> dict[str, float]:
    """The scores of the trivial answers."""
    known = next(run["baselines"] for run in tasks()[task].mad if run.get("baselines"))
    return {name: found[tasks()[task].measure] for name, found in known.items()}


def said_of_tasks() -> list[str]:
    rows, attention = "32 letters", ("S-c", "S-pc", PLAIN_MLP)
    weather = {mixer: seeds_of("forecast", mixer) for mixer in tasks()["forecast"].mixers}
    copied = {mixer: fmean(seeds_of("copy", mixer)) for mixer in (GLU, MLP, *attention)}
    words = [value for mixer in tasks()["group-words"].mixers for value in seeds_of("group-words", mixer)]
    learned = [letter_loss("copy", mixer, rows) for mixer in ("S-c", PLAIN_MLP, "deltanet")]
    parity = sorted(seeds_of("parity", "deltanet_neg", 1))
    answers = trivial("forecast")
    assert all(letter_loss("copy", mixer, rows) > 4 for mixer in (GLU, MLP, "S-p", "S-pc"))
    assert parity[1] > 99
    assert max(seed for mixer in (GLU, MLP) for seed in seeds_of("parity", mixer, 1)) < 55
    assert sum(value < 26 for value in seeds_of("mqar", PLAIN_MLP)) == 2
    assert all(min(seeds_of("mqar", mixer)) > SOLVED for mixer in (GLU, "S-c", "S-pc"))
    assert all(
        max(seeds_of("mqar", mixer)) < 100 * trivial("mqar")["a value of the row"] for mixer in ("gla", "mamba", "deltanet")
    )
    assert all(round(fmean(seeds_of("regbench", mixer))) == 80 for mixer in (GLU, MLP, "S-c", "S-pc", PLAIN_MLP, "deltanet"))
    return [
        f"HyperGLU ({copied[GLU]:.1f} %) and HyperMLP ({copied[MLP]:.1f} %) copy strings of the trained length",
        f"with convolutions ({min(copied[m] for m in attention):.1f} to {max(copied[m] for m in attention):.1f} %)",
        f"have {min(learned):.1f} to {max(learned):.1f} nats",
        f"HyperGLU has {letter_loss('copy-offsets', GLU, rows):.1f} and HyperMLP {letter_loss('copy-offsets', MLP, rows):.1f}, "
        f"still far behind S-c ({letter_loss('copy-offsets', 'S-c', rows):.1f})",
        f"HyperMLP is at {min(seeds_of('mqar', MLP)):.0f} % in one seed of three",
        f"gets {100 * trivial('regbench')['2-gram']:.0f} %, and a trigram {100 * trivial('regbench')['3-gram']:.0f} %",
        f"has {parity[0]:.0f} %",
        f"({min(words):.0f} to {max(words):.0f} % of the prefixes)",
        f"the linear maps ({answers['NLinear']:.3f})",
        f"from HyperMLP ({fmean(weather[MLP]):.3f}) to GLA ({fmean(weather['gla']):.3f})",
        f"differ by up to {max(max(values) - min(values) for values in weather.values()):.3f}",
        f"repeat {answers['repeat']:.3f}, seasonal repeat {answers['seasonal repeat']:.3f}, NLinear {answers['NLinear']:.3f}, "
        f"DLinear {answers['DLinear']:.3f}",
    ]


def test_tasks_say_what_the_records_say() -> None:
    document = text("docs/tasks.md")
    assert [said for said in said_of_tasks() if said not in document] == []


def test_when_to_use_something_else() -> None:
    """The README's advice is what the records show."""
    assert mean(GLU, COPY) > 2 * mean("S-pc", COPY)
    assert min(seeds_of("copy", GLU)) > 2 * max(seeds_of("copy", "S-pc")), "small models copy far better"
    assert mean("gated_deltanet", VALIDATION) < mean(GLU, VALIDATION)
    claims = {claim.title: claim.verdict.word for claim in judge_claims(study("table1"))}
    assert claims["HyperGLU is ahead of Gated DeltaNet"] == "contradicted"
    for run in tasks()["copy"].chosen.values():
        if run["mixer"] in (GLU, MLP):
            assert run["metrics"]["sets"]["16 letters"]["accuracy"] > 10 * run["metrics"]["sets"]["32 letters"]["accuracy"]
    rows = json.loads((ROOT / "results" / "bench" / "narrow" / "layer.json").read_text())["rows"]
    assert all(found.time > 1 for found in training_ratios(rows) if found.tokens >= 4096)
    rows = json.loads((ROOT / "results" / "bench" / "second" / "narrow" / "layer.json").read_text())["rows"]
    assert all(found.time < 1 for found in training_ratios(rows)), "slower on one of two processors"


def test_what_a_token_takes() -> None:
    """The sentences below the table of latencies in docs/benchmark.md."""

    def rows(name: str) -> dict[Any, dict[str, Any]]:
        made = json.loads((ROOT / "results" / "bench" / "latency" / f"{name}.json").read_text())["rows"]
        return {(row["contestant"], row["context"], row["weights"]): row for row in made}

    def share(name: str) -> float:
        ours, rival = (rows(name)[stream, 4096, "float32"] for stream in ("hyperglu", "softmax 12 heads"))
        return float(ours["p50"] / rival["p50"])

    document, model = text("docs/benchmark.md"), rows("model")
    assert f"HyperGLU's p50 is {share('warm'):.2f} of softmax attention's, and {share('cold'):.2f} where every" in document
    whole = {weights: row["p50"] for (stream, _, weights), row in model.items() if stream == "language model"}
    assert all(whole[weights] < 0.11 * model["language model, by modules", 256, weights]["p50"] for weights in whole)
    assert min(whole.values()) > 0.9 * whole["float32"], "smaller weights gain nothing in this model"
    assert all(3.5 < row["p99.9"] / row["p50"] < 4.5 for row in rows("warm").values())
    assert 550 < 1 / (1 - rows("warm")["hyperglu", 4096, "float32"]["met"]["1"]) < 650, "one token in 600"


def test_how_closely_the_authors_code_is_met() -> None:
    record = json.loads((ROOT / "results" / "parity" / "authors.json").read_text())
    again = [row["difference"] for row in record["stored vectors, their layer again"]]
    larger = record["larger, ours against theirs"]
    at_most = {dtype: max(row["difference"] for row in larger if row["dtype"] == dtype) for dtype in ("float32", "float64")}
    stored = len(list((ROOT / "tests" / "golden").glob("*.safetensors")))
    document = text("docs/layer.md")
    assert f"with {stored} stored results of their layer" in document
    assert f"to {max(again):.0e}.".replace("e-0", "e-") in document
    for dtype, difference in at_most.items():
        assert f"{difference:.0e} in {dtype}".replace("e-0", "e-") in document


def test_what_parallel_processes_take() -> None:
    """The table of docs/parallel.md."""
    document, mebi = text("docs/parallel.md"), 2**20
    rows = json.loads((ROOT / "results" / "bench" / "parallel.json").read_text())["rows"]
    alone = {row["mixer"]: row["memory"] for row in rows if row["processes"] == 1}
    for row in rows:
        share, sent, count = row["memory"] / alone[row["mixer"]], row["sent"] / mebi, row["count"] / mebi
        cells = f"{row['memory'] / mebi:.0f} | {share:.2f} | {sent:.1f} | {count:.1f}"
        assert f"| {row['mixer']} | {row['processes']} | {cells} |" in document


def test_what_is_said_of_the_papers_tables() -> None:
    ratio = TABLE5["HyperGLU"].flops_per_token[0] / TABLE5["SM(Flash)"].flops_per_token[0] - 1
    lower = [100 * (1 - row.gigabytes[0] / row.gigabytes[1]) for row in TABLE5.values()]
    document = text("docs/efficiency.md")
    assert f"HyperGLU's {100 * ratio:.0f} % over FlashAttention" in document
    assert f"{min(lower):.0f} to {max(lower):.0f} % below that of a training step" in document
    guessing = [row.scores["GPQA"] for size in TABLE2.values() for row in size.values()]
    assert f"{min(guessing)} to {max(guessing)}" in text("docs/evaluation.md").replace("0.270", "0.27")
    averages = {label: (TABLE1[label].average, fmean(TABLE1[label].accuracy.values())) for label in ("R-12o!", "R-1o!")}
    told = "R-12o! has {:.2f} where its columns give {:.2f}, and R-1o! {:.2f} where they give {:.2f}"
    assert told.format(*averages["R-12o!"], *averages["R-1o!"]) in text("docs/reproduction.md")


def test_what_mixing_does_in_the_bundled_model() -> None:
    """The sentences of docs/what-does-this-head-read.md below its table over held-out text."""
    record = json.loads((ROOT / "results" / "reading.json").read_text())
    heads = {row[0]: [float(cell.rstrip("%")) for cell in row[1:]] for row in record["heads"]}
    active, plain, _on, off, _reach, noise, noise_plain, weight = range(8)
    assert all(39 < heads[name][off] < 45 for name in ("2, 1", "2, 2")), "two slots of five"
    assert 45 < heads["4, 2"][off] < 55, "half of them"
    assert heads["4, 1"][active] > 2 * heads["4, 1"][plain], "wakes up"
    suppress = {name for name, row in heads.items() if row[noise] < row[noise_plain] - 5}
    opposite = {name for name, row in heads.items() if row[noise] > row[noise_plain] + 5}
    assert suppress == {"2, 1", "2, 2", "4, 2"}
    assert opposite == {"3, 1", "3, 2", "4, 1"}
    assert min(row[weight] for row in heads.values()) > 23
    assert max(row[weight] for row in heads.values()) < 53


def test_a_head_of_the_bundled_model_steps_from_token_to_token() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_reading.py"))
    subject = open_task(Path(COPYING), 0)
    places = [place for place, piece in enumerate(subject.pieces) if piece.isdigit()]
    answers = [token for token, target in enumerate(subject.targets) if target is not None]
    assert f"stand at {', '.join(map(str, places[:-1]))} and {places[-1]}." in text("docs/what-does-this-head-read.md")
    layer, head = made["READER"]
    opened = made["traces"](subject)[layer]
    read = [int(opened.memory(token, head).token_shares.argmax()) for token in answers]
    assert all(1 <= most - place <= 3 for most, place in zip(read, places, strict=True))
