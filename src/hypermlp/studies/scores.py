"""From the records of runs on tasks to scores by mixer, task and seed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from hypermlp.files import Record


def setting_score(records: Iterable[Record]) -> float | None:
    """The score of a setting from the runs of its learning rates: faithful takes the best, clean the best validated."""
    scored = [record for record in records if record["error"] is None and record["metrics"] is not None]
    if not scored:
        return None
    if scored[0]["protocol"] == "faithful":
        return max(record["metrics"]["accuracy"] for record in scored)
    measure = scored[0].get("measure", "accuracy")
    return min((record["metrics"]["validation_loss"], record["metrics"][measure]) for record in scored)[1]


Scores = dict[tuple[str, str], dict[int, float]]  # (mixer, task) → seed → score


def task_scores(records: Sequence[Record], settings: Mapping[str, str] | None = None) -> Scores:
    """The mean over a task's settings, for the seeds of which all have a score.

    settings: setting → task, of all that belong to the study; by default those that the records have. So all scores of a task
    are means over the same settings, and an unfinished seed has none.
    """
    protocols = {record["protocol"] for record in records}
    if len(protocols) > 1:
        raise ValueError(f"records of different protocols ({', '.join(sorted(protocols))}) cannot be compared")
    if settings is None:
        settings = {record["setting"]: record["task"] for record in records}
    groups: dict[tuple[str, str], dict[int, list[Record]]] = {}
    for record in records:
        groups.setdefault((record["mixer"], record["setting"]), {}).setdefault(record["seed"], []).append(record)
    found = {}
    for mixer in dict.fromkeys(record["mixer"] for record in records):
        for task in dict.fromkeys(settings.values()):
            columns = []
            for setting in (key for key, its in settings.items() if its == task):
                scores = {seed: setting_score(group) for seed, group in groups.get((mixer, setting), {}).items()}
                columns.append({seed: score for seed, score in scores.items() if score is not None})
            found[mixer, task] = common_mean(columns)
    return found


def common_mean(columns: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Seed → mean over the columns, for the seeds that all of them have."""
    common = set.intersection(*map(set, columns)) if columns else set()
    return {seed: fmean(column[seed] for column in columns) for seed in sorted(common)}
