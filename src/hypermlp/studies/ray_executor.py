"""Workers on a Ray cluster: the same jobs, messages and folder as the local pool, on as many machines as the cluster has.

A worker is an actor with one CPU or one GPU. It joins a running cluster (RAY_ADDRESS, or one on this machine), or starts a
local one. The study's folder, prepared corpora and files with your own mixers must lie where all machines see them.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hypermlp.studies.executors import Message, cores, find_device
from hypermlp.studies.folder import Folder
from hypermlp.studies.worker import Job, Work, serve

POLL = 0.2  # seconds that an actor waits for something to say


class RayExecutor:
    """Actors of a Ray cluster; `pip install 'hypermlp[cluster]'` brings Ray."""

    def __init__(self, workers: int | None = None, device: str = "auto") -> None:
        try:
            import ray
        except ModuleNotFoundError as error:
            raise ImportError("the executor ray needs Ray: pip install 'hypermlp[cluster]'") from error
        if workers is not None and workers < 1:
            raise ValueError(f"workers ({workers}) must be at least 1")
        self.ray: Any = ray
        if not ray.is_initialized():
            quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error", "namespace": "hypermlp"}
            try:
                ray.init(address="auto", **quiet)
            except ConnectionError:  # no cluster is running
                ray.init(num_cpus=max(workers or 1, cores()), include_dashboard=False, **quiet)
        resources: dict[str, float] = ray.cluster_resources()
        self.device = find_device(device) if device != "auto" else "cuda" if resources.get("GPU") else "cpu"
        most = int(resources.get("GPU" if self.device == "cuda" else "CPU", 0))
        if most < (workers or 1):
            kind = "GPUs" if self.device == "cuda" else "CPUs"
            raise ValueError(f"workers ({workers or 1}) must be at most {most}, the {kind} of the Ray cluster")
        self.workers = workers or most

    def start(self, work: Work, folder: Folder, every: float) -> ActorLink:
        needs = {"num_gpus": 1, "num_cpus": 0} if self.device == "cuda" else {"num_cpus": 1}
        actor = self.ray.remote(Host).options(max_concurrency=4, max_restarts=0, **needs)
        path = folder.path.resolve()
        return ActorLink(self.ray, actor.remote(work, path, every, "cuda:0" if self.device == "cuda" else "cpu"))

    def wait(self, links: Sequence[ActorLink], seconds: float) -> list[tuple[ActorLink, Message | None]]:
        by_reference = {link.listening: link for link in links}
        ready, _ = self.ray.wait(list(by_reference), num_returns=1, timeout=seconds) if links else ([], [])
        found: list[tuple[ActorLink, Message | None]] = []
        for reference in ready:
            link = by_reference[reference]
            try:
                messages, ended = self.ray.get(reference)
            except self.ray.exceptions.RayError as error:
                link.cause = type(error).__name__
                found.append((link, None))
                continue
            found += [(link, message) for message in messages]
            if ended:
                found.append((link, None))
            else:
                link.listen()
        return found


class ActorLink:
    """A worker in an actor."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self.ray, self.actor, self.cause = ray, actor, ""
        self.listen()

    def listen(self) -> None:
        self.listening = self.actor.listen.remote(POLL)

    def send(self, job: Job | None) -> None:
        self.actor.put.remote(job)

    def end(self) -> str:
        self.kill()
        return f"the worker was ended ({self.cause or 'by itself'}); perhaps there was not enough memory"

    def kill(self) -> None:
        with contextlib.suppress(Exception):  # it may be gone
            self.ray.kill(self.actor)


class Host:
    """What an actor runs: a worker in a thread, and two queues in place of a pipe."""

    def __init__(self, work: Work, folder: Path, every: float, device: str) -> None:
        self.connection = QueueConnection()
        self.thread = threading.Thread(target=serve, args=(self.connection, work, Folder(folder), every, device), daemon=True)
        self.thread.start()

    def put(self, job: Job | None) -> None:
        self.connection.inbox.put(job)

    def listen(self, seconds: float) -> tuple[list[Message], bool]:
        """What the worker has said since, and whether it has ended."""
        ended = not self.thread.is_alive()
        found: list[Message] = []
        with contextlib.suppress(queue.Empty):
            found.append(self.connection.outbox.get(timeout=0.01 if ended else seconds))
            while True:
                found.append(self.connection.outbox.get_nowait())
        return found, ended


class QueueConnection:
    """The worker's end: what `serve` sends and receives."""

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.outbox: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def send(self, message: Message) -> None:
        self.outbox.put(message)

    def recv(self) -> Any:
        return self.inbox.get()

    def poll(self) -> bool:
        return not self.inbox.empty()
