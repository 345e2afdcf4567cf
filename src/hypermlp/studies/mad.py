"""Studies on tasks: mixers × settings × seeds × learning rates, by one of two protocols that are never mixed.

    faithful   what the published MAD benchmark does: its accuracy by class and batch, a constant learning rate, no warm-up and
               no clipping; the test set ends a run (above 0.999) and picks its best epoch (lowest perplexity) and learning rate
    clean      what one would do: share of right tokens, warm-up, cosine, clipping; a validation set picks the learning rate,
               the test set is looked at once, with the last weights; what is known beforehand or cannot be known is not scored

All models of a setting have the same number of parameters (models/budget.py), apart from labels with "!".
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from hypermlp.checks import choose_from
from hypermlp.config import InitScale
from hypermlp.files import Record
from hypermlp.mixers import lora, new_layers, own
from hypermlp.mixers.hybrid import Size
from hypermlp.models.budget import MatchedModel, match_models
from hypermlp.models.lm import count_parameters, published_inner
from hypermlp.models.mad import build_model
from hypermlp.studies.search import Search
from hypermlp.studies.study import Study, check_given, each_once
from hypermlp.studies.worker import RunContext, Work, run_to_the_end
from hypermlp.tasks import TASKS, Material, Setting
from hypermlp.tasks.base import Sets
from hypermlp.tasks.mad import MAD
from hypermlp.train import fit
from hypermlp.train.fit import Fit
from hypermlp.train.optimisation import Precision, Recipe


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules by which a run trains and is scored."""

    validation: bool  # there is a validation set; without one the test set takes its place
    warmup: float  # share of the steps
    cosine: bool
    clip: float | None
    solved: float | None  # accuracy above which a run ends
    evaluations: int | None  # per run; None: one after every epoch


PROTOCOLS = {
    "faithful": Rules(validation=False, warmup=0, cosine=False, clip=None, solved=0.999, evaluations=None),
    "clean": Rules(validation=True, warmup=0.05, cosine=True, clip=1.0, solved=None, evaluations=12),
}


@dataclass(frozen=True, kw_only=True)
class TaskStudy(Study):
    """Every number that the runs of a study on tasks have in common."""

    tasks: tuple[str, ...] = tuple(MAD)
    protocol: str
    scale: Literal["baseline", "full"]  # one setting per task, or all
    width: int = 128
    depth: int = 2
    batch: int = 128
    examples: int | None = None  # to train on, at most; None: as many as the setting has
    tests: int = 1280  # and as many for validation
    epochs: int | None = 200
    steps: dict[str, int] | None = None  # per task; instead of epochs
    rates: tuple[float, ...] = (1e-4, 5e-4, 1e-3)
    decays: tuple[float, ...] = (0.0, 0.1)
    changes: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)  # per task, to its settings
    # Task → steps, lr and changes of a training that comes before: then adapters alone train (mixers/lora.py), or, in a mixer
    # without any, everything.
    pretrain: dict[str, dict[str, Any]] | None = None
    solved: float | None = None  # validation accuracy above which a run ends; None: as the protocol has it

    kind: ClassVar[str] = "mad"
    rate_field: ClassVar[str] = "rates"
    chosen: ClassVar[tuple[str, ...]] = ("tasks", "scale")
    added_later: ClassVar[tuple[str, ...]] = (*Study.added_later, "solved", "pretrain")

    def __post_init__(self) -> None:
        each_once("tasks", self.tasks)
        for task in self.tasks:
            choose_from("task", task, self.known)
        choose_from("protocol", self.protocol, tuple(PROTOCOLS))
        for task, changes in self.changes.items():
            choose_from("task in changes", task, self.known)
            names = tuple(field.name for field in dataclasses.fields(TASKS[task].baseline))
            for name in changes:
                choose_from(f"name in changes.{task}", name, names)
        if missing := [task for task in self.tasks if self.steps is not None and task not in self.steps]:
            raise ValueError(f"steps must be given for every task; {', '.join(missing)} has none")
        counts = {name: getattr(self, name) for name in ("width", "depth", "batch", "examples", "tests", "epochs")}
        for name, value in (counts | {f"steps of {task}": steps for task, steps in (self.steps or {}).items()}).items():
            if value is not None and value < 1:
                raise ValueError(f"{name} ({value}) must be at least 1")
        for task, before in (self.pretrain or {}).items():
            choose_from("task in pretrain", task, self.tasks)
            if set(before) != {"steps", "lr", "changes"}:
                raise ValueError(f"pretrain.{task} must say steps, lr and changes, not {', '.join(before)}")
        if self.pretrain is not None and (missing := [task for task in self.tasks if task not in self.pretrain]):
            raise ValueError(f"pretrain must be given for every task; {', '.join(missing)} has none")
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("a run's length is given in epochs or in steps: give one of them")
        if not self.rates or min(self.rates) <= 0 or not self.decays or min(self.decays) < 0:
            raise ValueError(f"learning rates {self.rates} must be above 0, weight decays {self.decays} at least 0")
        if self.search is not None and (not self.rules.validation or len(self.decays) > 1):
            raise ValueError(
                f"a search needs a validation split and one weight decay, not the protocol {self.protocol} with decays "
                f'{self.decays}; use protocol="clean" and one decay'
            )

    def check(self, mixers: Sequence[str], seeds: int) -> None:
        super().check(mixers, seeds)
        if self.given is not None:
            needed = {(mixer, task) for mixer in mixers for task in self.tasks}
            found = {(mixer, task) for mixer, rates in self.given.items() for task in rates}  # task → learning rate
            check_given(self.search, needed, found, (rate for rates in self.given.values() for rate in rates.values()))

    @property
    def rules(self) -> Rules:
        return PROTOCOLS[self.protocol]

    @property
    def work(self) -> Work:
        return train

    def numbers(self) -> dict[str, Any]:
        """As plans have always had them: the scale is called settings there."""
        return {**super().numbers(), "settings": self.scale}

    @property
    def known(self) -> tuple[str, ...]:
        """Tasks that this kind of study takes."""
        return tuple(MAD)

    def settings(self) -> dict[str, Setting]:
        """Those with the shortest runs first, so that a stopped study has as many whole tasks as it can."""
        found = [setting for task in self.tasks for setting in self.settings_of(task)]
        return {setting.key: setting for setting in sorted(found, key=self.tokens_of)}

    def settings_of(self, task: str) -> list[Any]:
        """The settings of a task, with this study's numbers in them."""
        found: dict[Any, None] = {}  # with few examples two settings may become the same
        for setting in MAD[task].settings(self.scale):
            examples = min(self.examples or setting.num_train, setting.num_train)
            changes: dict[str, Any] = {**self.changes.get(task, {}), "num_train": examples, "num_test": self.tests}
            found[dataclasses.replace(setting, **changes)] = None
        return list(found)

    def steps_of(self, setting: Setting) -> int:
        if self.steps is not None:
            return self.steps[setting.task]
        assert self.epochs is not None
        return self.epochs * math.ceil(setting.num_train / self.batch)

    def tokens_of(self, setting: Setting) -> int:
        """That a run is trained on."""
        return self.steps_of(setting) * self.batch * setting.seq_len

    def build(self, setting: Setting, mixer: str, size: Size, inner: int) -> nn.Module:
        how: dict[str, Any] = {"init": self.init, "init_scale": self.init_scale}
        make_mixer = new_layers(mixer, self.depth, self.width, setting.seq_len, size, **how)
        return build_model(setting, make_mixer, self.width, inner, self.depth)

    def match(self, setting: Setting, mixers: Sequence[str]) -> dict[str, MatchedModel]:
        # A mixer and the same with adapters have one model before they adapt.
        base = {mixer: mixer if self.pretrain is None else lora.split(mixer)[0] for mixer in mixers}
        names, build = list(dict.fromkeys(base.values())), partial(self.build, setting)
        found = match_models(names, self.width, setting.seq_len, build, published_inner(self.width))
        return {mixer: found[base[mixer]] for mixer in mixers}

    def at(self, rate: float, scale: InitScale) -> Self:
        return dataclasses.replace(self, rates=(rate,), init_scale=scale)

    def shape(self, setting: Setting) -> tuple[int, int]:
        return self.width, setting.seq_len

    def jobs(self, setting: Setting, mixer: str, model: MatchedModel, seed: int) -> list[Any]:
        return [
            TaskJob(
                mixer=mixer,
                setting=setting,
                seed=seed,
                lr=lr,
                weight_decay=decay,
                study=self,
                inner=model.inner,
                size=model.mixer.size,
                note=model.mixer.note,
            )
            for lr in (self.rates if self.given is None else (self.given[mixer][setting.task],))
            for decay in self.decays
        ]


SHORT = {
    "fuzzy-recall": {"seq_len": 64},
    "in-context-recall": {"seq_len": 64},
    "memorization": {"vocab_size": 64},
    "noisy-recall": {"seq_len": 64},
    "selective-copying": {"seq_len": 64, "num_tokens_to_copy": 8},
}
# full, baseline: the published sizes. laptop: the baseline settings with narrow models and few steps, some minutes a mixer on
# one core; recall is learned within the first hundred steps, the others take more. quick: to see it work, in minutes.
SCALES: dict[str, dict[str, Any]] = {
    "full": {"scale": "full"},
    "baseline": {"scale": "baseline"},
    "laptop": {
        "scale": "baseline",
        "width": 64,
        "batch": 16,
        "tests": 320,
        "epochs": None,
        "steps": {
            "compression": 6000,
            "fuzzy-recall": 600,
            "in-context-recall": 200,
            "memorization": 1500,
            "noisy-recall": 200,
            "selective-copying": 500,
        },
        "rates": (3e-3,),
        "decays": (0.1,),
        "init": "decays",
    },
    "quick": {
        "scale": "baseline",
        "width": 32,
        "batch": 32,
        "examples": 3200,
        "tests": 320,
        "epochs": None,
        "steps": dict.fromkeys(MAD, 600),
        "rates": (3e-3,),
        "decays": (0.0,),
        "changes": SHORT,
        "init": "decays",
    },
}


def task_study(
    protocol: str,
    scale: str,
    tasks: Sequence[str] = tuple(MAD),
    *,
    epochs: int | None = None,
    steps: int | None = None,
    examples: int | None = None,
    batch: int | None = None,
    width: int | None = None,
    lr: Sequence[float] | None = None,
    precision: Precision | None = None,
    init: str | None = None,
    search: Search | None = None,
) -> TaskStudy:
    """The study of a scale, with other numbers where they are given; `steps` is then the same for every task."""
    choose_from("scale", scale, tuple(SCALES))
    if epochs is not None and steps is not None:
        raise ValueError(f"epochs ({epochs}) and steps ({steps}) both say how long to train: give one of them")
    rates = tuple(lr) if lr else None
    given = {"examples": examples, "batch": batch, "width": width, "rates": rates, "precision": precision, "init": init}
    numbers = SCALES[scale] | {name: value for name, value in given.items() if value is not None}
    if epochs is not None:
        numbers |= {"epochs": epochs, "steps": None}
    if steps is not None:
        numbers |= {"epochs": None, "steps": dict.fromkeys(MAD, steps)}
    return TaskStudy(protocol=protocol, tasks=tuple(tasks), search=search, **numbers)


# ---- one run ----


@dataclass(frozen=True, kw_only=True)
class TaskJob:
    """One model on one setting: its record depends on nothing else."""

    mixer: str
    setting: Any
    seed: int
    lr: float
    weight_decay: float
    study: TaskStudy
    inner: int  # of the feed-forward
    size: Size  # of the mixer
    note: str = ""  # on the model's budget

    @property
    def key(self) -> str:
        scale = "" if self.study.init_scale == "0.02" else f",scale={self.study.init_scale}"
        hyper = f"seed={self.seed},lr={self.lr:g},wd={self.weight_decay:g}{scale}"
        return f"{self.study.protocol}/{self.mixer}/{self.setting.key}/{hyper}"

    @property
    def identity(self) -> Record:
        return {
            "protocol": self.study.protocol,
            "mixer": self.mixer,
            "task": self.setting.task,
            "setting": self.setting.key,
            "seed": self.seed,
            "lr": self.lr,
            "weight_decay": self.weight_decay,
            "init_scale": self.study.init_scale,
        }

    @property
    def cost(self) -> float:
        return self.study.tokens_of(self.setting)

    def build(self) -> nn.Module:
        own.adopt([self.mixer])
        torch.manual_seed(self.seed)
        return self.study.build(self.setting, self.mixer, self.size, self.inner)

    @property
    def recipe(self) -> Recipe:
        rules, steps = self.study.rules, self.study.steps_of(self.setting)
        return Recipe(
            steps=steps,
            lr=self.lr,
            warmup=math.ceil(rules.warmup * steps),
            final=0.0 if rules.cosine else 1.0,
            weight_decay=self.weight_decay,
            decayed="all",
            betas=(0.9, 0.999),
            clip=rules.clip,
            precision=self.study.precision,
        )

    @property
    def evaluate_every(self) -> int:
        evaluations = self.study.rules.evaluations
        epoch = math.ceil(self.setting.num_train / self.study.batch)
        return epoch if evaluations is None else max(1, self.study.steps_of(self.setting) // evaluations)


@lru_cache(maxsize=1)  # the runs of a worker come by setting and seed
def load_data(setting: Any, seed: int, clean: bool) -> Material:
    """What a run needs; seed 0 of MAD's faithful protocol is the published data, which has no validation set."""
    return TASKS[setting.task].open(setting, seed, clean=clean)


def train(job: TaskJob, context: RunContext | None = None) -> Record:
    """The record of train_model."""
    return train_model(job, context)[1]


def train_model(job: TaskJob, context: RunContext | None = None) -> tuple[nn.Module, Record]:
    """Train one model and score it. With a context it reports how far it is, and resumes where it was stopped."""
    study, clean = job.study, job.study.rules.validation
    task, data = TASKS[job.setting.task], load_data(job.setting, job.seed, clean)

    def scores(sets: Sets, model: nn.Module, slices: bool = False) -> dict[str, Any]:
        return task.scores(model, sets, study.batch, job.setting, clean=clean, slices=slices)

    model = job.build()
    if study.pretrain is not None:
        model.load_state_dict({**model.state_dict(), **pretrained(job)})
        lora.freeze(model)
    run = Fit(
        model if context is None else model.to(context.device),
        job.recipe,
        fit.EpochSampler(data.train, batch=study.batch, seed=job.seed),
        partial(scores, data.validation if clean else data.test),
        evaluate_every=job.evaluate_every,
        solved=study.rules.solved if study.solved is None else study.solved,
        world=None if context is None else context.world,
    )
    run_to_the_end(run, context, latest)
    metrics = clean_metrics(run, partial(scores, data.test, slices=True)) if clean else faithful_metrics(run)
    return model, {
        "parameters": count_parameters(model),
        "inner": job.inner,
        "size": job.size,
        "budget": job.note,
        "metrics": metrics,
        "stopped": run.stopped,
        "curve": run.curve,
        "seconds": run.seconds,
        "tokens_per_second": run.tokens / run.seconds,
    }


BASES: dict[str, dict[str, Tensor]] = {}  # the job, spelled out → weights; the last alone, from which mixers of a seed begin


def pretrained(job: TaskJob) -> dict[str, Tensor]:
    """The weights from which a job adapts."""
    base = base_of(job)
    if (key := repr(base)) not in BASES:
        BASES.clear()
        BASES[key] = train_model(base)[0].state_dict()
    return BASES[key]


def base_of(job: TaskJob) -> TaskJob:
    """The training that comes before a job: its mixer without adapters, on the setting that comes before."""
    study, task = job.study, job.setting.task
    assert study.pretrain is not None
    before = study.pretrain[task]
    changed: dict[str, Any] = {"steps": {task: before["steps"]}, "changes": {task: before["changes"]}}
    own = dataclasses.replace(study, pretrain=None, given=None, search=None, epochs=None, tasks=(task,), **changed)
    (setting,) = own.settings_of(task)
    return dataclasses.replace(job, mixer=lora.split(job.mixer)[0], setting=setting, study=own, lr=before["lr"])


def latest(run: Fit) -> dict[str, float]:
    shown = {name: run.curve[-1][name] for name in ("accuracy", "mse") if run.curve and name in run.curve[-1]}
    return shown | ({"train_loss": run.losses[-1]} if run.losses else {})


def faithful_metrics(run: Fit) -> dict[str, float] | None:
    """The scores of the epoch with the lowest test perplexity; None if there was none with a finite loss."""
    finite = [point for point in run.curve if math.isfinite(point["loss"])]
    return min(finite, key=lambda point: point["perplexity"]) if finite else None


def clean_metrics(run: Fit, test: Callable[[nn.Module], dict[str, Any]]) -> dict[str, Any] | None:
    """Test scores of the last weights, and the validation loss they are chosen by; None for a run that blew up."""
    if run.blew_up:
        return None
    return {"step": run.step, **run.scores(test), "validation_loss": run.curve[-1]["loss"]}
