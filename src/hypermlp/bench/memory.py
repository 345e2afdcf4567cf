"""Extra peak memory of one forward or one training step, in a process of its own.

`extra(...)` starts `python -m hypermlp.bench.memory`, which builds the contestant and its input, warms up on a short input, and
then reports by how many bytes the resident memory rises above that at its peak.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from hypermlp.bench.contestants import Case, build


class Extra(NamedTuple):
    """Bytes beyond the layer and its input that a step needs at its peak."""

    forward: int
    training: int


def extra(case: Case) -> Extra:
    done = subprocess.run(
        [sys.executable, "-m", "hypermlp.bench.memory", json.dumps(asdict(case))], capture_output=True, text=True
    )
    if done.returncode != 0:
        raise RuntimeError(f"measuring the memory of {case.name} failed:\n{done.stderr}")
    return Extra(*json.loads(done.stdout.splitlines()[-1]))


def measure(case: Case) -> Extra:
    contestant = build(case)
    found = []
    for step in (contestant.forward, contestant.train_step):
        step(contestant.input(1, min(case.time, 64)))
        x = contestant.input(case.batch, case.time)
        before = reset_peak()
        step(x)
        found.append(peak() - before)
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


if __name__ == "__main__":
    print(json.dumps(measure(Case(**json.loads(sys.argv[1])))))
