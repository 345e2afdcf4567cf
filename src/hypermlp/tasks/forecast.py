"""Long-horizon forecasting by the standard protocol, with every window counted once.

Informer's borders, channels standardised by the training rows, windows of a look-back and a horizon at every step (a split's
first window looks back into the split before), mean squared and absolute errors over windows × horizon × channels. Batches do
not matter: the last one counts however small it is. (Published code long dropped it, and its scores depend on the batch size.)

Models see one channel of one window at a time (models/forecast.py). With short horizons and long look-backs there are many
segments, which is where mixers differ. Beside them, computed from the same windows:

    repeat            the last value
    seasonal repeat   the values of a day before (a week, where rows are days)
    NLinear, DLinear  the linear maps of Zeng et al. (2023), shared by all channels: of the look-back less its last value, and
                      of its moving average and what remains; by least squares with a ridge that the validation windows choose

Letters: n rows of a series, C channels, W windows, L look-back, s horizon.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from hypermlp.checks import at_least_one
from hypermlp.eval_mode import evaluating
from hypermlp.tasks.base import Part, Rows, Scale, Sets, Sizes, Task
from hypermlp.tasks.series import Series, find_series

Floats = NDArray[np.float32]
SPLITS = ("train", "validation", "test")
AVERAGED = 25  # values of DLinear's moving average
RIDGES = tuple(10.0**power for power in range(-4, 1))  # relative to the mean square of a feature


@dataclass(frozen=True, kw_only=True)
class ForecastSetting(Sizes):
    """seq_len: segments of a look-back, the tokens of a mixer; num_train: windows × channels of an epoch, drawn at random."""

    task: str = "forecast"
    vocab_size: int = 1  # there are no tokens
    seq_len: int = 0
    num_train: int = 4096
    num_test: int = 0  # of the windows × channels of a split; 0: all
    source: str = "nyc-weather"  # a name, or the path of a CSV file
    lookback: int = 1024
    horizon: int = 12
    validation_step: int = 8  # every so manieth window is validated on; all are tested on

    def __post_init__(self) -> None:
        for name in ("lookback", "horizon", "num_train", "validation_step"):
            at_least_one(name, getattr(self, name))
        object.__setattr__(self, "seq_len", -(-self.lookback // self.horizon))

    @property
    def key(self) -> str:
        """What is forecast from what, and what else differs from the baseline."""
        usual = {"num_train": 4096, "num_test": 0, "validation_step": 8}
        changed = [f"{name}={getattr(self, name)}" for name, value in usual.items() if getattr(self, name) != value]
        return ",".join([f"{self.task}/{self.source}", f"lookback={self.lookback}", f"horizon={self.horizon}", *changed])

    @property
    def series(self) -> Series:
        return find_series(self.source)

    @property
    def channels(self) -> int:
        return len(self.series.channels)


@lru_cache(maxsize=2)
def split_values(source: str, lookback: int, horizon: int) -> dict[str, Floats]:
    """Split → its rows (n C), standardised, with the look-back of its first window in front."""
    series = find_series(source)
    values, (train, validation, test) = series.standardised().astype(np.float32), series.borders
    found = {
        "train": values[:train],
        "validation": values[max(0, train - lookback) : validation],
        "test": values[max(0, validation - lookback) : test],
    }
    for name, part in found.items():
        if len(part) < lookback + horizon:
            raise ValueError(
                f"the {name} part of {series.name} has {len(part)} rows, fewer than a window of {lookback} + {horizon}; "
                "shorten the look-back or the horizon"
            )
    return found


def windows(setting: ForecastSetting, split: str) -> Floats:
    """All windows of a split, one channel each: W C L+s, a view."""
    part = split_values(setting.source, setting.lookback, setting.horizon)[split]
    return np.lib.stride_tricks.sliding_window_view(part, setting.lookback + setting.horizon, axis=0)


def look_up(setting: ForecastSetting, places: NDArray[Any]) -> tuple[Floats, Floats]:
    """What a model gets (M 1+L), the channel's number and its look-back, and what followed (M s).

    places (M 3): split, window and channel of each row.
    """
    split, window, channel = places.T
    found = np.empty((len(places), setting.lookback + setting.horizon), dtype=np.float32)
    for number, name in enumerate(SPLITS):
        here = split == number
        if here.any():
            found[here] = windows(setting, name)[window[here], channel[here]]
    inputs = np.concatenate([channel[:, None].astype(np.float32), found[:, : setting.lookback]], axis=1)
    return inputs, found[:, setting.lookback :]


class Forecast(Task):
    """One series at one look-back and horizon. Lower is better."""

    name = family = "forecast"
    fresh = True
    measure: ClassVar[str] = "mse"
    baseline = ForecastSetting()

    def training(self, setting: ForecastSetting, seed: int, epoch: int) -> list[Rows]:
        random, (W, C, _) = np.random.default_rng([seed, epoch]), windows(setting, "train").shape
        window, channel = random.integers(W, size=setting.num_train), random.integers(C, size=setting.num_train)
        return [cast(Any, Rows)(*look_up(setting, np.stack([np.zeros_like(window), window, channel], axis=1)))]

    def evaluation(self, setting: ForecastSetting, seed: int, part: Part) -> dict[str, list[Rows]]:
        """Places (M 3) of every window of every channel, once; for validation one window in `validation_step`.

        No values beside them: a long look-back, once per window, need not fit in memory.
        """
        W, C, _ = windows(setting, part).shape
        window, channel = np.meshgrid(np.arange(0, W, setting.validation_step if part == "validation" else 1), np.arange(C))
        places = np.stack([np.full(window.size, SPLITS.index(part)), window.ravel(), channel.ravel()], axis=1)
        if 0 < setting.num_test < len(places):
            places = places[np.random.default_rng(0).permutation(len(places))[: setting.num_test]]
        return {"test": [Rows(places, np.zeros((len(places), 0), dtype=np.int64))]}

    def scores(
        self, model: nn.Module, sets: Sets, batch: int, setting: Any, *, clean: bool = True, slices: bool = False
    ) -> dict[str, Any]:
        (groups,) = sets.values()
        (rows,) = groups
        places = rows.inputs.numpy()
        return measure(*forecast(model, setting, places, batch), places[:, 2], setting.series.channels, slices=slices)

    def baselines(self, setting: ForecastSetting, seed: int) -> dict[str, dict[str, Any]]:
        """The scores of the simple forecasts on the test windows."""
        return simple_scores(setting)

    def check(self, setting: ForecastSetting, groups: Sequence[Rows], what: str) -> None:
        """Values and places, no tokens."""

    def tokens(self, setting: ForecastSetting, rows: Any) -> int:
        return setting.seq_len


@torch.no_grad()
def forecast(model: nn.Module, setting: ForecastSetting, places: NDArray[Any], batch: int) -> tuple[Floats, Floats]:
    """Forecasts (M s) and what came (M s), for all places (M 3), the last batch as large as is left."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    found, wanted = np.empty((2, len(places), setting.horizon), dtype=np.float32)
    for start in range(0, len(places), batch):
        here = slice(start, start + batch)
        inputs, wanted[here] = look_up(setting, places[here])
        with evaluating(model):
            found[here] = model(torch.from_numpy(inputs).to(device)).float().cpu().numpy()
    return found, wanted


def measure(
    forecasts: NDArray[Any], targets: NDArray[Any], channel: NDArray[Any], names: Sequence[str], *, slices: bool
) -> dict[str, Any]:
    """Mean squared and absolute errors of forecasts (M s), over all of them and by channel and step."""
    error = forecasts.astype(np.float64) - targets
    squared, absolute = error**2, np.abs(error)

    def means(where: Any) -> dict[str, float]:
        return {"mse": float(squared[where].mean()), "mae": float(absolute[where].mean())}

    whole: dict[str, Any] = means(...)
    found: dict[str, Any] = {**whole, "loss": whole["mse"]}
    if slices:
        rows = {"rows": len(error)}
        by_channel = {names[c]: {**means(channel == c), "rows": int((channel == c).sum())} for c in np.unique(channel)}
        steps = {f"step {i + 1}": {**means((slice(None), i)), **rows} for i in range(error.shape[1])}
        found["sets"] = {"test": {**whole, **rows, "slices": {"channel": by_channel, "step": steps}}}
    return found


# ---- simple forecasts ----


@lru_cache(maxsize=4)
def simple_scores(setting: ForecastSetting) -> dict[str, dict[str, Any]]:
    L, s, series = setting.lookback, setting.horizon, setting.series
    forecasts: dict[str, Callable[[Floats], Floats]] = {"repeat": lambda past: np.repeat(past[:, -1:], s, axis=1)}
    if series.period <= L:
        back = [L - series.period + i % series.period for i in range(s)]
        forecasts["seasonal repeat"] = lambda past: past[:, back]
    for name, features in LINEAR.items():
        forecasts[name] = fit_linear(setting, features)
    places = Forecast().evaluation(setting, 0, "test")["test"][0].inputs
    found: dict[str, list[Floats]] = {name: [] for name in forecasts}
    wanted = []
    for some in np.array_split(places, max(1, len(places) // 4096)):
        inputs, future = look_up(setting, some)
        wanted.append(future)
        for name, predict in forecasts.items():
            found[name].append(predict(inputs[:, 1:]))
    return {
        name: measure(np.concatenate(parts), np.concatenate(wanted), places[:, 2], series.channels, slices=True)
        for name, parts in found.items()
    }


def nlinear(L: int) -> tuple[NDArray[Any], float]:
    """The map of the look-back (L) to NLinear's features, and how much of its last value is added to the forecast."""
    less_last = np.eye(L)
    less_last[:, -1] -= 1
    return less_last[:-1], 1.0


def dlinear(L: int) -> tuple[NDArray[Any], float]:
    """The moving average with its ends repeated, and what remains: 2L features."""
    average = np.zeros((L, L))
    for i in range(L):
        for j in range(i - AVERAGED // 2, i + AVERAGED // 2 + 1):
            average[i, min(max(j, 0), L - 1)] += 1 / AVERAGED
    return np.concatenate([np.eye(L) - average, average]), 0.0


LINEAR: Mapping[str, Callable[[int], tuple[NDArray[Any], float]]] = {"NLinear": nlinear, "DLinear": dlinear}


def fit_linear(setting: ForecastSetting, features: Callable[[int], tuple[NDArray[Any], float]]) -> Callable[[Floats], Floats]:
    """Least squares from features of the look-back to the forecast, with the ridge that is best on the validation windows.

    All sums are quadratic forms of the second moments of whole windows, so these are read once.
    """
    L = setting.lookback
    maps, last = features(L)
    moments = {split: second_moments(setting, split) for split in ("train", "validation")}
    inputs = np.zeros((len(maps) + 1, moments["train"].shape[0]))  # of [look-back, future, 1]
    inputs[:-1, :L], inputs[-1, -1] = maps, 1
    outputs = np.zeros((setting.horizon, inputs.shape[1]))
    outputs[:, L:-1], outputs[:, L - 1] = np.eye(setting.horizon), -last

    def errors(weights: NDArray[Any]) -> float:
        left = weights @ inputs - outputs
        return float(np.einsum("ij,jk,ik->", left, moments["validation"], left))

    gram, cross = inputs @ moments["train"] @ inputs.T, outputs @ moments["train"] @ inputs.T
    ridge = np.eye(len(gram)) * np.trace(gram[:-1, :-1]) / max(1, len(maps))  # of a look-back of 1 NLinear has no features
    ridge[-1, -1] = 0  # the bias is free
    found = [np.linalg.solve(gram + r * ridge, cross.T).T for r in RIDGES]
    weights = min(found, key=errors)
    return lambda past: past @ (weights[:, :-1] @ maps).T + weights[:, -1] + last * past[:, -1:]


@lru_cache(maxsize=4)
def second_moments(setting: ForecastSetting, split: str) -> NDArray[Any]:
    """The mean of w wᵀ over all windows and channels, w = [look-back, future, 1]."""
    found = windows(setting, split)
    size = found.shape[2] + 1
    total, count = np.zeros((size, size)), found.shape[0] * found.shape[1]
    for some in np.array_split(found, max(1, count // 8192)):
        w = np.ones((some.shape[0] * some.shape[1], size), dtype=np.float32)
        w[:, :-1] = some.reshape(-1, size - 1)
        total += w.T @ w
    return total / count


def scales() -> dict[str, Scale]:
    quick = ForecastSetting(lookback=96, horizon=12, num_train=1024, num_test=2048)
    far = tuple(ForecastSetting(lookback=L, horizon=12) for L in (512, 1024, 2048))
    published = tuple(ForecastSetting(lookback=L, horizon=H) for L in (512, 1024, 2048, 4096) for H in (12, 24, 48, 96))
    return {
        "quick": Scale(settings=(quick,), width=32, batch=64, steps=100, rates=(3e-3,), evaluations=4, solved=None),
        "laptop": Scale(settings=far[1:2], width=64, batch=32, steps=300, rates=(1e-3, 3e-3), evaluations=4, solved=None),
        "published": Scale(
            settings=published, width=64, depth=3, batch=32, steps=20_000, rates=(6e-4,), evaluations=40, solved=None
        ),
    }


Forecast.scales = scales()
FORECAST: dict[str, Task] = {"forecast": Forecast()}
