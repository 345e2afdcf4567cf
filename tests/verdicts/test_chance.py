"""How often chance alone gives a verdict: the rules, simulated where nothing is to be found; and tests against known values."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from hypermlp.studies.protocol import Expectation, IntervalKind, Terms
from hypermlp.verdicts.claims import (
    CONTRADICTED,
    FEWER,
    NOTHING_TO_SEE,
    SUPPORTED,
    UNDECIDED,
    Claim,
    Evidence,
    Verdict,
    correct,
    judge,
    judge_claims,
)
from hypermlp.verdicts.estimates import Estimate, Unpaired, bootstrap, student_t
from hypermlp.verdicts.folders import read_studies
from hypermlp.verdicts.results import CEILING
from hypermlp.verdicts.significance import ERROR, exchange_p, flip_p, holm, least_flip_p, pairs_needed

TERMS = Terms(seeds=3)


def new_claim(gains: list[Estimate], expect: Expectation = "more", terms: Terms = TERMS, bounds: str = "") -> Claim:
    """A registered claim with one measure for each of these gains; bounds: how many of the first are at ceiling."""
    found = []
    for number, gain in enumerate(gains):
        bound = CEILING if number < len(bounds) else ""
        verdict = judge(gain, "compression", expect, terms, bound)
        found.append(Evidence("a", "b", f"measure {number}", gain, None, verdict, terms, expect, bound))
    return Claim("a is ahead", "", (expect,), correct(found, registered=True), registered=True)


def rates(
    measures: int, seeds: int, expect: Expectation, interval: IntervalKind, mean: float = 0.0, runs: int = 3000
) -> Verdicts:
    """How often claims are supported and contradicted whose gains have this mean, and deviations far above what matters."""
    noise = np.random.default_rng(measures * 100 + seeds).normal(mean, 25.0, size=(runs, measures, seeds)).tolist()
    terms = replace(TERMS, interval=interval)
    words = [new_claim([Estimate(tuple(own)) for own in one], expect, terms).verdict.word for one in noise]
    return words.count(SUPPORTED) / runs, words.count(CONTRADICTED) / runs


Verdicts = tuple[float, float]


@pytest.mark.parametrize("measures, seeds", list(product((1, 2, 8), (3, 5))))
def test_chance_gives_neither_verdict_more_than_one_time_in_twenty(measures: int, seeds: int) -> None:
    supported, contradicted = rates(measures, seeds, "more", "holm")
    assert supported <= 0.05
    assert contradicted <= 0.05
    assert contradicted > 0.005, "the test is not so strict that it finds nothing"
    assert rates(measures, seeds, "not behind", "holm")[1] <= 0.05


def test_a_loss_that_matters_is_seldom_called_level() -> None:
    """At the border of what matters, with deviations at which a level claim can be supported at all."""
    small = TERMS.points
    for measures in (1, 8):
        noise = np.random.default_rng(measures).normal(-small, 0.8, size=(2000, measures, 5)).tolist()
        words = [new_claim([Estimate(tuple(own)) for own in one], "level").verdict.word for one in noise]
        assert words.count(SUPPORTED) / 2000 <= 0.05
    steady = new_claim([Estimate((0.1, -0.1, 0.2, 0.0, 0.1))] * 3, "level")
    assert steady.verdict == Verdict(SUPPORTED)


def test_measures_that_are_judged_alone_find_by_chance_what_is_not_there() -> None:
    """Why there is a correction: the rule of the first registered study, with eight measures."""
    supported, contradicted = rates(8, 5, "more", "bootstrap", runs=400)
    assert supported > 0.1
    assert contradicted > 0.1


def test_an_effect_on_all_measures_is_found() -> None:
    supported, contradicted = rates(8, 5, "more", "holm", mean=150.0, runs=300)
    assert supported > 0.9
    assert contradicted == 0


STRONG, WEAK, LOST = (
    Estimate((9.0, 9.2, 9.1, 8.9, 9.0)),
    Estimate((9.0, -8.0, 3.0, 1.0, 2.0)),
    Estimate((-9.0, -9.1, -9.2, -8.8, -9.0)),
)


def test_a_claim_says_all_most_or_none_of_its_measures() -> None:
    for gains, verdict, extent in (
        ([STRONG] * 3, Verdict(SUPPORTED), (3, 3)),
        ([STRONG, STRONG, WEAK], Verdict(SUPPORTED), (2, 3)),
        ([STRONG, WEAK], Verdict(UNDECIDED, FEWER), (1, 2)),
        ([STRONG, WEAK, WEAK], Verdict(UNDECIDED, FEWER), (1, 3)),
        ([STRONG, STRONG, LOST], Verdict(CONTRADICTED), (2, 3)),
    ):
        claim = new_claim(gains)
        assert (claim.verdict, claim.extent) == (verdict, extent)
    assert new_claim([WEAK, WEAK]).verdict.word == UNDECIDED
    seen = new_claim([STRONG, STRONG], bounds="x")
    assert [item.verdict and item.verdict.word for item in seen.evidence] == [NOTHING_TO_SEE, SUPPORTED]
    assert (seen.verdict, seen.extent) == (Verdict(SUPPORTED), (1, 1))


def test_many_measures_ask_more_of_each() -> None:
    """What shows an effect alone does not beside seven others that show none."""
    gain = Estimate((1.0, 7.0, 5.0, 9.0, 6.0))
    assert gain.p() < ERROR < 8 * gain.p()
    assert new_claim([gain]).verdict == Verdict(SUPPORTED)
    (first, *_) = new_claim([gain, *[WEAK] * 7]).evidence
    assert first.verdict is not None
    assert first.verdict.word == UNDECIDED
    assert first.p_corrected == pytest.approx(8 * gain.p())


def test_earlier_terms_keep_their_verdict_and_the_stricter_one_stands_beside() -> None:
    gain = Estimate((1.0, 7.0, 5.0, 9.0, 6.0))
    for interval in ("student", "bootstrap"):
        claim = new_claim([gain, *[WEAK] * 7], terms=replace(TERMS, interval=interval))
        assert not claim.is_corrected
        assert claim.verdict == Verdict(SUPPORTED)
        assert claim.corrected.word == UNDECIDED


def test_the_registered_study_keeps_its_verdicts() -> None:
    """As they were published, whatever the rules of new protocols are; those by t with Holm's correction beside them."""
    (study,) = read_studies(Path(__file__).parents[2] / "results" / "table1")
    claims = judge_claims(study)
    yes, no, open_ = SUPPORTED, CONTRADICTED, UNDECIDED
    assert [claim.verdict.word for claim in claims] == [no, yes, no, open_, yes, yes, yes, no, yes, yes, no, no]
    assert [claim.corrected.word for claim in claims] == [no, open_, no, open_, yes, open_, open_, no, yes, yes, no, open_]


# ---- the tests themselves ----


@pytest.mark.parametrize(
    "freedom, t", [(1, 12.7062), (2, 4.30265), (4, 2.77645), (7, 2.36462), (9, 2.26216), (29, 2.04523), (30, 2.04227)]
)
def test_students_quantiles_are_those_of_the_tables(freedom: int, t: float) -> None:
    assert student_t(freedom) == pytest.approx(t, rel=1e-5)


def test_students_p() -> None:
    """t = 3 / (√2.5 / √5) = 4.2426 with 4 degrees of freedom: p = 0.013236."""
    gain = Estimate((1.0, 2.0, 3.0, 4.0, 5.0))
    assert gain.p() == pytest.approx(0.0132356, rel=1e-4)
    assert gain.p(6.0) == pytest.approx(gain.p())
    assert gain.p(3.0) == 1.0
    assert gain.p(gain.low) == pytest.approx(0.05, rel=1e-6)
    assert gain.p_within(gain.high) == pytest.approx(0.05, rel=1e-6)
    assert gain.p_within(0.0) == 1.0
    assert Estimate((2.0, 2.0)).p() == 0.0
    assert Estimate((0.0, 0.0)).p() == 1.0
    assert Estimate((2.0,)).p() == 1.0


def test_all_flips_of_signs_are_counted() -> None:
    assert flip_p((1.0, 2.0, 3.0, 4.0, 5.0)) == 2 / 32 == least_flip_p(5)
    assert flip_p((1.0, 2.0, 3.0, 4.0, -5.0)) == by_hand((1.0, 2.0, 3.0, 4.0, -5.0))
    assert flip_p((0.0, 0.0, 0.0)) == 1.0
    values = tuple(np.random.default_rng(3).normal(0.4, 1, 11).tolist())
    assert flip_p(values) == by_hand(values)
    many = np.random.default_rng(4).normal(0.3, 1, 30)
    t = Estimate(tuple(many.tolist()))
    assert t.exact_p == pytest.approx(t.p(), rel=0.3), "with thirty seeds both tests agree"
    assert flip_p([0.5] * 50) < 1e-4


def by_hand(values: tuple[float, ...]) -> float:
    sums = [
        abs(sum(sign * value for sign, value in zip(signs, values, strict=True)))
        for signs in product((1, -1), repeat=len(values))
    ]
    return sum(one >= abs(sum(values)) - 1e-9 for one in sums) / len(sums)


def test_what_few_seeds_cannot_show() -> None:
    assert [least_flip_p(n) for n in (3, 5, 6)] == [0.25, 0.0625, 0.03125]
    assert (pairs_needed(), pairs_needed(8)) == (6, 9)
    assert least_flip_p(pairs_needed(8)) * 8 <= ERROR < least_flip_p(pairs_needed(8) - 1) * 8


def test_holms_correction() -> None:
    """The lowest times the number of tests, the next times one less, and never below one before."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm([0.04]) == [0.04]
    assert holm([]) == []


def test_means_that_no_seed_pairs_are_compared_by_welchs_test() -> None:
    """27.5 ± 2.9 against 21 ± 1.4: t = 4.02 with 4.28 degrees of freedom, of which 4 are taken."""
    first, second = (24.0, 26.0, 29.0, 31.0), (19.0, 21.0, 22.0, 22.0)
    gain = Unpaired(first, second)
    t = 6.5 / math.sqrt(np.var(first, ddof=1) / 4 + 2.0 / 4)
    assert (gain.mean, gain.seeds, gain.freedom) == (6.5, 4, 4)
    assert gain.p() == pytest.approx(2 * gain.tail(6.5))
    assert gain.half == pytest.approx(student_t(4) * 6.5 / t)
    assert gain.exact_p == exchange_p(first, second) == 2 / math.comb(8, 4)
    low, high = gain.ends("bootstrap")
    assert 0 < low < 6.5 < high
    assert Unpaired((1.0,), (2.0, 3.0)).ends("student") == (-math.inf, math.inf)
    same = Unpaired((5.0, 5.0), (3.0, 3.0))
    assert (same.p(), same.p_within(3.0), same.p_within(1.0)) == (0.0, 0.0, 1.0)


def test_the_bootstrap_of_pairs_is_as_it_was() -> None:
    assert bootstrap((1.0, 2.0, 3.0, 4.0, 10.0)) == pytest.approx((1.2, 8.8))
