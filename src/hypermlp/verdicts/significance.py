"""Tests of a gain against chance: an exact one that flips signs, and Holm's correction where a claim has several measures.

Student's t is in estimates.py, with its interval. The exact tests assume no distribution; with few seeds they cannot show much:
of n pairs there are 2ⁿ ways to flip signs, so no p is below 2 / 2ⁿ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np

ERROR = 0.05  # how often a claim may be supported, or contradicted, by chance
EXACT = 40  # pairs of which all flips are counted; of more, so many are drawn:
DRAWS = 100_000


def holm(values: Sequence[float]) -> list[float]:
    """p-values of several tests, of which one is at most ERROR by chance as rarely as that of a single test (Holm 1979)."""
    found, highest = [1.0] * len(values), 0.0
    for rank, place in enumerate(sorted(range(len(values)), key=lambda place: values[place])):
        highest = max(highest, min(1.0, (len(values) - rank) * values[place]))
        found[place] = highest
    return found


def flip_p(gains: Sequence[float]) -> float:
    """How many of all ways to flip the signs of paired gains give a mean as far from 0, on either side.

    The sums of both halves are made once and counted against each other, so 30 pairs take 2 · 2¹⁵ sums and not 2³⁰.
    """
    values = np.asarray(gains, dtype=float)
    bound = abs(values.sum()) * (1 - 1e-9)
    if len(values) > EXACT:
        signs = np.random.default_rng(0).choice((-1.0, 1.0), size=(DRAWS, len(values)))
        return (1 + int((np.abs(signs @ values) >= bound).sum())) / (1 + DRAWS)
    if bound == 0:
        return 1.0
    left, right = (flips(half) for half in np.split(values, [len(values) // 2]))
    right.sort()
    above = len(right) - np.searchsorted(right, bound - left, side="left")
    below = np.searchsorted(right, -bound - left, side="right")
    return float((above + below).sum()) / 2 ** len(values)


def flips(values: np.ndarray) -> np.ndarray:
    """The sums of these values with all choices of signs."""
    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate([sums - value, sums + value])
    return sums


def exchange_p(first: Sequence[float], second: Sequence[float]) -> float:
    """How many of all ways to divide the values of both sides into such groups give means as far apart."""
    values, count = np.asarray([*first, *second], dtype=float), len(first)
    total, share = values.sum(), 1 / len(first) + 1 / len(second)

    def apart(sums: np.ndarray) -> np.ndarray:
        return np.abs(sums * share - total / len(second))

    bound = float(apart(values[:count].sum())) * (1 - 1e-9)
    if math.comb(len(values), count) > DRAWS:
        draw = np.random.default_rng(0)
        found = apart(np.array([draw.permutation(values)[:count].sum() for _ in range(DRAWS)]))
        return (1 + int((found >= bound).sum())) / (1 + DRAWS)
    found = apart(np.array([values[list(places)].sum() for places in combinations(range(len(values)), count)]))
    return float((found >= bound).mean())


def least_flip_p(pairs: int) -> float:
    """The lowest p that flipping signs can give."""
    return 2.0 ** (1 - pairs)


def pairs_needed(measures: int = 1) -> int:
    """The fewest pairs with which flipping signs can reach ERROR on all measures of a claim, after Holm's correction."""
    return math.ceil(1 + math.log2(measures / ERROR))
