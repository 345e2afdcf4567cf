"""Where workers run: the interface that the engine asks for workers, and the processes of this machine behind it.

The other executor, Ray, is in ray_executor.py.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

import torch

from hypermlp.checks import choose_from
from hypermlp.interrupts import ignoring_interrupts
from hypermlp.studies.folder import Folder
from hypermlp.studies.worker import Job, Work, serve

Message = tuple[str, Any]  # what a worker says: "ready", "step", "done", "failed", "disk" or "notice", and a value
DEVICES, EXECUTORS = ("auto", "cpu", "cuda"), ("local", "ray")


class WorkerLink(Protocol):
    """A worker, seen from the engine."""

    def send(self, job: Job | None) -> None:
        """Give it a job; None ends it, after saving the one it is at. A dead worker is noticed when it is listened to."""

    def end(self) -> str:
        """Wait for it; how it ended, in words."""

    def kill(self) -> None: ...


class Executor(Protocol):
    """Starts workers and listens to them."""

    workers: int  # that may run at once

    def start(self, work: Work, folder: Folder, every: float) -> WorkerLink:
        """A new worker, which serves jobs (worker.py: serve) and saves them every so many seconds."""

    def wait(self, links: Sequence[Any], seconds: float) -> list[tuple[Any, Message | None]]:
        """What the workers said, waiting for the first of it; None: that worker is gone."""


def find_device(device: str) -> str:
    """ "cpu" or "cuda"; "auto" takes GPUs where there are any."""
    choose_from("device", device, DEVICES)
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device (cuda): PyTorch finds no GPU; give --device cpu")
    return device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def find_executor(name: str, workers: int | None = None, device: str = "auto") -> Executor:
    """ "local": processes of this machine; "ray": actors of a Ray cluster."""
    choose_from("executor", name, EXECUTORS)
    if name == "local":
        return LocalPool(workers, device)
    from hypermlp.studies.ray_executor import RayExecutor  # late: it needs the extra `cluster`

    return RayExecutor(workers, device)


class LocalPool:
    """Fresh processes on this machine: one per core with one thread each, or one per GPU."""

    def __init__(self, workers: int | None = None, device: str = "auto") -> None:
        self.device = find_device(device)
        most = torch.cuda.device_count() if self.device == "cuda" else None
        if workers is not None and workers < 1:
            raise ValueError(f"workers ({workers}) must be at least 1")
        if workers is not None and most is not None and workers > most:
            raise ValueError(f"workers ({workers}) must be at most {most}, one per GPU")
        self.workers = workers or most or cores()
        self.free = [f"cuda:{i}" for i in range(most)] if most else []

    def start(self, work: Work, folder: Folder, every: float) -> ProcessLink:
        device = self.free.pop(0) if self.device == "cuda" else "cpu"
        return ProcessLink(self, work, folder, every, device)

    def release(self, device: str) -> None:
        if device != "cpu":
            self.free.append(device)

    def wait(self, links: Sequence[ProcessLink], seconds: float) -> list[tuple[ProcessLink, Message | None]]:
        by_connection: dict[Any, ProcessLink] = {link.connection: link for link in links}
        found: list[tuple[ProcessLink, Message | None]] = []
        for connection in wait(list(by_connection), timeout=seconds):
            link = by_connection[connection]
            try:
                found.append((link, link.connection.recv()))
            except (EOFError, OSError):  # gone, perhaps in the middle of a message
                found.append((link, None))
        return found


class ProcessLink:
    """A worker process."""

    def __init__(self, pool: LocalPool, work: Work, folder: Folder, every: float, device: str) -> None:
        self.pool, self.device = pool, device
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        self.connection: Connection = ours
        bare = Folder(folder.path)  # without the lock, which stays here
        self.process = spawn.Process(target=serve, args=(theirs, work, bare, every, device), daemon=True)
        with ignoring_interrupts():  # of the keyboard, which go to all processes: the engine says when to stop
            self.process.start()
        theirs.close()

    def send(self, job: Job | None) -> None:
        with contextlib.suppress(OSError):
            self.connection.send(job)

    def end(self) -> str:
        self.process.join()
        code = self.process.exitcode
        self.connection.close()
        self.pool.release(self.device)
        if code is not None and code < 0:
            why = "; perhaps there was not enough memory" if code == -signal.SIGKILL else ""
            return f"the worker was ended by {signal.Signals(-code).name}{why}"
        return f"the worker ended with exit code {code}"

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
