"""Runs the jobs of a study in its folder: hands them to workers, writes down what they report, stops and resumes.

Neither the number of workers nor their kind (executors.py) nor the order of the jobs changes a record. Started again, the same
study skips what is finished and continues what is not.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from hypermlp import notice
from hypermlp.errors import RunError
from hypermlp.files import Record, delete
from hypermlp.interrupts import stop_signals
from hypermlp.studies.executors import Executor, LocalPool, Message, WorkerLink
from hypermlp.studies.folder import Folder
from hypermlp.studies.worker import Job, Work, checkpoint_key

MEASURED = 5.0  # seconds of work from which the time left is estimated
PATIENCE = 30.0  # seconds that workers have to save where they are when the study stops
STARTS = 4  # workers in a row that may die before they are ready


@dataclass
class Running:
    job: Job
    step: int = 0
    steps: int = 0  # 0 as long as the run has not said
    metrics: dict[str, float] = field(default_factory=dict)

    def share(self, steps: int) -> float:
        """What so many steps cost."""
        return self.job.cost * steps / self.steps if self.steps else 0.0


@dataclass(frozen=True)
class Progress:
    total: int
    finished: tuple[Record, ...]  # with the failed ones, and those of earlier starts
    running: tuple[Running, ...]
    seconds_left: float | None  # None until a speed was measured
    stopping: bool = False  # by Ctrl-C or SIGTERM; workers are saving
    phase: str = ""  # that the study is in, where it has several

    @property
    def failed(self) -> int:
        return sum(record["error"] is not None for record in self.finished)


@dataclass
class Worker:
    """A worker and the run it is at."""

    link: WorkerLink
    ready: bool = False
    dismissed: bool = False
    run: Running | None = None

    def take(self, job: Job | None) -> None:
        self.dismissed = job is None
        self.run = self.run if job is None else Running(job)
        self.link.send(job)


def run(
    folder: Folder,
    jobs: Sequence[Job],
    work: Work,
    *,
    executor: Executor | None = None,
    retry_failed: bool = False,
    checkpoint_seconds: float = 60.0,
    marks: Mapping[str, Any] = MappingProxyType({}),
    follow: Callable[[Record], Sequence[Job]] | None = None,
    tell: Callable[[Progress], None] = lambda progress: None,
    done: Callable[[Record], None] = lambda record: None,
) -> list[Record]:
    """Do all `jobs` that folder.records does not hold, and those that follow from their records; the records of `jobs`.

    Args:
        folder: entered with `with`.
        jobs: each with a key of its own.
        work: a function of a module, called as work(job, context) in a worker; what it returns becomes the record.
        executor: where the workers run; by default a process per core or GPU of this machine.
        retry_failed: run again what has failed before.
        checkpoint_seconds: how often an unfinished run is saved.
        marks: what every record of these jobs says besides.
        follow: called with every new record; the jobs that it leads to, which come before all others. Workers wait for those
            as long as runs are at work.
        tell: called a few times a second with the state of things.
        done: called with the record of every run that ends.
    """
    engine = Engine(folder, jobs, work, executor or LocalPool(), retry_failed, checkpoint_seconds, marks, follow, done)
    with stop_signals("stopping, saving the runs at work …; once more: stop at once") as signals:
        try:
            while engine.todo or engine.workers:
                engine.turn(stop=len(signals) > 0)
                tell(engine.progress())
                if len(signals) > 1 or engine.overdue():
                    break
        finally:
            for worker in engine.workers:
                worker.link.kill()
        if engine.failure is not None:
            raise engine.failure
        if signals:
            finished = sum(key in folder.records for key in engine.jobs)
            raise KeyboardInterrupt(f"{finished} of {len(engine.jobs)} runs are finished; the same command resumes the others")
    return [folder.records[job.key] for job in jobs]


class Engine:
    """One call of run()."""

    def __init__(
        self,
        folder: Folder,
        jobs: Sequence[Job],
        work: Work,
        executor: Executor,
        retry_failed: bool,
        every: float,
        marks: Mapping[str, Any],
        follow: Callable[[Record], Sequence[Job]] | None,
        done: Callable[[Record], None],
    ) -> None:
        for key, count in Counter(job.key for job in jobs).items():
            if count > 1:
                raise ValueError(f"{count} jobs have the key {key!r}; each needs its own")
        self.folder, self.work, self.executor, self.retry_failed, self.every = folder, work, executor, retry_failed, every
        self.marks, self.follow, self.done = marks, follow, done
        self.jobs: dict[str, Job] = {}
        self.todo: deque[Job] = deque()
        self.add(jobs)
        self.workers: list[Worker] = []
        self.began: float | None = None  # when the first run told how far it is, or ended
        self.worked = 0.0  # cost of what this process has done since
        self.stopping: float | None = None  # since when
        self.failure: Exception | None = None  # why all of it stops
        self.lost_starts = 0  # workers in a row that died before they were ready

    def add(self, jobs: Sequence[Job]) -> None:
        """Jobs to do next, unless they were done before; one that comes again is done again if it has no record any more."""
        records = self.folder.records
        self.jobs |= {job.key: job for job in jobs}
        for job in reversed(jobs):
            if self.retry_failed and job.key in records and records[job.key]["error"] is not None:
                del records[job.key]
            if job.key not in records:
                self.todo.appendleft(job)

    def turn(self, stop: bool) -> None:
        """Listen to the workers for a moment, and give work to those that have none."""
        if (stop or self.failure is not None) and self.stopping is None:
            self.stopping = time.monotonic()
            self.todo.clear()
            for worker in self.workers:
                worker.take(None)
        idle = sum(worker.run is None and not worker.dismissed for worker in self.workers)
        for _ in range(min(self.executor.workers - len(self.workers), len(self.todo) - idle)):
            self.workers.append(Worker(self.executor.start(self.work, self.folder, self.every)))
        by_link = {id(worker.link): worker for worker in self.workers}
        for link, message in self.executor.wait([worker.link for worker in self.workers], seconds=0.25):
            if message is None:
                self._lose(by_link[id(link)])
            else:
                self._hear(by_link[id(link)], message)
        self._hand_out()

    def _hand_out(self) -> None:
        """Work for those that have none; without any they are dismissed, unless runs at work may lead to more."""
        for worker in self.workers:
            if worker.ready and worker.run is None and not worker.dismissed:
                if self.todo:
                    worker.take(self.todo.popleft())
                elif self.follow is None or not any(other.run for other in self.workers):
                    worker.take(None)

    def _hear(self, worker: Worker, message: Message) -> None:
        kind, value = message
        if kind == "notice":
            notice.once(value)
        elif kind == "disk":
            self.failure = OSError(f"{value}; finished runs are safe: make room and start again, it continues from there")
        elif kind == "step" and worker.run is not None:
            self._advance(worker.run, *value)
        elif kind in ("done", "failed") and worker.run is not None:
            job = worker.run.job
            if self.began is not None and not worker.run.steps:
                self.worked += job.cost
            self.began = self.began or time.monotonic()
            self._finish(worker, {"error": None, **value})
            if not getattr(job, "pauses", False):
                delete(self.folder.checkpoint(checkpoint_key(job)))
        if kind == "ready":
            worker.ready, self.lost_starts = True, 0

    def _advance(self, run: Running, step: int, steps: int, metrics: dict[str, float]) -> None:
        self.began = self.began or time.monotonic()
        if not run.steps:
            run.steps, run.step = steps, step  # where this process took it up
        self.worked += run.share(step - run.step)
        run.step, run.metrics = step, metrics

    def _finish(self, worker: Worker, outcome: Record) -> None:
        assert worker.run is not None
        job, worker.run = worker.run.job, None
        record = {"key": job.key, **job.identity, **self.marks, **outcome, "start": self.folder.start}
        self.folder.append(record)
        self.done(record)
        if self.follow is not None and self.stopping is None:
            self.add(self.follow(record))

    def _lose(self, worker: Worker) -> None:
        """A worker is gone: dismissed, or dead."""
        self.workers.remove(worker)
        how = worker.link.end()
        if worker.dismissed:
            return
        if not worker.ready:
            self.lost_starts += 1
            if self.lost_starts >= STARTS:
                self.failure = RunError(f"workers cannot be started, {STARTS} in a row: {how}; see its message above")
        if worker.run is not None:
            self._finish(worker, {"error": how, "traceback": None})  # its checkpoint stays, for a second try

    def overdue(self) -> bool:
        return self.stopping is not None and time.monotonic() - self.stopping > PATIENCE

    def progress(self) -> Progress:
        running = [worker.run for worker in self.workers if worker.run is not None]
        finished = tuple(self.folder.records[key] for key in self.jobs if key in self.folder.records)
        ahead = sum(job.cost for job in self.todo) + sum(run.job.cost - run.share(run.step) for run in running)
        seconds = 0.0 if self.began is None else time.monotonic() - self.began
        left = ahead * seconds / self.worked if self.worked and seconds >= MEASURED else None
        left = left if ahead else 0.0
        open_jobs = [*(run.job for run in running), *self.todo]
        phase = str(open_jobs[0].identity.get("phase", "")) if open_jobs else ""
        return Progress(len(self.jobs), finished, tuple(running), left, self.stopping is not None, phase)
