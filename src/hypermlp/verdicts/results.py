"""The results of a study: its runs (folders.py finds them), their scores by seed, and gains of one mixer over another."""

from __future__ import annotations

import ast
import dataclasses
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from statistics import fmean
from typing import Any

from hypermlp.files import Record
from hypermlp.mixers import MIXERS
from hypermlp.mixers.hybrid import count_runs, is_hybrid, pattern
from hypermlp.mixers.labels import ALIASES, SAME, TABLE1
from hypermlp.paper import tables as paper
from hypermlp.studies.language import LAST
from hypermlp.studies.mad import TaskStudy
from hypermlp.studies.protocol import Protocol, Terms, read_protocol
from hypermlp.studies.scores import common_mean, setting_score, task_scores
from hypermlp.studies.search import Outcome, Place
from hypermlp.tasks import TASKS
from hypermlp.tasks.mad_settings import MADSetting, chance
from hypermlp.verdicts.estimates import Estimate, Unpaired, estimate
from hypermlp.verdicts.registration import Version, registered_version

# Measures beside the tasks: the mean over the tasks, and the language model's losses: on the validation split, and on a sample
# of the training text, which is what the paper has.
AVERAGE, VALIDATION, LOSS = "average", "validation loss", "loss"
LOSSES = (VALIDATION, LOSS)
FIELDS = {VALIDATION: "validation_loss", LOSS: "loss"}  # what records call them
CEILING, FLOOR = "ceiling", "floor"  # all sides of a comparison solve the task, or all guess: it shows nothing
REFERENCES = ("S-pc", "S-p", "S")  # softmax attention, the first of them that was run


QUICK = "quick"  # what records of a quick study are marked with


@dataclass(frozen=True)
class Results:
    """All runs that may be compared with each other."""

    folders: tuple[str, ...]
    plans: dict[str, dict[str, Any]]  # "mad" and "language", where there are such runs; or "tasks" alone
    starts: list[dict[str, Any]]  # provenance of every start of a program that wrote runs
    mad: list[Record]  # runs on tasks, MAD's or others
    language: list[Record]
    damaged: int = 0  # lines that are no runs
    searched: tuple[Record, ...] = ()  # runs that only chose a learning rate
    searches: dict[Place, Outcome] = dataclasses.field(default_factory=dict)
    tuned: frozenset[Place] = frozenset()  # what searches chose for each mixer, among its scales and variants
    versions: tuple[Version, ...] = ()  # of the protocol that it was registered by
    objections: tuple[str, ...] = ()  # what a reader must know before the verdicts (registration.py)

    @cached_property
    def registered(self) -> Version | None:
        """The version that counts: the one that was fixed before the first run, or else the first."""
        return registered_version(self.versions) or next(iter(self.versions), None)

    @cached_property
    def protocol(self) -> Protocol | None:
        return None if self.registered is None else read_protocol(self.registered.text)

    @property
    def terms(self) -> Terms:
        """On which verdicts are given."""
        return Terms() if self.protocol is None else self.protocol.terms

    @property
    def records(self) -> list[Record]:
        return [*self.mad, *self.language]

    @cached_property
    def mixers(self) -> list[str]:
        return sorted({record["mixer"] for record in self.records}, key=table_order)

    @cached_property
    def reference(self) -> str | None:
        """The softmax attention that others are compared with; None if none was run."""
        return next((label for label in REFERENCES if label in self.mixers), None)

    @cached_property
    def tasks(self) -> list[str]:
        found = dict.fromkeys(record["task"] for record in self.mad)
        return [*(task for task in TASKS if task in found), *(task for task in found if task not in TASKS)]

    @property
    def averaged(self) -> Sequence[str]:
        """The tasks that an average is over: those of the protocol, or else all that were run."""
        half = None if self.protocol is None else self.protocol.studies.get("mad")
        return half.tasks if isinstance(half, TaskStudy) else self.tasks

    @cached_property
    def quick(self) -> bool:
        """Whether its models were trained at the quick scale, which is too short to rank mixers."""
        return any(record.get(QUICK) for record in self.records)

    @cached_property
    def measure(self) -> str:
        """What runs on tasks are scored by."""
        return str(self.mad[0].get("measure", "accuracy")) if self.mad else "accuracy"

    @property
    def times(self) -> int:
        """What scores on tasks are multiplied by, so that accuracies are in percent."""
        return 100 if self.measure == "accuracy" else 1

    @cached_property
    def measures(self) -> list[str]:
        """What there are numbers of: the average, the tasks, the losses."""
        return [*([AVERAGE] if self.tasks else []), *self.tasks, *self.losses]

    @cached_property
    def losses(self) -> list[str]:
        """The losses that language models have, that of the validation split first."""
        there = any(final_loss(record, VALIDATION) is not None for record in self.language)
        return [*([VALIDATION] if there else []), LOSS] if self.language else []

    @cached_property
    def seeds(self) -> list[int]:
        return sorted({record["seed"] for record in self.records})

    @cached_property
    def all_settings(self) -> dict[str, str]:
        """Setting → task, in the order of the runs."""
        return {record["setting"]: record["task"] for record in self.mad}

    def settings(self, task: str) -> list[str]:
        return [setting for setting, own in self.all_settings.items() if own == task]

    @cached_property
    def chosen(self) -> dict[tuple[str, str, int], Record]:
        """(mixer, setting, seed) → the run whose learning rate the protocol picks; runs without a score are left out."""
        groups: dict[tuple[str, str, int], list[Record]] = {}
        for record in self.mad:
            groups.setdefault((record["mixer"], record["setting"], record["seed"]), []).append(record)
        found = {}
        for place, group in groups.items():
            if (score := setting_score(group)) is not None:
                scored = [record for record in group if record["error"] is None and record["metrics"] is not None]
                found[place] = next(record for record in scored if record["metrics"][self.measure] == score)
        return found

    @cached_property
    def language_runs(self) -> dict[tuple[str, int], Record]:
        """(mixer, seed) → its run with the lowest final loss, where there are several learning rates."""
        found: dict[tuple[str, int], Record] = {}
        for record in self.language:
            place, loss = (record["mixer"], record["seed"]), final_loss(record)
            if loss is not None and (place not in found or loss < (final_loss(found[place]) or math.inf)):
                found[place] = record
        return found

    @cached_property
    def setting_scores(self) -> dict[tuple[str, str], dict[int, float]]:
        """(mixer, setting) → seed → score, accuracies in percent."""
        found: dict[tuple[str, str], dict[int, float]] = {}
        for (mixer, setting, seed), record in self.chosen.items():
            found.setdefault((mixer, setting), {})[seed] = self.times * record["metrics"][self.measure]
        return found

    def setting_values(self, mixer: str, setting: str) -> dict[int, float]:
        return self.setting_scores.get((mixer, setting), {})

    @cached_property
    def table(self) -> dict[tuple[str, str], dict[int, float]]:
        """(mixer, measure) → seed → number: scores over all settings of a task, accuracies in percent; loss in nats.

        A seed counts where nothing of it is missing, so that all means of a column are over the same things.
        """
        found: dict[tuple[str, str], dict[int, float]] = {}
        scores = task_scores(self.mad)
        for mixer in self.mixers:
            for task in self.tasks:
                found[mixer, task] = {seed: self.times * score for seed, score in scores.get((mixer, task), {}).items()}
            found[mixer, AVERAGE] = common_mean([found.get((mixer, task), {}) for task in self.averaged])
            for measure in LOSSES:
                runs = {seed: record for (name, seed), record in self.language_runs.items() if name == mixer}
                losses = {seed: final_loss(record, measure) for seed, record in runs.items()}
                found[mixer, measure] = {seed: loss for seed, loss in losses.items() if loss is not None}
        return found

    def values(self, mixer: str, measure: str) -> dict[int, float]:
        return self.table.get((mixer, measure), {})

    def score(self, mixer: str, measure: str) -> Estimate | None:
        return estimate(self.values(mixer, measure).values())

    def gain(self, better: str, worse: str, measure: str) -> Estimate | None:
        """How much better one mixer is than another: points of accuracy, or loss saved; over the seeds that both have."""
        a, b = self.values(better, measure), self.values(worse, measure)
        sign = -1 if measure in LOSSES else 1
        if not self.terms.paired:
            sides = [tuple(sign * side[seed] for seed in sorted(side)) for side in (a, b)]
            return Unpaired(*sides) if all(sides) else None
        return estimate(sign * (a[seed] - b[seed]) for seed in sorted(a.keys() & b.keys()))

    def floor(self, measure: str) -> float | None:
        """The accuracy of guessing, in percent, over all settings of a task or over all tasks; a loss has none."""
        if measure in LOSSES:
            return None
        tasks = self.tasks if measure == AVERAGE else [measure]
        return fmean(fmean(100 * chance_of(key) for key in self.settings(task)) for task in tasks)

    def bound(self, mixers: Sequence[str], measure: str) -> str:
        """CEILING where all of them solve the task, FLOOR where all of them guess; empty otherwise."""
        scores = [score.mean for mixer in mixers if (score := self.score(mixer, measure)) is not None]
        if not scores or (floor := self.floor(measure)) is None:
            return ""
        if min(scores) >= self.terms.ceiling:
            return CEILING
        return FLOOR if max(scores) <= floor + self.terms.points else ""

    def base_setting(self, task: str) -> str:
        """The setting that the others differ from in one number."""
        keys = self.settings(task)
        return min(keys, key=lambda key: sum(len(changes(key, other)) for other in keys))

    def axes(self, task: str) -> dict[str, list[tuple[float, str]]]:
        """What was varied alone → (value, setting), the base among them."""
        base = self.base_setting(task)
        found: dict[str, list[tuple[float, str]]] = {}
        for key in self.settings(task):
            changed = changes(base, key)
            if len(changed) == 1:
                found.setdefault(changed[0], []).append((read_setting(key)[changed[0]], key))
        return {name: sorted([*points, (read_setting(base)[name], base)]) for name, points in found.items()}

    @cached_property
    def search_runs(self) -> dict[str, int]:
        """Mixer → how many runs its searches took, over all settings; a run that went on from rung to rung is one."""
        names = ("mixer", "setting", "seed", "lr", "init_scale")
        runs = {tuple(record.get(name) for name in names) for record in self.searched}
        counts = Counter(str(mixer).partition("@")[0] for mixer, *_ in runs)
        return {mixer: counts[mixer] for mixer in sorted(counts, key=table_order)}


def published(results: Results, mixer: str, key: str | float) -> float | None:
    """The paper's number for a measure of these results, or for a threshold of the loss."""
    row = paper.TABLE1.get(mixer)
    if row is None:
        return None
    if not isinstance(key, str):
        return row.evaluations.get(key)
    if key == AVERAGE:
        whole = len(results.averaged) == len(paper.TASKS)
        return row.average if whole else fmean(row.accuracy[task] for task in results.averaged)
    return None if key == VALIDATION else row.loss if key == LOSS else row.accuracy[key]


def table_order(mixer: str) -> tuple[float, str]:
    """The order of Table 1, then other labels, then rivals."""
    order = [*TABLE1, *MIXERS]
    last = len(TABLE1) - 0.5  # between the labels of the table and the registry
    return (order.index(mixer) if mixer in order else last), mixer


def final_loss(record: Record, measure: str = LOSS) -> float | None:
    """The mean of the last evaluations; older records have it in their curve alone, or lack the validation loss."""
    if record["error"] is not None:
        return None
    name = FIELDS[measure]
    loss: float | None = (record.get("final") or {}).get(name)
    if loss is not None:
        return loss
    points = curve(record, name)
    return fmean(y for _, y in points[-LAST:]) if points else None


def curve(record: Record, measure: str) -> list[tuple[int, float]]:
    """(step, value) after every evaluation in training that gave a finite number."""
    points = record.get("curve") or []
    return [(p["step"], p[measure]) for p in points if p.get("step") and p.get(measure) is not None]


def evaluations_until(record: Record, threshold: float) -> int | None:
    """The number of the first evaluation with a lower loss, from 1."""
    return next((i for i, (_, loss) in enumerate(curve(record, "loss"), 1) if loss < threshold), None)


def mean_curve(records: Sequence[Record], measure: str) -> list[tuple[float, Estimate]]:
    """Step → mean over runs. A run that ended early, because it had solved its task, keeps its last value."""
    curves = [points for record in records if (points := curve(record, measure))]
    steps = sorted({step for points in curves for step, _ in points})
    found = []
    for step in steps:
        here = [bisect_left(points, (step + 1,)) - 1 for points in curves]
        known = [points[i][1] for points, i in zip(curves, here, strict=True) if i >= 0]
        if len(known) == len(curves) and (mean := estimate(known)) is not None:
            found.append((float(step), mean))
    return found


@cache
def read_setting(key: str) -> dict[str, Any]:
    """All numbers of a setting from its key, such as "in-context-recall/vocab_size=32"."""
    task, _, rest = key.partition("/")
    values = dataclasses.asdict(TASKS[task].baseline) if task in TASKS else {}
    for part in rest.split(",") if "=" in rest else []:
        name, _, value = part.partition("=")
        try:
            values[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            values[name] = value  # a word, such as the name of a group
    return values


def chance_of(key: str) -> float:
    return chance(MADSetting(**read_setting(key)))


def changes(key: str, other: str) -> list[str]:
    a, b = read_setting(key), read_setting(other)
    return [name for name in {**a, **b} if a.get(name) != b.get(name)]


def label_of(mixer: str) -> str:
    """The label that a registered name is, with its ranks."""
    base, at, rank = mixer.partition("@")
    return SAME.get(base, base) + at + rank


def title_of(mixer: str) -> str:
    """The name that a label has in the paper, or the full one of a rival; of a hybrid those in it; empty if there is none."""
    if is_hybrid(mixer):
        runs = count_runs(pattern(mixer))
        return ", then ".join(f"{n} layers of {plain_name(own)}" if n > 1 else plain_name(own) for own, n in runs)
    base, _, rank = mixer.partition("@")
    if rank:
        return f"{title_of(base) or base}, mixing of rank {rank}"
    return ALIASES.get(mixer) or (MIXERS[mixer].title if mixer in MIXERS else "")


def full_name(mixer: str) -> str:
    """The mixer, and behind it how it is called, where that is something else."""
    title = title_of(mixer)
    return f"{mixer} ({title})" if title else mixer


NAMES = {
    "S-pc": "softmax attention",
    "S-p": "softmax attention without convolutions",
    "R-pc": "ReLU attention",
    "R-cg-q": "HyperMLP without mixing",
    "G-cg-q": "HyperGLU without mixing",
    "R-12o!": "ReLU attention, mixing by lag",
    "R-12!": "ReLU attention, mixing by place",
    "G-12o!": "GLU attention, mixing by lag",
    "G-12!": "GLU attention, mixing by place",
}


def plain_name(mixer: str) -> str:
    """What a reader may know the mixer by; the label where there is nothing else."""
    base, bracket, rest = mixer.partition(" (")  # behind it is what tells training runs apart
    return (NAMES.get(base) or title_of(base) or base) + bracket + rest
