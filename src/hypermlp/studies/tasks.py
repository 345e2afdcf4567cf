"""Studies on tasks at one of their own scales: mixers × settings × seeds, searched learning rates, slices and baselines.

A task says how it is run (tasks/base.py: Scale). Runs follow the clean protocol of mad.py and end early once every validation
set is solved. Beside what records of mad.py have, there are the scores of every evaluation set and slice, the trivial
baselines, and the bytes that the model remembers of its longest row.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import nn

from hypermlp.checks import choose_from, did_you_mean
from hypermlp.files import Record
from hypermlp.mixers import own
from hypermlp.mixers.base import Mixer
from hypermlp.mixers.hyper import HyperGLU
from hypermlp.mixers.lags import LagExtension, extend_layer, find_lags
from hypermlp.models.budget import MatchedModel
from hypermlp.studies import mad
from hypermlp.studies.mad import PROTOCOLS, Rules, TaskJob, TaskStudy
from hypermlp.studies.search import Search, choose_search
from hypermlp.studies.study import Study
from hypermlp.studies.worker import RunContext, Work
from hypermlp.tasks import TASKS, Task
from hypermlp.tasks.base import SCALES, Sets
from hypermlp.tasks.mad import MAD

WAYS: tuple[LagExtension, ...] = ("hold", "decay", "fresh")  # beside the window, which a layer with lags is by itself
FAMILIES_OF_MAD = {"quick": "quick", "laptop": "laptop", "published": "full"}  # its scales under these names


@dataclass(frozen=True, kw_only=True)
class ScaledStudy(TaskStudy):
    """One task at one of its scales. `own`: where a task of the user's own comes from, FILE.py:CLASS."""

    protocol: str = "clean"
    scale: Any = "laptop"
    epochs: int | None = None
    evaluations: int = 12
    solved: float | None = 0.99
    own: tuple[str, ...] = ()

    kind: ClassVar[str] = "tasks"
    added_later: ClassVar[tuple[str, ...]] = Study.added_later
    chosen: ClassVar[tuple[str, ...]] = ("tasks", "scale", "examples", "tests", "epochs", "changes", "own")

    @property
    def known(self) -> tuple[str, ...]:
        return tuple(TASKS)

    @property
    def rules(self) -> Rules:
        return dataclasses.replace(PROTOCOLS[self.protocol], solved=self.solved, evaluations=self.evaluations)

    @property
    def work(self) -> Work:
        return train

    def numbers(self) -> dict[str, Any]:
        sources = {"sources": adopt_tasks(self.own)} if self.own else {}
        return {**super().numbers(), "task": self.tasks[0], **sources}

    def settings_of(self, task: str) -> list[Any]:
        """Those of the scale with this study's changes; some may become the same."""
        return [
            dataclasses.replace(setting, **self.changes.get(task, {})) for setting in TASKS[task].scale(self.scale).settings
        ]

    def jobs(self, setting: Any, mixer: str, model: MatchedModel, seed: int) -> list[Any]:
        found = super().jobs(setting, mixer, model, seed)
        return [ScaledJob(**{f.name: getattr(job, f.name) for f in dataclasses.fields(job)}) for job in found]


class ScaledJob(TaskJob):
    """A job that travels without the classes of a user's own task, which its worker imports by name."""

    @property
    def identity(self) -> Record:
        return {"kind": "tasks", "measure": TASKS[self.setting.task].measure, **super().identity}

    def __reduce__(self) -> tuple[Any, ...]:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return restore, (dataclasses.asdict(fields.pop("setting")), fields)


def restore(setting: dict[str, Any], fields: dict[str, Any]) -> ScaledJob:
    adopt_tasks(fields["study"].own)
    return ScaledJob(setting=type(TASKS[setting["task"]].baseline)(**setting), **fields)


# ---- which studies ----


def adopt_tasks(names: Sequence[str]) -> dict[str, str]:
    """Import tasks FILE.py:CLASS and register them under their own names; returns the digests of their sources, by place."""
    found = {}
    for place in names:
        file, _, attribute = place.rpartition(":")
        module = own.load(file)
        made = getattr(module, attribute, None)
        if not (isinstance(made, Task) or (isinstance(made, type) and issubclass(made, Task) and made is not Task)):
            raise ValueError(f"{place}: {attribute} must be a subclass of hypermlp.tasks.Task or an object of one")
        try:
            task = made if isinstance(made, Task) else made()
            settings = [task.baseline, *(setting for scale in task.scales.values() for setting in scale.settings)]
            strange = [setting.task for setting in settings if setting.task != task.name]
        except (AttributeError, TypeError) as error:
            raise ValueError(f"{place} must have a name, a baseline, training and evaluation: {error}") from error
        if strange:
            raise ValueError(f"{place} is called {task.name!r}, and so must be the task of its settings, not {strange[0]!r}")
        if task.name in TASKS and not isinstance(TASKS[task.name], type(task)):
            raise ValueError(f"{place} is called {task.name!r}, and so is a task of the registry; give it another name")
        TASKS[task.name] = task
        found[place] = hashlib.sha256(inspect.getsource(module).encode()).hexdigest()[:16]
    return found


def find_tasks(names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Tasks by name, family (with several tasks) or FILE.py:CLASS, or "all": name → where its code comes from, if not here."""
    families: dict[str, list[str]] = {}
    for task in TASKS.values():
        families.setdefault(task.family, []).append(task.name)
    found: dict[str, tuple[str, ...]] = {}
    for name in names:
        if ":" in name:
            before = set(TASKS)
            adopt_tasks([name])
            new = [task for task in TASKS if task not in before] or [own_name(name)]
            found |= {task: (name,) for task in new}
        elif name in TASKS:
            found[name] = ()
        elif name == "all":
            found |= dict.fromkeys((task for task in TASKS if TASKS[task].family not in ("mad", "own")), ())
        else:
            choose_from("task", name, tuple(dict.fromkeys((*TASKS, *families, "all"))))
            found |= dict.fromkeys(families[name], ())
    return found


def own_name(place: str) -> str:
    file, _, attribute = place.rpartition(":")
    made = getattr(own.load(file), attribute)
    return str(made.name)


def scaled_studies(
    names: Sequence[str],
    scale: str,
    *,
    steps: int | None = None,
    batch: int | None = None,
    width: int | None = None,
    depth: int | None = None,
    lr: Sequence[float] | None = None,
    search: bool | None = None,
    init: str | None = None,
    changes: Sequence[str] = (),
) -> dict[str, Study]:
    """Folder → study: one for every task, and one for all of MAD's. Numbers that are given take the place of the scale's.

    search: whether each mixer's learning rate is searched; by default where there are several.
    changes: NAME=VALUE, to the settings of every task.
    """
    choose_from("scale", scale, SCALES)
    found: dict[str, Study] = {}
    tasks = find_tasks(names)
    if mads := [name for name in tasks if name in MAD]:
        if depth is not None:
            raise ValueError("the models of MAD have two layers; leave depth out")
        if changes:
            raise ValueError(f"the settings of MAD are the benchmark's; leave {', '.join(changes)} out")
        options: dict[str, Any] = {"steps": steps, "batch": batch, "width": width, "init": init}
        options |= {"search": choose_search(lr)} if search else {"lr": lr}
        found["mad"] = mad.task_study("clean", FAMILIES_OF_MAD[scale], mads, **options)
    for name, place in tasks.items():
        if name not in MAD:
            numbers = TASKS[name].scale(scale)
            rates = tuple(sorted(lr)) if lr else numbers.rates
            searched = len(rates) > 1 if search is None else search
            found[name] = ScaledStudy(
                tasks=(name,),
                scale=scale,
                steps={name: steps or numbers.steps},
                rates=rates,
                decays=numbers.decays,
                evaluations=numbers.evaluations,
                solved=numbers.solved,
                own=place,
                changes={name: read_changes(name, changes)} if changes else {},
                init=choose_init(init, scale),
                search=choose_rates(rates) if searched else None,
                width=width or numbers.width,
                depth=depth or numbers.depth,
                batch=batch or numbers.batch,
            )
    return found


def choose_rates(rates: tuple[float, ...]) -> Search:
    """A search among these rates; the usual one, where a scale has a single rate."""
    return Search(rates=rates, rungs=(0.3, 1.0), keep=0.33, widen=1) if len(rates) > 1 else choose_search()


def read_changes(task: str, changes: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE, each of the kind that the task's setting has there."""
    known = {field.name: getattr(TASKS[task].baseline, field.name) for field in dataclasses.fields(TASKS[task].baseline)}
    del known["task"]
    readers: dict[type, Callable[[str], Any]] = {
        int: int,
        float: float,
        str: str,
        bool: {"true": True, "false": False}.__getitem__,
    }
    found = {}
    for text in changes:
        name, _, value = text.partition("=")
        try:
            found[name] = readers[type(known[name] if value else None)](value)
        except (KeyError, ValueError):
            usual = ", ".join(f"{key}={str(one).lower() if isinstance(one, bool) else one}" for key, one in known.items())
            hint = did_you_mean(name, known) if name not in known else ""
            raise ValueError(f"{text}: the settings of {task} have {usual}{hint}") from None
    return found


def choose_init(init: str | None, scale: str) -> Any:
    """What is given, else as released where a study is, too."""
    return init or ("paper" if scale == "published" else "decays")


# ---- one run ----


@lru_cache(maxsize=2)  # the runs of a worker come by setting and seed
def baselines(setting: Any, seed: int) -> Record:
    """Name → its measure over the headline, and of every set."""
    task = TASKS[setting.task]
    return {name: condense(scores, task.measure) for name, scores in task.baselines(setting, seed).items()}


def condense(scores: Record, measure: str) -> Record:
    return {measure: scores[measure], "sets": {name: one[measure] for name, one in scores["sets"].items()}}


def state_bytes(model: nn.Module, tokens: int) -> int:
    """What all layers keep of one row of so many tokens, in float32."""
    return 4 * sum(layer.cache_spec().size(tokens) for layer in model.modules() if isinstance(layer, Mixer))


def train(job: TaskJob, context: RunContext | None = None) -> Record:
    """The record of mad.train_model, with baselines, the size of the state, and other ways to run rows beyond the context."""
    model, record = mad.train_model(job, context)
    record["baselines"] = baselines(job.setting, job.seed)
    record["state_bytes"] = state_bytes(model, longest(job))
    if record["metrics"] is not None and (ways := other_ways(job, model)):
        record["ways"] = ways
    return record


def evaluated(job: TaskJob) -> Sets:
    return mad.load_data(job.setting, job.seed, True).test


def longest(job: TaskJob, sets: Sets | None = None) -> int:
    """Tokens of the longest row that is evaluated."""
    task = TASKS[job.setting.task]
    return max(task.tokens(job.setting, rows) for groups in (sets or evaluated(job)).values() for rows in groups)


def other_ways(job: TaskJob, model: nn.Module) -> Record:
    """Way → scores on the sets with rows beyond the context of a layer with lags, which the model itself runs as a window."""
    task = TASKS[job.setting.task]
    sets = {name: groups for name, groups in evaluated(job).items() if longest(job, {name: groups}) > job.setting.seq_len}
    if not sets or not any(isinstance(layer, HyperGLU) for layer in model.modules()):
        return {}
    found: Record = {}
    for way in WAYS if find_lags(model) else WAYS[:1]:
        torch.manual_seed(job.seed)
        other = copy.deepcopy(model)
        try:
            for block in other.modules():
                if isinstance(mixer := getattr(block, "mixer", None), HyperGLU):
                    block.mixer = extend_layer(mixer, longest(job, sets), way)
        except ValueError:
            continue  # a layer that counts places instead of lags cannot be extended
        scores = task.scores(other, evaluated(job), job.study.batch, job.setting, slices=True)
        found[way] = {"sets": {name: scores["sets"][name][task.measure] for name in sets}}
    return found
