"""What a study will cost: a few steps and one evaluation of every mixer on every setting, and what they add up to."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from hypermlp.studies.folder import Folder
from hypermlp.studies.study import Study
from hypermlp.studies.worker import Paused, RunContext, State

STEPS = 6  # that are timed, after two


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

    def tick(self, step: int, steps: int, metrics: dict[str, float], state: Callable[[], State]) -> None:
        self.times.append(time.process_time())

    def save(self, step: int, tensors: Any, progress: Any) -> None:
        pass


def measure_costs(study: Study, mixers: Sequence[str], seeds: int) -> Iterator[StudyCost]:
    """Measured here, one thread, one after the other; a search is taken without widening and ties."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as out, Folder(Path(out)) as folder:
        for pairing in study.plan_pairings(folder, mixers):
            job, *others = study.jobs(pairing.setting, pairing.mixer, pairing.model, seed=0)
            context = Clock(folder.checkpoint(job.key))
            context.until = 1e-9  # one step
            try:
                study.work(job, context)
            except Paused as paused:
                run = paused.run
            for _ in range(STEPS + 2):
                run.advance()
                context.tick(run.step, run.steps, {}, run.state)
            begin = time.process_time()
            run.scores(run.evaluate)
            look = time.process_time() - begin
            times = [b - a for a, b in zip(context.times[1:], context.times[2:], strict=False)]
            looks = math.ceil(run.steps / run.evaluate_every)
            runs = study.planned_runs(pairing, mixers, seeds, 1 + len(others))
            yield StudyCost(pairing.mixer, pairing.key, run.steps, median(times), look, looks, runs)
