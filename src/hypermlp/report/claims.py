"""What the paper claims, and how a study's own runs judge it: statuses, rules and the claims themselves.

A claim is data: what is said, in our words, the rule it is judged by, and the comparisons the rule is applied to. A comparison
is the gain of one label over another, paired by seed. Rules use Student's 95 % confidence interval of it; one seed has none.
Every task of the run counts: a claim that something gains fails if it loses on one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from hypermlp.experiments import paper
from hypermlp.report.estimates import NONE, Estimate, estimate, interval, seeds_text, signed
from hypermlp.report.study import AVERAGE, CEILING, FLOOR, FULL, LOSS, NATS, POINTS, REFERENCES, Study
from hypermlp.report.table1 import TITLES, published
from hypermlp.studies.scores import common_mean

CONFIRMED, REFUTED, UNKNOWN = "confirmed", "not confirmed", "not enough runs"
NOT_BEHIND = "not behind"  # a comparison that shows no loss: it does not fail a claim, and confirms none
SHOWN = ""  # the status of a comparison that is printed and not judged
WIDE = 5  # times that: how far intervals may reach and still tell something, and what a collapse must exceed

HYPERGLU, HYPERMLP = "G-cg-q-12o", "R-cg-q-12o"


@dataclass(frozen=True)
class Evidence:
    """How much better one label is than another."""

    better: str
    worse: str
    measure: str
    gain: Estimate | None  # None: one of them was not run
    paper: float  # the same difference in the paper
    status: str
    note: str = ""

    @property
    def digits(self) -> int:
        return 3 if self.measure == LOSS else 1


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
        """One comparison that fails is enough to fail; one that shows an effect is needed to confirm."""
        found = [item.status for item in self.evidence]
        order = (REFUTED, CONFIRMED, UNKNOWN, NOT_BEHIND, CEILING, FLOOR)
        return next((status for status in order if status in found), UNKNOWN)

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
            shown = [f"{measure_name(item)} {interval(item.gain, item.digits, '+')}{beside(item)}" for item in halves]
            if tasks:
                single = [f"{measure_name(i)} {signed(i.gain.mean, 1)}{beside(i)}" for i in tasks if i.gain is not None]
                shown.append(f"by task: {', '.join(single)}" if halves else ", ".join(single))
            found.append(f"{pair[0]} − {pair[1]}: {'; '.join(shown)}")
        return ". ".join(found)

    @property
    def sentence(self) -> str:
        """Verdict and numbers, for terminal and page alike."""
        return f"{self.claim.title}: {self.verdict} ({seeds_text(item.gain for item in self.judged)}). {self.numbers}."


def measure_name(item: Evidence) -> str:
    return {AVERAGE: "MAD average", LOSS: "loss saved"}.get(item.measure, TITLES[item.measure].lower())


def beside(item: Evidence) -> str:
    """The paper's gain, and what limits this one."""
    return f" (paper {signed(item.paper, item.digits)}{f', {item.status}' if item.status in (CEILING, FLOOR) else ''})"


# ---- rules: from a gain to a status ----


def margin(measure: str) -> float:
    return NATS if measure == LOSS else POINTS


def is_more(gain: Estimate, measure: str) -> bool:
    return gain.low > 0 and gain.mean > margin(measure)


def is_far_more(gain: Estimate, measure: str) -> bool:
    return gain.low > WIDE * margin(measure)


def is_level(gain: Estimate, measure: str) -> bool:
    far = WIDE * margin(measure)
    return abs(gain.mean) <= margin(measure) and -far <= gain.low and gain.high <= far


def is_not_behind(gain: Estimate, measure: str) -> bool:
    return gain.mean >= -margin(measure) and gain.low >= -WIDE * margin(measure)


Rule = Callable[[Estimate, str], bool]


def judge(gain: Estimate | None, measure: str, rule: Rule, bound: str = "") -> str:
    """bound: CEILING or FLOOR where both sides are there."""
    if gain is None or gain.seeds < 2:
        return UNKNOWN
    if bound:
        return bound
    if rule is is_not_behind:
        lost = gain.mean < -margin(measure) and gain.high < 0
        return NOT_BEHIND if rule(gain, measure) else REFUTED if lost else UNKNOWN
    if rule(gain, measure):
        return CONFIRMED
    drowned = gain.low <= 0 <= gain.high and gain.high - gain.low > 2 * WIDE * margin(measure)
    return UNKNOWN if drowned else REFUTED


def weigh(study: Study, better: str, worse: str, measure: str, rule: Rule | None) -> Evidence:
    """One comparison; without a rule it is only shown."""
    gain = study.gain(better, worse, measure)
    status = SHOWN if rule is None else judge(gain, measure, rule, study.bound((better, worse), measure))
    theirs = paper_gain(study, better, worse, measure)
    return Evidence(better, worse, measure, gain, theirs, status, remark(gain, measure, rule))


def remark(gain: Estimate | None, measure: str, rule: Rule | None) -> str:
    """Why a gain that is there does not confirm."""
    if gain is None or gain.seeds < 2 or rule not in (is_more, is_far_more) or gain.low <= 0:
        return ""
    return "too small to matter" if gain.mean <= margin(measure) else ""


def paper_gain(study: Study, better: str, worse: str, measure: str) -> float:
    """The same difference in the paper, whose table has both."""
    a, b = published(study, better, measure), published(study, worse, measure)
    assert a is not None
    assert b is not None
    return b - a if measure == LOSS else a - b


def halves(study: Study) -> list[str]:
    """The measures of Table 1's halves that were run."""
    return [measure for measure in (AVERAGE, LOSS) if measure in study.measures]


def on_average(rule: Rule, *labels: tuple[str, str]) -> Callable[[Study], list[Evidence]]:
    """Compare these labels on both halves by one rule."""
    return lambda study: [weigh(study, a, b, measure, rule) for a, b in labels for measure in halves(study)]


def everywhere(rule: Rule, *labels: tuple[str, str]) -> Callable[[Study], list[Evidence]]:
    """The rule on both halves, and no loss on any task."""

    def compare(study: Study) -> list[Evidence]:
        tasks = study.tasks if len(study.tasks) > 1 else []
        rules: list[tuple[str, Rule]] = [(half, rule) for half in halves(study)] + [(task, is_not_behind) for task in tasks]
        return [weigh(study, a, b, measure, own) for a, b in labels for measure, own in rules]

    return compare


# ---- the claims ----


def compression_of_vo(study: Study) -> list[Evidence]:
    return [
        weigh(study, f"{base}-c-q", f"{base}-c-v", measure, is_more if measure == "compression" else None)
        for base in ("S", "R")
        for measure in study.measures
    ]


def best_of_budget(study: Study) -> list[Evidence]:
    found = []
    for measure in halves(study):
        rule = is_more if measure == LOSS else is_not_behind
        found.append(weigh(study, HYPERGLU, HYPERMLP, measure, rule))
        others = [own for own in paper.TABLE1 if not own.endswith("!") and own != HYPERGLU and study.values(own, measure)]
        if others:
            sign = -1 if measure == LOSS else 1
            best = max(others, key=lambda own: sign * fmean(study.values(own, measure).values()))
            if best != HYPERMLP:
                found.append(weigh(study, HYPERGLU, best, measure, rule))
    return found


def ahead_of_softmax(study: Study) -> list[Evidence]:
    """What must be gained is what the paper gains on the tasks of this run, where that matters; no loss elsewhere."""
    rival = study.reference or REFERENCES[0]
    tasks = study.tasks if len(study.tasks) > 1 else []
    found = []
    for measure in [*halves(study), *tasks]:
        gains = measure in halves(study) and paper_gain(study, HYPERGLU, rival, measure) > margin(measure)
        found.append(weigh(study, HYPERGLU, rival, measure, is_more if gains else is_not_behind))
    return found


GAIN = (
    f"confirmed if the mean gain is above {POINTS:g} points of the MAD average ({NATS:g} of the loss) and its interval lies "
    "above 0"
)
NO_LOSS = f"it is behind on no task, by more than {POINTS:g} points with an interval below 0"

CLAIMS = (
    Claim(
        "Softmax is not essential",
        "With rotary embedding and convolutions, ReLU attention is as good as softmax attention: S-pc and R-pc are level.",
        f"confirmed if the mean difference is at most {POINTS:g} points of the MAD average ({NATS:g} of the loss) and its "
        f"interval reaches no further than {WIDE * POINTS:g} points ({WIDE * NATS:g}) from 0",
        on_average(is_level, ("S-pc", "R-pc")),
    ),
    Claim(
        "Mixing along the sequence is what gains most",
        "R-cg-q and R-cg-q-12o differ only in temporal mixing (paid for by a smaller QK rank), and the second is far better.",
        f"{GAIN}, and {NO_LOSS}",
        everywhere(is_more, (HYPERMLP, "R-cg-q")),
    ),
    Claim(
        "The lag layout is necessary",
        "Mixing whose parameters belong to places in the input, not to lags, collapses: R-12! against R-12o!, G-12! against "
        "G-12o!.",
        f"confirmed if the interval of the loss of quality lies above {WIDE * POINTS:g} points of the MAD average "
        f"({WIDE * NATS:g} of the loss), and {NO_LOSS}",
        everywhere(is_far_more, ("R-12o!", "R-12!"), ("G-12o!", "G-12!")),
    ),
    Claim(
        "Mixing on both sides helps",
        "R1 and R2 together are better than R1 alone: G-cg-q-12o against G-cg-q-1o, R-cg-q-12o against R-cg-q-1o.",
        f"{GAIN}, and {NO_LOSS}",
        everywhere(is_more, (HYPERGLU, "G-cg-q-1o"), (HYPERMLP, "R-cg-q-1o")),
    ),
    Claim(
        "Compressing VO costs more than compressing QK",
        "A smaller readout rank leaves fewer directions to write to, which hurts tasks that need many of them. Compression is "
        "the clearest: one state must hold the whole input. S-c-q and S-c-v, R-c-q and R-c-v differ in what is compressed.",
        f"confirmed if on the compression task the mean gain of q over v is above {POINTS:g} points and its interval lies "
        "above 0; the other numbers are shown and not judged",
        compression_of_vo,
    ),
    Claim(
        "HyperGLU is the best of the budget",
        "Of all labels within the budget, G-cg-q-12o has the lowest loss and is among the best on MAD; it is compared with "
        "HyperMLP (R-cg-q-12o) and with the best other label that was run.",
        f"confirmed if the mean loss saved is above {NATS:g} and its interval lies above 0, and if it is not behind on the MAD "
        f"average: by no more than {POINTS:g} points, with an interval that reaches no lower than −{WIDE * POINTS:g}",
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
    return [Outcome(claim, claim.compare(study)) for claim in CLAIMS]


# ---- Table 4 ----

MIXING = ((HYPERMLP, "R-cg-q"), (HYPERGLU, "G-cg-q"))
REASONS = {
    "compression": "the answer needs summaries of many tokens, which mixing can build as slots of their own",
    "noisy-recall": "mixing can merge noise into few slots, so that less of it is activated",
    "fuzzy-recall": "mixing that depends on the input bends the borders of what a key matches",
    "selective-copying": "R2 can learn shifts, to match in one place and copy from another",
    "in-context-recall": "one slot per token is already the right basis",
    "memorization": "what is asked for is in the weights, not in the context",
}
NOISE_RULE = (
    "Rules use Student’s 95 % confidence interval of the gain, also where two or three seeds are shown as they are. Where a "
    f"rule is not met, but the interval has 0 inside and ends more than {WIDE * POINTS:g} points ({WIDE * NATS:g} of the loss) "
    "away from its mean, chance decides: not enough runs; one seed is never enough. “At ceiling”: both sides have at least "
    f"{FULL:g} %; “at floor”: neither is more than {POINTS:g} points above guessing. Neither confirms anything."
)
PREDICTION_RULE = (
    "The gain of a task is its accuracy with mixing (R-cg-q-12o, G-cg-q-12o) minus that without (R-cg-q, G-cg-q), averaged "
    "over the pairs that were run and paired by seed. “High” and “med-high” are confirmed if the mean gain is above "
    f"{POINTS:g} points and above that of the “low” tasks that were run, and its interval lies above 0. “Low” is confirmed if "
    f"the mean gain is at most {POINTS:g} points and its interval ends below {WIDE * POINTS:g}."
)


@dataclass(frozen=True)
class Prediction:
    task: str
    expected: str
    evidence: Evidence

    @property
    def verdict(self) -> str:
        return self.evidence.status


def predictions(study: Study) -> list[Prediction]:
    """Table 4, task by task."""
    gains = {task: mixing_gains(study, task) for task in paper.TABLE4}
    low = [gain.mean for task, (gain, _) in gains.items() if gain is not None and paper.TABLE4[task] == "low"]
    labels = [label for pair in MIXING for label in pair]
    found = []
    for task, expected in paper.TABLE4.items():
        gain, in_paper = gains[task]
        bound = study.bound(labels, task) if task in study.tasks else ""
        status = judge(gain, task, is_low if expected == "low" else above(low), bound)
        found.append(Prediction(task, expected, Evidence("with mixing", "without", task, gain, in_paper, status)))
    return found


def mixing_gains(study: Study, task: str) -> tuple[Estimate | None, float]:
    """The gain of mixing on a task, and the paper's; None if no pair was run."""
    run = [(a, b) for a, b in MIXING if study.values(a, task) and study.values(b, task)]
    columns = []
    for a, b in run:
        with_mixing, without = study.values(a, task), study.values(b, task)
        columns.append({seed: with_mixing[seed] - without[seed] for seed in with_mixing.keys() & without.keys()})
    return estimate(common_mean(columns).values()), fmean(paper_gain(study, a, b, task) for a, b in run or MIXING)


def is_low(gain: Estimate, measure: str) -> bool:
    return gain.mean <= POINTS and gain.high < WIDE * POINTS


def above(low: Sequence[float]) -> Rule:
    return lambda gain, measure: is_more(gain, measure) and (not low or gain.mean > fmean(low))


def verdicts_markdown(study: Study) -> str:
    """Claims and predictions with their verdicts, for a document."""
    lines = ["| claim | verdict here | gains (loss: saved) |", "| --- | --- | --- |"]
    for i, outcome in enumerate(judge_claims(study), 1):
        lines.append(f"| {i}. {outcome.claim.title} | {outcome.verdict} | {outcome.numbers or NONE} |")
    for found in predictions(study):
        item = found.evidence
        shown = f"with mixing − without: {interval(item.gain, item.digits, '+')}{beside(item)}"
        lines.append(f"| Table 4: {found.expected} gain on {TITLES[found.task].lower()} | {found.verdict} | {shown} |")
    return "\n".join(lines)
