"""Extra peak memory of one forward or one training step, in a process of its own.

The process builds the contestant and its input, warms up on a short input, and then reports by how many bytes the resident
memory rises above that at its peak. It is forked from one that has imported everything and computed nothing. With glibc, large
blocks go back to the system as soon as they are free: what is counted is alive, not kept for later.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

from hypermlp.bench.contestants import Case, build
from hypermlp.errors import RunError

MMAP_THRESHOLD, LARGE = -3, 64 * 1024  # mallopt's parameter and the bytes from which a block has a mapping of its own


class Extra(NamedTuple):
    """Bytes beyond the layer and its input that a step needs at its peak."""

    forward: int
    training: int


def extra(case: Case) -> Extra:
    forks = "forkserver" in multiprocessing.get_all_start_methods()  # not on Windows
    context = multiprocessing.get_context("forkserver" if forks else "spawn")
    if forks:
        context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(1, mp_context=context) as process:
        try:
            return process.submit(measure, case).result()
        except BrokenProcessPool:
            raise RunError(f"measuring the memory of {case.name} ended its process; is there enough memory?") from None


def measure(case: Case) -> Extra:
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt"):
        ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, LARGE)
    contestant = build(case)
    found = []
    for step in (contestant.forward, contestant.train_step):
        step(contestant.input(1, min(case.time, 64)))
        x = contestant.input(case.batch, case.time)
        before = reset_peak()
        step(x)
        found.append(max(0, peak() - before))  # VmHWM lags behind VmRSS by some pages
    return Extra(*found)


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
