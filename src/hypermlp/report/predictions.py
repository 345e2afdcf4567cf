"""Table 4: where the paper predicts mixing to gain much, and where little; judged by a study's own runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from hypermlp.paper import tables as paper
from hypermlp.report.claims import (
    CONTRADICTED,
    HYPERGLU,
    HYPERMLP,
    INCONCLUSIVE,
    SUPPORTED,
    Evidence,
    due,
    judge,
    paper_gain,
)
from hypermlp.report.estimates import Estimate, estimate
from hypermlp.report.study import CEILING, FLOOR, Study
from hypermlp.studies.protocol import Terms
from hypermlp.studies.scores import common_mean

MIXING = ((HYPERMLP, "R-cg-q"), (HYPERGLU, "G-cg-q"))
REASONS = {
    "compression": "the answer needs summaries of many tokens, which mixing can build as slots of their own",
    "noisy-recall": "mixing can merge noise into few slots, so that less of it is activated",
    "fuzzy-recall": "mixing that depends on the input bends the borders of what a key matches",
    "selective-copying": "R2 can learn shifts, to match in one place and copy from another",
    "in-context-recall": "one slot per token is already the right basis",
    "memorization": "what is asked for is in the weights, not in the context",
}


def prediction_rule(terms: Terms) -> str:
    return (
        "The gain of a task is its accuracy with mixing (R-cg-q-12o, G-cg-q-12o) minus that without (R-cg-q, G-cg-q), averaged "
        "over the pairs that were run and paired by seed. “High” and “med-high” are supported if the mean gain is above "
        f"{terms.points:g} points and above that of the “low” tasks that were run, and its interval lies above 0. “Low” is "
        f"supported if the mean gain is at most {terms.points:g} points and its interval ends below "
        f"{terms.wide * terms.points:g}, contradicted if it is larger and the interval lies above 0."
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
    """Table 4, task by task; of a registered study, its tasks."""
    gains = {task: mixing_gains(study, task) for task in paper.TABLE4 if study.protocol is None or task in study.due}
    low = [gain.mean for task, (gain, _) in gains.items() if gain is not None and paper.TABLE4[task] == "low"]
    labels = [label for pair in MIXING for label in pair]
    found = []
    for task, (gain, in_paper) in gains.items():
        expected = paper.TABLE4[task]
        bound = study.bound(labels, task) if task in study.tasks else ""
        status = (
            judge_low(gain, task, study.terms, bound) if expected == "low" else judge_high(gain, task, study.terms, bound, low)
        )
        item = Evidence("with mixing", "without", task, gain, in_paper, status, study.terms)
        found.append(Prediction(task, expected, due(study, item)))
    return found


def mixing_gains(study: Study, task: str) -> tuple[Estimate | None, float]:
    """The gain of mixing on a task, and the paper's; None if no pair was run."""
    run = [(a, b) for a, b in MIXING if study.values(a, task) and study.values(b, task)]
    columns = []
    for a, b in run:
        with_mixing, without = study.values(a, task), study.values(b, task)
        columns.append({seed: with_mixing[seed] - without[seed] for seed in with_mixing.keys() & without.keys()})
    theirs = [paper_gain(study, a, b, task) or 0.0 for a, b in run or MIXING]  # the paper has all of them
    return estimate(common_mean(columns).values()), fmean(theirs)


def judge_low(gain: Estimate | None, task: str, terms: Terms, bound: str) -> str:
    status = judge(gain, task, "more", terms, bound)
    if gain is None or status in (CEILING, FLOOR) or gain.seeds < terms.seeds:
        return status
    if status == SUPPORTED:
        return CONTRADICTED
    far = gain.ends(terms.interval)[1] >= terms.wide * terms.points
    return INCONCLUSIVE if far or gain.mean > terms.points else SUPPORTED


def judge_high(gain: Estimate | None, task: str, terms: Terms, bound: str, low: Sequence[float]) -> str:
    status = judge(gain, task, "more", terms, bound)
    below = gain is not None and bool(low) and gain.mean <= fmean(low)
    return CONTRADICTED if status == SUPPORTED and below else status
