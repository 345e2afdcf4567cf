"""A mean over seeds, and how far it may be trusted: Student's confidence interval and test, or the bootstrap's interval.

Without scipy, which is no dependency of torch and larger than all of this package: t for whole degrees of freedom is a finite
sum, and of five seeds there are so few resamples that the bootstrap counts all of them, where scipy's draws some.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, combinations_with_replacement
from statistics import fmean, stdev

from hypermlp.studies.protocol import IntervalKind
from hypermlp.verdicts.significance import exchange_p, flip_p

CONFIDENCE = 0.95
DRAWS = 20_000  # resamples, where not all are counted
ENOUGH = 4  # seeds from which an interval is shown; fewer are shown as they are


@dataclass(frozen=True)
class Estimate:
    """One value per seed: a score, or a gain paired by seed."""

    values: tuple[float, ...]

    @property
    def seeds(self) -> int:
        return len(self.values)

    @cached_property
    def mean(self) -> float:
        return fmean(self.values)

    @cached_property
    def error(self) -> float:
        """The standard error of the mean; infinite with one seed."""
        return stdev(self.values) / math.sqrt(self.seeds) if self.seeds > 1 else math.inf

    @property
    def freedom(self) -> int:
        """Degrees of freedom of Student's distribution."""
        return self.seeds - 1

    @cached_property
    def half(self) -> float | None:
        """Half the width of the confidence interval; None with one seed."""
        return student_t(self.freedom) * self.error if self.seeds > 1 else None

    @property
    def low(self) -> float:
        return -math.inf if self.half is None else self.mean - self.half

    @property
    def high(self) -> float:
        return math.inf if self.half is None else self.mean + self.half

    def ends(self, kind: IntervalKind) -> tuple[float, float]:
        """The interval of the mean, of this kind; infinite with one seed."""
        return self.bootstrap() if kind == "bootstrap" and self.seeds > 1 else (self.low, self.high)

    def bootstrap(self) -> tuple[float, float]:
        return bootstrap(self.values)

    def p(self, at: float = 0.0) -> float:
        """By Student's t: how often chance alone puts the mean as far from `at`, on either side."""
        return 2 * self.tail(abs(self.mean - at))

    def p_within(self, bound: float) -> float:
        """By Student's t: at most 0.05 where the 95 % interval lies within ±bound (two one-sided tests, doubled)."""
        return min(1.0, 2 * max(self.tail(bound + self.mean), self.tail(bound - self.mean)))

    def tail(self, distance: float) -> float:
        """The share of Student's distribution beyond a distance, on one side; 1 − that of the opposite for a negative one."""
        if self.seeds < 2:
            return 0.5
        if self.error == 0:
            return 0.5 if distance == 0 else 0.0 if distance > 0 else 1.0
        beyond = (1 - central_share(abs(distance) / self.error, self.freedom)) / 2
        return beyond if distance >= 0 else 1 - beyond

    @cached_property
    def exact_p(self) -> float:
        """By all ways to flip signs, without a distribution."""
        return flip_p(self.values)

    @property
    def has_interval(self) -> bool:
        """Whether there are enough seeds to show an interval."""
        return self.seeds >= ENOUGH


@dataclass(frozen=True)
class Unpaired(Estimate):
    """How far the mean of some values is above that of others, where no seed pairs them: Welch's test."""

    others: tuple[float, ...] = ()

    @property
    def seeds(self) -> int:
        return min(len(self.values), len(self.others))

    @cached_property
    def mean(self) -> float:
        return fmean(self.values) - fmean(self.others)

    @cached_property
    def variances(self) -> tuple[float, float]:
        """Of both means."""
        first, second = (stdev(side) ** 2 / len(side) for side in (self.values, self.others))
        return first, second

    @cached_property
    def error(self) -> float:
        return math.sqrt(sum(self.variances)) if self.seeds > 1 else math.inf

    @property
    def freedom(self) -> int:
        """Welch's, rounded down, which is the careful side."""
        if self.error == 0:
            return 2 * self.seeds - 2
        sides = zip(self.variances, (self.values, self.others), strict=True)
        return max(1, math.floor(self.error**4 / sum(v**2 / (len(side) - 1) for v, side in sides) + 1e-9))

    def bootstrap(self) -> tuple[float, float]:
        draw = random.Random(0)
        sides = (self.values, self.others)
        means = [[fmean(draw.choices(side, k=len(side))) for _ in range(DRAWS)] for side in sides]
        gains = sorted((a - b, 1.0) for a, b in zip(*means, strict=True))
        share = tail_share(self.seeds)
        return quantile(gains, share), quantile(gains[::-1], share)

    @cached_property
    def exact_p(self) -> float:
        """By all ways to exchange values between the sides."""
        return exchange_p(self.values, self.others)


def estimate(values: Iterable[float]) -> Estimate | None:
    """None without values."""
    found = tuple(values)
    return Estimate(found) if found else None


@cache
def student_t(freedom: int) -> float:
    """The t within which Student's distribution has its middle 95 %, by halving an interval."""
    low, high = 0.0, 20.0  # 12.7 with one degree of freedom
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if central_share(middle, freedom) < CONFIDENCE else (low, middle)
    return high


def central_share(t: float, freedom: int) -> float:
    """P(|T| < t) for a whole number of degrees of freedom: a finite sum in the angle atan(t / √freedom)."""
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    term = total = math.cos(angle) if odd else 1.0
    for k in range(2 + odd, freedom, 2):
        term *= (k - 1) / k * math.cos(angle) ** 2
        total += term
    if not odd:
        return math.sin(angle) * total
    return 2 / math.pi * (angle + (math.sin(angle) * total if freedom > 1 else 0))


@cache
def bootstrap(values: tuple[float, ...]) -> tuple[float, float]:
    """The expanded percentile interval of the mean (Hesterberg 2015), from all resamples of at most 8 values; DRAWS of more.

    With few values the plain percentiles are too narrow; here they are as far out as Student's t is against the normal's.
    """
    n = len(values)
    tail = tail_share(n)
    if n <= 8:
        means = [(fmean(found), weight) for found, weight in resamples(sorted(values))]
    else:
        draw = random.Random(0)
        means = [(fmean(draw.choices(values, k=n)), 1.0) for _ in range(DRAWS)]
    means.sort()
    return quantile(means, tail), quantile(means[::-1], tail)


def tail_share(n: int) -> float:
    """The share of resamples that lies beyond an end: as far out as Student's t is against the normal's."""
    return math.erfc(math.sqrt(n / (n - 1)) * student_t(n - 1) / math.sqrt(2)) / 2


def resamples(values: Sequence[float]) -> Iterator[tuple[tuple[float, ...], float]]:
    """Every multiset of as many values, and how many orders it has."""
    for places in combinations_with_replacement(range(len(values)), len(values)):
        orders = math.factorial(len(values)) // math.prod(map(math.factorial, Counter(places).values()))
        yield tuple(values[place] for place in places), float(orders)


def quantile(weighted: Sequence[tuple[float, float]], share: float) -> float:
    """The first value at which `share` of the weight is reached."""
    total = sum(weight for _, weight in weighted)
    reached = accumulate(weight for _, weight in weighted)
    return next(value for (value, _), sum_so_far in zip(weighted, reached, strict=True) if sum_so_far >= share * total)


# ---- as text ----

NONE = "–"


def interval(value: Estimate | None, digits: int, sign: str = "") -> str:
    """Mean ± half the interval from four seeds on; with two or three the mean and their range; with one the value."""
    if value is None:
        return NONE
    mean = signed(value.mean, digits, sign)
    if value.has_interval and value.half is not None:
        return f"{mean} ± {value.half:.{digits}f}"
    shown = spread_text(value, digits, sign)
    return f"{mean} [{shown}]" if shown else mean


def gain_text(gain: Estimate, kind: IntervalKind, digits: int) -> str:
    """A gain with its sign: as `interval` shows it, or with the ends of the bootstrap's interval."""
    if kind != "bootstrap" or gain.seeds < 2:
        return interval(gain, digits, "+")
    low, high = (signed(end, digits) for end in gain.ends(kind))
    return f"{signed(gain.mean, digits)} [{low} to {high}]"


def spread_text(value: Estimate, digits: int, sign: str = "") -> str:
    """The range of two or three values; empty where they round to the same number, or there is an interval instead."""
    if value.has_interval or isinstance(value, Unpaired):
        return ""
    low, high = min(value.values), max(value.values)
    ends = [signed(end, digits, sign) for end in (low, high)]
    return "" if ends[0] == ends[1] else (" to " if sign or low < 0 else "–").join(ends)


def signed(value: float, digits: int, sign: str = "+") -> str:
    """With a true minus, and no sign before a zero."""
    text = f"{value:{sign}.{digits}f}"
    return text.lstrip("+-") if float(text) == 0 else text.replace("-", "−")


def seeds_text(found: Iterable[Estimate | None]) -> str:
    """How many seeds are behind these numbers: "2 seeds", "2 or 3 seeds", "2 to 4 seeds"."""
    counts = sorted({value.seeds for value in found if value is not None})
    if not counts:
        return "no seeds"
    if len(counts) == 1:
        return "one seed" if counts == [1] else f"{counts[0]} seeds"
    return f"{counts[0]} {'or' if counts[-1] - counts[0] == 1 else 'to'} {counts[-1]} seeds"


def spread_rule(found: Iterable[Estimate | None]) -> str:
    """What stands beside the means of these numbers, in words."""
    counts = {value.seeds for value in found if value is not None}
    if counts <= {1}:
        return "no range or interval"
    few, many = any(1 < n < ENOUGH for n in counts), any(n >= ENOUGH for n in counts)
    shown = (["with the range where there are two or three"] if few else []) + (
        ["with half of the 95 % confidence interval (±) where there are more"] if many else []
    )
    return ", ".join(shown)
