"""The inside of a worker: it takes one job after another, reports how far each is, and saves it when the study stops.

A worker has one thread on a CPU, or one GPU, so a run's numbers depend on its job alone; one that dies takes down its run and
nothing else.
"""

from __future__ import annotations

import io
import json
import logging
import math
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from hypermlp import notice
from hypermlp.allocator import keep_freed_memory
from hypermlp.files import Record, read_json
from hypermlp.studies.folder import Folder, plain
from hypermlp.train.checkpoint import Checkpoints
from hypermlp.train.distributed import World
from hypermlp.train.fit import Fit

PROGRESS = "progress.json"  # in a checkpoint: what is not a tensor
State = tuple[dict[str, Tensor], dict[str, Any]]  # tensors, and plain data with the step


class Job(Protocol):
    """What to run; it is pickled on its way to a worker."""

    @property
    def key(self) -> str:
        """The run's identity within its folder."""

    @property
    def identity(self) -> Record:
        """The same in fields, for the record."""

    @property
    def cost(self) -> float:
        """In any unit; for the time left."""


def checkpoint_key(job: Job) -> str:
    """The key that a run's checkpoints are kept under; jobs that continue one another (search.py) share one, `run`."""
    return str(getattr(job, "run", job.key))


class Connection(Protocol):
    """A pipe to the process that runs the study."""

    def send(self, message: Any) -> None: ...
    def recv(self) -> Any: ...
    def poll(self) -> bool: ...


class Stopped(BaseException):
    """The study ends; the run is saved and continues another time."""


class Paused(BaseException):
    """A run has come as far as its context lets it, and is saved."""

    def __init__(self, run: Fit) -> None:
        super().__init__()
        self.run = run


class DiskError(OSError):
    """A checkpoint cannot be written: not the run's fault."""


class RunContext:
    """What a run is given besides its job: a device, its last checkpoint, and someone to report to."""

    def __init__(self, connection: Connection, checkpoints: Path, every: float, device: str = "cpu") -> None:
        self.connection, self.every, self.device = connection, every, torch.device(device)
        self.checkpoints = Checkpoints(checkpoints, World(), keep=1)
        self.saved = time.monotonic()
        self.reported = -math.inf
        self.until: float | None = None  # the share of the steps after which the run is paused; None: it goes to its end

    @property
    def models(self) -> Path:
        """Where a run may leave its model: in the study's folder, beside the checkpoints."""
        return self.checkpoints.folder.parents[1] / "models"

    @property
    def world(self) -> World:
        return World(device=self.device)

    def load(self, tensors: dict[str, Tensor], last: float = math.inf) -> dict[str, Any] | None:
        """Fill `tensors` from the run's last checkpoint and return its plain data; None if there is none.

        last: the step that the run goes to. A checkpoint beyond it is not used: a run of a search that has lost its line is
        measured again at the same step, not where a later one was.
        """
        latest = self.checkpoints.latest()
        if latest is None:
            return None
        progress: dict[str, Any] = read_json(latest / PROGRESS)
        if progress["step"] > last:
            notice.once(f"{latest} is beyond step {last:g}, whose line is lost; that run starts over to measure it again")
            return None
        self.checkpoints.load(latest, tensors)
        return progress

    def tick(self, step: int, steps: int, metrics: dict[str, float], state: Callable[[], State]) -> None:
        """Call after every step. Saves `state()` where that is due; does not return when the study stops."""
        now = time.monotonic()
        asked = self.asked_to_stop()
        if asked or now - self.saved >= self.every:
            self.save(step, *state())
        if asked:
            raise Stopped
        if now - self.reported >= 0.2 or step == steps:
            self.reported = now
            send(self.connection, "step", (step, steps, metrics))

    def save(self, step: int, tensors: dict[str, Tensor], progress: dict[str, Any]) -> None:
        try:
            self.checkpoints.save(step, tensors, files={PROGRESS: json.dumps(progress)})
        except OSError as error:
            raise DiskError(error.errno, f"cannot write checkpoints to {self.checkpoints.folder} ({error.strerror})") from error
        self.saved = time.monotonic()

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


class ForwardNotices(logging.Handler):
    """Notices of a worker appear in the parent, once in all, not once per worker."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self.connection = connection

    def emit(self, record: logging.LogRecord) -> None:
        send(self.connection, "notice", record.getMessage())


def run_to_the_end(run: Fit, context: RunContext | None, shown: Callable[[Fit], dict[str, float]]) -> None:
    """Advance from the last checkpoint to the end, and report after every step; or to where the context pauses it."""
    last = run.steps if context is None or context.until is None else math.ceil(context.until * run.steps)
    if context is not None and (progress := context.load(run.state()[0], last)) is not None:
        run.resume(progress)
    while not run.finished and run.step < last:
        run.advance()
        if context is not None:
            context.tick(run.step, last, shown(run), run.state)
    if context is not None and context.until is not None:
        if not run.finished and (not run.curve or run.curve[-1]["step"] < run.step):
            run.look()
        if last < run.steps:
            context.save(run.step, *run.state())
        raise Paused(run)


class ForwardLines(io.TextIOBase):
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


Work = Callable[[Any, RunContext], Record]


def serve(connection: Connection, work: Work, folder: Folder, every: float, device: str) -> None:
    """A worker's life: one job after another until there is none."""
    torch.set_num_threads(1)
    keep_freed_memory()
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    notice.logger.addHandler(ForwardNotices(connection))
    notice.logger.setLevel(logging.INFO)
    sys.stdout = sys.stderr = ForwardLines(connection)
    try:
        send(connection, "ready")
        while (job := connection.recv()) is not None:
            try:
                record = plain(work(job, RunContext(connection, folder.checkpoint(checkpoint_key(job)), every, device)))
            except DiskError as error:
                send(connection, "disk", str(error.strerror))
            except Exception as error:
                send(connection, "failed", {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()})
            else:
                send(connection, "done", record)
    except (EOFError, OSError, Stopped):
        return
