"""The MAD benchmark as a study: mixers × settings × seeds × learning rates, by one of two protocols that are never mixed.

    faithful   what the published benchmark does: its accuracy by class and batch, a constant learning rate, no warm-up and no
               clipping; the test set ends a run (above 0.999), picks its best epoch (lowest perplexity) and its learning rate
    clean      what one would do: share of right tokens, warm-up, cosine, clipping; a validation set picks the learning rate,
               the test set is looked at once, with the last weights; what is known beforehand or cannot be known is not scored

All models of a setting have the same number of parameters (models/budget.py), apart from labels with "!".
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from hypermlp.config import choose_from
from hypermlp.data.mad import SEED, TASKS, Setting, Split, clean_targets, generate, settings
from hypermlp.evals.mad import evaluate
from hypermlp.experiments import runs
from hypermlp.experiments.runs import Desk, Folder, Progress, Record
from hypermlp.mixers import build_mixer, own
from hypermlp.models.budget import MatchedModel, match_models
from hypermlp.models.lm import count_parameters
from hypermlp.models.mad import build_model, published_inner
from hypermlp.train.resumable import Examples, Recipe, Training


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """The rules by which a run trains and is scored."""

    validation: bool  # there is a validation set; without one the test set takes its place
    warmup: float  # share of the steps
    cosine: bool
    clip: float | None
    solved: float | None  # accuracy above which a run ends
    evaluations: int | None  # per run; None: one after every epoch


PROTOCOLS = {
    "faithful": Protocol(validation=False, warmup=0, cosine=False, clip=None, solved=0.999, evaluations=None),
    "clean": Protocol(validation=True, warmup=0.05, cosine=True, clip=1.0, solved=None, evaluations=12),
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Every number that the runs of a study have in common."""

    protocol: str
    settings: Literal["baseline", "full"]  # one per task, or all 66
    width: int = 128
    depth: int = 2
    batch: int = 128
    examples: int | None = None  # to train on, at most; None: as many as the setting has
    tests: int = 1280  # and as many for validation
    epochs: int | None = 200
    steps: dict[str, int] | None = None  # per task; instead of epochs
    rates: tuple[float, ...] = (1e-4, 5e-4, 1e-3)
    decays: tuple[float, ...] = (0.0, 0.1)
    changes: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)  # per task, to its settings

    def __post_init__(self) -> None:
        choose_from("protocol", self.protocol, tuple(PROTOCOLS))
        counts = [getattr(self, name) for name in ("width", "depth", "batch", "examples", "tests", "epochs")]
        if any(value is not None and value < 1 for value in [*counts, *(self.steps or {}).values()]):
            raise ValueError(f"width, depth, batch, examples, tests, epochs and steps must be at least 1: {self}")
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("a run's length is given in epochs or in steps: give one of them")
        if not self.rates or min(self.rates) <= 0 or not self.decays or min(self.decays) < 0:
            raise ValueError(f"learning rates {self.rates} must be above 0, weight decays {self.decays} at least 0")

    @property
    def rules(self) -> Protocol:
        return PROTOCOLS[self.protocol]

    def settings_of(self, task: str) -> list[Setting]:
        """The settings of a task, with this plan's numbers in them."""
        found: dict[Setting, None] = {}  # with few examples two settings may become the same
        for setting in settings(task, self.settings):
            examples = min(self.examples or setting.num_train, setting.num_train)
            changes: dict[str, Any] = {**self.changes.get(task, {}), "num_train": examples, "num_test": self.tests}
            found[dataclasses.replace(setting, **changes)] = None
        return list(found)

    def steps_of(self, setting: Setting) -> int:
        if self.steps is not None:
            return self.steps[setting.task]
        assert self.epochs is not None
        return self.epochs * math.ceil(setting.num_train / self.batch)


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
    "full": {"settings": "full"},
    "baseline": {"settings": "baseline"},
    "laptop": {
        "settings": "baseline",
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
    },
    "quick": {
        "settings": "baseline",
        "width": 32,
        "batch": 32,
        "examples": 3200,
        "tests": 320,
        "epochs": None,
        "steps": dict.fromkeys(TASKS, 600),
        "rates": (3e-3,),
        "decays": (0.0,),
        "changes": SHORT,
    },
}


def make_plan(
    protocol: str,
    scale: str,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    examples: int | None = None,
    batch: int | None = None,
    width: int | None = None,
    lr: Sequence[float] | None = None,
) -> Plan:
    """The plan of a scale, with other numbers where they are given; `steps` is then the same for every task."""
    choose_from("scale", scale, tuple(SCALES))
    if epochs is not None and steps is not None:
        raise ValueError(f"epochs ({epochs}) and steps ({steps}) both say how long to train: give one of them")
    given = {"examples": examples, "batch": batch, "width": width, "rates": tuple(lr) if lr else None}
    plan = SCALES[scale] | {name: value for name, value in given.items() if value is not None}
    if epochs is not None:
        plan |= {"epochs": epochs, "steps": None}
    if steps is not None:
        plan |= {"epochs": None, "steps": dict.fromkeys(TASKS, steps)}
    return Plan(protocol=protocol, **plan)


# ---- one run ----


@dataclass(frozen=True, kw_only=True)
class Job:
    """One model on one setting: its record depends on nothing else."""

    mixer: str
    setting: Setting
    seed: int
    lr: float
    weight_decay: float
    plan: Plan
    inner: int  # of the feed-forward
    size: int | None  # of the mixer
    note: str = ""  # what is to be said about the model's budget

    @property
    def key(self) -> str:
        hyper = f"seed={self.seed},lr={self.lr:g},wd={self.weight_decay:g}"
        return f"{self.plan.protocol}/{self.mixer}/{self.setting.key}/{hyper}"

    @property
    def identity(self) -> Record:
        return {
            "protocol": self.plan.protocol,
            "mixer": self.mixer,
            "task": self.setting.task,
            "setting": self.setting.key,
            "seed": self.seed,
            "lr": self.lr,
            "weight_decay": self.weight_decay,
        }

    @property
    def cost(self) -> float:
        """Tokens to be trained on."""
        return self.plan.steps_of(self.setting) * self.plan.batch * self.setting.seq_len

    def build(self) -> nn.Module:
        own.adopt([self.mixer])
        torch.manual_seed(self.seed)
        return build_for(self.setting, self.plan, self.mixer, self.size, self.inner)

    def recipe(self) -> Recipe:
        rules, steps = self.plan.rules, self.plan.steps_of(self.setting)
        epoch = math.ceil(self.setting.num_train / self.plan.batch)
        return Recipe(
            steps=steps,
            lr=self.lr,
            weight_decay=self.weight_decay,
            evaluate_every=epoch if rules.evaluations is None else max(1, steps // rules.evaluations),
            warmup=math.ceil(rules.warmup * steps),
            cosine=rules.cosine,
            clip=rules.clip,
            solved=rules.solved,
        )


def build_for(setting: Setting, plan: Plan, mixer: str, size: int | None, inner: int) -> nn.Module:
    make_mixer = partial(build_mixer, mixer, plan.width, setting.seq_len, size)
    return build_model(setting, make_mixer, plan.width, inner, plan.depth)


class Tensors(NamedTuple):
    inputs: Tensor  # N T
    targets: Tensor  # N T


@lru_cache(maxsize=1)  # the runs of a worker come by setting and seed
def load_data(setting: Setting, seed: int, clean: bool) -> tuple[Tensors, Tensors, Tensors]:
    """Train, validation and test; seed 0 of the faithful protocol is the published data, which has no validation set."""
    data = generate(setting, SEED + seed, exact=not clean, validation=setting.num_test if clean else 0)

    def tensors(split: Split) -> Tensors:
        targets = clean_targets(setting, split.targets) if clean else split.targets
        return Tensors(torch.from_numpy(split.inputs), torch.from_numpy(targets))

    return tensors(data.train), tensors(data.validation), tensors(data.test)


def train(job: Job, desk: Desk | None = None) -> Record:
    """The record of train_model."""
    return train_model(job, desk)[1]


def train_model(job: Job, desk: Desk | None = None) -> tuple[nn.Module, Record]:
    """Train one model and score it. With a desk it tells there how far it is, and goes on where it was stopped."""
    clean = job.plan.rules.validation
    train_set, validation, test = load_data(job.setting, job.seed, clean)

    def scores(data: Tensors, model: nn.Module) -> dict[str, float]:
        found = evaluate(model, *data, job.plan.batch)
        if clean:
            return {"accuracy": found.accuracy, "loss": found.loss}
        return {"accuracy": found.macro_accuracy, "perplexity": found.perplexity, "loss": found.loss}

    model = job.build()
    examples = Examples(*train_set, batch=job.plan.batch, seed=job.seed)
    training = Training(model, job.recipe(), examples, partial(scores, validation if clean else test))
    if desk is not None and (state := desk.load()) is not None:
        training.load_state(state)
    while not training.finished:
        training.advance()
        if desk is not None:
            desk.tick(training.step, training.recipe.steps, latest(training), training.state)
    metrics = clean_metrics(training, partial(scores, test)) if clean else faithful_metrics(training)
    return model, {
        "parameters": count_parameters(model),
        "inner": job.inner,
        "size": job.size,
        "budget": job.note,
        "metrics": metrics,
        "stopped": training.stopped,
        "curve": training.curve,
        "seconds": training.seconds,
        "tokens_per_second": training.tokens / training.seconds,
    }


def latest(training: Training) -> dict[str, float]:
    shown = {"accuracy": training.curve[-1]["accuracy"]} if training.curve else {}
    return shown | ({"train_loss": training.losses[-1]} if training.losses else {})


def faithful_metrics(training: Training) -> dict[str, float] | None:
    """The scores of the epoch with the lowest test perplexity; None if there was none with a finite loss."""
    finite = [point for point in training.curve if math.isfinite(point["loss"])]
    return min(finite, key=lambda point: point["perplexity"]) if finite else None


def clean_metrics(training: Training, test: Callable[[nn.Module], dict[str, float]]) -> dict[str, float] | None:
    """Test scores of the last weights, and the validation loss they are chosen by; None for a run that blew up."""
    if training.stopped is not None:
        return None
    return {"step": training.step, **test(training.model), "validation_loss": training.curve[-1]["loss"]}


# ---- the study ----


def study(
    out: Path,
    mixers: Sequence[str],
    tasks: Sequence[str],
    plan: Plan,
    *,
    seeds: int = 1,
    work: runs.Work = train,
    workers: int | None = None,
    retry_failed: bool = False,
    checkpoint_seconds: float = 60.0,
    tell: Callable[[Progress], None] = lambda progress: None,
    done: Callable[[Record], None] = lambda record: None,
) -> list[Record]:
    """Run what is missing in `out`, and return the records of all that was asked for (experiments/runs.py)."""
    check(mixers, tasks, seeds)
    with Folder(out) as folder:
        jobs = plan_jobs(folder, mixers, tasks, plan, seeds)
        return runs.run(
            folder,
            jobs,
            work,
            workers=workers,
            retry_failed=retry_failed,
            checkpoint_seconds=checkpoint_seconds,
            tell=tell,
            done=done,
        )


def check(mixers: Sequence[str], tasks: Sequence[str], seeds: int) -> None:
    """Bad names fail before anything starts."""
    for name, values in (("mixers", mixers), ("tasks", tasks)):
        if not values or len(set(values)) < len(values):
            raise ValueError(f"{name} ({', '.join(values)}) must be at least one, each named once")
    for task in tasks:
        choose_from("task", task, tuple(TASKS))
    if seeds < 1:
        raise ValueError(f"seeds ({seeds}) must be at least 1")
    own.adopt(mixers)
    for mixer in mixers:
        build_mixer(mixer, 64, 64)


def plan_jobs(folder: Folder, mixers: Sequence[str], tasks: Sequence[str], plan: Plan, seeds: int) -> list[Job]:
    """Write the plan into the folder, and list its runs. Mixers that came before take part in the budget."""
    known = folder.plan.get("models", {})
    contestants = list(dict.fromkeys([*(name for models in known.values() for name in models), *mixers]))
    jobs, models = [], {}
    for setting in [setting for task in tasks for setting in plan.settings_of(task)]:
        matched = match_setting(setting, contestants, plan)
        models[setting.key] = {name: {"inner": m.inner, "size": m.mixer.size} for name, m in matched.items()}
        changed = [name for name, model in known.get(setting.key, {}).items() if model != models[setting.key][name]]
        if changed and numbers(plan).items() <= folder.plan.items():
            raise ValueError(
                f"with {', '.join(mixers)} the largest model on {setting.key} is larger than before, so {', '.join(changed)} "
                f"would have to be trained anew to match it; run all of them in another folder than {folder.path}"
            )
        for seed in range(seeds):
            for name in mixers:
                model = matched[name]
                jobs += [
                    Job(
                        mixer=name,
                        setting=setting,
                        seed=seed,
                        lr=lr,
                        weight_decay=decay,
                        plan=plan,
                        inner=model.inner,
                        size=model.mixer.size,
                        note=model.mixer.note,
                    )
                    for lr in plan.rates
                    for decay in plan.decays
                ]
    folder.begin({**numbers(plan), "models": models, "own": own.adopt(mixers)})
    return jobs


def match_setting(setting: Setting, mixers: Sequence[str], plan: Plan) -> dict[str, MatchedModel]:
    build = partial(build_for, setting, plan)
    return match_models(mixers, plan.width, setting.seq_len, build, published_inner(plan.width))


def numbers(plan: Plan) -> dict[str, Any]:
    """The plan as JSON gives it back."""
    values = {"study": "mad", **dataclasses.asdict(plan)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


# ---- scores ----


def setting_score(records: Iterable[Record]) -> float | None:
    """The accuracy of a setting from the runs of its learning rates: faithful takes the best, clean the best validated."""
    scored = [record for record in records if record["error"] is None and record["metrics"] is not None]
    if not scored:
        return None
    if scored[0]["protocol"] == "faithful":
        return max(record["metrics"]["accuracy"] for record in scored)
    return min((record["metrics"]["validation_loss"], record["metrics"]["accuracy"]) for record in scored)[1]


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
