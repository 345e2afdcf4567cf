"""A benchmark's results, in one kind of file: its settings, where and when it was measured, and rows. It grows with every row.

The same command resumes a file with equal settings. Rows of one kind beside others say which: rounds, memory, operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hypermlp.bench.timing import median, ratio
from hypermlp.checks import same_settings
from hypermlp.files import read_json, write_json
from hypermlp.provenance import provenance

PHASES = ("forward", "training")
Row = dict[str, Any]


def read_results(path: Path) -> dict[str, Any]:
    """What a file of results holds, old forms included: settings, sessions, rows."""
    found = read_json(path)
    if "rounds" in found:  # tables by what was measured
        parts = [{"kind": "round", **one} for one in found.pop("rounds")]
        for kind in ("work", "memory"):
            parts += [{"kind": kind, "of": name, **one} for name, one in found.pop(kind).items()]
        found["rows"] = parts
    if "provenance" in found:
        old = found.pop("provenance")
        found["sessions"] = old if isinstance(old, list) else [old]
    return {"benchmark": path.stem, "settings": {}, **found}


def grouped(results: dict[str, Any]) -> dict[str, Any]:
    """Results with rows of several kinds, by kind: rounds in order, work and memory by what they are of."""
    found: dict[str, Any] = {"settings": results["settings"], "sessions": results["sessions"]}
    found |= {"work": {}, "memory": {}, "rounds": []}
    for row in results["rows"]:
        rest = {name: value for name, value in row.items() if name not in ("kind", "of")}
        if row["kind"] == "round":
            found["rounds"].append(rest)
        else:
            found[row["kind"]][row["of"]] = rest
    return found


class ResultsFile:
    """Written whole after every addition, so that a kill loses at most what was being measured."""

    def __init__(self, path: Path, benchmark: str, settings: dict[str, Any], *, anew: bool = False) -> None:
        """settings: what must be equal for numbers to be comparable; a file with others is refused. anew: none is resumed."""
        self.path = path
        self.file: dict[str, Any] = {"benchmark": benchmark, "settings": settings, "sessions": [], "rows": []}
        if path.exists() and not anew:
            self.file = read_results(path)
            same_settings(path, self.file["settings"], settings)
        self.begun = False

    @property
    def rows(self) -> list[Row]:
        return self.file["rows"]

    @property
    def session(self) -> int:
        """The number of this one, which rows may refer to."""
        return len(self.file["sessions"]) - self.begun

    def extend(self, rows: Iterable[Row], **more: Any) -> None:
        """Add rows; more: what the file says besides."""
        if not self.begun:
            self.file["sessions"].append(provenance())
            self.begun = True
        self.file["rows"] += rows
        self.file |= more
        write_json(self.path, self.file)

    def add(self, row: Row) -> None:
        self.extend([row])


class RoundsFile(ResultsFile):
    """Results by rounds, in which everybody takes part, beside memory and operations of each."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        super().__init__(path, "model", settings)

    @property
    def data(self) -> dict[str, Any]:
        return grouped(self.file)

    def note(self, kind: str, entries: dict[str, dict[str, Any]]) -> None:
        """Add what is known of some mixers: work or memory."""
        self.extend([{"kind": kind, "of": name, **one} for name, one in entries.items()])

    def add_round(self, time: int, seconds: dict[str, list[float]]) -> None:
        self.add({"kind": "round", "session": self.session, "time": time, "seconds": seconds})

    def rounds(self, time: int, name: str | None = None) -> list[dict[str, Any]]:
        """Finished rounds at a length, of one mixer or of any."""
        return [r for r in self.data["rounds"] if r["time"] == time and (name is None or name in r["seconds"])]


def entry(name: str, time: int) -> str:
    """The key of a mixer at a length."""
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
