"""What a study will cost: a few steps and one evaluation of every mixer on every setting, and what they add up to."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from hypermlp.mixers import lora
from hypermlp.studies import mad
from hypermlp.studies.folder import Folder
from hypermlp.studies.language import LanguageJob
from hypermlp.studies.mad import TaskJob
from hypermlp.studies.study import Pairing, Study
from hypermlp.studies.worker import Paused, RunContext, State
from hypermlp.tasks.mad_settings import MADSetting

STEPS = 4  # that are timed, after two
ROWS = 64  # an evaluation is timed on this many, where there are more


@dataclass(frozen=True)
class StudyCost:
    """One mixer on one setting; seconds of a core."""

    mixer: str
    setting: str
    steps: int
    per_step: float
    per_look: float  # an evaluation
    looks: int
    runs: float  # whole ones: seeds, and what the search adds
    base: bool = False  # a training that comes before, whose weights others adapt

    @property
    def seconds(self) -> float:
        return self.runs * (self.steps * self.per_step + self.looks * self.per_look)


class Silence:
    """A pipe that nobody listens to."""

    def send(self, message: Any) -> None: ...
    def recv(self) -> Any: ...
    def poll(self) -> bool:
        return False


class Clock(RunContext):
    """Lets a run train for a few steps, and keeps the processor time after each."""

    def __init__(self, folder: Path) -> None:
        super().__init__(Silence(), folder, math.inf)
        self.times: list[float] = []
        self.until = 1e-9  # one step

    def tick(self, step: int, steps: int, metrics: dict[str, float], state: Callable[[], State]) -> None:
        self.times.append(time.process_time())

    def save(self, step: int, tensors: Any, progress: Any) -> None:
        pass


def measure_costs(
    study: Study, mixers: Sequence[str], seeds: int, tell: Callable[[str], None] = lambda what: None
) -> Iterator[StudyCost]:
    """Measured here, one thread, one after the other; a search is taken without widening and ties.

    tell: is called with what is measured next.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as out, Folder(Path(out)) as folder:
        pairings = study.plan_pairings(folder, mixers)
        for number, pairing in enumerate(pairings, 1):
            tell(f"{pairing.mixer}{f' on {pairing.key}' if pairing.key else ''}, {number} of {len(pairings)}")
            job, *others = study.jobs(pairing.setting, pairing.mixer, pairing.model, seed=0)
            if isinstance(job, TaskJob) and job.study.pretrain is not None:
                family = adapting(pairing, pairings)
                if pairing is family[0]:
                    own = study.seeds_of(pairing.key, seeds)
                    trained = own if study.search is None else own * len(family) + study.search.seeds
                    base = mad.base_of(job)
                    cost, run = measure(study, base, folder, base.mixer, pairing.key, trained, base=True)
                    mad.BASES[repr(base)] = run.model.state_dict()  # few steps serve to time those who adapt it
                    yield cost
            runs = study.planned_runs(pairing, mixers, seeds, 1 + len(others))
            yield measure(study, job, folder, pairing.mixer, pairing.key, runs)[0]
        mad.BASES.clear()


def measure(
    study: Study, job: Any, folder: Folder, mixer: str, key: str, runs: float, base: bool = False
) -> tuple[StudyCost, Any]:
    """Time a few steps of a run, and the evaluation after the first; also the run, as far as it got."""
    small, share = shortened(job)
    context = Clock(folder.checkpoint(job.key))
    try:
        study.work(small, context)
    except Paused as paused:
        run, look = paused.run, time.process_time() - context.times[-1]
    for _ in range(STEPS + 1):
        run.advance()
        context.tick(run.step, run.steps, {}, run.state)
    times = [b - a for a, b in zip(context.times[1:], context.times[2:], strict=False)]
    steps, every = (job.recipe.steps, job.evaluate_every) if isinstance(job, TaskJob) else (run.steps, run.evaluate_every)
    return StudyCost(mixer, key, steps, median(times), look / share, math.ceil(steps / every), runs, base), run


def shortened(job: Any) -> tuple[Any, float]:
    """The same run with less data, which takes long to make, and its share of the rows that an evaluation looks at."""
    if isinstance(job, TaskJob) and isinstance(old := job.setting, MADSetting):
        train, test = min(old.num_train, (STEPS + 2) * job.study.batch), min(old.num_test, ROWS)
        return replace(job, setting=replace(old, num_train=train, num_test=test)), test / old.num_test
    if isinstance(job, LanguageJob) and (all_of_it := job.study.sample) > 2:
        return replace(job, study=replace(job.study, sample=2)), 2 / all_of_it
    return job, 1.0


def adapting(pairing: Pairing, pairings: Sequence[Pairing]) -> list[Pairing]:
    """All that adapt the same model; each trains it anew for its seeds, because a search decides when it gets there."""
    base = lora.split(pairing.mixer)[0]
    return [one for one in pairings if (one.key, lora.split(one.mixer)[0]) == (pairing.key, base)]
