"""Many independent runs on all cores, in a folder that survives whatever stops them.

    plan.json            what the runs have in common; where, when and by which command they were started
    runs.jsonl           one line a finished run
    checkpoints/*.pt     how far the unfinished ones are
    lock                 held by the one process that works here

Only the parent writes lines, each whole and on the disk before the next. Workers are fresh processes with one thread each, so a
run's numbers depend on its job alone; one that dies takes down its run and nothing else. Started again, the same study skips
what is finished and continues what is not.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TextIO

import torch

from hypermlp import notice
from hypermlp.errors import RunError
from hypermlp.files import Record as Record
from hypermlp.files import read_json, read_json_lines, write_json, write_whole
from hypermlp.provenance import provenance

MEASURED = 5.0  # seconds of work from which the time left is estimated
PATIENCE = 30.0  # seconds that workers have to save where they are when the study stops
STARTS = 4  # workers in a row that may die before they are ready


class Job(Protocol):
    """What to run; it is pickled on its way to a worker."""

    @property
    def key(self) -> str: ...  # the run's identity within its folder
    @property
    def identity(self) -> Record: ...  # the same in fields, for the record
    @property
    def cost(self) -> float: ...  # in any unit; for the time left


# ---- the folder ----


class Folder:
    """A folder of runs, held by this process from `with` to its end."""

    def __init__(self, path: Path) -> None:
        self.path, self.lines, self.checkpoints = path, path / "runs.jsonl", path / "checkpoints"
        self.plan: dict[str, Any] = {}
        self.start = 0  # the number of this start, which records refer to
        self.records: dict[str, Record] = {}  # the latest of each key

    def __enter__(self) -> Folder:
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self._lock = lock(self.path)
        for leftover in self.checkpoints.glob(".*"):
            leftover.unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            self.plan = read_json(self.path / "plan.json")["plan"]
        self.records = self._repair()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._lock.close()

    def _repair(self) -> dict[str, Record]:
        """Read what is there; lines that a kill or a full disk left unfinished are dropped, and their runs repeated."""
        records, dropped = read_lines(self.lines)
        if dropped or (self.lines.exists() and not self.lines.read_bytes().endswith(b"\n")):
            write_whole(self.lines, "".join(map(to_line, records)).encode())
        if dropped:
            notice.once(f"{self.lines}: dropped {dropped} damaged line(s); those runs are repeated")
        return {record["key"]: record for record in records}

    def begin(self, plan: dict[str, Any]) -> None:
        """Write down what is run, and by whom. What the plan said before must not change; it may grow."""
        path = self.path / "plan.json"
        starts = read_json(path)["starts"] if path.exists() else []
        self.plan = merge(self.plan, json.loads(json.dumps(plan)), str(self.path))
        self.start = len(starts)
        write_json(path, {"plan": self.plan, "starts": [*starts, provenance()]})

    def append(self, record: Record) -> None:
        """One line, on the disk when this returns; or not at all, with an error."""
        data = to_line(record).encode()
        with open(self.lines, "ab", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            try:
                written = 0
                while written < len(data):
                    written += file.write(data[written:])
                os.fsync(file.fileno())
            except OSError as error:
                file.truncate(size)
                raise OSError(
                    error.errno,
                    f"cannot write {self.lines} ({error.strerror}); its {len(self.records)} runs are safe: "
                    "make room and start again, it continues from there",
                ) from error
        self.records[record["key"]] = record

    def checkpoint(self, key: str) -> Path:
        return self.checkpoints / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.pt"


def lock(folder: Path) -> TextIO:
    """Keep other processes out of a folder until the file that is returned is closed, by this process or by its end."""
    file = open(folder / "lock", "w")  # noqa: SIM115  (held by the caller)
    if sys.platform != "win32":
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise RunError(f"{folder} is in use: another process works there") from None
    return file


def read_lines(path: Path) -> tuple[list[Record], int]:
    """The records of a runs.jsonl in order, and how many lines are no records."""
    return read_json_lines(path, lambda record: isinstance(record.get("key"), str))


def to_line(record: Record) -> str:
    return json.dumps(plain(record), ensure_ascii=False, allow_nan=False) + "\n"


def plain(value: Any) -> Any:
    """JSON has no numbers that are not finite: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def merge(old: Any, new: Any, where: str, name: str = "") -> Any:
    """Both plans together; a ValueError names the first value in which they differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        both = {part: merge(old[part], new[part], where, f"{name}.{part}") for part in old if part in new}
        return {**old, **new, **both}
    if old != new:
        label = name.removeprefix(".")
        raise ValueError(f"{where} holds runs with {label} = {old!r}, not {new!r}; choose another folder, or the old value")
    return new


def save_state(path: Path, state: dict[str, Any]) -> None:
    """A checkpoint: its checksum, since torch would read damaged numbers without a word, and what torch saves."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_whole(path, hashlib.sha256(buffer.getvalue()).digest() + buffer.getvalue())


def load_state(path: Path) -> dict[str, Any] | None:
    """A checkpoint, or None if there is none or it is damaged."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    if hashlib.sha256(data[32:]).digest() != data[:32]:
        notice.once(f"{path}: damaged checkpoint; its run begins anew")
        return None
    return torch.load(io.BytesIO(data[32:]), weights_only=True)


# ---- inside a worker ----


class Stopped(BaseException):
    """The study ends; the run is saved and continues another time."""


class DiskError(OSError):
    """A checkpoint cannot be written: not the run's fault."""


class Desk:
    """Where a run works: it gets its checkpoint here and tells here how far it is."""

    def __init__(self, connection: Connection, checkpoint: Path, every: float) -> None:
        self.connection, self.checkpoint, self.every = connection, checkpoint, every
        self.saved = time.monotonic()
        self.told = -math.inf

    def load(self) -> dict[str, Any] | None:
        return load_state(self.checkpoint)

    def tick(self, step: int, steps: int, metrics: dict[str, float], state: Callable[[], dict[str, Any]]) -> None:
        """Call after every step. Saves `state()` where that is due; does not come back when the study stops."""
        now = time.monotonic()
        asked = self.asked_to_stop()
        if asked or now - self.saved >= self.every:
            try:
                save_state(self.checkpoint, state())
            except OSError as error:
                raise DiskError(
                    error.errno, f"cannot write checkpoints to {self.checkpoint.parent} ({error.strerror})"
                ) from error
            self.saved = now
        if asked:
            raise Stopped
        if now - self.told >= 0.2 or step == steps:
            self.told = now
            send(self.connection, "step", (step, steps, metrics))

    def asked_to_stop(self) -> bool:
        try:
            return self.connection.poll() and self.connection.recv() is None
        except (EOFError, OSError):
            raise Stopped from None  # the parent is gone


def send(connection: Connection, kind: str, value: Any = None) -> None:
    try:
        connection.send((kind, value))
    except OSError:
        raise Stopped from None  # the parent is gone


class Forward(logging.Handler):
    """Notices of a worker appear in the parent, once, not once a worker."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self.connection = connection

    def emit(self, record: logging.LogRecord) -> None:
        send(self.connection, "notice", record.getMessage())


class Lines(io.TextIOBase):
    """What a worker prints: whole lines go to the parent, whose display they would break."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self.connection, self.begun = connection, ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self.begun = (self.begun + text).split("\n")
        for line in filter(str.strip, lines):
            send(self.connection, "notice", line)
        return len(text)


Work = Callable[[Any, Desk], Record]


def serve(connection: Connection, work: Work, folder: Folder, every: float) -> None:
    """A worker's life: one job after another until there is none."""
    torch.set_num_threads(1)
    notice.logger.addHandler(Forward(connection))
    notice.logger.setLevel(logging.INFO)
    sys.stdout = sys.stderr = Lines(connection)
    try:
        send(connection, "ready")
        while (job := connection.recv()) is not None:
            try:
                record = plain(work(job, Desk(connection, folder.checkpoint(job.key), every)))
            except DiskError as error:
                send(connection, "disk", str(error.strerror))
            except Exception as error:
                send(connection, "failed", {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()})
            else:
                send(connection, "done", record)
    except (EOFError, OSError, Stopped):
        return


# ---- the parent ----


@dataclass
class Running:
    job: Job
    step: int = 0
    steps: int = 0  # 0 as long as the run has not told
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

    @property
    def failed(self) -> int:
        return sum(record["error"] is not None for record in self.finished)


class Worker:
    """A process, and the run it is at."""

    def __init__(self, work: Work, folder: Folder, every: float) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.connection, theirs = spawn.Pipe()
        bare = Folder(folder.path)  # without the lock, which stays here
        self.process = spawn.Process(target=serve, args=(theirs, work, bare, every), daemon=True)
        with ignoring_interrupts():  # of the keyboard, which go to all processes: the parent tells when to stop
            self.process.start()
        theirs.close()
        self.ready = self.dismissed = False
        self.run: Running | None = None

    def take(self, job: Job | None) -> None:
        """Give it a job; None ends it, after saving the one it is at."""
        self.dismissed = job is None
        self.run = self.run if job is None else Running(job)
        with contextlib.suppress(OSError):  # a dead worker is noticed when it is listened to
            self.connection.send(job)

    def end(self) -> str:
        """Wait for the process; how it ended, in words."""
        self.process.join()
        code = self.process.exitcode
        self.connection.close()
        if code is not None and code < 0:
            why = "; perhaps there was not enough memory" if code == -signal.SIGKILL else ""
            return f"the worker was ended by {signal.Signals(-code).name}{why}"
        return f"the worker ended with exit code {code}"


def run(
    folder: Folder,
    jobs: Sequence[Job],
    work: Work,
    *,
    workers: int | None = None,
    retry_failed: bool = False,
    checkpoint_seconds: float = 60.0,
    tell: Callable[[Progress], None] = lambda progress: None,
    done: Callable[[Record], None] = lambda record: None,
) -> list[Record]:
    """Do all `jobs` that folder.records does not hold; the records of all, in the order of the jobs.

    work: a function of a module, called as work(job, desk) in a worker; what it returns becomes the record.
    tell, done: told a few times a second how things are, and of every run that ends.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"workers ({workers}) must be at least 1")
    pool = Pool(folder, jobs, work, workers or cores(), retry_failed, checkpoint_seconds, done)
    with stop_signals("stopping, saving the runs at work …; once more: stop at once") as signals:
        try:
            while pool.todo or pool.workers:
                pool.turn(stop=len(signals) > 0)
                tell(pool.progress())
                if len(signals) > 1 or pool.overdue():
                    break
        finally:
            for worker in pool.workers:
                worker.process.kill()
                worker.process.join()
        if pool.failure is not None:
            raise pool.failure
        if signals:
            finished = sum(job.key in folder.records for job in jobs)
            raise KeyboardInterrupt(f"{finished} of {len(jobs)} runs are finished; the same command resumes the others")
    return [folder.records[job.key] for job in jobs]


class Pool:
    """The workers of one call of run()."""

    def __init__(
        self,
        folder: Folder,
        jobs: Sequence[Job],
        work: Work,
        size: int,
        retry_failed: bool,
        every: float,
        done: Callable[[Record], None],
    ) -> None:
        for key, count in Counter(job.key for job in jobs).items():
            if count > 1:
                raise ValueError(f"{count} jobs have the key {key!r}; each needs its own")
        self.folder, self.jobs, self.work, self.size, self.every, self.done = folder, jobs, work, size, every, done
        self.todo: deque[Job] = deque(job for job in jobs if self._open(job, retry_failed))
        self.workers: list[Worker] = []
        self.began: float | None = None  # when the first run told how far it is, or ended
        self.worked = 0.0  # cost of what this process has done since
        self.stopping: float | None = None  # since when
        self.failure: Exception | None = None  # why all of it stops
        self.lost_starts = 0  # workers in a row that died before they were ready

    def _open(self, job: Job, retry_failed: bool) -> bool:
        records = self.folder.records
        if retry_failed and job.key in records and records[job.key]["error"] is not None:
            del records[job.key]
        return job.key not in records

    def turn(self, stop: bool) -> None:
        """Listen to the workers for a moment, and give work to those that have none."""
        if (stop or self.failure is not None) and self.stopping is None:
            self.stopping = time.monotonic()
            self.todo.clear()
            for worker in self.workers:
                worker.take(None)
        idle = sum(worker.run is None for worker in self.workers)
        for _ in range(min(self.size - len(self.workers), len(self.todo) - idle)):
            self.workers.append(Worker(self.work, self.folder, self.every))
        connections: Any = [worker.connection for worker in self.workers]
        heard = wait(connections, timeout=0.25)
        for worker in [worker for worker in self.workers if worker.connection in heard]:
            try:
                self._hear(worker, *worker.connection.recv())
            except (EOFError, ConnectionError):
                self._lose(worker)

    def _hear(self, worker: Worker, kind: str, value: Any) -> None:
        if kind == "notice":
            notice.once(value)
        elif kind == "disk":
            self.failure = OSError(f"{value}; finished runs are safe: make room and start again, it continues from there")
        elif kind == "step" and worker.run is not None:
            run, (step, steps, metrics) = worker.run, value
            self.began = self.began or time.monotonic()
            if not run.steps:
                run.steps, run.step = steps, step  # where this process took it up
            self.worked += run.share(step - run.step)
            run.step, run.metrics = step, metrics
        elif kind in ("done", "failed") and worker.run is not None:
            job = worker.run.job
            if self.began is not None and not worker.run.steps:
                self.worked += job.cost
            self.began = self.began or time.monotonic()
            self._finish(worker, {"error": None, **value})
            self.folder.checkpoint(job.key).unlink(missing_ok=True)
        if kind == "ready":
            worker.ready, self.lost_starts = True, 0
        if kind in ("ready", "done", "failed") and not worker.dismissed:
            worker.take(self.todo.popleft() if self.todo else None)

    def _finish(self, worker: Worker, outcome: Record) -> None:
        assert worker.run is not None
        job, worker.run = worker.run.job, None
        record = {"key": job.key, **job.identity, **outcome, "start": self.folder.start}
        self.folder.append(record)
        self.done(record)

    def _lose(self, worker: Worker) -> None:
        """A worker is gone: dismissed, or dead."""
        self.workers.remove(worker)
        how = worker.end()
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
        finished = tuple(self.folder.records[job.key] for job in self.jobs if job.key in self.folder.records)
        ahead = sum(job.cost for job in self.todo) + sum(run.job.cost - run.share(run.step) for run in running)
        seconds = 0.0 if self.began is None else time.monotonic() - self.began
        left = ahead * seconds / self.worked if self.worked and seconds >= MEASURED else None
        return Progress(len(self.jobs), finished, tuple(running), left if ahead else 0.0, self.stopping is not None)


def cores() -> int:
    """Those this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


@contextlib.contextmanager
def stop_signals(message: str | None = None) -> Iterator[list[int]]:
    """Collect Ctrl-C and SIGTERM in a list instead of dying of them in the middle of a line.

    message: printed on stderr at the first of them, at once.
    """
    signals: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield signals  # only the main thread can handle signals
        return

    def collect(number: int, frame: Any) -> None:
        signals.append(number)
        if message is not None and len(signals) == 1:
            with contextlib.suppress(OSError, RuntimeError):  # a closed terminal; or stderr was being written to
                print(f"hypermlp: {message}", file=sys.stderr, flush=True)

    before = {number: signal.signal(number, collect) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def ignoring_interrupts() -> Iterator[None]:
    """A process started meanwhile ignores Ctrl-C from its first moment on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
