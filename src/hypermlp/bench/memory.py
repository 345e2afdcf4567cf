"""Extra peak memory of one forward or one training step, in a process of its own.

The process builds the layer and its input, warms up on a short input, and then reports by how many bytes the resident
memory rises above that at its peak. It is forked from one that has imported everything and computed nothing. With glibc, large
blocks go back to the system as soon as they are free: what is counted is alive, not kept for later.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from hypermlp.allocator import return_freed_memory
from hypermlp.bench import cases
from hypermlp.bench.timing import matmul_peak
from hypermlp.errors import RunError


class Extra(NamedTuple):
    """Bytes that a step needs at its peak, beyond the layer and its input, and how long the step took there at its best."""

    forward: int
    training: int
    forward_seconds: float
    training_seconds: float
    matmul: float = 0.0  # operations per second of matrix products in that process, between the steps; 0: on a GPU


class Measurable(Protocol):
    """What is measured: a layer or a model."""

    def input(self, batch: int, time: int) -> torch.Tensor: ...
    def forward(self, x: torch.Tensor) -> None: ...
    def train_step(self, x: torch.Tensor) -> None: ...


def extra(case: Any, build: Callable[[Any], Measurable] = cases.build, repeats: int = 1) -> Extra:
    """Of the mixer that `build` (a function of some module) makes from `case`, which has a name, a batch and a time.

    repeats: how often each step is timed.
    """
    forks = "forkserver" in multiprocessing.get_all_start_methods()  # not on Windows
    context = multiprocessing.get_context("forkserver" if forks else "spawn")
    if forks:
        context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(1, mp_context=context) as process:
        try:
            return process.submit(measure, case, build, torch.get_num_threads(), repeats).result()
        except BrokenProcessPool:
            raise RunError(f"measuring the memory of {case.name} ended its process; is there enough memory?") from None


def measure(case: Any, build: Callable[[Any], Measurable], threads: int, repeats: int) -> Extra:
    torch.set_num_threads(threads)
    return_freed_memory()
    built = build(case)
    found, seconds, matmul = [], [], 0.0
    for step in (built.forward, built.train_step):
        step(built.input(1, min(case.time, 64)))
        x = built.input(case.batch, case.time)
        rise = rise_on_gpu if x.is_cuda else rise_of_process
        tries = []
        for _ in range(repeats):
            begin = time.perf_counter()
            found.append(rise(step, x))
            tries.append(time.perf_counter() - begin)
        seconds.append(min(tries))
        matmul = 0.0 if x.is_cuda else max(matmul, matmul_peak(rounds=3))
    return Extra(found[0], found[repeats], seconds[0], seconds[1], matmul)


def rise_of_process(step: Callable[[torch.Tensor], None], x: torch.Tensor) -> int:
    before = reset_peak()
    step(x)
    return max(0, peak() - before)  # VmHWM lags behind VmRSS by some pages


def rise_on_gpu(step: Callable[[torch.Tensor], None], x: torch.Tensor) -> int:
    step(x)  # what is compiled and chosen for this shape
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(x)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def reset_peak() -> int:
    """Bytes resident now; on Linux the high-water mark starts again from here."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return peak()
    return status("VmRSS")


def peak() -> int:
    try:
        return status("VmHWM")
    except OSError:
        import resource  # not on Windows

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {field} in /proc/self/status")


def available() -> int:
    """Bytes that are free, on the GPU where there is one."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
