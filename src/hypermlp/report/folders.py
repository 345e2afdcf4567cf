"""Reads a results folder: its runs, and which of them may be compared.

A folder of runs has plan.json ({"plan": …, "starts": [provenance, …]}) and runs.jsonl, one record a line (studies/folder.py):

    MAD       mixer, task, setting, seed, lr, weight_decay, protocol, metrics, curve, parameters, inner, size, seconds, error
    language  kind "language", mixer, seed, parameters, inner, curve [{step, train_loss, loss}, …], final {loss}, seconds, error

The folder of a training run (runs/train.py: run.json and metrics.jsonl) is a language record too: its validation loss.

Fields that a record lacks are shown as unknown; a line without a mixer and a seed is damaged. Folders with the same plan belong
to one study. A folder with one MAD plan and one language plan is both halves of Table 1; otherwise every plan stands alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hypermlp.files import Record
from hypermlp.mixers.labels import SAME
from hypermlp.models.lm import ModelConfig
from hypermlp.report.study import Study, label_of
from hypermlp.runs.configs import count
from hypermlp.studies.folder import read_lines
from hypermlp.studies.protocol import VERSIONS, read_versions, registration_problems
from hypermlp.studies.search import PHASE, Choice, Outcome, Place, Search, choose, place_of, read_search
from hypermlp.tasks import TASKS
from hypermlp.train.run_folder import RUN, RunFolder


@dataclass(frozen=True)
class Part:
    """The runs of one folder and one kind."""

    folder: str
    kind: str
    plan: dict[str, Any]
    starts: list[dict[str, Any]]
    records: list[Record]
    damaged: int
    registered: Path | None = None  # the folder of its protocol

    @cached_property
    def searches(self) -> dict[Place, Outcome]:
        """What the search of this folder has found, if it has one."""
        rules = self.plan.get("search")
        return read_search(Search.from_plan(rules), self.records) if rules else {}

    @cached_property
    def choices(self) -> dict[Place, Choice]:
        return choose(Search.from_plan(self.plan["search"]), self.searches) if self.searches else {}

    @property
    def counted(self) -> list[Record]:
        """The runs that are no search's; where one was made, those with the learning rate that it chose."""
        found = [record for record in self.records if record.get("phase") != PHASE]
        if not self.searches:
            return found
        return [r for r in found if self.choices.get(place_of(r)) == (r.get("variant", r["mixer"]), r["lr"])]

    @property
    def rules(self) -> dict[str, Any]:
        """What must agree between runs that are compared; which models take part may differ."""
        return {name: value for name, value in self.plan.items() if name not in ("models", "own")}


def read_studies(folder: Path) -> list[Study]:
    """The studies below `folder`."""
    parts = [part for path in sorted(folder.rglob("runs.jsonl")) for part in read_parts(folder, path)]
    trained = [RunFolder(path.parent) for path in sorted(folder.rglob(RUN))]
    parts += [read_training(folder, run) for run in trained if run.metrics.exists()]
    groups: dict[str, list[list[Part]]] = {"mad": [], "language": [], "tasks": []}
    for part in parts:
        group = next((g for g in groups[part.kind] if g[0].rules == part.rules), None)
        if group is None:
            groups[part.kind].append([part])
        else:
            group.append(part)
    if not parts:
        raise ValueError(
            f"there are no finished runs in {folder} or below: a folder of results holds runs.jsonl or metrics.jsonl; "
            "make one with, for example, hypermlp study run mad --scale quick"
        )
    mad, language = groups["mad"], groups["language"]
    if len(mad) == len(language) == 1 and not groups["tasks"]:
        return [new_study([*mad[0], *language[0]])]
    return [new_study(group) for group in [*groups["tasks"], *mad, *language]]


def read_parts(root: Path, path: Path) -> list[Part]:
    records, damaged = read_lines(path)
    try:
        head = json.loads((path.parent / "plan.json").read_text())
    except FileNotFoundError:
        head = {}
    except ValueError as error:
        raise ValueError(f"{path.parent / 'plan.json'} is not JSON ({error}); restore it, or move its folder away") from None
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
        registered = next((place for place in (path.parent, path.parent.parent) if (place / VERSIONS).exists()), None)
        found.append(Part(name, kind, plan, head.get("starts", []), runs, damaged, registered))
        damaged = 0  # counted once
    return found


def read_training(root: Path, run: RunFolder) -> Part:
    """A training run as one language record; runs that differ in mixer, size, learning rate and seed alone are compared."""
    head = run.read()
    config = head["config"]
    model, how = dict(config["model"]), dict(config["train"])
    mixer, inner, size = model.pop("mixer"), model.pop("inner"), model.pop("size")
    points = run.read_metrics()
    curve = [{"step": p["step"], "train_loss": p["loss"], "loss": p["validation"]} for p in points if "validation" in p]
    tokens = how["batch"] * config["data"]["context"]
    name = mixer if isinstance(mixer, str) else "+".join(mixer)
    record: Record = {
        "kind": "language",
        "mixer": SAME.get(name, name),
        "seed": how.pop("seed"),
        "lr": how.pop("lr"),
        "parameters": head.get("parameters") or count(ModelConfig.from_dict(config["model"])),
        "inner": inner,
        "size": size,
        "curve": curve,
        "final": {"loss": curve[-1]["loss"]} if curve else None,
        "seconds": sum(tokens / p["tokens_per_second"] for p in points),
        "error": None,
        "metrics": None,
    }
    plan = {"study": "training", **config["data"], **model, **how}
    return Part(run.path.relative_to(root).as_posix(), "language", plan, head["starts"], [record], 0)


def is_run(record: Record, kind: object) -> bool:
    """Whether there is what a run cannot be shown without."""
    if not isinstance(record.get("mixer"), str) or not isinstance(record.get("seed"), int):
        return False
    known = kind == "tasks" or (kind == "mad" and record.get("task") in TASKS)
    return kind == "language" or (known and {"task", "setting", "protocol"} <= record.keys())


def new_study(parts: Sequence[Part]) -> Study:
    """One study of several folders; of runs with the same identity the last one counts."""
    tell_apart([record for part in parts if part.plan.get("study") == "training" for record in part.records])
    runs: dict[str, dict[tuple[Any, ...], Record]] = {"mad": {}, "language": {}, "tasks": {}}
    for part in parts:
        for r in part.counted:
            identity = tuple(r.get(name) for name in ("mixer", "setting", "seed", "lr", "weight_decay"))
            runs[part.kind][identity] = r
    starts = {part.folder: part.starts for part in parts}
    registered = list(dict.fromkeys(part.registered for part in parts if part.registered is not None))[:1]
    return Study(
        folders=tuple(dict.fromkeys(part.folder for part in parts)),
        plans={part.kind: part.plan for part in parts},
        starts=[start for each in starts.values() for start in each],
        mad=[*runs["mad"].values(), *runs["tasks"].values()],
        language=list(runs["language"].values()),
        damaged=sum(part.damaged for part in parts),
        searched=tuple(record for part in parts for record in part.records if record.get("phase") == PHASE),
        searches={place: outcome for part in parts for place, outcome in part.searches.items()},
        taken=frozenset((choice.variant, place[1]) for part in parts for place, choice in part.choices.items()),
        versions=tuple(version for folder in registered for version in read_versions(folder)),
        unregistered=tuple(problem for folder in registered for problem in registration_problems(folder)),
    )


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
