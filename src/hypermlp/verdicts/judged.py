"""A folder, read once and judged once: what the terminal, a page and a document then show."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hypermlp.verdicts.claims import Claim, judge_claims
from hypermlp.verdicts.folders import read_studies
from hypermlp.verdicts.predictions import Prediction, predictions
from hypermlp.verdicts.results import Results


@dataclass(frozen=True)
class Judged:
    """A study's results with the verdicts on its claims and on the paper's predictions."""

    results: Results
    claims: list[Claim]
    predictions: list[Prediction]


def judge(results: Results) -> Judged:
    """The verdicts on a study; of a quick one there are none."""
    if results.quick:
        return Judged(results, [], [])
    return Judged(results, judge_claims(results), [] if "tasks" in results.plans else predictions(results))


def judge_folder(folder: Path) -> list[Judged]:
    """The studies in `folder` and below."""
    return [judge(results) for results in read_studies(folder)]
