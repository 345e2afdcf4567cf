"""Extra peak memory of one forward or one training step, in a process of its own.

`extra(...)` starts `python -m hypermlp.bench.memory`, which builds the contestant and its input, warms up on a short input, and
then reports by how many bytes the resident memory rises above that at its peak.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from hypermlp.bench.contestants import Case, build


def extra(case: Case, *, training: bool) -> int:
    """Bytes beyond the layer and its input that one step needs at its peak."""
    order = json.dumps({"case": asdict(case), "training": training})
    done = subprocess.run([sys.executable, "-m", "hypermlp.bench.memory", order], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"measuring the memory of {case.name} failed:\n{done.stderr}")
    return int(done.stdout.splitlines()[-1])


def measure(case: Case, *, training: bool) -> int:
    contestant = build(case)
    step = contestant.train_step if training else contestant.forward
    step(contestant.input(1, min(case.time, 64)))
    x = contestant.input(case.batch, case.time)
    before = reset_peak()
    step(x)
    return peak() - before


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
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {field} in /proc/self/status")


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    print(measure(Case(**asked["case"]), training=asked["training"]))
