"""A study: mixers × settings × seeds, small models of equal parameters, all trained and scored in the same way.

A kind of study (mad.py, language.py) is a frozen dataclass of every number that its runs have in common; it says what the
settings are, how models are matched, and which jobs there are. This module does the rest.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import groupby, product
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self, get_args

from hypermlp.checks import choose_from
from hypermlp.config import Init, InitScale
from hypermlp.files import Record, delete
from hypermlp.mixers import build_mixer, hybrid, is_known, own
from hypermlp.models.budget import MatchedModel
from hypermlp.studies import engine, search
from hypermlp.studies.engine import Progress
from hypermlp.studies.executors import Executor
from hypermlp.studies.folder import Folder
from hypermlp.studies.search import (
    Choices,
    Chosen,
    Outcome,
    Place,
    Search,
    Trial,
    Tuned,
    Where,
    choose,
    is_failed_trial,
    place_of,
    read_search,
    settle,
)
from hypermlp.studies.worker import Job, Work
from hypermlp.train.optimisation import Precision

# Tables of a plan that may get more entries, by task, mixer or file, and how deep below them. A new entry in the changes of a
# task would be another task of the same name.
GROWS = {"steps": 1, "changes": 1, "given": 2, "models": 2, "own": 1, "sources": 1}


class Pairing(NamedTuple):
    """One mixer on one setting."""

    key: str  # of the setting
    setting: Any
    mixer: str
    model: MatchedModel


@dataclass(frozen=True, kw_only=True)
class Study(ABC):
    """What the runs of a study have in common."""

    precision: Precision = "float32"
    depth: int  # layers of the models
    init: Init = "paper"  # how convolutions and lag factors begin, in every mixer that has them (docs/layer.md)
    init_scale: InitScale = "0.02"  # of the weights of linear layers in every mixer; a search may choose it
    search: Search | None = None  # how each mixer's learning rate is chosen on each setting; None: it is given
    given: dict[str, Any] | None = dataclasses.field(default=None, hash=False)  # mixer → its rate, or task → its rate

    kind: ClassVar[str]  # of the plan and its records
    measure: ClassVar[str] = "loss"  # of a run's curve: the validation loss, by which a search chooses
    rate_field: ClassVar[str]  # what says the learning rates that a search replaces
    flat: ClassVar[bool] = False  # there is one setting, which the plan's models are not filed under
    chosen: ClassVar[tuple[str, ...]] = ()  # fields that say which runs to do, not how
    # Fields that older plans lack: written unless they have their default, which a plan without them means.
    added_later: ClassVar[tuple[str, ...]] = ("precision", "init", "init_scale", "search", "given")

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

    @abstractmethod
    def at(self, rate: float, scale: InitScale) -> Self:
        """The same study with this learning rate and this initial scale alone."""

    @abstractmethod
    def shape(self, setting: Any) -> tuple[int, int]:
        """The width of the models, and their longest context."""

    def seeds_of(self, key: str, seeds: int) -> int:
        """How many runs of a mixer count on a setting."""
        return seeds

    def is_searched(self, key: str) -> bool:
        """Whether a search chooses the rates of a setting; else they follow from those of others (`transfer`)."""
        return True

    def transfer(self, choices: Mapping[Where, Tuned], found: Mapping[Place, Outcome], pairings: Sequence[Pairing]) -> Choices:
        """The choices of the search, and what follows from them for settings that are not searched."""
        return dict(choices)

    def rate_tests(self, choices: Mapping[Where, Tuned], pairings: Sequence[Pairing]) -> list[Job]:
        """Runs that test what was transferred."""
        return []

    def planned_runs(self, pairing: Pairing, mixers: Sequence[str], seeds: int, each: int) -> float:
        """How many whole runs a mixer takes on a setting, where each seed has `each`; its search without widening and ties."""
        own = self.seeds_of(pairing.key, seeds)
        if self.search is None or not self.is_searched(pairing.key):
            return float(own * each)
        return self.search.runs + (own if pairing.mixer in mixers else 0)  # other allocations of ranks are only searched

    def check(self, mixers: Sequence[str], seeds: int) -> None:
        """Bad names fail before anything starts."""
        each_once("mixers", mixers)
        if seeds < 1:
            raise ValueError(f"seeds ({seeds}) must be at least 1")
        choose_from("init", self.init, get_args(Init))
        choose_from("init_scale", self.init_scale, get_args(InitScale))
        own.adopt(mixers)
        for mixer in mixers:
            for one, _ in hybrid.layers(mixer, self.depth):
                build_mixer(one, 64, 64)

    def numbers(self) -> dict[str, Any]:
        """The plan as JSON gives it back."""
        values: dict[str, Any] = {"study": self.kind}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            decided = (self.search is not None or self.given is not None) and field.name == self.rate_field
            if decided or field.name in self.chosen or (field.name in self.added_later and value == field.default):
                continue
            value = value.to_plan() if isinstance(value, Search) else value
            values[field.name] = list(value) if isinstance(value, tuple) else value
        return values

    @property
    def absent(self) -> dict[str, Any]:
        """What a plan means that does not say it."""
        return {
            "own": {},
            **{field.name: field.default for field in dataclasses.fields(self) if field.name in self.added_later},
        }

    def run(
        self,
        out: Path,
        mixers: Sequence[str],
        *,
        seeds: int = 1,
        executor: Executor | None = None,
        retry_failed: bool = False,
        checkpoint_seconds: float = 60.0,
        marks: Mapping[str, Any] = MappingProxyType({}),
        tell: Callable[[Progress], None] = lambda progress: None,
        done: Callable[[Record], None] = lambda record: None,
    ) -> list[Record]:
        """Run what is missing in `out`, and return the records of all that was asked for (engine.py: run).

        With a search its runs come first; the records are those of the settings that it chose.
        marks: what every record says besides.
        """
        self.check(mixers, seeds)
        with Folder(out) as folder:
            pairings = self.plan_pairings(folder, mixers)
            run = partial(engine.run, folder, executor=executor, checkpoint_seconds=checkpoint_seconds, tell=tell, done=done)
            run = partial(run, retry_failed=retry_failed, marks=marks)
            if self.search is None:
                return run(self.list_jobs(pairings, seeds), self.work)
            agenda = Agenda(self, folder, pairings, seeds)
            if retry_failed:
                agenda.forget_failures()
            run(agenda.ready(), search.train, follow=agenda.follow)
            return [folder.records[job.key] for job in agenda.finals()]

    def next_trials(self, pairings: Sequence[Pairing], records: Collection[Record]) -> list[Trial]:
        """The runs that the search needs next, by setting and seed; none when all pairings are decided."""
        assert self.search is not None
        found, trials = read_search(self.search, records), []
        for seed in self.search.own_seeds:
            searched = [pairing for pairing in pairings if self.is_searched(pairing.key)]
            for pairing, scale in product(searched, self.search.scales or (self.init_scale,)):
                outcome = found.get(Place(pairing.mixer, pairing.key, scale)) or settle(self.search, {})
                trials += [self.trial(pairing, seed, scale, rate, rung) for rate, rung in outcome.missing]
        have = {record["key"] for record in records}
        return [trial for trial in trials if trial.key not in have]

    def trial(self, pairing: Pairing, seed: int, scale: InitScale, rate: float, rung: float) -> Trial:
        (job,) = self.at(rate, scale).jobs(pairing.setting, pairing.mixer, pairing.model, seed)
        return Trial(job=job, work=self.work, measure=self.measure, rate=rate, rung=rung)

    def plan_jobs(self, folder: Folder, mixers: Sequence[str], seeds: int) -> list[Job]:
        """Write the plan into the folder, and list its runs, of a study without a search."""
        return self.list_jobs(self.plan_pairings(folder, mixers), seeds)

    def list_jobs(self, pairings: Sequence[Pairing], seeds: int) -> list[Job]:
        """The runs of a study without a search, by setting and seed."""
        return [
            job
            for key, own in groupby(pairings, key=lambda pairing: pairing.key)
            for seed, pairing in product(range(self.seeds_of(key, seeds)), list(own))
            for job in self.jobs(pairing.setting, pairing.mixer, pairing.model, seed)
        ]

    def chosen_jobs(self, pairings: Sequence[Pairing], seeds: int, choices: Mapping[Where, Tuned]) -> list[Job]:
        """The runs that count after a search, by setting and seed."""
        found: list[Job] = []
        places = {(pairing.mixer, pairing.key): pairing for pairing in pairings}
        for key in dict.fromkeys(pairing.key for pairing in pairings):
            own = [(mixer, choice) for (mixer, setting), choice in choices.items() if setting == key]
            for seed, (mixer, (variant, rate, scale)) in product(range(self.seeds_of(key, seeds)), own):
                if (pairing := places.get((variant, key))) is not None:
                    (job,) = self.at(rate, scale).jobs(pairing.setting, variant, pairing.model, seed)
                    found.append(Chosen(job=job, work=self.work, mixer=mixer, variant=variant))
        return found

    def plan_pairings(self, folder: Folder, mixers: Sequence[str]) -> list[Pairing]:
        """Write the plan into the folder, and match the models. Mixers that came before take part in the budget.

        Those that are gone (removed, or somebody's own code that is not named now) cannot; what they and the others have done
        stays as it is.
        """
        known: dict[str, Any] = folder.plan.get("models", {})
        known = {"": known} if self.flat else known
        mixers = mixers if self.search is None else [name for mixer in mixers for name in self.search.variants(mixer)]
        before = dict.fromkeys(name for models in known.values() for name in models)
        there = [name for name in before if is_known(name)]
        everyone = list(dict.fromkeys([*there, *mixers]))
        pairings: list[Pairing] = []
        models: dict[str, Any] = {}
        for key, setting in self.settings().items():
            matched, old = self.match(setting, everyone), known.get(key, {})
            if len(there) < len(before) and all(name in old for name in mixers):  # who is gone may have been the largest
                matched |= {
                    name: dataclasses.replace(matched[name], inner=old[name]["inner"]) for name in old if name in matched
                }
            models[key] = {name: {"inner": m.inner, "size": as_read(m.mixer.size)} for name, m in matched.items()}
            changed = [name for name, model in old.items() if name in matched and model != models[key][name]]
            if changed and self.numbers().items() <= folder.plan.items():
                raise ValueError(
                    f"with {', '.join(mixers)} the largest model{f' on {key}' if key else ''} has changed, so "
                    f"{', '.join(changed)} would have to be trained again to match it; use another folder than {folder.path}"
                )
            pairings += [Pairing(key, setting, name, matched[name]) for name in mixers]
        plan = {**self.numbers(), "models": models[""] if self.flat else models, "own": own.adopt(mixers)}
        folder.begin(plan, grows=GROWS, **self.absent)
        return pairings


class Agenda:
    """What a study that searches has to do next: trials of mixers that are not decided, and the runs of those that are."""

    def __init__(self, study: Study, folder: Folder, pairings: Sequence[Pairing], seeds: int) -> None:
        assert study.search is not None
        self.study, self.rules, self.folder, self.pairings, self.seeds = study, study.search, folder, pairings, seeds
        self.asked: set[str] = set()
        self.tried_again: set[str] = set()

    def finals(self, mixer: str | None = None) -> list[Job]:
        """The runs that count, of the searches that are finished; of one mixer, or of all."""
        pairings = self.pairings_of(mixer)
        found = read_search(self.rules, self.records_of(mixer))
        choices = self.study.transfer(choose(self.rules, found), found, pairings)
        return [*self.study.chosen_jobs(pairings, self.seeds, choices), *self.study.rate_tests(choices, pairings)]

    def ready(self, mixer: str | None = None) -> list[Job]:
        """All that can be done now and was not asked for before; what is decided comes first, so that settings end in turn.

        mixer: the one whose records are new; no other's search has moved.
        """
        trials = self.study.next_trials(self.pairings_of(mixer), self.records_of(mixer))
        found: list[Job] = [job for job in (*self.finals(mixer), *trials) if job.key not in self.asked]
        self.asked |= {job.key for job in found}
        return found

    def pairings_of(self, mixer: str | None) -> list[Pairing]:
        """Those of a mixer with its other allocations of ranks, or all."""
        return [one for one in self.pairings if mixer in (None, self.rules.base(one.mixer))]

    def records_of(self, mixer: str | None) -> list[Record]:
        return [record for record in self.folder.records.values() if mixer in (None, self.rules.base(record["mixer"]))]

    def follow(self, record: Record) -> list[Job]:
        """What a new record leads to. A trial that failed is run once more, so that a killed worker decides nothing."""
        key = record["key"]
        if is_failed_trial(record) and key not in self.tried_again:
            self.tried_again.add(key)
            self.asked.remove(key)
            del self.folder.records[key]
        elif "rung" in record:
            self.clear(record)
        return self.ready(self.rules.base(record["mixer"]))

    def clear(self, record: Record) -> None:
        """Where this was the last trial of its rung, delete what those that do not go on have saved."""
        records, place = self.folder.records.values(), place_of(record)
        outcome = read_search(self.rules, (own for own in records if place_of(own) == place))[place]
        pairing = next(one for one in self.pairings if (one.mixer, one.key) == (place.mixer, place.setting))
        if all(rung != record["rung"] for _, rung in outcome.missing):
            ended = set(outcome.rates) - {rate for rate, _ in outcome.missing}
            for rate, seed in product(ended, self.rules.own_seeds):
                delete(self.folder.checkpoint(self.study.trial(pairing, seed, place.scale, rate, 1.0).run))

    def forget_failures(self) -> None:
        for key in [key for key, record in self.folder.records.items() if is_failed_trial(record)]:
            del self.folder.records[key]


def check_given(search: Search | None, needed: Set[Any], found: Set[Any], rates: Iterable[float]) -> None:
    """Learning rates that are given are there for every run, above 0, and not searched."""
    if search is not None:
        raise ValueError("given and search both set the learning rates: leave out one of them")
    if missing := sorted(needed - found):
        raise ValueError(f"given lacks a learning rate for {', '.join(map(str, missing))}")
    if other := sorted(found - needed):
        raise ValueError(f"given has a learning rate for {', '.join(map(str, other))}, which no run needs")
    if not all(rate > 0 for rate in rates):
        raise ValueError("learning rates that are given must be above 0")


def as_read(size: hybrid.Size) -> int | list[int | None] | None:
    """A size as JSON gives it back."""
    return list(size) if isinstance(size, tuple) else size


def each_once(name: str, values: Sequence[str]) -> None:
    if not values or len(set(values)) < len(values):
        raise ValueError(f"{name} ({', '.join(values)}) must be at least one, each named once")
