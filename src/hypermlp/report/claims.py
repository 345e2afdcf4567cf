"""What the paper claims, and how a study's own runs judge it: statuses, rules and the claims themselves.

A claim is data: what is said, in our words, the rule it is judged by, and the comparisons the rule is applied to. A comparison
is the gain of one mixer over another, paired by seed, with its 95 % interval. Every task of the run counts: a claim that
something gains fails if it loses on one of them. A study with a protocol (studies/protocol.py) brings its own claims and terms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

from hypermlp.paper import tables as paper
from hypermlp.report.estimates import NONE, Estimate, gain_text, seeds_text, signed
from hypermlp.report.study import AVERAGE, CEILING, FLOOR, LOSS, REFERENCES, Study
from hypermlp.report.table1 import TITLES, published
from hypermlp.studies.protocol import Comparison, Expectation, Terms

SUPPORTED, CONTRADICTED, INCONCLUSIVE = "supported", "contradicted", "inconclusive"
UNFINISHED = "not finished"  # a registered comparison that lacks runs: no claim is supported before all of it is there
LEVEL = "no difference"  # none that matters: the whole interval is smaller
NOT_BEHIND = "not behind"  # a comparison that shows no loss: it does not fail a claim, and supports none
SHOWN = ""  # the status of a comparison that is printed and not judged

HYPERGLU, HYPERMLP = "G-cg-q-12o", "R-cg-q-12o"


@dataclass(frozen=True)
class Evidence:
    """How much better one label is than another."""

    better: str
    worse: str
    measure: str
    gain: Estimate | None  # None: one of them was not run
    paper: float | None  # the same difference in the paper, if its table has both
    status: str
    terms: Terms
    note: str = ""

    @property
    def complete(self) -> bool:
        """There are as many seeds as a verdict needs."""
        return self.gain is not None and self.gain.seeds >= self.terms.seeds

    @property
    def digits(self) -> int:
        return 3 if self.measure == LOSS else 1

    @property
    def gain_text(self) -> str:
        return NONE if self.gain is None else gain_text(self.gain, self.terms.interval, self.digits)

    @property
    def words(self) -> str:
        """The status as it is printed."""
        return f"no difference larger than {smallest(self.measure, self.terms)}" if self.status == LEVEL else self.status


def smallest(measure: str, terms: Terms) -> str:
    """The smallest effect of interest, in words."""
    return f"{terms.nats:g} nats" if measure == LOSS else f"{terms.points:g} points"


@dataclass(frozen=True)
class Claim:
    title: str
    text: str
    rule: str
    compare: Callable[[Study], list[Evidence]]


@dataclass(frozen=True)
class Outcome:
    claim: Claim
    evidence: list[Evidence]

    @property
    def verdict(self) -> str:
        """One comparison that fails is enough to fail; one that shows an effect is needed to support."""
        found = [item.status for item in self.evidence]
        order = (CONTRADICTED, UNFINISHED, SUPPORTED, INCONCLUSIVE, LEVEL, NOT_BEHIND, CEILING, FLOOR)
        return next((status for status in order if status in found), INCONCLUSIVE)

    @property
    def words(self) -> str:
        """The verdict as it is printed."""
        if self.verdict == UNFINISHED:
            lacking = dict.fromkeys(measure_name(item) for item in self.evidence if item.status == UNFINISHED)
            return f"{UNFINISHED}: {', '.join(lacking)}"
        level = dict.fromkeys(smallest(item.measure, item.terms) for item in self.evidence if item.status == LEVEL)
        return f"no difference larger than {' or '.join(level)}" if self.verdict == LEVEL else self.verdict

    @property
    def judged(self) -> list[Evidence]:
        """The comparisons that decide and that were run."""
        return [item for item in self.evidence if item.status and item.gain is not None]

    @property
    def numbers(self) -> str:
        """The gains behind the verdict, by pair of labels."""
        found = []
        for pair in dict.fromkeys((item.better, item.worse) for item in self.judged):
            own = [item for item in self.judged if (item.better, item.worse) == pair]
            halves = [item for item in own if item.measure in (AVERAGE, LOSS)]
            tasks = [item for item in own if item.measure not in (AVERAGE, LOSS)]
            shown = [f"{measure_name(item)} {item.gain_text}{beside(item)}" for item in halves]
            if tasks:
                single = [f"{measure_name(i)} {signed(i.gain.mean, 1)}{beside(i)}" for i in tasks if i.gain is not None]
                shown.append(f"by task: {', '.join(single)}" if halves else ", ".join(single))
            found.append(f"{pair[0]} − {pair[1]}: {'; '.join(shown)}")
        return ". ".join(found)

    @property
    def sentence(self) -> str:
        """Verdict and numbers, for terminal and page alike."""
        return f"{self.claim.title}: {self.words} ({seeds_text(item.gain for item in self.judged)}). {self.numbers}."


def measure_name(item: Evidence) -> str:
    return {AVERAGE: "MAD average", LOSS: "loss saved"}.get(item.measure, TITLES[item.measure].lower())


def beside(item: Evidence) -> str:
    """The paper's gain, and what limits this one."""
    notes = [] if item.paper is None else [f"paper {signed(item.paper, item.digits)}"]
    notes += [item.status] if item.status in (CEILING, FLOOR) else []
    return f" ({', '.join(notes)})" if notes else ""


# ---- rules: from a gain to a status ----


def margin(measure: str, terms: Terms) -> float:
    return terms.nats if measure == LOSS else terms.points


def judge(gain: Estimate | None, measure: str, expect: Expectation, terms: Terms, bound: str = "") -> str:
    """The status of a comparison. bound: CEILING or FLOOR where both sides are there."""
    if gain is None or gain.seeds < terms.seeds:
        return INCONCLUSIVE
    if bound:
        return bound
    small, far = margin(measure, terms), terms.wide * margin(measure, terms)
    low, high = gain.ends(terms.interval)
    gained, lost = low > 0 and gain.mean > small, high < 0 and gain.mean < -small
    within = -small <= low and high <= small
    rules: dict[Expectation, list[tuple[bool, str]]] = {
        "more": [(gained, SUPPORTED), (lost, CONTRADICTED), (within, LEVEL)],
        "far more": [(low > far, SUPPORTED), (high < far, CONTRADICTED)],
        "level": [(within, SUPPORTED), (gained or lost, CONTRADICTED)],
        "not behind": [(gain.mean >= -small and low >= -far, NOT_BEHIND), (lost, CONTRADICTED)],
    }
    return next((status for holds, status in rules[expect] if holds), INCONCLUSIVE)


def weigh(study: Study, better: str, worse: str, measure: str, expect: Expectation | None) -> Evidence:
    """One comparison; without an expectation it is only shown."""
    gain, terms = study.gain(better, worse, measure), study.terms
    status = SHOWN if expect is None else judge(gain, measure, expect, terms, study.bound((better, worse), measure))
    theirs = paper_gain(study, better, worse, measure)
    return Evidence(better, worse, measure, gain, theirs, status, terms, remark(gain, measure, expect, terms))


def remark(gain: Estimate | None, measure: str, expect: Expectation | None, terms: Terms) -> str:
    """Why a gain that is there does not support."""
    if gain is None or gain.seeds < terms.seeds or expect not in ("more", "far more") or gain.ends(terms.interval)[0] <= 0:
        return ""
    return "too small to matter" if gain.mean <= margin(measure, terms) else ""


def paper_gain(study: Study, better: str, worse: str, measure: str) -> float | None:
    """The same difference in the paper; None where its table lacks one of them."""
    a, b = published(study, better, measure), published(study, worse, measure)
    if a is None or b is None:
        return None
    return b - a if measure == LOSS else a - b


def halves(study: Study) -> list[str]:
    """The measures of Table 1's halves that were run."""
    return [measure for measure in (AVERAGE, LOSS) if measure in study.measures]


def on_average(expect: Expectation, *labels: tuple[str, str]) -> Callable[[Study], list[Evidence]]:
    """Compare these labels on both halves."""
    return lambda study: [weigh(study, a, b, measure, expect) for a, b in labels for measure in halves(study)]


def everywhere(expect: Expectation, *labels: tuple[str, str]) -> Callable[[Study], list[Evidence]]:
    """What is expected on both halves, and no loss on any task."""

    def compare(study: Study) -> list[Evidence]:
        tasks = study.tasks if len(study.tasks) > 1 else []
        expected: dict[str, Expectation] = {
            **{task: "not behind" for task in tasks},
            **{half: expect for half in halves(study)},
        }
        order = [*halves(study), *tasks]
        return [weigh(study, a, b, measure, expected[measure]) for a, b in labels for measure in order]

    return compare


# ---- the claims ----


def compression_of_vo(study: Study) -> list[Evidence]:
    return [
        weigh(study, f"{base}-c-q", f"{base}-c-v", measure, "more" if measure == "compression" else None)
        for base in ("S", "R")
        for measure in study.measures
    ]


def best_of_budget(study: Study) -> list[Evidence]:
    found = []
    for measure in halves(study):
        expect: Expectation = "more" if measure == LOSS else "not behind"
        found.append(weigh(study, HYPERGLU, HYPERMLP, measure, expect))
        others = [own for own in paper.TABLE1 if not own.endswith("!") and own != HYPERGLU and study.values(own, measure)]
        if others:
            sign = -1 if measure == LOSS else 1
            best = max(others, key=lambda own: sign * fmean(study.values(own, measure).values()))
            if best != HYPERMLP:
                found.append(weigh(study, HYPERGLU, best, measure, expect))
    return found


def ahead_of_softmax(study: Study) -> list[Evidence]:
    """What must be gained is what the paper gains on the tasks of this run, where that matters; no loss elsewhere."""
    rival = study.reference or REFERENCES[0]
    tasks = study.tasks if len(study.tasks) > 1 else []
    found = []
    for measure in [*halves(study), *tasks]:
        gains = measure in halves(study) and (paper_gain(study, HYPERGLU, rival, measure) or 0) > margin(measure, study.terms)
        found.append(weigh(study, HYPERGLU, rival, measure, "more" if gains else "not behind"))
    return found


TERMS = Terms()  # of studies without a protocol
GAIN = (
    f"supported if the mean gain is above {TERMS.points:g} points of the MAD average ({TERMS.nats:g} of the loss) and its "
    "interval lies above 0"
)
NO_LOSS = f"it is behind on no task, by more than {TERMS.points:g} points with an interval below 0"

CLAIMS = (
    Claim(
        "Softmax is not essential",
        "With rotary embedding and convolutions, ReLU attention is as good as softmax attention: S-pc and R-pc are level.",
        f"supported if the interval of the difference reaches no further than {TERMS.points:g} points of the MAD average "
        f"({TERMS.nats:g} of the loss) from 0",
        on_average("level", ("S-pc", "R-pc")),
    ),
    Claim(
        "Mixing along the sequence is what gains most",
        "R-cg-q and R-cg-q-12o differ only in temporal mixing (paid for by a smaller QK rank), and the second is far better.",
        f"{GAIN}, and {NO_LOSS}",
        everywhere("more", (HYPERMLP, "R-cg-q")),
    ),
    Claim(
        "The lag layout is necessary",
        "Mixing whose parameters belong to places in the input, not to lags, collapses: R-12! against R-12o!, G-12! against "
        "G-12o!.",
        f"supported if the interval of the loss of quality lies above {TERMS.wide * TERMS.points:g} points of the MAD average "
        f"({TERMS.wide * TERMS.nats:g} of the loss), and {NO_LOSS}",
        everywhere("far more", ("R-12o!", "R-12!"), ("G-12o!", "G-12!")),
    ),
    Claim(
        "Mixing on both sides helps",
        "R1 and R2 together are better than R1 alone: G-cg-q-12o against G-cg-q-1o, R-cg-q-12o against R-cg-q-1o.",
        f"{GAIN}, and {NO_LOSS}",
        everywhere("more", (HYPERGLU, "G-cg-q-1o"), (HYPERMLP, "R-cg-q-1o")),
    ),
    Claim(
        "Compressing VO costs more than compressing QK",
        "A smaller readout rank leaves fewer directions to write to, which hurts tasks that need many of them. Compression is "
        "the clearest: one state must hold the whole input. S-c-q and S-c-v, R-c-q and R-c-v differ in what is compressed.",
        f"supported if on the compression task the mean gain of q over v is above {TERMS.points:g} points and its interval "
        "lies above 0; the other numbers are shown and not judged",
        compression_of_vo,
    ),
    Claim(
        "HyperGLU is the best of the budget",
        "Of all labels within the budget, G-cg-q-12o has the lowest loss and is among the best on MAD; it is compared with "
        "HyperMLP (R-cg-q-12o) and with the best other label that was run.",
        f"supported if the mean loss saved is above {TERMS.nats:g} and its interval lies above 0, and if it is not behind on "
        f"the MAD average: by no more than {TERMS.points:g} points, with an interval that reaches no lower than "
        f"−{TERMS.wide * TERMS.points:g}",
        best_of_budget,
    ),
    Claim(
        "HyperGLU is ahead of softmax attention",
        "At equal parameters, G-cg-q-12o is better than softmax attention with rotary embedding and convolutions (S-pc).",
        f"{GAIN}, wherever the paper's own gain over the same tasks is that large; and {NO_LOSS}",
        ahead_of_softmax,
    ),
)


def judge_claims(study: Study) -> list[Outcome]:
    """The claims of the study's protocol, or else the paper's, each with its comparisons; none about tasks beyond Table 1."""
    if "tasks" in study.plans:
        return []
    claims = CLAIMS if study.protocol is None else registered_claims(study.protocol.comparisons, study.terms)
    return [Outcome(claim, claim.compare(study)) for claim in claims]


def registered_claims(comparisons: Sequence[Comparison], terms: Terms) -> list[Claim]:
    """Comparisons with the same title are one claim."""
    found = []
    for title in dict.fromkeys(item.title for item in comparisons):
        own = [item for item in comparisons if item.title == title]
        text = " ".join(dict.fromkeys(item.text for item in own if item.text))
        small = f"{terms.points:g} points ({terms.nats:g} nats)"
        far = f"{terms.wide * terms.points:g} points ({terms.wide * terms.nats:g} nats)"
        rules = "; ".join(dict.fromkeys(EXPECTED[item.expect].format(small=small, far=far) for item in own))
        found.append(Claim(title, text, rules, partial(weigh_all, own)))
    return found


def weigh_all(comparisons: Sequence[Comparison], study: Study) -> list[Evidence]:
    """All that was registered, whether it was run or not."""
    found = [weigh(study, item.better, item.worse, measure, item.expect) for item in comparisons for measure in item.on]
    return [due(study, item) for item in found]


def due(study: Study, item: Evidence) -> Evidence:
    """A comparison of a registered study is judged when all its seeds are there."""
    return item if item.complete or study.protocol is None else replace(item, status=UNFINISHED)


EXPECTED: dict[Expectation, str] = {
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
}


# ---- the rules in words ----

INTERVALS = {
    "student": "Student’s 95 % confidence interval of the gain, also where two or three seeds are shown as they are",
    "bootstrap": (
        "the 95 % bootstrap interval of the mean gain: all resamples of the seeds, percentiles as far out as Student’s "
        "distribution is wider than the normal one"
    ),
}


def noise_rule(terms: Terms) -> str:
    return (
        f"Rules use {INTERVALS[terms.interval]}; a verdict needs {terms.seeds} seeds. Where the whole interval is within "
        f"{terms.points:g} points ({terms.nats:g} nats) of 0, there is no difference that matters; where no rule is met, the "
        f"verdict is inconclusive. “At ceiling”: both sides have at least {terms.ceiling:g} %; “at floor”: neither is "
        f"more than {terms.points:g} points above guessing. Neither decides anything."
    )
