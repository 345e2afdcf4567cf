"""Verdicts: what a study's own runs say of a claim.

A claim is one comparison of two mixers or several, on measures of the study: a gain paired by seed, with its 95 % interval, and
what is expected of it. All claims are data: a registered study brings its own (studies/protocol.py), and of any other the
paper's are judged, which are in paper.toml. Every task counts: a claim that something gains fails if it loses on one of them.

Each measure is judged by Student's t, with Holm's correction over the measures of the claim, and a claim is supported where
most of them are. So neither verdict is given by chance more often than one time in twenty, however many measures a claim has
(tests/verdicts/test_chance.py). Studies that were registered on other terms keep their verdicts, with this one beside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from hypermlp.paper import tables as paper
from hypermlp.studies.protocol import BEST, EACH_TASK, SOFTMAX, Comparison, Expectation, Terms, read_claims
from hypermlp.verdicts.estimates import Estimate
from hypermlp.verdicts.results import LOSSES, REFERENCES, Results, published
from hypermlp.verdicts.significance import ERROR, holm

SUPPORTED, CONTRADICTED, UNDECIDED, NOT_RUN = "supported", "contradicted", "undecided", "not run"
NOTHING_TO_SEE = "nothing to see"  # all sides solve the task, or all guess (results.py: CEILING, FLOOR)
WORDS = (SUPPORTED, CONTRADICTED, UNDECIDED, NOT_RUN, NOTHING_TO_SEE)

# What leaves a comparison undecided.
MISSING = "not all of it was run"
FEW = "too few seeds"
NOISE = "the interval is too wide"
SMALL = "too small to matter"
LEVEL = "no difference that matters"  # the whole interval is smaller
NO_LOSS = "no loss, which supports nothing"
FEWER = "not on most of its measures"


class Verdict(NamedTuple):
    """One of WORDS, and what limits it: a reason above, or results.py's CEILING or FLOOR."""

    word: str
    limit: str = ""


@dataclass(frozen=True)
class Evidence:
    """A comparison as it was measured: how much better one mixer is than another."""

    better: str
    worse: str
    measure: str
    gain: Estimate | None  # None: one of them was not run
    paper: float | None  # the same difference in the paper, if its table has both
    verdict: Verdict | None  # None: it is shown, and not judged
    terms: Terms
    expect: Expectation = "shown"
    bound: str = ""  # results.py's CEILING or FLOOR, where both sides are there
    corrected: Verdict | None = None  # by Student's t with Holm's correction over the measures of its claim
    p_corrected: float | None = None  # of a difference

    @property
    def can_support(self) -> bool:
        """Whether it counts for a claim; "not behind" can only count against it."""
        return self.expect in ("more", "far more", "level")

    @property
    def is_run(self) -> bool:
        return self.verdict is not None and self.verdict.word != NOT_RUN

    @property
    def reference(self) -> float:
        return reference(self.measure, self.expect, self.terms)


@dataclass(frozen=True)
class Claim:
    """What is said, and the comparisons that decide it."""

    title: str
    text: str
    expected: tuple[Expectation, ...]  # that its rule is made of
    evidence: list[Evidence]
    registered: bool

    @property
    def verdict(self) -> Verdict:
        """By the terms of the study."""
        if self.is_corrected:
            return self.corrected
        return self.conclude([item.verdict for item in self.evidence if item.verdict is not None])

    @property
    def is_corrected(self) -> bool:
        """Whether the terms of the study are Student's t with Holm's correction."""
        return all(item.terms.interval == "holm" for item in self.evidence)

    @property
    def corrected(self) -> Verdict:
        """By Student's t with Holm's correction over its measures: supported where most of them are, and none fails."""
        found = self.conclude([item.corrected for item in self.evidence if item.corrected is not None])
        supported, measures = self.extent
        return Verdict(UNDECIDED, FEWER) if found.word == SUPPORTED and 2 * supported <= measures else found

    @property
    def extent(self) -> tuple[int, int]:
        """On how many of its measures it is supported, with the correction, and how many there are that can show something."""
        found = [e.corrected for e in self.evidence if e.corrected is not None and e.can_support]
        there = [verdict for verdict in found if verdict.word not in (NOT_RUN, NOTHING_TO_SEE)]
        return sum(verdict.word == SUPPORTED for verdict in there), len(there)

    def conclude(self, found: list[Verdict]) -> Verdict:
        """One comparison that fails is enough to fail; one that shows an effect is needed to support.

        A registered claim waits for all of its comparisons, unless one fails; of any other those that were run are judged.
        """
        if all(verdict.word == NOT_RUN for verdict in found):
            return Verdict(NOT_RUN)
        if not self.registered:
            found = [Verdict(UNDECIDED, MISSING) if verdict.word == NOT_RUN else verdict for verdict in found]
        return min(found, key=decisiveness)

    @property
    def judged(self) -> list[Evidence]:
        """The comparisons that decide and that were run."""
        return [item for item in self.evidence if item.verdict is not None and item.gain is not None]

    @property
    def lacking(self) -> list[str]:
        """The measures of comparisons that were not run."""
        return list(dict.fromkeys(item.measure for item in self.evidence if item.verdict and item.verdict.word == NOT_RUN))


def decisiveness(verdict: Verdict) -> tuple[int, int]:
    """Of several verdicts the lowest decides."""
    words, limits = (CONTRADICTED, NOT_RUN, SUPPORTED, UNDECIDED, NOTHING_TO_SEE), (LEVEL, NO_LOSS)
    return words.index(verdict.word), limits.index(verdict.limit) + 1 if verdict.limit in limits else 0


# ---- from a gain to a verdict ----


def smallest(measure: str, terms: Terms) -> float:
    """The smallest effect of interest."""
    return terms.nats if measure in LOSSES else terms.points


class Finding(NamedTuple):
    """What a gain shows beyond chance."""

    above: bool  # 0, or what a collapse must exceed
    below: bool
    within: bool  # the smallest effect of interest, on both sides


def by_interval(gain: Estimate, measure: str, expect: Expectation, terms: Terms) -> Finding:
    """By the interval of the terms, each measure alone."""
    at, small = reference(measure, expect, terms), smallest(measure, terms)
    low, high = gain.ends(terms.interval)
    return Finding(low > at, high < at, -small <= low and high <= small)


def reference(measure: str, expect: Expectation, terms: Terms) -> float:
    """The gain that the one found is tested against: what a collapse must exceed, or none."""
    return terms.wide * smallest(measure, terms) if expect == "far more" else 0.0


def judge(
    gain: Estimate | None, measure: str, expect: Expectation, terms: Terms, bound: str = "", shown: Finding | None = None
) -> Verdict:
    """The verdict on a comparison.

    Args:
        gain: None: not run.
        measure, expect, terms: what it is of, what is expected, and the terms of the study.
        bound: CEILING or FLOOR where both sides are there.
        shown: what the gain shows; None: what its interval does.
    """
    if gain is None:
        return Verdict(NOT_RUN)
    if gain.seeds < terms.seeds:
        return Verdict(UNDECIDED, FEW)
    if bound:
        return Verdict(NOTHING_TO_SEE, bound)
    small, far = smallest(measure, terms), terms.wide * smallest(measure, terms)
    above, below, within = shown or by_interval(gain, measure, expect, terms)
    low = gain.ends(terms.interval)[0]
    gained, lost = above and gain.mean > small, below and gain.mean < -small
    supported, contradicted = Verdict(SUPPORTED), Verdict(CONTRADICTED)
    no_loss = gain.mean >= -small and low >= -far
    rules: dict[Expectation, list[tuple[bool, Verdict]]] = {
        "more": [(gained, supported), (lost, contradicted), (within, Verdict(UNDECIDED, LEVEL))],
        "far more": [(above, supported), (below, contradicted)],
        "level": [(within, supported), (gained or lost, contradicted)],
        "not behind": [(no_loss, Verdict(UNDECIDED, NO_LOSS)), (lost, contradicted)],
    }
    too_small = gain.mean <= small and ((expect == "more" and above) or (expect == "far more" and low > 0))
    return next((verdict for holds, verdict in rules[expect] if holds), Verdict(UNDECIDED, SMALL if too_small else NOISE))


def correct(evidence: Sequence[Evidence], registered: bool) -> list[Evidence]:
    """The comparisons of one claim, judged together: Student's t with Holm's correction over all of them.

    Differences and their absence are two families, since a claim is refuted by one and may rest on the other. A registered
    comparison that is still to be run counts as one that shows nothing.
    """
    family = [place for place, e in enumerate(evidence) if e.verdict is not None and (registered or e.gain is not None)]
    differ = dict(zip(family, holm([p_differs(evidence[place]) for place in family]), strict=True))
    same = dict(zip(family, holm([p_same(evidence[place]) for place in family]), strict=True))

    def of(place: int, item: Evidence) -> Evidence:
        if item.verdict is None:
            return item
        found = item.verdict
        if item.gain is not None and item.is_run:
            beyond, more = differ[place] <= ERROR, item.gain.mean > item.reference
            shown = Finding(beyond and more, beyond and not more, same[place] <= ERROR)
            found = judge(item.gain, item.measure, item.expect, item.terms, item.bound, shown)
        own = found if item.terms.interval == "holm" else item.verdict
        return replace(item, corrected=found, verdict=own, p_corrected=differ.get(place))

    return [of(place, item) for place, item in enumerate(evidence)]


def p_differs(item: Evidence) -> float:
    return item.gain.p(item.reference) if item.gain is not None and item.is_run else 1.0


def p_same(item: Evidence) -> float:
    return item.gain.p_within(smallest(item.measure, item.terms)) if item.gain is not None and item.is_run else 1.0


def weigh(results: Results, better: str, worse: str, measure: str, expect: Expectation) -> Evidence:
    """One comparison by the terms of the study, alone."""
    gain, terms = results.gain(better, worse, measure), results.terms
    theirs = paper_gain(results, better, worse, measure)
    if expect == "as published":
        expect = "more" if (theirs or 0) > smallest(measure, terms) else "not behind"
    verdict, bound = None, results.bound((better, worse), measure)
    if expect != "shown":
        verdict = wait(results, gain) or judge(gain, measure, expect, terms, bound)
    return Evidence(better, worse, measure, gain, theirs, verdict, terms, expect, bound)


def wait(results: Results, gain: Estimate | None) -> Verdict | None:
    """A registered comparison is judged when all its seeds are there, so nobody can stop where it looks best."""
    if results.protocol is None or (gain is not None and gain.seeds >= max(results.protocol.seeds, results.terms.seeds)):
        return None
    return Verdict(NOT_RUN, FEW if gain is not None else "")


def paper_gain(results: Results, better: str, worse: str, measure: str) -> float | None:
    """The same difference in the paper; None where its table lacks one of them."""
    a, b = published(results, better, measure), published(results, worse, measure)
    if a is None or b is None:
        return None
    return b - a if measure in LOSSES else a - b


# ---- from a protocol to claims ----

PAPER = Path(__file__).with_name("paper.toml")


@cache
def paper_claims() -> tuple[Comparison, ...]:
    return read_claims(PAPER.read_text(encoding="utf-8"))


def judge_claims(results: Results) -> list[Claim]:
    """The claims of the study's protocol, or else the paper's; none about tasks beyond Table 1."""
    if "tasks" in results.plans:
        return []
    comparisons = paper_claims() if results.protocol is None else results.protocol.comparisons
    found = []
    for title in dict.fromkeys(item.title for item in comparisons):  # comparisons with the same title are one claim
        own = [item for item in comparisons if item.title == title]
        text = " ".join(dict.fromkeys(item.text for item in own if item.text))
        expected = tuple(dict.fromkeys(item.expect for item in own))
        found.append(Claim(title, text, expected, compare(results, own), results.protocol is not None))
    return found


def compare(results: Results, comparisons: Sequence[Comparison]) -> list[Evidence]:
    """All that was registered, whether it was run or not; of the paper's claims what the runs have measures of."""
    found: dict[tuple[str, str, str], Evidence] = {}
    for item in comparisons:
        for measure in measures_of(results, item):
            if (worse := opponent(results, item, measure)) is not None:
                place = (item.better, worse, measure)
                found[place] = found.get(place) or weigh(results, *place, item.expect)
    return correct(list(found.values()), results.protocol is not None)


def measures_of(results: Results, item: Comparison) -> Iterator[str]:
    for measure in item.on:
        if measure == EACH_TASK:
            yield from results.tasks if len(results.tasks) > 1 else ()  # of one task the average says the same
        elif results.protocol is not None or measure in results.measures:
            yield measure


def opponent(results: Results, item: Comparison, measure: str) -> str | None:
    """The mixer that another is compared with; None if none was run that it could be."""
    if item.worse == SOFTMAX:
        return results.reference or REFERENCES[0]
    if item.worse != BEST:
        return item.worse
    sign = -1 if measure in LOSSES else 1
    others = [name for name in paper.TABLE1 if not name.endswith("!") and name != item.better]
    scores = {name: sign * fmean(own.values()) for name in others if (own := results.values(name, measure))}
    return max(scores, key=lambda name: scores[name], default=None)
