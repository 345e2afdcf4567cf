"""Verdicts and their numbers in words, for the terminal, pages and documents alike."""

from __future__ import annotations

from collections.abc import Sequence

from hypermlp.report.table1 import TITLES
from hypermlp.studies.protocol import Expectation, Terms
from hypermlp.verdicts.claims import LEVEL, NOISE, NOT_RUN, NOTHING_TO_SEE, WORDS, Claim, Evidence, Verdict, smallest
from hypermlp.verdicts.estimates import NONE, gain_text, seeds_text, signed
from hypermlp.verdicts.results import AVERAGE, LOSS


def digits(item: Evidence) -> int:
    return 3 if item.measure == LOSS else 1


def gain_words(item: Evidence) -> str:
    return NONE if item.gain is None else gain_text(item.gain, item.terms.interval, digits(item))


def smallest_words(measure: str, terms: Terms) -> str:
    return f"{smallest(measure, terms):g} {'nats' if measure == LOSS else 'points'}"


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
    limit = ""
    if claim.verdict.limit == LEVEL:
        own = [item for item in claim.judged if item.verdict and item.verdict.limit == LEVEL]
        level = dict.fromkeys(smallest_words(item.measure, item.terms) for item in own)
        limit = f"no difference larger than {' or '.join(level)}"
    elif claim.registered and claim.verdict.word == NOT_RUN:
        limit = ", ".join(map(measure_words, claim.lacking))
    return verdict_words(claim.verdict, limit)


def measure_words(measure: str) -> str:
    return {AVERAGE: "MAD average", LOSS: "loss saved"}.get(measure) or TITLES[measure].lower()


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
        halves = [item for item in own if item.measure in (AVERAGE, LOSS)]
        tasks = [item for item in own if item.measure not in (AVERAGE, LOSS)]
        shown = [f"{measure_words(item.measure)} {gain_words(item)}{beside(item)}" for item in halves]
        if tasks:
            single = [f"{measure_words(i.measure)} {signed(i.gain.mean, 1)}{beside(i)}" for i in tasks if i.gain is not None]
            shown.append(f"by task: {', '.join(single)}" if halves else ", ".join(single))
        found.append(f"{pair[0]} − {pair[1]}: {'; '.join(shown)}")
    return ". ".join(found)


def sentence(claim: Claim) -> str:
    """Verdict and numbers."""
    return f"{claim.title}: {claim_words(claim)} ({seeds_text(item.gain for item in claim.judged)}). {numbers(claim)}."


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
    "student": "Student’s 95 % confidence interval of the gain, even where a table lists two or three seeds as they are",
    "bootstrap": (
        "the 95 % bootstrap interval of the mean gain: all resamples of the seeds, percentiles as far out as Student’s "
        "distribution is wider than the normal one"
    ),
}


def claim_rule(claim: Claim, terms: Terms) -> str:
    small = f"{terms.points:g} points ({terms.nats:g} nats)"
    far = f"{terms.wide * terms.points:g} points ({terms.wide * terms.nats:g} nats)"
    return "; ".join(RULES[expect].format(small=small, far=far) for expect in claim.expected)


def noise_rule(terms: Terms) -> str:
    return (
        f"Verdicts use {INTERVALS[terms.interval]}; each needs {terms.seeds} seeds. Where the whole interval is within "
        f"{terms.points:g} points ({terms.nats:g} nats) of 0, there is no difference that matters. “Nothing to see”: both "
        f"sides have at least {terms.ceiling:g} % (ceiling), or neither is more than {terms.points:g} points above "
        "guessing (floor)."
    )
