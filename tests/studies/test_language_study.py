"""The language half of Table 1: what is measured, and that equal jobs give equal records."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from statistics import fmean

import pytest
import torch

from hypermlp.data.packing import Batches
from hypermlp.mixers.groups import CORE, choose_mixers
from hypermlp.mixers.labels import TABLE1
from hypermlp.models.lm import LanguageModel, count_parameters
from hypermlp.runs.configs import CONFIGS
from hypermlp.studies import language
from hypermlp.studies.folder import Folder
from hypermlp.studies.language import LanguageJob, LanguageStudy, language_study
from hypermlp.studies.table1 import table1_studies
from hypermlp.train.optimisation import Recipe

STUDY = dataclasses.replace(language_study("quick"), width=16, steps=12, evaluations=6, sample=2, length=32)
TIMES = ("seconds", "tokens_per_second")


def jobs(folder: Path, mixers: list[str], seeds: int = 1, study: LanguageStudy = STUDY) -> list[LanguageJob]:
    with Folder(folder) as held:
        return study.plan_jobs(held, mixers, seeds)


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
    model = LanguageModel(STUDY.config("S", None, 32))
    found = language.losses(STUDY, model)
    batches = Batches(corpus, "train", context=STUDY.length, batch=STUDY.batch, seed=1_000_003)
    sample = [one[:2] for step in range(STUDY.sample) for one in batches.passes(step)]
    inputs, targets = (torch.cat(parts) for parts in zip(*sample, strict=True))
    expected = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).item()
    assert found["loss"] == pytest.approx(expected, rel=1e-5)


def test_models_are_equal_in_parameters_apart_from_those_above_the_budget(tmp_path: Path) -> None:
    counts = {}
    for job in jobs(tmp_path, ["S", "G-cg-q-12o", "mamba", "R-12!"]):
        config = STUDY.config(job.mixer, job.size, job.inner)
        counts[job.mixer] = count_parameters(LanguageModel(config))
        assert config.style == "gpt2"
    within = [count for name, count in counts.items() if not name.endswith("!")]
    assert max(within) <= 1.01 * min(within)


def test_a_folder_takes_more_seeds_but_no_other_numbers_and_no_larger_models(tmp_path: Path) -> None:
    assert len(jobs(tmp_path, ["S"])) == 1
    assert len(jobs(tmp_path, ["S"], seeds=2)) == 2
    with pytest.raises(ValueError, match="steps was 12, not 20"):
        jobs(tmp_path, ["S"], study=dataclasses.replace(STUDY, steps=20))
    with pytest.raises(ValueError, match="would have to be trained again"):
        jobs(tmp_path, ["S", "G-cg-q-12o"])


def test_mistakes_are_told_before_anything_starts() -> None:
    with pytest.raises(ValueError, match="unknown mixer 'transformer'"):
        STUDY.check(["transformer"], 1)
    with pytest.raises(ValueError, match="each named once"):
        STUDY.check(["S", "S"], 1)
    with pytest.raises(ValueError, match=r"scale \('huge'\) must be one of 'paper', 'laptop', 'quick'"):
        language_study("huge")
    with pytest.raises(ValueError, match=r"steps \(0\) must be at least 1"):
        dataclasses.replace(STUDY, steps=0)
    with pytest.raises(ValueError, match="nowhere holds no prepared corpus"):
        language_study("quick", corpus="nowhere").check(["S"], 1)


def test_the_papers_scale_is_the_one_definition_of_nanogpt() -> None:
    study, config = language_study("paper"), CONFIGS["nanogpt-owt2"]
    assert study.recipe == Recipe(**{f.name: getattr(config.train, f.name) for f in dataclasses.fields(Recipe)})
    assert study.init == config.model.init == "paper"
    model = LanguageModel(language_study("quick").config("G-cg-q-12o", None, 32))
    assert model.get_parameter("blocks.0.mixer.conv_v.weight").abs().max() > 0.3, "ours begin with decays"
    assert (study.steps, study.evaluations, study.batch, study.micro) == (40_000, 80, 480, 12)
    assert study.recipe.rate(20_000) == pytest.approx(6e-4, rel=0.01)  # of 600,000 steps
    assert "vocabulary" not in STUDY.numbers(), "plans of before stay comparable"


def test_rows_computed_a_few_at_a_time_give_the_same_updates(tmp_path: Path) -> None:
    (job,) = jobs(tmp_path, ["S"])
    parts = dataclasses.replace(job, study=dataclasses.replace(STUDY, micro=2))
    whole, divided = language.train(job)["curve"], language.train(parts)["curve"]
    assert [p["train_loss"] for p in divided] == pytest.approx([p["train_loss"] for p in whole], rel=1e-4)


def test_the_papers_scale_is_for_gpus_and_says_so() -> None:
    with pytest.raises(ValueError, match="needs corpus=FOLDER"):
        table1_studies("paper", device="cpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="is for GPUs, and PyTorch finds none"):
            table1_studies("paper", ["mad"])
        with pytest.raises(ValueError, match="PyTorch finds no GPU"):
            table1_studies("laptop", device="cuda")
    (study,) = table1_studies("paper", ["mad"], device="cpu").values()
    assert (study.numbers()["protocol"], study.numbers()["settings"], study.precision) == ("faithful", "full", "float32")
    assert list(table1_studies("quick", device="cpu")) == ["mad", "language"]


def test_groups_of_mixers() -> None:
    assert choose_mixers("core") == list(CORE)
    assert choose_mixers("S-pc, labels")[0] == "S-pc"
    assert len(choose_mixers("S-pc,labels")) == len(TABLE1)
    assert len(choose_mixers("all")) == len(set(choose_mixers("all")))
