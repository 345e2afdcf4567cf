"""A result that grows, in one file: rounds, memory, operations, and where they were measured. The same command resumes it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hypermlp.bench.timing import median, ratio
from hypermlp.errors import RunError
from hypermlp.files import read_json, write_json
from hypermlp.provenance import provenance

PHASES = ("forward", "training")


class Record:
    """Written whole after every addition, so that a kill loses at most what was being measured."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        """settings: what must be equal for numbers to be comparable; a file with others is refused."""
        self.path = path
        self.data: dict[str, Any] = {"settings": settings, "sessions": [], "work": {}, "memory": {}, "rounds": []}
        if path.exists():
            self.data = read_json(path)
            differs = differences(self.data["settings"], settings)
            if differs:
                raise RunError(f"{path} was measured with {'; '.join(differs)}; choose another --out, or move the file away")
        self.begun = False

    def add(self, **parts: Any) -> None:
        """Add a round (round=…), or to the entries of memory or work."""
        if not self.begun:
            self.data["sessions"].append(provenance())
            self.begun = True
        if "round" in parts:
            self.data["rounds"].append({"session": len(self.data["sessions"]) - 1, **parts.pop("round")})
        for name, entries in parts.items():
            self.data[name] |= entries
        write_json(self.path, self.data)

    def rounds(self, time: int, name: str | None = None) -> list[dict[str, Any]]:
        """Finished rounds at a length, of one contestant or of any."""
        return [r for r in self.data["rounds"] if r["time"] == time and (name is None or name in r["seconds"])]


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    return [f"{key} {old.get(key)}, not {new.get(key)}" for key in {**old, **new} if old.get(key) != new.get(key)]


def entry(name: str, time: int) -> str:
    """The key of a contestant at a length."""
    return f"{name} {time}"


def timings(data: dict[str, Any], name: str, time: int, baseline: str) -> dict[str, Any] | None:
    """Median seconds of each phase and the ratio to the baseline within rounds; None: not measured."""
    rounds = [r["seconds"] for r in data["rounds"] if r["time"] == time and name in r["seconds"]]
    if not rounds:
        return None
    found: dict[str, Any] = {}
    for place, phase in enumerate(PHASES):
        own, base = ([r[who][place] for r in rounds if who in r] for who in (name, baseline))
        both = len(own) == len(base)
        found[phase] = {"seconds": median(own), "ratio": ratio(own, base)._asdict() if both else None}
    return found


def lengths(data: dict[str, Any]) -> list[int]:
    return sorted({r["time"] for r in data["rounds"]} | {int(key.rsplit(" ", 1)[1]) for key in data["memory"]})


def names(data: dict[str, Any], order: Sequence[str]) -> list[str]:
    """Who was measured, in an order."""
    found = {name for r in data["rounds"] for name in r["seconds"]} | {key.rsplit(" ", 1)[0] for key in data["memory"]}
    return [name for name in order if name in found]
