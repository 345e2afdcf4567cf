"""Fits find the law that made the numbers, intervals hold it, and crossings are where they must be."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hypermlp.studies.scaling_law import (
    FittedLaw,
    PowerLaw,
    can_fit_parametric,
    cross,
    find_crossing,
    fit_parametric_law,
    fit_power_law,
    forecast,
    quantiles,
    resample,
)

COMPUTE = [1e12, 4e12, 1.2e13, 5e13, 2e14]


def law(a: float, b: float, alpha: float, compute: float) -> float:
    """b at 10¹² operations."""
    return a + b * (compute / 1e12) ** -alpha


@pytest.mark.parametrize("a, b, alpha", [(1.2, 1.5, 0.3), (0.0, 3.0, 0.08), (0.8, 0.6, 0.9), (1.0, 2.0, 0.15)])
def test_a_law_is_found_again(a: float, b: float, alpha: float) -> None:
    found = fit_power_law(COMPUTE, [[law(a, b, alpha, c)] for c in COMPUTE])
    assert found.law.exponent == pytest.approx(alpha, rel=1e-3)
    assert found.law.floor == pytest.approx(a, abs=2e-3)
    assert found.law.loss(1e12) - found.law.floor == pytest.approx(b, abs=3e-3)
    assert found.law.loss(1e15) == pytest.approx(law(a, b, alpha, 1e15), rel=1e-4)
    assert found.interval(lambda one: one.exponent).half == pytest.approx(0, abs=1e-9), "one seed has no spread"


def test_numbers_are_never_negative() -> None:
    rising = fit_power_law(COMPUTE, [[1.0 + 0.1 * i] for i in range(5)])
    assert rising.law.scale == 0
    assert rising.law.floor == pytest.approx(1.2)
    steep = fit_power_law([1e12, 1e13, 1e14], [[3.0], [2.9], [2.0]])
    assert steep.law.floor >= 0 < steep.law.scale


def test_intervals_hold_the_truth_and_narrow_with_seeds() -> None:
    inside, widths = {3: 0, 12: 0}, {3: 0.0, 12: 0.0}
    for trial in range(40):
        generator = np.random.default_rng(trial)
        for seeds in inside:
            losses = [[law(1.2, 1.5, 0.3, c) + e for e in generator.normal(0, 0.01, seeds)] for c in COMPUTE]
            fitted = fit_power_law(COMPUTE, losses)
            interval = fitted.interval(lambda one: one.exponent)
            inside[seeds] += 0.3 in interval
            widths[seeds] += interval.half
    assert inside[3] >= 34
    assert inside[12] >= 34
    assert widths[12] < 0.7 * widths[3]


def test_a_forecast_holds_new_runs() -> None:
    held = 0
    for trial in range(40):
        generator = np.random.default_rng(trial)
        losses = [[law(1.2, 1.5, 0.3, c) + e for e in generator.normal(0, 0.01, 3)] for c in COMPUTE]
        new = law(1.2, 1.5, 0.3, 1e15) + generator.normal(0, 0.01 / math.sqrt(2))
        held += new in forecast(fit_power_law(COMPUTE, losses), losses, 1e15, seeds=2)
    assert held >= 34


def test_draws_of_few_seeds_are_as_wide_as_fresh_ones() -> None:
    drawn = resample([[1.0, 2.0, 3.0]], 20_000, np.random.default_rng(0))
    assert drawn.mean() == pytest.approx(2, abs=0.02)
    assert drawn.std() == pytest.approx(1 / math.sqrt(3), rel=0.02)
    assert (resample([[1.5]], 5, np.random.default_rng(0)) == 1.5).all()


def test_few_points_are_refused() -> None:
    with pytest.raises(ValueError, match="needs 3 amounts of compute, not 2"):
        fit_power_law([1e12, 1e13, 1e13], [[3.0], [2.0], [2.1]])


def test_curves_cross_where_they_are_equal() -> None:
    first, second = PowerLaw(1.0, 2.0, 0.2, 1e12), PowerLaw(1.3, 1.0, 0.2, 1e12)
    where = 1e12 * (1 / 0.3) ** 5  # 2 x − x = 0.3
    assert cross(first, second, 1e12, 1e16) == pytest.approx(where, rel=1e-6)
    assert cross(first, second, 1e12, 1e14) is None
    drawn = tuple(PowerLaw(1.0 + shift, 2.0, 0.2, 1e12) for shift in (-0.01, 0.0, 0.01, 0.5))
    found = find_crossing(FittedLaw(first, drawn), FittedLaw(second, (second,) * 4), 1e12, 1e16)
    assert found is not None
    assert found.first_wins
    assert found.share == 0.75
    assert where in found.interval
    assert find_crossing(FittedLaw(first, drawn), FittedLaw(first, drawn), 1e12, 1e16) is None


def test_parameters_and_tokens_are_told_apart() -> None:
    sizes, ratios = [1e5, 2e5, 4e5, 8e5], [5.0, 20.0, 80.0]
    parameters = [n for n in sizes for _ in ratios]
    tokens = [r * n for n in sizes for r in ratios]
    losses = [1.1 + 0.9 * (n / 1e5) ** -0.4 + 0.7 * (d / 1e6) ** -0.3 for n, d in zip(parameters, tokens, strict=True)]
    found = fit_parametric_law(parameters, tokens, losses)
    assert (found.alpha, found.beta) == pytest.approx((0.4, 0.3), rel=0.03)
    assert found.floor == pytest.approx(1.1, abs=0.03)
    assert found.loss(1.6e6, 3e7) == pytest.approx(1.1 + 0.9 * 16**-0.4 + 0.7 * 30**-0.3, rel=2e-3)
    assert can_fit_parametric(parameters, tokens)
    assert not can_fit_parametric(sizes * 2, [20 * n for n in sizes * 2]), "along one ratio they are one thing"


def test_quantiles_are_the_middle_95_percent() -> None:
    found = quantiles([float(i) for i in range(1001)])
    assert (found.low, found.high) == pytest.approx((25, 975))
