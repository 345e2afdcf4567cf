"""Reads a folder: the results of every study in it.

A folder of runs has plan.json ({"plan": …, "starts": [provenance, …]}) and runs.jsonl, one record a line (studies/folder.py):

    MAD       mixer, task, setting, seed, lr, weight_decay, protocol, metrics, curve, parameters, inner, size, seconds, error
    language  kind "language", mixer, seed, parameters, inner, curve [{step, train_loss, loss}, …], final {loss}, seconds, error

The folder of a training run (runs/train.py: run.json and metrics.jsonl) is a language record too: its validation loss.

What belongs to one study is said by where it lies, never by what else is read, so a folder has the verdicts of its parts:

    a folder with protocols.jsonl        all runs below it
    mad/ and language/ side by side      the halves of Table 1
    training runs side by side           those with equal settings
    any other folder with runs.jsonl     alone

Runs in one place whose plans differ are not compared. Fields that a record lacks are shown as unknown; a line without a mixer
and a seed is damaged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hypermlp.files import Record, read_json
from hypermlp.mixers.hybrid import spell
from hypermlp.mixers.labels import SAME
from hypermlp.models.lm import ModelConfig
from hypermlp.runs.configs import count
from hypermlp.studies.folder import read_lines
from hypermlp.studies.scaling import ScalingStudy
from hypermlp.studies.search import PHASE, Outcome, Place, Search, Tuned, Where, choose, read_search, scale_of, where
from hypermlp.tasks import TASKS
from hypermlp.train.run_folder import RUN, RunFolder
from hypermlp.verdicts.registration import MARK, VERSIONS, objections, read_versions
from hypermlp.verdicts.results import Results, label_of

HALVES = ("mad", "language")


@dataclass(frozen=True)
class Runs:
    """The runs of one folder and one kind."""

    folder: str
    place: Path  # of the study that they belong to
    kind: str
    plan: dict[str, Any]
    starts: list[dict[str, Any]]
    records: list[Record]
    damaged: int

    @cached_property
    def searches(self) -> dict[Place, Outcome]:
        """What the search of this folder has found, if it has one."""
        rules = self.plan.get("search")
        return read_search(Search.from_plan(rules), self.records) if rules else {}

    @cached_property
    def choices(self) -> dict[Where, Tuned]:
        return choose(Search.from_plan(self.plan["search"]), self.searches) if self.searches else {}

    @property
    def counted(self) -> list[Record]:
        """The runs that are no search's; where one was made, those with the learning rate and scale that it chose."""
        found = [record for record in self.records if record.get("phase") != PHASE]
        if not self.searches:
            return found
        return [r for r in found if self.choices.get(where(r)) == (r.get("variant", r["mixer"]), r["lr"], scale_of(r))]

    @property
    def rules(self) -> dict[str, Any]:
        """What must agree between runs that are compared; which models take part may differ."""
        return {name: value for name, value in self.plan.items() if name not in ("models", "own")}


def read_studies(folder: Path) -> list[Results]:
    """The results of the studies in `folder` and below."""
    parts = [part for path in sorted(folder.rglob("runs.jsonl")) for part in read_runs(folder, path)]
    trained = [RunFolder(path.parent) for path in sorted(folder.rglob(RUN))]
    parts += [read_training(folder, run) for run in trained if run.metrics.exists()]
    if not parts:
        raise ValueError(
            f"there are no finished runs in {folder} or below: a folder of results holds runs.jsonl or metrics.jsonl; "
            "make one with, for example, hypermlp demo"
        )
    places: dict[Path, dict[str, list[list[Runs]]]] = {}
    for part in parts:
        kind = "training" if part.plan.get("study") == "training" else part.kind
        groups = places.setdefault(part.place, {"tasks": [], "mad": [], "language": [], "training": []})[kind]
        group = next((own for own in groups if own[0].rules == part.rules), None)
        if group is None:
            groups.append([part])
        else:
            group.append(part)
    found = []
    for place, kinds in places.items():
        if len(kinds["mad"]) == len(kinds["language"]) == 1 and not kinds["tasks"]:
            found.append(new_results(place, [*kinds["mad"][0], *kinds["language"][0]]))
        else:
            found += [new_results(place, group) for kind in kinds.values() for group in kind]
    return found


def place_of_study(folder: Path) -> Path:
    """Where the study lies that the runs of this folder belong to."""
    folder = folder.resolve()
    if (folder.parent / VERSIONS).exists():
        return folder.parent
    return folder.parent if folder.name in HALVES and not (folder / VERSIONS).exists() else folder


def read_runs(root: Path, path: Path) -> list[Runs]:
    records, damaged = read_lines(path)
    plan_file = path.parent / "plan.json"
    head = read_json(plan_file) if plan_file.exists() else {}
    if head.get("plan", {}).get("study") == ScalingStudy.kind:
        return []  # scaling.py reads it
    kinds: dict[tuple[str, str | None], list[Record]] = {}
    for record in records:
        kind = record.get("kind", "mad")
        if not is_run(record, kind):
            damaged += 1
            continue
        names: Record = {name: label_of(record[name]) for name in ("mixer", "variant") if name in record}
        kinds.setdefault((kind, record.get("protocol")), []).append({"error": None, "metrics": None, **record, **names})
    name = path.parent.relative_to(root).as_posix()
    found = []
    for (kind, protocol), runs in kinds.items():
        plan = {"protocol": protocol, **head.get("plan", {})}
        found.append(Runs(name, place_of_study(path.parent), kind, plan, head.get("starts", []), runs, damaged))
        damaged = 0  # counted once
    return found


def read_training(root: Path, run: RunFolder) -> Runs:
    """A training run as one language record; runs that differ in mixer, size, learning rate and seed alone are compared."""
    head = run.read()
    config = head["config"]
    model, how = dict(config["model"]), dict(config["train"])
    mixer, inner, size = model.pop("mixer"), model.pop("inner"), model.pop("size")
    points = run.read_metrics()
    curve = [{"step": p["step"], "train_loss": p["loss"], "loss": p["validation"]} for p in points if "validation" in p]
    tokens = how["batch"] * config["data"]["context"]
    name = mixer if isinstance(mixer, str) else spell(mixer)
    record: Record = {
        "kind": "language",
        "mixer": SAME.get(name, name),
        "seed": how.pop("seed"),
        "lr": how.pop("lr"),
        "parameters": head.get("parameters") or count(ModelConfig.from_dict(config["model"])),
        "inner": inner,
        "size": tuple(size) if isinstance(size, list) else size,
        "curve": curve,
        "final": {"loss": curve[-1]["loss"]} if curve else None,
        "seconds": sum(tokens / p["tokens_per_second"] for p in points),
        "error": None,
        "metrics": None,
    }
    plan = {"study": "training", **config["data"], **model, **how}
    place = run.path.resolve().parent
    return Runs(run.path.relative_to(root).as_posix(), place, "language", plan, head["starts"], [record], 0)


def is_run(record: Record, kind: object) -> bool:
    """Whether there is what a run cannot be shown without."""
    if not isinstance(record.get("mixer"), str) or not isinstance(record.get("seed"), int):
        return False
    known = kind == "tasks" or (kind == "mad" and record.get("task") in TASKS)
    return kind == "language" or (known and {"task", "setting", "protocol"} <= record.keys())


def new_results(place: Path, parts: Sequence[Runs]) -> Results:
    """The results of a study; of runs with the same identity the last one counts, of a registered one what was registered."""
    tell_apart([record for part in parts if part.plan.get("study") == "training" for record in part.records])
    found = Results(
        folders=tuple(dict.fromkeys(part.folder for part in parts)),
        plans={part.kind: part.plan for part in parts},
        starts=[start for starts in {part.folder: part.starts for part in parts}.values() for start in starts],
        mad=[],
        language=[],
        damaged=sum(part.damaged for part in parts),
        searched=tuple(record for part in parts for record in part.records if record.get("phase") == PHASE),
        searches={place: outcome for part in parts for place, outcome in part.searches.items()},
        tuned=frozenset(
            Place(choice.variant, setting, choice.scale) for part in parts for (_, setting), choice in part.choices.items()
        ),
        versions=tuple(read_versions(place)),
        objections=objections(place, (record.get(MARK) for part in parts for record in part.records)),
    )
    names = ("mixer", "setting", "seed", "lr", "weight_decay")
    runs = {(part.kind, scale_of(r), *(r.get(name) for name in names)): r for part in parts for r in part.counted}
    registered = planned(found)
    for (kind, *_), record in runs.items():
        if registered is None or registered(str(kind), record):
            (found.language if kind == "language" else found.mad).append(record)
    return found


def planned(study: Results) -> Callable[[str, Record], bool] | None:
    """Whether a run is one that was registered: later versions may add seeds, and settings of a task. None: nothing was."""
    if (protocol := study.protocol) is None:
        return None
    settings = {kind: set(own.settings()) for kind, own in protocol.studies.items()}

    def is_planned(kind: str, record: Record) -> bool:
        known = record.get(MARK) == protocol.digest or record.get("setting", "") in settings.get(kind, {})
        return known and bool(record["seed"] < protocol.seeds)

    return is_planned


def tell_apart(trained: Sequence[Record]) -> None:
    """Training runs of one mixer that differ in model.inner, model.size or train.lr: their names say so."""
    values: dict[str, dict[str, set[Any]]] = {}
    for record in trained:
        own = values.setdefault(record["mixer"], {name: set() for name in ("inner", "size", "lr")})
        for name, found in own.items():
            found.add(record[name])
    for record in trained:
        own = values[record["mixer"]]
        changed = [f"{name}={record[name]}" for name, found in own.items() if len(found) > 1 and record[name] is not None]
        if changed:
            record["mixer"] += f" ({', '.join(changed)})"
