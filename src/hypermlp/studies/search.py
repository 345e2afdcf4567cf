"""The search before the runs that count: which learning rate and initial scale a mixer gets on a setting.

Each scale has its own search of rates; the best of all is chosen. Another allocation of a mixer's ranks may be searched, too,
but not in a protocol that is fair: it would give more runs to the mixers that have ranks to allocate.

Successive halving: all rates of the grid train for the first rung, a share of the steps; the best ones continue to the next,
and the best of the last rung is chosen. A best rate at the end of the grid adds one beyond it. Scores are losses on the
validation split, with data and weights of seeds that no other run has; the test set is not looked at.

What to do next follows from the records alone (`settle`), so a search that was stopped needs nothing but its folder, and the
page shows it by the same function.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from statistics import fmean
from typing import Any, NamedTuple, get_args

from hypermlp.checks import choose_from
from hypermlp.config import InitScale
from hypermlp.files import Record
from hypermlp.mixers.labels import shares_ranks
from hypermlp.models.lm import count_parameters
from hypermlp.studies.worker import Job, Paused, RunContext, Work

PHASE = "search"  # of records; those of the chosen settings say FINAL
FINAL = "final"
FIRST_SEED = 10_000  # of the search; other runs count from 0


@dataclass(frozen=True, kw_only=True)
class Search:
    """How learning rates and initial scales are chosen, for each mixer and setting on its own.

    Args:
        rates: the grid, rising.
        rungs: shares of the steps at which runs are compared, rising to 1.
        keep: share of the runs that continue after a rung, rounded up; so do those that are level with the last of them.
        seeds: runs of each rate; their mean decides.
        widen: how many rates may be added beyond the ends of the grid, one after the other.
        level: losses that differ by less than this share of themselves are level: they are told as ties. With 0 exactly as many
            continue as `keep` says.
        ranks: of temporal mixing, tried besides the published one at equal parameters, each with a search of its own, where
            mixing and the width of q and k share a budget (mixers/labels.py: NAME@RANK).
        scales: initial ones of linear layers' weights (config.InitScale), each tried with all rates; none: the study's own.
    """

    rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3, 8e-3)
    rungs: tuple[float, ...] = (0.25, 1.0)
    keep: float = 0.5
    seeds: int = 1
    widen: int = 2
    level: float = 0.01
    ranks: tuple[int, ...] = ()
    scales: tuple[InitScale, ...] = ()

    def __post_init__(self) -> None:
        if not rising(self.rates) or self.rates[0] <= 0:
            raise ValueError(f"learning rates to search {self.rates} must be above 0 and rise")
        if len(self.rates) < 2 and self.widen:
            raise ValueError(f"a grid of one rate {self.rates} has no step to widen it by; give two, or widen=0")
        if not rising(self.rungs) or self.rungs[0] <= 0 or self.rungs[-1] != 1:
            raise ValueError(f"rungs {self.rungs} must be shares of the steps that rise to 1, such as (0.25, 1.0)")
        if len(set(self.scales)) < len(self.scales):
            raise ValueError(f"initial scales to search {self.scales} must be named once each")
        for scale in self.scales:
            choose_from("initial scale", scale, get_args(InitScale))
        if not 0 < self.keep <= 1 or self.level < 0 or self.seeds < 1 or self.widen < 0:
            raise ValueError(
                f"keep ({self.keep}) must be above 0 and at most 1, level ({self.level}) and widen ({self.widen}) at least 0, "
                f"seeds ({self.seeds}) at least 1"
            )

    @classmethod
    def from_plan(cls, values: Mapping[str, Any]) -> Search:
        """What `to_plan` gave, read from a plan or a protocol."""
        numbers: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in values.items()}
        try:
            return cls(**numbers)
        except TypeError as error:
            raise ValueError(f"a search has the numbers {', '.join(cls.__dataclass_fields__)}: {error}") from None

    def to_plan(self) -> dict[str, Any]:
        """Plain data; without scales where there are none, as in plans from before they were searched."""
        numbers = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        return {name: value for name, value in numbers.items() if name != "scales" or value}

    @property
    def unequal(self) -> list[str]:
        """Why mixers may not have equal numbers of runs in this search, as what is to be changed."""
        wanted = {"ranks": (), "widen": 0, "level": 0}
        return [name for name, value in wanted.items() if getattr(self, name) != value]

    @property
    def own_seeds(self) -> range:
        return range(FIRST_SEED, FIRST_SEED + self.seeds)

    def variants(self, mixer: str) -> list[str]:
        """The mixer, and its other allocations of ranks."""
        return [mixer, *(f"{mixer}@{rank}" for rank in self.ranks if shares_ranks(mixer))]

    def base(self, variant: str) -> str:
        """The mixer that a variant stands for."""
        mixer, _, rank = variant.partition("@")
        return mixer if rank in map(str, self.ranks) else variant

    def level_with(self, loss: float) -> float:
        """The highest loss that is level with this one."""
        return loss + self.level * abs(loss) if math.isfinite(loss) else loss

    @property
    def runs(self) -> float:
        """How many whole runs the search of a mixer on a setting costs, without widening and ties."""
        left, cost, before = len(self.rates), 0.0, 0.0
        for rung in self.rungs:
            cost += left * (rung - before)
            left, before = math.ceil(self.keep * left), rung
        return self.seeds * cost * max(1, len(self.scales))


def choose_search(rates: Sequence[float] | None = None) -> Search:
    """The usual search, of these rates if they are given."""
    return Search(rates=tuple(sorted(rates))) if rates else Search()


def rising(values: Sequence[float]) -> bool:
    return bool(values) and all(a < b for a, b in pairwise(values))


# ---- from scores to what is next ----

Scores = Mapping[tuple[float, float], float]  # (rate, rung) → mean loss of all seeds; infinite for runs without one


@dataclass(frozen=True)
class Outcome:
    """What a search has found so far, for one mixer on one setting."""

    missing: tuple[tuple[float, float], ...]  # (rate, rung) to run next; none: it is finished
    scores: Scores
    rate: float | None = None  # the chosen one
    ties: tuple[float, ...] = ()  # rates that are level with it
    end: str = ""  # "lowest" or "highest": the chosen rate is still the last one tried on that side
    widened: int = 0  # rates added to the grid

    @property
    def rates(self) -> list[float]:
        return sorted({rate for rate, _ in self.scores})

    def reached(self, rate: float) -> float:
        """The last rung that a rate was scored at."""
        return max(rung for own, rung in self.scores if own == rate)


def settle(search: Search, scores: Scores) -> Outcome:
    """Follow the halving through the scores there are, up to the choice or to the first rung that lacks some."""
    field, cuts = list(search.rates), {}
    for rung in search.rungs:
        if missing := [(rate, rung) for rate in field if (rate, rung) not in scores]:
            return Outcome(tuple(missing), scores)
        cuts[rung] = cut(search, [scores[rate, rung] for rate in field])
        if rung < 1:
            field = continuing(search, field, cuts[rung], {rate: scores[rate, rung] for rate in field})
    tried, added = list(search.rates), 0
    while added < search.widen and (beyond := neighbour(best(field, scores), tried)) is not None:
        tried, added = sorted([*tried, beyond]), added + 1
        for rung in search.rungs:
            if (beyond, rung) not in scores:
                return Outcome(((beyond, rung),), scores, widened=added)
            if rung == 1:
                field.append(beyond)
            elif scores[beyond, rung] > cuts[rung]:
                break
    chosen = best(field, scores)
    bound = search.level_with(scores[chosen, 1.0])
    ties = tuple(sorted(rate for rate in field if rate != chosen and scores[rate, 1.0] <= bound))
    end = {tried[0]: "lowest", tried[-1]: "highest"}.get(chosen, "") if len(tried) > 1 else ""
    return Outcome((), scores, chosen, ties, end, added)


def cut(search: Search, losses: Sequence[float]) -> float:
    """The highest loss with which a run continues."""
    return search.level_with(sorted(losses)[math.ceil(search.keep * len(losses)) - 1])


def continuing(search: Search, field: Sequence[float], bound: float, losses: Mapping[float, float]) -> list[float]:
    """Those that go on after a rung, in their order."""
    if search.level:
        return [rate for rate in field if losses[rate] <= bound]
    kept = sorted(field, key=lambda rate: (losses[rate], rate))[: math.ceil(search.keep * len(field))]
    return [rate for rate in field if rate in kept]


def best(rates: Iterable[float], scores: Scores) -> float:
    """The rate with the lowest loss of a whole run; of equal ones the lowest."""
    return min(sorted(rates), key=lambda rate: scores[rate, 1.0])


def neighbour(rate: float, tried: Sequence[float]) -> float | None:
    """The rate beyond the end of the grid, where `rate` is that end, at the distance of the last two."""
    if rate == tried[-1]:
        return float(f"{rate * rate / tried[-2]:.3g}")
    return float(f"{rate * rate / tried[1]:.3g}") if rate == tried[0] else None


def is_failed_trial(record: Record) -> bool:
    """An accident, not a loss that grew beyond bounds."""
    return record.get("phase") == PHASE and record["error"] is not None


class Place(NamedTuple):
    """What a search of rates is for."""

    mixer: str
    setting: str  # "" where there is only one
    scale: InitScale = "0.02"


Where = tuple[str, str]  # mixer, setting


def place_of(record: Record) -> Place:
    return Place(*where(record), scale_of(record))


def scale_of(record: Record) -> InitScale:
    """The initial scale of a run; records from before it was a choice do not say it."""
    found: InitScale = record.get("init_scale", "0.02")
    return found


def where(record: Record) -> Where:
    return record["mixer"], record.get("setting", "")


def read_search(search: Search, records: Iterable[Record]) -> dict[Place, Outcome]:
    """The search of every mixer and setting that has records of one."""
    found: dict[Place, dict[tuple[float, float], dict[int, float]]] = {}
    for record in records:
        if record.get("phase") == PHASE:
            score = record.get("score") if record["error"] is None else None
            by_seed = found.setdefault(place_of(record), {}).setdefault((record["lr"], record["rung"]), {})
            by_seed[record["seed"]] = math.inf if score is None else score
    return {place: settle(search, whole(search, scores)) for place, scores in found.items()}


def whole(search: Search, scores: Mapping[tuple[float, float], Mapping[int, float]]) -> dict[tuple[float, float], float]:
    """The means of those that all seeds of the search have."""
    seeds = set(search.own_seeds)
    return {place: fmean(by_seed[s] for s in seeds) for place, by_seed in scores.items() if seeds <= by_seed.keys()}


class Tuned(NamedTuple):
    variant: str
    rate: float
    scale: InitScale = "0.02"


Choices = dict[Where, Tuned]


def choose(search: Search, found: Mapping[Place, Outcome]) -> Choices:
    """Mixer and setting → the best of its variants and scales, each at its best rate; those whose searches are finished."""
    groups: dict[Where, dict[tuple[str, InitScale], Outcome]] = {}
    for (variant, setting, scale), outcome in found.items():
        groups.setdefault((search.base(variant), setting), {})[variant, scale] = outcome
    chosen = {}
    for place, tried in groups.items():
        scores = {
            Tuned(name, own.rate, scale): own.scores[own.rate, 1.0]
            for (name, scale), own in tried.items()
            if own.rate is not None
        }
        # Records may be of a mixer that is no longer registered.
        scales = search.scales or [scale for _, scale in tried]
        wanted = {*product(search.variants(place[0]), scales), *tried}
        if len(scores) == len(wanted):
            chosen[place] = min(scores, key=lambda choice: scores[choice])
    return chosen


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A job of the study as the search chose it; its record is that of the mixer, whichever variant it is."""

    job: Any
    work: Work
    mixer: str
    variant: str

    @property
    def key(self) -> str:
        return str(self.job.key)

    @property
    def identity(self) -> Record:
        own = {} if self.variant == self.mixer else {"variant": self.variant}
        return {**self.job.identity, "mixer": self.mixer, **own, "phase": FINAL}

    @property
    def cost(self) -> float:
        return float(self.job.cost)


# ---- a run of the search ----


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A job of the study up to a rung; where it was left at the rung before, it continues."""

    job: Any
    work: Work  # of the study
    measure: str  # of the curve: what is compared
    rate: float
    rung: float

    @property
    def run(self) -> str:
        """What all rungs have in common: the key of the checkpoint."""
        return f"{PHASE}/{self.job.key}/lr={self.rate:g}"

    @property
    def key(self) -> str:
        return f"{self.run}/rung={self.rung:g}"

    @property
    def pauses(self) -> bool:
        """Whether the checkpoint is kept."""
        return self.rung < 1

    @property
    def identity(self) -> Record:
        return {**self.job.identity, "lr": self.rate, "rung": self.rung, "phase": PHASE}

    @property
    def cost(self) -> float:
        job: Job = self.job
        return job.cost * self.rung


def train(job: Trial | Chosen, context: RunContext) -> Record:
    """The work of a study that searches."""
    return try_out(job, context) if isinstance(job, Trial) else job.work(job.job, context)


def try_out(trial: Trial, context: RunContext) -> Record:
    """Train up to the rung; the record has the loss there, on the validation split."""
    context.until = trial.rung
    try:
        trial.work(trial.job, context)
    except Paused as paused:
        run = paused.run
        return {
            "parameters": count_parameters(run.model),
            "score": None if run.blew_up else run.curve[-1][trial.measure],
            "step": run.step,
            "stopped": run.stopped,
            "curve": run.curve,
            "seconds": run.seconds,
        }
    raise AssertionError("the work of a study that is searched must train with run_to_the_end")
