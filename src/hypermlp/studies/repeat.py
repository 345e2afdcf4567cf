"""Recorded runs, trained again: are their numbers still the same?

What a run gives depends on its job, on the code and on how a machine rounds. Its record and plan hold the job. The start that
it belongs to holds the rest: commit, versions, processor, and what else decides rounding (ops/dispatch.py: rounding).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypermlp.files import Record, read_json
from hypermlp.mixers import is_known
from hypermlp.models.budget import Matched, MatchedModel
from hypermlp.ops.dispatch import rounding
from hypermlp.provenance import provenance
from hypermlp.studies import engine
from hypermlp.studies.executors import Executor
from hypermlp.studies.folder import Folder, plain, read_lines
from hypermlp.studies.language import LanguageStudy
from hypermlp.studies.mad import TaskStudy
from hypermlp.studies.search import PHASE
from hypermlp.studies.study import Study
from hypermlp.studies.tasks import ScaledStudy, adopt_tasks
from hypermlp.studies.worker import Job

EQUAL, ROUNDING, CHANGED, FAILED = "bit-equal", "within rounding", "changed", "failed"
# The relative difference of the numbers at the first evaluation that rounding explains. Later ones say less: training makes
# a difference in the last bit larger with every step.
ROUNDED = 1e-3
KINDS: dict[str, type[Study]] = {study.kind: study for study in (TaskStudy, ScaledStudy, LanguageStudy)}
CAUSES = ("commit", "torch", "cpu", "cpu_capability", "gpu", "kernel", "math")  # of a start: what numbers depend on


@dataclass(frozen=True)
class Recorded:
    """A finished run: its record, and the job that it was."""

    folder: Path
    record: Record
    start: dict[str, Any]  # of the study, that made it
    study: Study
    job: Job


@dataclass(frozen=True)
class Repeated:
    """A run and the same again."""

    recorded: Recorded
    again: Record

    @property
    def first(self) -> float | None:
        """The largest relative difference at the first evaluation; None: the run failed."""
        if self.again["error"] is not None:
            return None
        points = (self.recorded.record["curve"][:1], self.again["curve"][:1])
        return largest_difference(*points)

    @property
    def outcome(self) -> str:
        if self.first is None:
            return FAILED
        names = ("curve", "metrics", "final")
        old, new = ({name: record[name] for name in names if name in record} for record in (self.recorded.record, self.again))
        if len(old["curve"]) == len(new["curve"]) and largest_difference(old, new) == 0:
            return EQUAL
        return ROUNDING if self.first <= ROUNDED else CHANGED

    def causes(self, now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
        """What is not as it was, with both values; what the record does not say is None."""
        then = self.recorded.start
        return {name: (then.get(name), now.get(name)) for name in CAUSES if then.get(name) != now.get(name)}


def read_runs(folder: Path) -> Iterator[Recorded]:
    """The runs of a folder, and below it, that count and can be made again."""
    for path in sorted(folder.rglob("runs.jsonl")):
        plan_file = path.parent / "plan.json"
        if not plan_file.exists() or (head := read_json(plan_file))["plan"].get("study") not in KINDS:
            continue
        for record in read_lines(path)[0]:
            whole = record.get("error") is None and record.get("curve") and record.get("phase") != PHASE
            if whole and record.get("inner") is not None and is_known(name_of(record)):
                starts, number = head["starts"], record.get("start")
                start = starts[number] if isinstance(number, int) and 0 <= number < len(starts) else {}
                study = read_study(head["plan"], record)
                if (job := find_job(study, record)) is not None:
                    yield Recorded(path.parent, record, start, study, job)


def name_of(record: Record) -> str:
    """What was trained: the mixer, or the allocation of its ranks that a search chose."""
    return str(record.get("variant", record["mixer"]))


def read_study(plan: dict[str, Any], record: Record) -> Study:
    """The study of a plan, with the numbers of one run."""
    kind = KINDS[plan["study"]]
    values = {field.name: plan[field.name] for field in fields(kind) if field.name in plan}
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    values |= {"search": None, "given": None}
    if issubclass(kind, TaskStudy):
        task = record["task"]
        values |= {"tasks": (task,), "scale": plan["settings"], "decays": (record["weight_decay"],)}
        values |= {"pretrain": {task: plan["pretrain"][task]}} if plan.get("pretrain") else {}
        if kind is ScaledStudy:
            adopt_tasks(own := tuple(plan.get("sources", ())))
            values["own"] = own
    return kind(**{"lr": record["lr"], **values} if kind is LanguageStudy else values).at(
        record["lr"], record.get("init_scale", "0.02")
    )


def find_job(study: Study, record: Record) -> Job | None:
    """The job of a record; None where the plan does not say its setting."""
    settings = study.settings()
    key = record.get("setting", "")
    if key not in settings:
        return None
    size = tuple(record["size"]) if isinstance(record["size"], list) else record["size"]
    name = name_of(record)
    mixer = Matched(name=name, size=size, parameters=0, target=0, note=record.get("budget") or "")
    model = MatchedModel(mixer=mixer, inner=record["inner"], parameters=record["parameters"])
    (job,) = study.jobs(settings[key], name, model, record["seed"])
    return job


def choose_runs(runs: Sequence[Recorded], count: int) -> list[Recorded]:
    """So many of them, spread evenly."""
    count = min(count, len(runs))
    return [runs[i * len(runs) // count] for i in range(count)]


def repeat(runs: Sequence[Recorded], *, executor: Executor | None = None, **watching: Any) -> list[Repeated]:
    """Train them again; nothing is written where they are. watching: tell and done, as engine.run takes them."""
    found: list[Repeated] = []
    for place, group in groupby(runs, key=lambda recorded: recorded.folder):
        own = list(group)
        with TemporaryDirectory() as folder, Folder(Path(folder)) as temporary:
            temporary.begin({"study": "repeat", "of": str(place)})
            again = engine.run(temporary, [one.job for one in own], own[0].study.work, executor=executor, **watching)
            found += map(Repeated, own, map(plain, again))  # as a record is read: a loss that is not finite is None
    return found


def conditions() -> dict[str, Any]:
    """What a start made now would say."""
    return {**provenance(), **rounding()}


def largest_difference(old: Any, new: Any) -> float:
    """Of the numbers in the same place of both, relative to the larger; what only one of them has does not count."""
    if isinstance(old, dict) and isinstance(new, dict):
        return max((largest_difference(old[name], new[name]) for name in old.keys() & new.keys()), default=0.0)
    if isinstance(old, list | tuple) and isinstance(new, list | tuple):
        return max(map(largest_difference, old, new), default=0.0)
    if isinstance(old, int | float) and isinstance(new, int | float):
        return abs(old - new) / max(abs(old), abs(new)) if old != new else 0.0
    return float(old != new)
