"""What a result must say about where it came from: versions, machine, commit, command, time."""

from __future__ import annotations

import datetime
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch


def machine() -> dict[str, Any]:
    """This machine and the software on it, in plain values."""
    from hypermlp import __version__  # late: the package may be importing this module

    return {
        "hypermlp": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def provenance(seed: int | None = None) -> dict[str, Any]:
    """The machine, the commit of the source and the command line, for the head of a result file."""
    return {
        "command": " ".join([program(), *map(without_folder, sys.argv[1:])]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "seed": seed,
        **machine(),
    }


def program() -> str:
    """How the running program is called: the command, or your own script."""
    name = Path(sys.argv[0]).name
    return f"python {name}" if name.endswith(".py") and name != "__main__.py" else "hypermlp"


def without_folder(argument: str) -> str:
    """Without paths of the machine that made it."""
    return Path(argument).name if Path(argument).is_absolute() else argument


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def commit() -> str | None:
    """The commit of the checkout that this package runs from, with a + if its source has changes; None outside of one."""
    folder = Path(__file__).parent
    try:
        # Not the commit of a checkout that merely contains the environment this package is installed in.
        subprocess.run(["git", "ls-files", "--error-unmatch", Path(__file__).name], cwd=folder, capture_output=True, check=True)
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True)
        # Results and documents that change beside the source change no number; a new file in the source may.
        status = ["git", "status", "--porcelain", "--", str(folder.parent)]
        dirty = subprocess.run(status, cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip()[:12] + ("+" if dirty.stdout.strip() else "")
