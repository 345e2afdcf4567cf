"""The language half of Table 1: what is measured, and that equal jobs give equal records."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest
import torch

from hypermlp.data.packing import Batches
from hypermlp.experiments import language
from hypermlp.experiments.runs import Folder
from hypermlp.experiments.table1 import CORE, contestants
from hypermlp.mixers.labels import TABLE1
from hypermlp.models.lm import LanguageModel, count_parameters

PLAN = language.make_plan("quick", width=16, steps=12, evaluations=6, sample=2, length=32)
TIMES = ("seconds", "tokens_per_second")


def jobs(folder: Path, mixers: list[str], seeds: int = 1, plan: language.Plan = PLAN) -> list[language.Job]:
    with Folder(folder) as held:
        return language.plan_jobs(held, mixers, plan, seeds)


def test_a_run_is_measured_as_in_the_paper(tmp_path: Path) -> None:
    (job,) = jobs(tmp_path, ["G-cg-q-12o"])
    record = language.train(job)
    curve = record["curve"]
    assert [point["step"] for point in curve] == [2, 4, 6, 8, 10, 12]
    for name in ("loss", "validation_loss"):
        assert record["final"][name] == pytest.approx(fmean(point[name] for point in curve[-5:]))
    assert curve[-1]["loss"] < curve[0]["loss"]
    again = language.train(job)
    assert {k: v for k, v in again.items() if k not in TIMES} == {k: v for k, v in record.items() if k not in TIMES}


def test_losses_are_those_of_the_sampled_tokens() -> None:
    corpus = language.load_corpus("stdlib")
    torch.manual_seed(0)
    model = LanguageModel(PLAN.config(corpus.tokenizer.vocabulary, "S", None, 32))
    found = language.losses(PLAN, model)
    batches = Batches(corpus, "train", context=PLAN.length, batch=PLAN.batch, seed=1_000_003)
    inputs, targets = (torch.cat(parts) for parts in zip(*(batches.at(step)[:2] for step in range(PLAN.sample)), strict=True))
    expected = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).item()
    assert found["loss"] == pytest.approx(expected, rel=1e-5)


def test_models_are_equal_in_parameters_apart_from_those_above_the_budget(tmp_path: Path) -> None:
    counts = {}
    for job in jobs(tmp_path, ["S", "G-cg-q-12o", "mamba", "R-12!"]):
        config = PLAN.config(257, job.mixer, job.size, job.inner)
        counts[job.mixer] = count_parameters(LanguageModel(config))
        assert config.style == "gpt2"
    within = [count for name, count in counts.items() if not name.endswith("!")]
    assert max(within) <= 1.01 * min(within)


def test_a_folder_takes_more_seeds_but_no_other_numbers_and_no_larger_models(tmp_path: Path) -> None:
    assert len(jobs(tmp_path, ["S"])) == 1
    assert len(jobs(tmp_path, ["S"], seeds=2)) == 2
    with pytest.raises(ValueError, match="steps = 12, not 20"):
        jobs(tmp_path, ["S"], plan=language.make_plan("quick", width=16, steps=20, evaluations=6, sample=2, length=32))
    with pytest.raises(ValueError, match="would have to be trained anew"):
        jobs(tmp_path, ["S", "G-cg-q-12o"])


def test_mistakes_are_told_before_anything_starts() -> None:
    with pytest.raises(ValueError, match="unknown mixer 'transformer'"):
        language.check(["transformer"], 1, PLAN)
    with pytest.raises(ValueError, match="each named once"):
        language.check(["S", "S"], 1, PLAN)
    with pytest.raises(ValueError, match=r"scale \('huge'\) must be one of 'paper', 'laptop', 'quick'"):
        language.make_plan("huge")
    with pytest.raises(ValueError, match=r"steps \(0\) must be at least 1"):
        language.make_plan("quick", steps=0)
    with pytest.raises(ValueError, match="nowhere holds no prepared corpus"):
        language.check(["S"], 1, language.make_plan("quick", corpus="nowhere"))


def test_groups_of_contestants() -> None:
    assert contestants("core") == list(CORE)
    assert contestants("S-pc, labels")[0] == "S-pc"
    assert len(contestants("S-pc,labels")) == len(TABLE1)
    assert len(contestants("all")) == len(set(contestants("all")))
