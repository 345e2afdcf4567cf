"""Verdicts and their numbers in words, for the terminal, pages and documents alike."""

from __future__ import annotations

from collections.abc import Sequence

from hypermlp.report.table1 import TITLES
from hypermlp.studies.protocol import Expectation, Terms
from hypermlp.verdicts.claims import (
    FEWER,
    LEVEL,
    NOISE,
    NOT_RUN,
    NOTHING_TO_SEE,
    SUPPORTED,
    WORDS,
    Claim,
    Evidence,
    Verdict,
    smallest,
)
from hypermlp.verdicts.estimates import NONE, Unpaired, gain_text, seeds_text, signed
from hypermlp.verdicts.results import AVERAGE, LOSS, LOSSES, VALIDATION
from hypermlp.verdicts.significance import ERROR, least_flip_p, pairs_needed


def digits(item: Evidence) -> int:
    return 3 if item.measure in LOSSES else 1


def gain_words(item: Evidence) -> str:
    return NONE if item.gain is None else gain_text(item.gain, item.terms.interval, digits(item))


def smallest_words(measure: str, terms: Terms) -> str:
    return f"{smallest(measure, terms):g} {'nats' if measure in LOSSES else 'points'}"


def verdict_words(verdict: Verdict, limit: str = "") -> str:
    """limit: what limits it, in more words. An interval that is too wide is what a reader expects."""
    limit = limit or ("" if verdict.limit == NOISE else verdict.limit)
    return f"{verdict.word}: {limit}" if limit else verdict.word


def evidence_words(item: Evidence) -> str:
    """The verdict on one comparison."""
    if item.verdict is None:
        return "not judged"
    level = item.verdict.limit == LEVEL
    return verdict_words(item.verdict, f"no difference larger than {smallest_words(item.measure, item.terms)}" if level else "")


def claim_words(claim: Claim) -> str:
    """The verdict on a claim."""
    limit = fewer_words(claim, claim.verdict)
    if claim.verdict.limit == LEVEL:
        own = [item for item in claim.judged if item.verdict and item.verdict.limit == LEVEL]
        level = dict.fromkeys(smallest_words(item.measure, item.terms) for item in own)
        limit = f"no difference larger than {' or '.join(level)}"
    elif claim.registered and claim.verdict.word == NOT_RUN:
        limit = ", ".join(map(measure_words, claim.lacking))
    return verdict_words(claim.verdict, limit)


def extent_words(claim: Claim) -> str:
    """On how many of its measures a claim is supported; empty where there are not several."""
    supported, measures = claim.extent
    if measures < 2:
        return ""
    if supported in (0, measures):
        return f"{'all' if supported else 'none'} of its {measures} measures"
    return f"{'most' if 2 * supported > measures else 'some'} of its measures, {supported} of {measures}"


def with_extent(claim: Claim, verdict: Verdict, words: str) -> str:
    """A verdict's words, and on how many of its measures the claim is supported, with the correction."""
    extent = extent_words(claim)
    if not extent or verdict.word in (NOT_RUN, NOTHING_TO_SEE) or verdict.limit == FEWER:
        return words
    return f"{words}, {'on' if verdict.word == SUPPORTED else 'supported on'} {extent}"


def corrected_words(claim: Claim) -> str:
    """The verdict by Student's t with Holm's correction, beside that on other terms; empty where the terms are these."""
    if claim.is_corrected or not claim.judged:
        return ""
    words = with_extent(claim, claim.corrected, verdict_words(claim.corrected, fewer_words(claim, claim.corrected)))
    return f"by Student’s t with Holm: {words}"


def fewer_words(claim: Claim, verdict: Verdict) -> str:
    return f"supported on {extent_words(claim)}" if verdict.limit == FEWER else ""


def tests_words(item: Evidence) -> str:
    """How likely chance is behind a gain, by both tests, and the bootstrap's interval."""
    gain = item.gain
    if gain is None or gain.seeds < 2:
        return ""
    corrected = "" if item.p_corrected is None else f" ({p_text(item.p_corrected)} with Holm)"
    name = "Welch’s t" if isinstance(gain, Unpaired) else "Student’s t"
    exact = "exchange" if isinstance(gain, Unpaired) else "sign flips"
    low, high = (signed(end, digits(item)) for end in gain.bootstrap())
    shown = f"p by {name} {p_text(gain.p(item.reference))}{corrected}, by {exact} {p_text(gain.exact_p)}"
    return f"{shown}; bootstrap {low} to {high}"


def p_text(p: float) -> str:
    return f"{p:.4f}" if p >= 0.0005 else "< 0.0005"


def power_words(claims: Sequence[Claim]) -> str:
    """What the seeds of these claims cannot show; empty where the exact test can show a single measure."""
    gains = [item.gain for claim in claims for item in claim.judged if item.gain is not None]
    seeds = max((gain.seeds for gain in gains if not isinstance(gain, Unpaired)), default=0)
    if seeds < 2 or least_flip_p(seeds) <= ERROR:
        return ""
    measures = max(len(claim.judged) for claim in claims)
    more = f" ({pairs_needed(measures)} for {measures} measures at once)" if measures > 1 else ""
    return (
        f"What {seeds} seeds cannot show: the exact test has {2**seeds} ways to flip their signs, so its p is never below "
        f"2/{2**seeds} = {least_flip_p(seeds):g}. Verdicts rest on Student’s t, and so on gains that are distributed normally, "
        f"which {seeds} seeds cannot show either. The exact test needs {pairs_needed()} seeds{more}."
    )


def measure_words(measure: str) -> str:
    names = {AVERAGE: "MAD average", VALIDATION: "validation loss saved", LOSS: "loss saved"}
    return names.get(measure) or TITLES[measure].lower()


def beside(item: Evidence) -> str:
    """The paper's gain, and what limits this one."""
    notes = [] if item.paper is None else [f"paper {signed(item.paper, digits(item))}"]
    notes += [f"at {item.verdict.limit}"] if item.verdict and item.verdict.word == NOTHING_TO_SEE else []
    return f" ({', '.join(notes)})" if notes else ""


def numbers(claim: Claim) -> str:
    """The gains behind the verdict, by pair of mixers."""
    found = []
    for pair in dict.fromkeys((item.better, item.worse) for item in claim.judged):
        own = [item for item in claim.judged if (item.better, item.worse) == pair]
        halves = [item for item in own if item.measure in (AVERAGE, *LOSSES)]
        tasks = [item for item in own if item not in halves]
        shown = [f"{measure_words(item.measure)} {gain_words(item)}{beside(item)}" for item in halves]
        if tasks:
            single = [f"{measure_words(i.measure)} {signed(i.gain.mean, 1)}{beside(i)}" for i in tasks if i.gain is not None]
            shown.append(f"by task: {', '.join(single)}" if halves else ", ".join(single))
        found.append(f"{pair[0]} − {pair[1]}: {'; '.join(shown)}")
    return ". ".join(found)


def sentence(claim: Claim) -> str:
    """Verdict and numbers."""
    beside, words = corrected_words(claim), claim_words(claim)
    verdict = with_extent(claim, claim.verdict, words) if claim.is_corrected else words
    seeds = seeds_text(item.gain for item in claim.judged)
    return f"{claim.title}: {verdict} ({'; '.join(filter(None, [seeds, beside]))}). {numbers(claim)}."


def tally(verdicts: Sequence[Verdict]) -> str:
    counts = {word: sum(verdict.word == word for verdict in verdicts) for word in WORDS}
    return ", ".join(f"{count} {word}" for word, count in counts.items() if count)


# ---- the rules ----

RULES: dict[Expectation, str] = {
    "more": (
        "supported if the mean gain is above {small} and its interval above 0, contradicted if the same holds the other way "
        "round"
    ),
    "far more": "supported if the interval lies above {far}, contradicted if below",
    "level": (
        "supported if the whole interval is within {small} of 0, contradicted if the mean is further away and the interval "
        "does not contain 0"
    ),
    "not behind": "contradicted if it is behind by more than {small} with an interval below 0",
    "as published": "a gain of more than {small} is expected where the paper has one, and no loss elsewhere",
    "shown": "other numbers are shown and not judged",
}
INTERVALS = {
    "holm": (
        "Student’s t, with Holm’s correction over the measures of a claim: neither verdict on a claim is given by chance more "
        "often than one time in twenty. A claim is supported where most of its measures are and none fails; a measure on which "
        "a loss alone would count, or on which there is nothing to see, is not among them"
    ),
    "student": "Student’s 95 % confidence interval of the gain, even where a table lists two or three seeds as they are",
    "bootstrap": (
        "the 95 % bootstrap interval of the mean gain: all resamples of the seeds, percentiles as far out as Student’s "
        "distribution is wider than the normal one"
    ),
}
ALONE = (
    " Each measure is judged alone, as it was registered, so that a claim of several measures is supported by chance more "
    "often than one time in twenty; the verdict by Student’s t with Holm’s correction is beside it."
)


def claim_rule(claim: Claim, terms: Terms) -> str:
    small = f"{terms.points:g} points ({terms.nats:g} nats)"
    far = f"{terms.wide * terms.points:g} points ({terms.wide * terms.nats:g} nats)"
    return "; ".join(RULES[expect].format(small=small, far=far) for expect in claim.expected)


def noise_rule(terms: Terms) -> str:
    return (
        f"Verdicts use {INTERVALS[terms.interval]}; each needs {terms.seeds} seeds.{'' if terms.interval == 'holm' else ALONE} "
        f"Where the whole interval is within {terms.points:g} points ({terms.nats:g} nats) of 0, there is no difference that "
        f"matters. “Nothing to see”: both sides have at least {terms.ceiling:g} % (ceiling), or neither is more than "
        f"{terms.points:g} points above guessing (floor)."
    )
