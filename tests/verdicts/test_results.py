"""Reading results and the statistics over seeds."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from hypermlp.mixers import build_mixer
from hypermlp.mixers.labels import SAME, build, count_by_component
from hypermlp.models.lm import LanguageModel, ModelConfig, count_parameters
from hypermlp.report.table1 import rate_losses
from hypermlp.verdicts.estimates import estimate, student_t
from hypermlp.verdicts.folders import read_studies
from hypermlp.verdicts.results import AVERAGE, LOSS, evaluations_until, final_loss, mean_curve
from made_up import language, mad, write


@pytest.mark.parametrize("freedom, t", [(1, 12.7062), (2, 4.3027), (3, 3.1824), (5, 2.5706), (10, 2.2281), (30, 2.0423)])
def test_student_t_is_that_of_the_tables(freedom: int, t: float) -> None:
    assert student_t(freedom) == pytest.approx(t, abs=1e-4)


def test_intervals_by_hand() -> None:
    found = estimate([1.0, 2.0, 3.0])  # standard deviation 1, so 4.3027 / √3
    assert found is not None
    assert (found.mean, found.seeds) == (2, 3)
    assert found.half == pytest.approx(2.4841, abs=1e-4)
    assert (found.low, found.high) == pytest.approx((-0.4841, 4.4841), abs=1e-4)
    one = estimate([5.0])
    assert one is not None
    assert (one.mean, one.half, one.low, one.high) == (5, None, -math.inf, math.inf)
    assert estimate([]) is None


def test_gains_are_paired_by_seed(tmp_path: Path) -> None:
    # Differences 1, 2 and 3 on top of a spread between seeds that is far larger; seed 9 has no partner.
    ours, theirs = {0: 11, 1: 52, 2: 93, 9: 99}, {0: 10, 1: 50, 2: 90}
    records = [mad("G-cg-q-12o", "compression", y, s) for s, y in ours.items()]
    records += [mad("S-pc", "compression", y, s) for s, y in theirs.items()]
    (study,) = read_studies(write(tmp_path, records))
    gain = study.gain("G-cg-q-12o", "S-pc", "compression")
    assert gain is not None
    assert gain.seeds == 3
    assert (gain.mean, gain.half) == pytest.approx((2, 2.4841), abs=1e-4)
    assert study.gain("G-cg-q-12o", "R-pc", "compression") is None


def test_loss_saved_is_a_gain(tmp_path: Path) -> None:
    (study,) = read_studies(write(tmp_path, [language("S-pc", 3.2), language("R-pc", 3.0)]))
    gain = study.gain("R-pc", "S-pc", LOSS)
    assert gain is not None
    assert gain.mean == pytest.approx(0.2)


def test_a_seed_counts_where_nothing_of_it_is_missing(tmp_path: Path) -> None:
    records = [mad("S", task, 50 + seed, seed) for seed in range(3) for task in ("compression", "memorization")]
    records += [mad("S", "compression", 40, 1, setting="vocab_size=32")]
    (study,) = read_studies(write(tmp_path, records))
    assert study.values("S", "memorization") == {0: 50, 1: 51, 2: 52}
    assert study.values("S", "compression") == {1: pytest.approx((51 + 40) / 2)}
    assert study.values("S", AVERAGE) == {1: pytest.approx((45.5 + 51) / 2)}


def test_trained_models_of_other_sizes_and_rates_are_not_merged(tmp_path: Path) -> None:
    losses = {"a": 3.0, "b": 2.5, "c": 2.0, "d": 1.5, "e": 1.0}
    softmax = {"mixer": "softmax"}
    changes: dict[str, dict[str, object]] = {"a": {}, "b": {"inner": 64}, "c": {"size": 8}, "d": softmax, "e": softmax}
    for name, change in changes.items():
        model = ModelConfig(vocabulary=32, width=16, depth=1, length=16, inner=48).replace(**change)
        config = {
            "model": model.to_dict(),
            "data": {"context": 16},
            "train": {"batch": 2, "seed": 0, "lr": 2e-3 if name == "e" else 1e-3},
        }
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps({"config": config, "starts": []}))
        point = {"step": 1, "loss": 4.0, "validation": losses[name], "tokens_per_second": 10.0}
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(point) + "\n")
    (study,) = read_studies(tmp_path)
    found = {mixer: study.values(mixer, LOSS)[0] for mixer in study.mixers}
    assert found == {
        "G-cg-q-12o (inner=48)": 3.0,
        "G-cg-q-12o (inner=64)": 2.5,
        "G-cg-q-12o (inner=48, size=8)": 2.0,
        "S-p (lr=0.001)": 1.5,
        "S-p (lr=0.002)": 1.0,
    }
    assert rate_losses(study)["S-p"] == {1e-3: 1.5, 2e-3: 1.0}


def test_the_protocol_picks_the_learning_rate(tmp_path: Path) -> None:
    metrics = [{"accuracy": 0.9, "validation_loss": 2.0, "loss": 1}, {"accuracy": 0.6, "validation_loss": 1.0, "loss": 1}]
    records = [mad("S", "compression", 0, lr=lr, metrics=m) for lr, m in zip((1e-3, 1e-4), metrics, strict=True)]
    (study,) = read_studies(write(tmp_path / "clean", records))
    assert study.values("S", "compression") == {0: 60}
    (study,) = read_studies(write(tmp_path / "faithful", [record | {"protocol": "faithful"} for record in records]))
    assert study.values("S", "compression") == {0: 90}


def test_one_plan_of_each_kind_are_the_halves_of_a_study_and_others_stand_alone(tmp_path: Path) -> None:
    write(tmp_path / "mad", [mad("S", "compression", 1)])
    write(tmp_path / "language", [language("S", 3)], {"study": "language"})
    (study,) = read_studies(tmp_path)
    assert (len(study.mad), len(study.language), study.measures) == (1, 1, [AVERAGE, "compression", LOSS])
    write(tmp_path / "other", [mad("S", "compression", 2)])
    assert [(len(s.mad), len(s.language)) for s in read_studies(tmp_path)] == [(1, 1), (1, 0)]
    with (tmp_path / "mad" / "runs.jsonl").open("a") as file:
        file.write(json.dumps(mad("R", "compression", 1, protocol="faithful")) + "\n")
    studies = read_studies(tmp_path)
    assert [(len(s.mad), len(s.language)) for s in studies] == [(1, 0), (1, 0), (0, 1), (1, 0)]
    assert [{record["protocol"] for record in s.mad} for s in studies[:2]] == [{"clean"}, {"faithful"}]


def test_of_runs_with_the_same_identity_the_last_counts(tmp_path: Path) -> None:
    failed = mad("S", "compression", 0, error="RuntimeError: no", metrics=None)
    (study,) = read_studies(write(tmp_path, [failed, mad("S", "compression", 30)]))
    assert study.values("S", "compression") == {0: 30}
    assert len(study.records) == 1


def test_registered_names_are_read_as_the_labels_they_are(tmp_path: Path) -> None:
    for name, label in SAME.items():
        assert count_by_component(build_mixer(name, 64, 32)) == count_by_component(build(label, 64, 32))
    with torch.device("meta"):
        assert vars(build_mixer("softmax", 64, 32))["use_rope"]
    (study,) = read_studies(write(tmp_path, [mad("hyperglu", "compression", 30), mad("gla", "compression", 1)]))
    assert study.mixers == ["G-cg-q-12o", "gla"]


def test_damaged_lines_are_counted_and_left_out(tmp_path: Path) -> None:
    write(tmp_path, [mad("S", "compression", 30)])
    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write('{"key": "cut off", "mix\n')
        file.write(json.dumps({"key": "no mixer", "seed": 0}) + "\n")
        file.write(json.dumps({"key": "unknown", "kind": "other", "mixer": "S", "seed": 0}) + "\n")
    (study,) = read_studies(tmp_path)
    assert (len(study.records), study.damaged) == (1, 3)


def test_a_folder_without_runs_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no finished runs in .* hypermlp demo"):
        read_studies(tmp_path)
    write(tmp_path, [])
    with pytest.raises(ValueError, match="no finished runs"):
        read_studies(tmp_path)


def test_a_plan_may_be_missing_but_not_broken(tmp_path: Path) -> None:
    write(tmp_path, [mad("S", "compression", 30)])
    (tmp_path / "plan.json").unlink()
    (study,) = read_studies(tmp_path)
    assert study.starts == []
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        read_studies(tmp_path)


def test_what_was_varied(tmp_path: Path) -> None:
    settings = ["num_test=320", "vocab_size=64,num_test=320", "vocab_size=32,num_test=320", "seq_len=64,num_test=320"]
    (study,) = read_studies(write(tmp_path, [mad("S", "compression", 1, setting=s) for s in settings]))
    assert study.base_setting("compression") == "compression/num_test=320"
    axes = study.axes("compression")
    assert {name: [value for value, _ in points] for name, points in axes.items()} == {
        "vocab_size": [16, 32, 64],
        "seq_len": [32, 64],
    }


def test_final_loss_is_the_mean_of_the_last_five_where_it_is_not_given() -> None:
    record = language("S", 3.0, final=None, curve=[{"step": i, "loss": float(i)} for i in range(1, 8)])
    assert final_loss(record) == 5
    assert final_loss(record | {"error": "no"}) is None
    assert final_loss(record | {"curve": []}) is None


def test_evaluations_until_a_threshold() -> None:
    losses = [9.0, 4.0, None, 3.0, 2.0]  # the first before training, one not finite
    record = language("S", 3.0, curve=[{"step": i, "loss": y} for i, y in enumerate(losses)])
    assert [evaluations_until(record, level) for level in (5, 4, 2.5, 1)] == [1, 2, 3, None]


def test_a_run_that_ended_early_keeps_its_last_value() -> None:
    long = mad("S", "compression", 0, curve=[{"step": 1, "accuracy": 0.1}, {"step": 2, "accuracy": 0.2}])
    short = mad("S", "compression", 0, curve=[{"step": 1, "accuracy": 0.9}])
    assert [(step, mean.mean, mean.seeds) for step, mean in mean_curve([long, short], "accuracy")] == [
        (1, pytest.approx(0.5), 2),
        (2, pytest.approx(0.55), 2),
    ]


def test_training_runs_that_differ_in_mixer_and_rate_alone_are_one_study(tmp_path: Path) -> None:
    config = {
        "model": ModelConfig(vocabulary=11, width=16, depth=1, length=8, mixer="softmax").to_dict(),
        "data": {"corpus": "stdlib", "context": 8},
        "train": {"batch": 2, "lr": 1e-3, "seed": 0},
    }
    points = [
        {"step": 1, "loss": 3.0, "tokens_per_second": 8.0},
        {"step": 2, "loss": 1.5, "tokens_per_second": 8.0, "validation": 2.0},
        {"step": 4, "loss": 0.75, "tokens_per_second": 8.0, "validation": 1.0},
    ]
    other_mixer = {"model": {**config["model"], "mixer": "hyperglu"}, "train": {**config["train"], "lr": 1}}
    other_recipe = {"train": {**config["train"], "warmup": 1}}
    for name, changes in {"a": {}, "b": other_mixer, "c": other_recipe}.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "run.json").write_text(json.dumps({"config": {**config, **changes}, "starts": []}))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(point) + "\n" for point in points))
    together, alone = read_studies(tmp_path)
    assert (together.mixers, alone.mixers) == (["S-p", "G-cg-q-12o"], ["S-p"])
    (record,) = alone.language
    assert record["curve"] == [{"step": 2, "train_loss": 1.5, "loss": 2.0}, {"step": 4, "train_loss": 0.75, "loss": 1.0}]
    assert (record["final"], record["seconds"]) == ({"loss": 1.0}, 6.0)
    assert record["parameters"] == count_parameters(LanguageModel(ModelConfig.from_dict(config["model"])))


def test_only_accuracies_are_percents(tmp_path: Path) -> None:
    """Other scores are the numbers of the records, to the last bit."""
    fields = {"kind": "tasks", "measure": "mse", "metrics": {"mse": 0.2871, "validation_loss": 1.0, "step": 4}}
    (study,) = read_studies(write(tmp_path, [mad("S", "compression", 0, **fields)], {"study": "tasks"}))
    assert study.values("S", "compression") == {0: 0.2871}
    assert study.setting_values("S", "compression/baseline") == {0: 0.2871}
    (study,) = read_studies(write(tmp_path, [mad("S", "compression", 28.71)]))
    assert study.values("S", "compression") == {0: pytest.approx(28.71)}
