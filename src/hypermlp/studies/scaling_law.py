"""Fits of a loss against compute, or against parameters and tokens, by least squares; and where two fitted curves cross.

    L(C) = a + b C^−α                        PowerLaw
    L(N, D) = E + A N^−α + B D^−β            ParametricLaw

For given exponents the other numbers, none of them negative, follow exactly; the exponents are searched from many starts.
Losses are means over seeds, and intervals come from drawing the seeds of every point again.

Letters: n points, R resamples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
EXPONENTS = np.geomspace(0.01, 3, 120)  # from which the search begins
RESAMPLES = 400
SHARE = 0.95  # of the resamples that an interval holds
LEAST = 3  # points that a power law needs
LEAST_PARAMETRIC = 6  # and the parametric form, at two numbers of tokens per parameter or more
GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Interval:
    low: float
    high: float

    @property
    def half(self) -> float:
        return (self.high - self.low) / 2

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class PowerLaw:
    """a + b (C / unit)^−α."""

    floor: float  # a
    scale: float  # b, at compute `unit`
    exponent: float  # α
    unit: float

    def loss(self, compute: float) -> float:
        return self.floor + self.scale * (compute / self.unit) ** -self.exponent


@dataclass(frozen=True)
class FittedLaw:
    """A power law with what other draws of the seeds give."""

    law: PowerLaw
    resampled: tuple[PowerLaw, ...]

    def interval(self, of: Callable[[PowerLaw], float]) -> Interval:
        return quantiles([of(law) for law in self.resampled])


def quantiles(values: Sequence[float]) -> Interval:
    low, high = np.quantile(np.asarray(values), [(1 - SHARE) / 2, (1 + SHARE) / 2])
    return Interval(float(low), float(high))


def fit_power_law(compute: Sequence[float], losses: Sequence[Sequence[float]], seed: int = 0) -> FittedLaw:
    """The law of one curve.

    Args:
        compute: of each point, above 0.
        losses: of the seeds of each point.
        seed: of the resamples.
    """
    if len(set(compute)) < LEAST:
        raise ValueError(
            f"a power law with a floor has three numbers: it needs {LEAST} amounts of compute, not {len(set(compute))}"
        )
    draws = resample(losses, RESAMPLES, np.random.default_rng(seed))
    means = np.array([[float(np.mean(own)) for own in losses]])
    laws = fit_many(np.asarray(compute, float), np.concatenate([means, draws]))
    return FittedLaw(laws[0], tuple(laws[1:]))


def forecast(fitted: FittedLaw, losses: Sequence[Sequence[float]], compute: float, seeds: int, seed: int = 0) -> Interval:
    """Where the mean of new runs at this compute should lie: the resampled curves, and the spread of seeds around a curve."""
    squares = sum(float(np.var(own)) * len(own) for own in losses)
    freedom = sum(len(own) - 1 for own in losses)
    spread = math.sqrt(squares / freedom / seeds) if freedom else 0.0
    noise = np.random.default_rng(seed).normal(0, spread, len(fitted.resampled))
    return quantiles([law.loss(compute) + float(e) for law, e in zip(fitted.resampled, noise, strict=True)])


def resample(losses: Sequence[Sequence[float]], count: int, generator: np.random.Generator) -> Numbers:
    """Means over seeds that are drawn again with replacement (R n).

    They vary less than k fresh seeds would, so their distances from the mean are widened by √(k / (k − 1)).
    """
    columns = []
    for own in losses:
        values, k = np.asarray(own, float), len(own)
        drawn = values[generator.integers(k, size=(count, k))].mean(1)
        wider = math.sqrt(k / (k - 1)) if k > 1 else 1.0
        columns.append(values.mean() + wider * (drawn - values.mean()))
    return np.stack(columns, 1)


def fit_many(compute: Numbers, losses: Numbers) -> list[PowerLaw]:
    """The law of every row of losses (R n) at the same compute (n)."""
    unit = float(np.exp(np.log(compute).mean()))
    logs = np.log(compute / unit)

    def errors(exponents: Numbers) -> Numbers:
        """Of an exponent for each row (R)."""
        return solve(np.exp(-exponents[:, None] * logs), losses)[2]

    grid = np.stack([errors(np.full(len(losses), exponent)) for exponent in EXPONENTS])
    at = grid.argmin(0)
    low, high = EXPONENTS[np.maximum(at - 1, 0)], EXPONENTS[np.minimum(at + 1, len(EXPONENTS) - 1)]
    for _ in range(40):  # golden sections between the neighbours of the best start
        left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
        smaller = errors(left) <= errors(right)
        low, high = np.where(smaller, low, left), np.where(smaller, right, high)
    exponents = (low + high) / 2
    floors, scales, _ = solve(np.exp(-exponents[:, None] * logs), losses)
    rows = zip(floors, scales, exponents, strict=True)
    return [PowerLaw(float(a), float(b), float(exponent), unit) for a, b, exponent in rows]


def solve(x: Numbers, y: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """The a and b, neither below 0, with the least squares of y − a − b x in each row, and these squares."""
    mx, my = x.mean(1), y.mean(1)
    dx = x - mx[:, None]
    b = (dx * (y - my[:, None])).sum(1) / np.maximum((dx * dx).sum(1), 1e-300)
    a = my - b * mx
    through = (x * y).sum(1) / (x * x).sum(1)  # without a floor
    b = np.where(a < 0, through, b)
    a = np.where(a < 0, 0.0, a)
    a, b = np.where(b < 0, my, a), np.maximum(b, 0.0)
    return a, b, ((y - a[:, None] - b[:, None] * x) ** 2).sum(1)


# ---- two curves ----


@dataclass(frozen=True)
class Crossing:
    """Where the first curve falls below the second, or the second below the first."""

    compute: float
    interval: Interval  # of the resamples that cross
    share: float  # of the resamples that do
    first_wins: bool  # beyond it


def cross(first: PowerLaw, second: PowerLaw, low: float, high: float) -> float | None:
    """The compute within the range at which two laws give the same loss; the largest, where there are several."""
    places = np.geomspace(low, high, 200)
    gaps = np.array([first.loss(c) - second.loss(c) for c in places])
    changes = np.nonzero(np.sign(gaps[:-1]) * np.sign(gaps[1:]) < 0)[0]
    if not len(changes):
        return None
    a, b = float(places[changes[-1]]), float(places[changes[-1] + 1])
    begins = first.loss(a) < second.loss(a)
    for _ in range(60):
        middle = math.sqrt(a * b)
        a, b = (middle, b) if (first.loss(middle) < second.loss(middle)) is begins else (a, middle)
    return math.sqrt(a * b)


def find_crossing(first: FittedLaw, second: FittedLaw, low: float, high: float) -> Crossing | None:
    """Of the fitted curves; None where they do not cross within the range."""
    place = cross(first.law, second.law, low, high)
    if place is None:
        return None
    pairs = zip(first.resampled, second.resampled, strict=True)
    drawn = [found for a, b in pairs if (found := cross(a, b, low, high)) is not None]
    beyond = 1.01 * place
    wins = first.law.loss(beyond) < second.law.loss(beyond)
    interval = quantiles(drawn) if drawn else Interval(place, place)
    return Crossing(place, interval, len(drawn) / len(first.resampled), wins)


# ---- parameters and tokens ----


@dataclass(frozen=True)
class ParametricLaw:
    """E + A (N / n)^−α + B (D / d)^−β."""

    floor: float  # E
    of_parameters: float  # A, at n parameters
    alpha: float
    of_tokens: float  # B, at d tokens
    beta: float
    units: tuple[float, float]  # n, d

    def loss(self, parameters: float, tokens: float) -> float:
        n, d = self.units
        return self.floor + self.of_parameters * (parameters / n) ** -self.alpha + self.of_tokens * (tokens / d) ** -self.beta


def can_fit_parametric(parameters: Sequence[float], tokens: Sequence[float]) -> bool:
    """Whether the points tell parameters and tokens apart."""
    ratios = {round(math.log(d / n), 2) for n, d in zip(parameters, tokens, strict=True)}
    return len(parameters) >= LEAST_PARAMETRIC and len(ratios) > 1 and len({round(math.log(n), 1) for n in parameters}) >= LEAST


def fit_parametric_law(parameters: Sequence[float], tokens: Sequence[float], losses: Sequence[float]) -> ParametricLaw:
    """From a grid of both exponents, which is then drawn closer around the best of several starts."""
    units = float(np.exp(np.log(parameters).mean())), float(np.exp(np.log(tokens).mean()))
    n, d = np.log(np.asarray(parameters) / units[0]), np.log(np.asarray(tokens) / units[1])
    y = np.asarray(losses, float)

    def attempt(alpha: float, beta: float) -> tuple[float, Numbers]:
        return not_negative(np.stack([np.ones_like(n), np.exp(-alpha * n), np.exp(-beta * d)], 1), y)

    grid = np.geomspace(0.03, 2, 16)
    tried = sorted((attempt(a, b)[0], float(a), float(b)) for a in grid for b in grid)
    ends = []
    for error, a, b in tried[:4]:
        found, step = (error, a, b), float(grid[1] / grid[0])
        for _ in range(10):
            near = [(found[1] * step**i, found[2] * step**j) for i in (-1, -0.5, 0, 0.5, 1) for j in (-1, -0.5, 0, 0.5, 1)]
            found = min((attempt(*place)[0], *place) for place in near)
            step = step**0.6
        ends.append(found)
    _, alpha, beta = min(ends)
    floor, a_part, b_part = attempt(alpha, beta)[1]
    return ParametricLaw(float(floor), float(a_part), alpha, float(b_part), beta, units)


def not_negative(x: Numbers, y: Numbers) -> tuple[float, Numbers]:
    """Least squares with no number below 0 (Lawson's problem, small enough to try every set of numbers that are above it)."""
    best: tuple[float, Numbers] = (math.inf, np.zeros(x.shape[1]))
    columns = range(x.shape[1])
    for size in columns:
        for kept in combinations(columns, size + 1):
            found = np.linalg.lstsq(x[:, kept], y, rcond=None)[0]
            error = float(((y - x[:, kept] @ found) ** 2).sum())
            if (found >= 0).all() and error < best[0]:
                whole = np.zeros(x.shape[1])
                whole[list(kept)] = found
                best = error, whole
    return best
