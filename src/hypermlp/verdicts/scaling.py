"""Reads the folder of a scaling study: losses by size, fitted curves and where they cross, and what became of predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

from hypermlp.files import Record, read_json
from hypermlp.studies.folder import read_lines
from hypermlp.studies.scaling import PREDICTIONS, TRANSFER, Points, ScalingStudy, curve_points, fit_points
from hypermlp.studies.scaling_law import (
    LEAST,
    Crossing,
    FittedLaw,
    Interval,
    ParametricLaw,
    can_fit_parametric,
    find_crossing,
    fit_parametric_law,
)
from hypermlp.studies.search import FINAL, scale_of, where
from hypermlp.verdicts.estimates import Estimate, estimate
from hypermlp.verdicts.registration import MARK, VERSIONS, Version, objections, read_versions
from hypermlp.verdicts.results import REFERENCES

BEYOND = 10.0  # times the largest compute: how far curves are continued
SHORT = 10.0  # tokens per parameter below which a study shows that it works, too short to rank mixers


@dataclass(frozen=True)
class TrainedSize:
    """A setting that was run."""

    key: str
    width: int
    ratio: float
    parameters: int
    tokens: int


@dataclass(frozen=True)
class Curve:
    """One mixer: its losses by compute, and the law through them where there are points enough."""

    mixer: str
    points: Points
    fitted: FittedLaw | None


@dataclass(frozen=True)
class LossForecast:
    """What the smaller models predicted for the largest, and what was measured."""

    mixer: str
    setting: str
    predicted: float
    interval: Interval
    records: int  # that it is made from
    commit: str
    measured: Estimate | None

    @property
    def holds(self) -> bool | None:
        """None: not measured yet, or one seed alone says nothing of the spread."""
        return None if self.measured is None or not self.interval.half else self.measured.mean in self.interval


@dataclass(frozen=True)
class TransferResult:
    """One mixer's rate that followed from smaller models, with others beside it."""

    mixer: str
    rate: float
    losses: dict[float, float]  # of seed 0, by rate

    @property
    def best(self) -> float:
        return min(self.losses, key=lambda rate: self.losses[rate])

    @property
    def lost(self) -> float:
        """In nats, by not taking the best of those tried."""
        return self.losses[self.rate] - self.losses[self.best]


@dataclass(frozen=True)
class ScalingResults:
    plan: dict[str, Any]
    starts: list[dict[str, Any]]
    records: list[Record]  # of all phases
    predictions: list[Record]
    versions: tuple[Version, ...] = ()  # of the protocol that it was registered by
    objections: tuple[str, ...] = ()  # what a reader must know before the verdicts (registration.py)

    @cached_property
    def counted(self) -> list[Record]:
        return [r for r in self.records if r.get("phase", FINAL) == FINAL and r["error"] is None and r["final"] is not None]

    @property
    def failed(self) -> list[Record]:
        return [record for record in self.records if record["error"] is not None]

    @cached_property
    def mixers(self) -> list[str]:
        return list(dict.fromkeys(record["mixer"] for record in self.counted))

    @cached_property
    def reference(self) -> str | None:
        """Softmax attention if it takes part, else the first."""
        return next((name for name in REFERENCES if name in self.mixers), self.mixers[0] if self.mixers else None)

    @cached_property
    def ratio(self) -> float:
        """Tokens per parameter of the curves: the most."""
        return max(record["ratio"] for record in self.counted)

    @property
    def short(self) -> bool:
        return self.ratio < SHORT

    @cached_property
    def sizes(self) -> list[TrainedSize]:
        """Small ones first."""
        found: dict[str, list[Record]] = {}
        for record in self.counted:
            found.setdefault(record["setting"], []).append(record)
        sizes = []
        for key, own in found.items():
            parameters, tokens = (round(fmean(r[name] for r in own)) for name in ("parameters", "tokens"))
            sizes.append(TrainedSize(key, own[0]["width"], own[0]["ratio"], parameters, tokens))
        return sorted(sizes, key=lambda size: (size.width, size.ratio))

    @property
    def curve_sizes(self) -> list[TrainedSize]:
        """Those that the curves are drawn through."""
        return [size for size in self.sizes if size.ratio == self.ratio]

    def losses(self, mixer: str, setting: str) -> dict[int, float]:
        """Seed → validation loss."""
        return {
            r["seed"]: r["final"]["validation_loss"] for r in self.counted if (r["mixer"], r["setting"]) == (mixer, setting)
        }

    def gain(self, mixer: str, other: str, setting: str) -> Estimate | None:
        """How much lower the loss is than the other's, seed by seed."""
        own, theirs = self.losses(mixer, setting), self.losses(other, setting)
        return estimate(theirs[seed] - own[seed] for seed in sorted(own.keys() & theirs.keys()))

    @cached_property
    def curves(self) -> dict[str, Curve]:
        found = {}
        for mixer in self.mixers:
            points = curve_points(self.counted, mixer, self.ratio)
            found[mixer] = Curve(mixer, points, fit_points(points) if len(points) >= LEAST else None)
        return found

    @property
    def compute(self) -> tuple[float, float]:
        """The least and the most of a run."""
        values = [value for curve in self.curves.values() for value in curve.points]
        return min(values), max(values)

    @cached_property
    def crossings(self) -> list[tuple[str, str, Crossing]]:
        """Of fitted curves, from the least compute to BEYOND times the most; none of a study too short to rank mixers."""
        low, high = self.compute
        found: list[tuple[str, str, Crossing]] = []
        if self.short:
            return found
        for first, second in combinations(self.mixers, 2):
            a, b = self.curves[first].fitted, self.curves[second].fitted
            if a is not None and b is not None and (crossing := find_crossing(a, b, low, BEYOND * high)) is not None:
                found.append((first, second, crossing))
        return found

    def parametric(self, mixer: str) -> ParametricLaw | None:
        """The form in parameters and tokens, where there are ratios enough to tell them apart."""
        own = [(size, values) for size in self.sizes if (values := self.losses(mixer, size.key))]
        parameters, tokens = [float(size.parameters) for size, _ in own], [float(size.tokens) for size, _ in own]
        if not can_fit_parametric(parameters, tokens):
            return None
        return fit_parametric_law(parameters, tokens, [fmean(values.values()) for _, values in own])

    @cached_property
    def forecasts(self) -> list[LossForecast]:
        return [
            LossForecast(
                item["mixer"],
                item["setting"],
                item["loss"],
                Interval(item["low"], item["high"]),
                item["records"],
                str(item["made"].get("commit") or "unknown"),
                estimate(self.losses(item["mixer"], item["setting"]).values()),
            )
            for item in self.predictions
        ]

    @cached_property
    def rates(self) -> dict[tuple[str, str], float]:
        """(mixer, setting) → learning rate of the runs that count."""
        return {(record["mixer"], record["setting"]): record["lr"] for record in self.counted}

    @cached_property
    def scales(self) -> dict[tuple[str, str], str]:
        """(mixer, setting) → initial scale of the runs that count."""
        return {where(record): scale_of(record) for record in self.counted}

    @cached_property
    def rate_tests(self) -> list[TransferResult]:
        tried: dict[tuple[str, str], dict[float, float]] = {}
        for record in self.records:
            if record.get("phase") == TRANSFER and record["error"] is None and record["final"] is not None:
                own = tried.setdefault((record["mixer"], record["setting"]), {})
                own[record["lr"]] = record["final"]["validation_loss"]
        found = []
        for (mixer, setting), losses in tried.items():
            first = self.losses(mixer, setting).get(0)
            if first is not None:
                rate = self.rates[mixer, setting]
                found.append(TransferResult(mixer, rate, dict(sorted({**losses, rate: first}.items()))))
        return found

    def ranked(self, size: TrainedSize) -> list[tuple[str, Estimate]]:
        """The mixers that have this size, the lowest loss first."""
        scores = [(mixer, estimate(self.losses(mixer, size.key).values())) for mixer in self.mixers]
        return sorted(((mixer, score) for mixer, score in scores if score is not None), key=lambda pair: pair[1].mean)


class Unfinished(ValueError):
    """A study has no runs to show."""


def is_scaling(folder: Path) -> bool:
    """Whether a folder is that of a scaling study."""
    path = folder / "plan.json"
    head = read_json(path) if path.is_file() else {}
    plan = head.get("plan") if isinstance(head, dict) else None  # other programs have a plan.json, too
    return isinstance(plan, dict) and plan.get("study") == ScalingStudy.kind


def find_scaling(folder: Path) -> list[Path]:
    """The scaling studies in a folder and below."""
    return [path.parent for path in sorted(folder.rglob("plan.json")) if is_scaling(path.parent)]


def read_scaling(folder: Path) -> ScalingResults:
    """The results of one study; an error where no run of it is finished."""
    head = read_json(folder / "plan.json")
    file = folder / PREDICTIONS
    predictions: Sequence[Record] = read_json(file)["predictions"] if file.exists() else ()
    latest = {record["key"]: record for record in read_lines(folder / "runs.jsonl")[0]}
    place = folder.resolve().parent
    place = place if (place / VERSIONS).exists() else folder
    known = (tuple(read_versions(place)), objections(place, (record.get(MARK) for record in latest.values())))
    found = ScalingResults(head["plan"], head["starts"], list(latest.values()), list(predictions), *known)
    if not found.counted:
        raise Unfinished(f"no run that counts is finished in {folder}: the same command continues the study")
    return found
