"""A study: mixers × settings × seeds, small models of equal parameters, all trained and scored in the same way.

A kind of study (mad.py, language.py) is a frozen dataclass of every number that its runs have in common; it says what the
settings are, how models are matched, and which jobs there are. This module does the rest.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, get_args

from hypermlp.checks import choose_from
from hypermlp.config import Init
from hypermlp.files import Record
from hypermlp.mixers import build_mixer, own
from hypermlp.models.budget import MatchedModel
from hypermlp.studies import engine
from hypermlp.studies.engine import Progress
from hypermlp.studies.executors import Executor
from hypermlp.studies.folder import Folder
from hypermlp.studies.worker import Job, Work
from hypermlp.train.training import Precision


@dataclass(frozen=True, kw_only=True)
class Study(ABC):
    """What the runs of a study have in common."""

    precision: Precision = "float32"
    init: Init = "paper"  # how convolutions and lag factors begin, in every contestant that has them (docs/layer.md)

    kind: ClassVar[str]  # of the plan and its records
    flat: ClassVar[bool] = False  # there is one setting, which the plan's models are not filed under
    chosen: ClassVar[tuple[str, ...]] = ()  # fields that say which runs to do, not how
    since: ClassVar[tuple[str, ...]] = ("precision", "init")  # fields that older plans lack: written unless at the default

    @property
    @abstractmethod
    def work(self) -> Work:
        """The function that does a job."""

    @abstractmethod
    def settings(self) -> Mapping[str, Any]:
        """Key → what each mixer is trained on."""

    @abstractmethod
    def match(self, setting: Any, mixers: Sequence[str]) -> dict[str, MatchedModel]:
        """Sizes at which the models of all mixers have equal parameters."""

    @abstractmethod
    def jobs(self, setting: Any, mixer: str, model: MatchedModel, seed: int) -> list[Job]:
        """The runs of one mixer: one, or one per learning rate and weight decay."""

    def check(self, mixers: Sequence[str], seeds: int) -> None:
        """Bad names fail before anything starts."""
        each_once("mixers", mixers)
        if seeds < 1:
            raise ValueError(f"seeds ({seeds}) must be at least 1")
        choose_from("init", self.init, get_args(Init))
        own.adopt(mixers)
        for mixer in mixers:
            build_mixer(mixer, 64, 64)

    def numbers(self) -> dict[str, Any]:
        """The plan as JSON gives it back."""
        values: dict[str, Any] = {"study": self.kind}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in self.chosen or (field.name in self.since and value == field.default):
                continue
            values[field.name] = list(value) if isinstance(value, tuple) else value
        return values

    def run(
        self,
        out: Path,
        mixers: Sequence[str],
        *,
        seeds: int = 1,
        executor: Executor | None = None,
        retry_failed: bool = False,
        checkpoint_seconds: float = 60.0,
        tell: Callable[[Progress], None] = lambda progress: None,
        done: Callable[[Record], None] = lambda record: None,
    ) -> list[Record]:
        """Run what is missing in `out`, and return the records of all that was asked for (engine.py: run)."""
        self.check(mixers, seeds)
        with Folder(out) as folder:
            jobs = self.plan_jobs(folder, mixers, seeds)
            return engine.run(
                folder,
                jobs,
                self.work,
                executor=executor,
                retry_failed=retry_failed,
                checkpoint_seconds=checkpoint_seconds,
                tell=tell,
                done=done,
            )

    def plan_jobs(self, folder: Folder, mixers: Sequence[str], seeds: int) -> list[Job]:
        """Write the plan into the folder, and list its runs. Mixers that came before take part in the budget."""
        known: dict[str, Any] = folder.plan.get("models", {})
        known = {"": known} if self.flat else known
        contestants = list(dict.fromkeys([*(name for models in known.values() for name in models), *mixers]))
        jobs: list[Job] = []
        models: dict[str, Any] = {}
        for key, setting in self.settings().items():
            matched = self.match(setting, contestants)
            models[key] = {name: {"inner": m.inner, "size": m.mixer.size} for name, m in matched.items()}
            changed = [name for name, model in known.get(key, {}).items() if model != models[key][name]]
            if changed and self.numbers().items() <= folder.plan.items():
                raise ValueError(
                    f"with {', '.join(mixers)} the largest model{f' on {key}' if key else ''} is larger than before, so "
                    f"{', '.join(changed)} would have to be trained again to match it; run all of them in another folder than "
                    f"{folder.path}"
                )
            for seed in range(seeds):
                for name in mixers:
                    jobs += self.jobs(setting, name, matched[name], seed)
        folder.begin({**self.numbers(), "models": models[""] if self.flat else models, "own": own.adopt(mixers)})
        return jobs


def each_once(name: str, values: Sequence[str]) -> None:
    if not values or len(set(values)) < len(values):
        raise ValueError(f"{name} ({', '.join(values)}) must be at least one, each named once")
