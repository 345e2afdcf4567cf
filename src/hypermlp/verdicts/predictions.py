"""Table 4: where the paper predicts mixing to gain much, and where little; judged by a study's own runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from hypermlp.paper import tables as paper
from hypermlp.studies.protocol import Terms
from hypermlp.studies.scores import common_mean
from hypermlp.verdicts.claims import (
    CONTRADICTED,
    NOISE,
    NOT_RUN,
    NOTHING_TO_SEE,
    SUPPORTED,
    UNDECIDED,
    Evidence,
    Verdict,
    judge,
    paper_gain,
    wait,
)
from hypermlp.verdicts.estimates import Estimate, estimate
from hypermlp.verdicts.results import Results

HYPERGLU, HYPERMLP = "G-cg-q-12o", "R-cg-q-12o"
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
    def verdict(self) -> Verdict:
        assert self.evidence.verdict is not None
        return self.evidence.verdict


def predictions(results: Results) -> list[Prediction]:
    """Table 4, task by task; of a registered study, its tasks."""
    gains = {task: mixing_gains(results, task) for task in paper.TABLE4 if not results.protocol or task in results.averaged}
    low = [gain.mean for task, (gain, _) in gains.items() if gain is not None and paper.TABLE4[task] == "low"]
    labels = [label for pair in MIXING for label in pair]
    found = []
    for task, (gain, in_paper) in gains.items():
        expected = paper.TABLE4[task]
        bound = results.bound(labels, task) if task in results.tasks else ""
        verdict = wait(results, gain) or judge(gain, task, "more", results.terms, bound)
        if verdict.word not in (NOT_RUN, NOTHING_TO_SEE) and gain is not None and gain.seeds >= results.terms.seeds:
            verdict = judge_low(gain, results.terms, verdict) if expected == "low" else judge_high(gain, low, verdict)
        found.append(
            Prediction(task, expected, Evidence("with mixing", "without", task, gain, in_paper, verdict, results.terms))
        )
    return found


def mixing_gains(results: Results, task: str) -> tuple[Estimate | None, float]:
    """The gain of mixing on a task, and the paper's; None if no pair was run."""
    run = [(a, b) for a, b in MIXING if results.values(a, task) and results.values(b, task)]
    columns = []
    for a, b in run:
        with_mixing, without = results.values(a, task), results.values(b, task)
        columns.append({seed: with_mixing[seed] - without[seed] for seed in with_mixing.keys() & without.keys()})
    theirs = [paper_gain(results, a, b, task) or 0.0 for a, b in run or MIXING]  # the paper has all of them
    return estimate(common_mean(columns).values()), fmean(theirs)


def judge_low(gain: Estimate, terms: Terms, more: Verdict) -> Verdict:
    """more: the verdict on a gain, which here is not expected."""
    if more.word == SUPPORTED:
        return Verdict(CONTRADICTED)
    far = gain.ends(terms.interval)[1] >= terms.wide * terms.points
    return Verdict(UNDECIDED, NOISE) if far or gain.mean > terms.points else Verdict(SUPPORTED)


def judge_high(gain: Estimate, low: Sequence[float], more: Verdict) -> Verdict:
    """A gain must also be above those of the tasks where little is expected."""
    return Verdict(CONTRADICTED) if more.word == SUPPORTED and low and gain.mean <= fmean(low) else more
