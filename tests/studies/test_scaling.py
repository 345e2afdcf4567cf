"""A scaling study: models and tokens in proportion, rates that follow from small models, predictions made before, its page."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

import made_up
from hypermlp.cli import app
from hypermlp.cli.watch import leave_scaling
from hypermlp.files import read_json, write_json
from hypermlp.mixers import MIXERS
from hypermlp.models.lm import LanguageModel
from hypermlp.report.scaling import ahead, lead, outlook, power, write_scaling
from hypermlp.report.terminal import new_console
from hypermlp.studies import scaling
from hypermlp.studies.catalogue import StudyOptions, plan_study
from hypermlp.studies.cost import measure_costs
from hypermlp.studies.executors import LocalPool
from hypermlp.studies.folder import Folder, read_lines
from hypermlp.studies.protocol import find_protocol, load_protocol
from hypermlp.studies.scaling import PREDICTIONS, TRANSFER, ScalingSetting, ScalingStudy, optimum, training_flops, transfer_rate
from hypermlp.studies.search import FINAL, PHASE, Place, Search, Tuned, settle
from hypermlp.studies.study import Pairing
from hypermlp.verdicts import registration
from hypermlp.verdicts.estimates import Estimate
from hypermlp.verdicts.folders import read_studies
from hypermlp.verdicts.registration import enter
from hypermlp.verdicts.scaling import ScalingResults, find_scaling, read_scaling
from made_up import write

MIX = ("S", "gla", "gla+S")
SMALL: dict[str, Any] = {
    "widths": (8, 12, 16, 24),
    "ratios": (0.1,),
    "depth": 2,
    "length": 16,
    "batch": 4,
    "evaluations": 2,
    "sample": 1,
    "search": Search(rates=(2e-3, 8e-3), rungs=(1.0,), widen=0),
}
STUDY = ScalingStudy(**SMALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("scaling") / "study"
    STUDY.run(out, MIX, seeds=2, executor=LocalPool(1))
    return out


@pytest.fixture
def results(folder: Path) -> ScalingResults:
    return read_scaling(folder)


def jobs(study: ScalingStudy, width: int, mixers: tuple[str, ...] = MIX) -> list[Any]:
    setting = ScalingSetting(width, study.ratios[-1])
    return [job for name, model in study.match(setting, mixers).items() for job in study.jobs(setting, name, model, 0)]


def test_tokens_are_in_proportion_to_parameters_which_are_equal(results: ScalingResults) -> None:
    assert [size.width for size in results.sizes] == [8, 12, 16, 24]
    for size in results.sizes:
        own = [record for record in results.counted if record["setting"] == size.key]
        counts = [record["parameters"] for record in own]
        assert max(counts) <= 1.01 * min(counts)
        for record in own:
            wanted = 0.1 * record["parameters"]
            assert wanted <= record["tokens"] < wanted + STUDY.batch * STUDY.length
            assert record["bytes"]["weights"] == 4 * record["parameters"]
            assert record["bytes"]["state"] > 0
    assert [len(results.losses("gla+S", size.key)) for size in results.sizes] == [2, 2, 2, 2]


def test_the_largest_size_may_have_fewer_seeds() -> None:
    study = dataclasses.replace(STUDY, largest_seeds=1)
    assert [study.seeds_of(key, 3) for key in study.settings()] == [3, 3, 3, 1]
    assert [study.smaller().seeds_of(key, 3) for key in study.smaller().settings()] == [3, 3, 3]


@pytest.mark.parametrize("mixer", ["hyperglu", "S", "hyperglu+S"])
def test_operations_are_those_that_torch_counts(mixer: str) -> None:
    """Three forwards; in torch's own kernel of softmax attention it sees nothing, so the pairs of tokens are added here."""
    (job,) = jobs(dataclasses.replace(STUDY, widths=(16, 32)), 32, (mixer,))
    net = LanguageModel(job.study.config(mixer, job.size, job.inner))
    rows, length = job.tokens // STUDY.length, STUDY.length
    with FlopCounterMode(display=False) as counter:
        net(torch.zeros(2, length, dtype=torch.long))
    unseen = sum(2 * 2 * 32 * length * (length + 1) // 2 for own in net.config.mixers if own == "S")
    assert training_flops(job) == (3 * rows * (counter.get_total_flops() / 2 + unseen), [])


def test_rates_follow_the_rule() -> None:
    assert transfer_rate({32: 4e-3, 64: 4e-3}, 224) == 4e-3
    assert transfer_rate({32: 8e-3, 64: 8e-3 / math.sqrt(2)}, 128) == pytest.approx(4e-3, rel=2e-3)
    assert transfer_rate({64: 2e-3, 32: 8e-3}, 128) == pytest.approx(4e-3 * math.sqrt(32 * 64) / 128, rel=3e-3), (
        "at most 1 / width"
    )
    assert transfer_rate({32: 2e-3, 64: 8e-3}, 128) == 4e-3, "never rises"


def test_initial_scales_are_searched_too_and_follow_the_larger_model() -> None:
    search = Search(rates=(2e-3, 8e-3), rungs=(1.0,), widen=0, scales=("0.02", "torch"))
    study = dataclasses.replace(STUDY, search=search)
    keys = [setting.key for setting in study.settings().values()]
    losses = {"0.02": (1.0, 2.0), "torch": (2.0, 1.5)}  # of both rates
    found = {
        Place("S", key, scale): settle(search, {(2e-3, 1.0): low, (8e-3, 1.0): high})
        for key in keys[:2]
        for scale, (low, high) in losses.items()
    }
    choices = {("S", keys[0]): Tuned("S", 2e-3, "0.02"), ("S", keys[1]): Tuned("S", 8e-3, "torch")}
    (model,) = study.match(study.largest, ["S"]).values()
    pairings = [Pairing(key, setting, "S", model) for key, setting in study.settings().items()]
    everywhere = study.transfer(choices, found, pairings)
    assert everywhere == {**choices, **{("S", key): Tuned("S", 8e-3, "torch") for key in keys[2:]}}
    tests = study.rate_tests(everywhere, pairings)
    assert [(test.identity["lr"], test.identity["init_scale"]) for test in tests] == [(4e-3, "torch"), (1.6e-2, "torch")]
    finals = study.chosen_jobs(pairings, 1, everywhere)
    trials = [study.trial(pairings[0], 10_000, scale, 2e-3, 1.0) for scale in search.scales]
    assert len({job.key for job in (*tests, *finals, *trials)}) == 2 + 4 + 2


def test_the_best_rate_is_the_lowest_point_of_a_parabola() -> None:
    search = Search(rates=(1e-3, 2e-3, 4e-3), rungs=(1.0,), widen=0)

    def found(losses: list[float]) -> float:
        return optimum(settle(search, {(rate, 1.0): loss for rate, loss in zip(search.rates, losses, strict=True)}))

    def bowl(rate: float) -> float:
        return 2 + 0.1 * math.log(rate / 2.5e-3) ** 2

    assert found([bowl(rate) for rate in search.rates]) == pytest.approx(2.5e-3)
    assert found([3.0, 2.0, 1.0]) == 4e-3, "at the end of the grid, that end"
    assert found([math.inf, 1.0, 2.0]) == 2e-3, "beside a run that blew up there is no parabola"


def test_only_small_models_are_searched_and_the_third_tests_what_followed(results: ScalingResults) -> None:
    searched = {record["width"] for record in results.records if record.get("phase") == PHASE}
    assert searched == {8, 12}
    for mixer in MIX:
        rates = [results.rates[mixer, size.key] for size in results.sizes]
        assert set(rates[:2]) <= {2e-3, 8e-3}
        assert rates[2:] == [transfer_rate(dict(zip((8, 12), rates, strict=False)), width) for width in (16, 24)]
    tests = [record for record in results.records if record.get("phase") == TRANSFER]
    assert {(record["width"], record["seed"]) for record in tests} == {(16, 0)}
    for test in results.rate_tests:
        assert list(test.losses) == pytest.approx([test.rate / 2, test.rate, 2 * test.rate], rel=1e-2)
        assert test.lost == test.losses[test.rate] - min(test.losses.values()) >= 0
    assert len(results.rate_tests) == len(MIX)


def test_a_prediction_is_made_of_smaller_models_and_never_afterwards(
    folder: Path, results: ScalingResults, tmp_path: Path
) -> None:
    before = (folder / PREDICTIONS).read_bytes()
    assert [item.mixer for item in results.forecasts] == list(MIX)
    for item in results.forecasts:
        assert item.setting == STUDY.largest.key
        assert item.records == 6
        assert item.interval.low < item.predicted < item.interval.high
        assert item.measured is not None
        assert item.holds is (item.measured.mean in item.interval)
    records = len(read_lines(folder / "runs.jsonl")[0])
    STUDY.run(folder, MIX, seeds=2, executor=LocalPool(1))
    assert (folder / PREDICTIONS).read_bytes() == before
    assert len(read_lines(folder / "runs.jsonl")[0]) == records, "nothing is run again"
    (tmp_path / "runs.jsonl").write_bytes((folder / "runs.jsonl").read_bytes())
    STUDY.predict(tmp_path, MIX)
    assert not (tmp_path / PREDICTIONS).exists(), "the largest models are trained already"


def test_a_prediction_is_there_before_the_largest_models_are_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[list[int], bool]] = []

    def run(study: ScalingStudy, out: Path, mixers: tuple[str, ...], **how: Any) -> list[Any]:
        seen.append(([setting.width for setting in study.settings().values()], (out / PREDICTIONS).exists()))
        return []

    monkeypatch.setattr(scaling.LanguageStudy, "run", run)
    monkeypatch.setattr(ScalingStudy, "predict", lambda study, out, mixers: write_json(out / PREDICTIONS, {"predictions": []}))
    STUDY.run(tmp_path, MIX, seeds=2)
    assert seen == [([8, 12, 16], False), ([8, 12, 16, 24], True)]


def test_the_page_begins_with_a_sentence_and_has_both_charts(folder: Path, results: ScalingResults) -> None:
    page = write_scaling(folder).read_text(encoding="utf-8")
    assert "too short to rank mixers" in lead(results)
    assert page.index(lead(results)) < page.index("<svg")
    assert page.count("<figure>") == 2
    assert "gla+S" in page
    assert "Predicted, then measured" in page
    assert "http" not in page.replace("http-equiv", "")
    longer = dataclasses.replace(results, records=[{**record, "ratio": 20.0} for record in results.records])
    first = longer.ranked(longer.curve_sizes[-1])[0][0]
    assert f"{first} has the lowest loss" in lead(longer)
    assert "lay where the smaller ones had predicted them" in outlook(longer)
    assert not results.crossings, "a study that ranks nobody says nothing of who passes whom"
    assert not outlook(results)


def test_a_sentence_says_whether_all_seeds_agree() -> None:
    assert ahead(Estimate((0.02, 0.04))) == "0.030 behind in both seeds"
    assert ahead(Estimate((-0.01, 0.04, 0.03))) == "0.020 behind in the mean of 3 seeds"
    assert power(2.64e13) == "2.6·10¹³"


def test_other_pages_leave_a_scaling_study_alone(folder: Path) -> None:
    assert find_scaling(folder.parent) == [folder]
    with pytest.raises(ValueError, match="no finished runs"):
        read_studies(folder)


def test_a_folder_above_has_every_study_that_has_runs(folder: Path, tmp_path: Path) -> None:
    """Also beside one that has just begun, and beside the plan of another program."""
    shutil.copytree(folder, tmp_path / "a" / "scaling")
    write(tmp_path / "b", [made_up.mad(mixer, "compression", 50) for mixer in ("S-pc", "gla")])
    begun = tmp_path / "begun"
    begun.mkdir()
    head = json.loads((folder / "plan.json").read_text())
    (begun / "plan.json").write_text(json.dumps(head))
    for number, foreign in enumerate(("[]", '{"plan": "a house"}', '{"steps": 3}')):
        (tmp_path / f"foreign-{number}").mkdir()
        (tmp_path / f"foreign-{number}" / "plan.json").write_text(foreign)
    done = CliRunner().invoke(app, ["study", "report", str(tmp_path)], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert f"Left out: no run that counts is finished in {begun}" in done.output
    assert (tmp_path / "a" / "scaling" / "report.html").exists()
    assert (tmp_path / "report.html").exists()
    shutil.rmtree(tmp_path / "b")
    shutil.rmtree(tmp_path / "a")
    done = CliRunner().invoke(app, ["study", "report", str(tmp_path)])
    assert "no run that counts is finished" in str(done.exception)


@pytest.fixture
def mine(tmp_path: Path) -> Iterator[str]:
    file = tmp_path / "mine.py"
    file.write_text("from hypermlp.mixers.base import Mixer\n" + MEAN)
    yield f"{file}:Mean"
    MIXERS.pop(f"{file}:Mean", None)


MEAN = """
import torch
from torch import nn
from hypermlp.cache import CacheSpec


class Mean(Mixer):
    def __init__(self, width):
        super().__init__()
        self.width, self.proj = width, nn.Linear(width, width)

    def cache_spec(self):
        return CacheSpec(slots={"x": (self.width,)})

    def mix(self, tokens, cache):
        return self.proj(tokens.x.cumsum(1))
"""


def test_the_command_runs_reports_and_takes_mixers_of_ones_own(mine: str, tmp_path: Path) -> None:
    numbers = [
        "corpus=stdlib",
        "widths=8,12,16",
        "ratios=0.05,0.1",
        "length=16",
        "batch=4",
        "evaluations=2",
        "sample=1",
        "lr=4e-3",
    ]
    out = ["--out", str(tmp_path / "out")]
    options = ["--mixers", f"{mine},S", "--seeds", "1", "--no-search", "--workers", "1", "--json", *out]
    done = CliRunner().invoke(app, ["study", "run", "scaling", *numbers, *options])
    assert done.exit_code == 0, done.output
    losses, fits = json.loads(done.stdout)[-2:]
    assert [row["mixer"].split()[0] for row in losses["rows"]] == [mine, "S"]
    assert len(losses["rows"][0]) == 1 + 6
    assert fits["title"].startswith("L = a + b")
    assert not (tmp_path / "out" / PREDICTIONS).exists(), "three sizes are too few to predict the third"
    records = read_lines(tmp_path / "out" / "runs.jsonl")[0]
    assert {tuple(record["uncounted"]) for record in records if record["mixer"] == mine} == {(mine,)}
    assert read_json(tmp_path / "out" / "plan.json")["plan"]["own"].keys() == {mine}
    shown = CliRunner().invoke(app, ["study", "report", str(tmp_path / "out"), "--json"])
    assert json.loads(shown.stdout)[-2:] == [losses, fits]
    assert "operations between tokens of" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_two_ratios_tell_parameters_and_tokens_apart(results: ScalingResults) -> None:
    assert results.parametric("S") is None
    doubled = [{**r, "ratio": 0.2, "setting": r["setting"] + "x", "tokens": 2 * r["tokens"]} for r in results.counted]
    both = dataclasses.replace(results, records=[*results.records, *doubled])
    assert both.parametric("S") is not None
    assert [size.ratio for size in both.curve_sizes] == [0.2] * 4


def test_names_and_numbers_of_the_command() -> None:
    plan = plan_study("scaling", StudyOptions(changes=["widths=16,32,48", "ratios=5"], seeds=2))
    (study,) = plan.studies.values()
    assert isinstance(study, ScalingStudy)
    assert (study.widths, study.ratios, plan.seeds) == ((16, 32, 48), (5.0,), 2)
    assert "gated_deltanet+hyperglu" in plan.mixers
    assert plan_study("scaling.toml").studies["scaling"] == plan_study("scaling").studies[""]
    assert plan_study("scaling", StudyOptions(scale="quick")).folder == Path("runs/scaling-quick")
    with pytest.raises(ValueError, match="hypermlp data prepare packages"):
        study.match(study.largest, ["S"])
    for wrong, rule in (("widths=32,16", "rise"), ("widths=16", "at least 2"), ("ratios=0", "above 0")):
        with pytest.raises(ValueError, match=rule):
            plan_study("scaling", StudyOptions(changes=[wrong]))
    with pytest.raises(ValueError, match="say lr=NUMBER"):
        plan_study("scaling", StudyOptions(search=False))
    with pytest.raises(ValueError, match="takes no --tasks"):
        plan_study("scaling", StudyOptions(tasks="mad"))


def test_a_cost_counts_searches_seeds_and_tests(tmp_path: Path) -> None:
    study = dataclasses.replace(STUDY, largest_seeds=1)
    costs = {(cost.mixer, cost.setting): cost.runs for cost in measure_costs(study, ["S"], 2)}
    assert list(costs.values()) == [2 + 2, 2 + 2, 2 + 2, 1]


def test_another_corpus_or_context_is_another_study(folder: Path) -> None:
    with Folder(folder) as held, pytest.raises(ValueError, match="length was 16, not 32"):
        dataclasses.replace(STUDY, length=32).plan_pairings(held, MIX)
    assert {record.get("phase") for record in read_lines(folder / "runs.jsonl")[0]} == {FINAL, PHASE, TRANSFER}


def test_a_registered_study_shows_its_protocol(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(folder, tmp_path / "scaling")
    file = tmp_path / "mine.toml"
    file.write_text(find_protocol("scaling").read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(registration, "commit_of", lambda path, text: ("c" * 40, "2000-01-01T00:00:00+00:00"))
    enter(tmp_path, file, load_protocol(file))
    assert leave_scaling(new_console(file=io.StringIO()), tmp_path)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Which mixer" in page
    assert "Not registered beforehand" in page, "its records do not have the digest of this file"
