"""The paper's six findings (section "Result analysis") and the predictions of its Table 4, judged by a study's own runs.

Each is data: what is claimed, in our words, the rule it is judged by, and the comparisons the rule is applied to. A comparison
is a gain of one label over another, paired by seed, with Student's 95 % confidence interval, which for one seed has no ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from hypermlp.experiments import paper
from hypermlp.experiments.mad import common_mean
from hypermlp.report.study import AVERAGE, LOSS, Estimate, Study, estimate
from hypermlp.report.table1 import published

CONFIRMED, REFUTED, UNKNOWN = "confirmed", "not confirmed", "not enough runs"
SHOWN = ""  # the status of a comparison that is printed and not judged
POINTS, NATS = 2.0, 0.02  # differences that do not matter: of accuracy, of loss
WIDE = 5  # times that: how far intervals may reach and still tell something, and what a collapse must exceed
FULL = 98.0  # percent, from where there is no room to gain


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
        """One comparison that fails is enough to fail; one that holds is needed to hold."""
        found = [item.status for item in self.evidence]
        return next((status for status in (REFUTED, CONFIRMED) if status in found), UNKNOWN)


# ---- rules: from a gain to a status ----


def margin(measure: str) -> float:
    return NATS if measure == LOSS else POINTS


def is_more(gain: Estimate, measure: str) -> bool:
    return gain.low > 0


def is_far_more(gain: Estimate, measure: str) -> bool:
    return gain.low > WIDE * margin(measure)


def is_level(gain: Estimate, measure: str) -> bool:
    far = WIDE * margin(measure)
    return abs(gain.mean) <= margin(measure) and -far <= gain.low and gain.high <= far


def is_not_behind(gain: Estimate, measure: str) -> bool:
    return gain.mean >= -margin(measure) and gain.low >= -WIDE * margin(measure)


Rule = Callable[[Estimate, str], bool]


def judge(gain: Estimate | None, measure: str, rule: Rule) -> str:
    if gain is None:
        return UNKNOWN
    if rule(gain, measure):
        return CONFIRMED
    drowned = gain.low <= 0 <= gain.high and gain.high - gain.low > 2 * WIDE * margin(measure)
    return UNKNOWN if drowned else REFUTED


def weigh(study: Study, better: str, worse: str, measure: str, rule: Rule | None) -> Evidence:
    """One comparison; without a rule it is only shown."""
    gain = study.gain(better, worse, measure)
    status = SHOWN if rule is None else judge(gain, measure, rule)
    return Evidence(better, worse, measure, gain, paper_gain(study, better, worse, measure), status)


def paper_gain(study: Study, better: str, worse: str, measure: str) -> float:
    """The same difference in the paper, whose table has both."""
    a, b = published(study, better, measure), published(study, worse, measure)
    assert a is not None
    assert b is not None
    return b - a if measure == LOSS else a - b


def halves(study: Study) -> list[str]:
    """The measures of Table 1's halves that were run."""
    return [measure for measure in (AVERAGE, LOSS) if measure in study.measures]


def pairs(rule: Rule, *labels: tuple[str, str]) -> Callable[[Study], list[Evidence]]:
    """Compare these labels on both halves by one rule."""
    return lambda study: [weigh(study, a, b, measure, rule) for a, b in labels for measure in halves(study)]


# ---- the findings ----


def compression_of_vo(study: Study) -> list[Evidence]:
    return [
        weigh(study, f"{base}-c-q", f"{base}-c-v", measure, is_more if measure == "compression" else None)
        for base in ("S", "R")
        for measure in study.measures
    ]


def best_of_budget(study: Study) -> list[Evidence]:
    ours, found = "G-cg-q-12o", []
    for measure in halves(study):
        rule = is_more if measure == LOSS else is_not_behind
        found.append(weigh(study, ours, "R-cg-q-12o", measure, rule))
        others = [name for name in paper.TABLE1 if not name.endswith("!") and name != ours and study.values(name, measure)]
        if others:
            sign = -1 if measure == LOSS else 1
            best = max(others, key=lambda name: sign * fmean(study.values(name, measure).values()))
            if best != "R-cg-q-12o":
                found.append(weigh(study, ours, best, measure, rule))
    return found


FINDINGS = (
    Claim(
        "Softmax is not essential",
        "With rotary embedding and convolutions, ReLU attention is as good as softmax attention: S-pc and R-pc are level.",
        f"confirmed if the mean difference is at most {POINTS:g} points of the MAD average ({NATS:g} of the loss) and its "
        f"interval reaches no further than {WIDE * POINTS:g} points ({WIDE * NATS:g}) from 0",
        pairs(is_level, ("S-pc", "R-pc")),
    ),
    Claim(
        "Mixing along the sequence is what gains most",
        "R-cg-q and R-cg-q-12o differ only in temporal mixing (paid for by a smaller QK rank), and the second is far better.",
        "confirmed if the interval of the gain lies above 0",
        pairs(is_more, ("R-cg-q-12o", "R-cg-q")),
    ),
    Claim(
        "The lag layout is necessary",
        "Mixing whose parameters belong to places in the input, not to lags, collapses: R-12! against R-12o!, G-12! against "
        "G-12o!.",
        f"confirmed if the interval of the loss of quality lies above {WIDE * POINTS:g} points ({WIDE * NATS:g} of the loss)",
        pairs(is_far_more, ("R-12o!", "R-12!"), ("G-12o!", "G-12!")),
    ),
    Claim(
        "Mixing on both sides helps",
        "R1 and R2 together are better than R1 alone: G-cg-q-12o against G-cg-q-1o, R-cg-q-12o against R-cg-q-1o.",
        "confirmed if the interval of the gain lies above 0",
        pairs(is_more, ("G-cg-q-12o", "G-cg-q-1o"), ("R-cg-q-12o", "R-cg-q-1o")),
    ),
    Claim(
        "Compressing VO costs more than compressing QK",
        "A smaller readout rank leaves fewer directions to write to, which hurts tasks that need many of them. Compression is "
        "the clearest: one state must hold the whole input. S-c-q and S-c-v, R-c-q and R-c-v differ in what is compressed.",
        "confirmed if on the compression task the interval of the gain of q over v lies above 0; the other numbers are "
        "shown and not judged",
        compression_of_vo,
    ),
    Claim(
        "HyperGLU is the best of the budget",
        "Of all labels within the budget, G-cg-q-12o has the lowest loss and is among the best on MAD; it is compared with "
        "HyperMLP (R-cg-q-12o) and with the best other label that was run.",
        "confirmed if the interval of the loss saved lies above 0, and if it is on the MAD average no more than "
        f"{POINTS:g} points behind, with an interval that reaches no lower than {WIDE * POINTS:g}",
        best_of_budget,
    ),
)


def findings(study: Study) -> list[Outcome]:
    return [Outcome(claim, claim.compare(study)) for claim in FINDINGS]


# ---- Table 4 ----

MIXING = (("R-cg-q-12o", "R-cg-q"), ("G-cg-q-12o", "G-cg-q"))
REASONS = {
    "compression": "the answer needs summaries of many tokens, which mixing can build as slots of their own",
    "noisy-recall": "mixing can merge noise into few slots, so that less of it is activated",
    "fuzzy-recall": "mixing that depends on the input bends the borders of what a key matches",
    "selective-copying": "R2 can learn shifts, to match in one place and copy from another",
    "in-context-recall": "one slot per token is already the right basis",
    "memorization": "what is asked for is in the weights, not in the context",
}
NOISE_RULE = (
    f"Where a rule is not met, but the interval has 0 inside and ends more than {WIDE * POINTS:g} points ({WIDE * NATS:g} of "
    "the loss) away from its mean, chance decides: not enough runs."
)
PREDICTION_RULE = (
    "The gain of a task is its accuracy with mixing (R-cg-q-12o, G-cg-q-12o) minus that without (R-cg-q, G-cg-q), averaged "
    "over the pairs that were run and paired by seed. “High” and “med-high” are confirmed if the interval of the gain lies "
    "above 0 and its mean is above the mean gain of the “low” tasks that were run. “Low” is confirmed if the mean gain is "
    f"at most {POINTS:g} points and its interval ends below {WIDE * POINTS:g}."
)


def mixing_gains(study: Study, task: str) -> tuple[Estimate | None, float]:
    """The gain of mixing on a task, and the paper's; None if no pair was run."""
    run = [(a, b) for a, b in MIXING if study.values(a, task) and study.values(b, task)]
    columns = []
    for a, b in run:
        with_mixing, without = study.values(a, task), study.values(b, task)
        columns.append({seed: with_mixing[seed] - without[seed] for seed in with_mixing.keys() & without.keys()})
    return estimate(common_mean(columns).values()), fmean(paper_gain(study, a, b, task) for a, b in run or MIXING)


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
    found = []
    for task, expected in paper.TABLE4.items():
        gain, in_paper = gains[task]
        status = judge(gain, task, is_low if expected == "low" else above(low))
        item = Evidence("with mixing", "without", task, gain, in_paper, status, room(study, task, expected))
        found.append(Prediction(task, expected, item))
    return found


def is_low(gain: Estimate, measure: str) -> bool:
    return gain.mean <= POINTS and gain.high < WIDE * POINTS


def above(low: Sequence[float]) -> Rule:
    return lambda gain, measure: gain.low > 0 and (not low or gain.mean > fmean(low))


def room(study: Study, task: str, expected: str) -> str:
    """A word about a task that nothing can gain much on."""
    without = [score.mean for _, b in MIXING if (score := study.score(b, task)) is not None]
    if expected == "low" or not without or min(without) < FULL:
        return ""
    return f"no room to gain: {min(without):.1f} % without mixing"


def verdicts_markdown(study: Study) -> str:
    """Findings and predictions with their verdicts, for a document."""

    def gain(item: Evidence) -> str:
        digits = 3 if item.measure == LOSS else 1
        shown = "–" if item.gain is None else f"{item.gain.mean:+.{digits}f}"
        return f"{item.better} − {item.worse}, {item.measure}: {shown} (paper {item.paper:+.{digits}f})"

    lines = ["| claim | verdict here | gains (loss: saved) |", "| --- | --- | --- |"]
    for i, outcome in enumerate(findings(study), 1):
        judged = [gain(item) for item in outcome.evidence if item.status and item.gain is not None]
        lines.append(f"| {i}. {outcome.claim.title} | {outcome.verdict} | {'; '.join(judged) or '–'} |")
    for found in predictions(study):
        lines.append(f"| Table 4: {found.expected} gain on {found.task} | {found.verdict} | {gain(found.evidence)} |")
    return "\n".join(lines)
