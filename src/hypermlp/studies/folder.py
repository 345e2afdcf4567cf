"""The folder of a study, which survives whatever stops the runs.

    plan.json            what the runs have in common; where, when and by which command they were started
    runs.jsonl           one line per finished run
    checkpoints/         the unfinished runs, one folder each (train/checkpoint.py)
    models/              what the demo leaves for the explorer (task_models.py)
    lock                 held by the one process that works here

Only that process writes lines, each whole and on the disk before the next.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from hypermlp import notice
from hypermlp.checks import same_settings
from hypermlp.files import Record, append_json_line, end_last_line, lock, read_json, read_json_lines, write_json, write_whole
from hypermlp.ops.dispatch import rounding
from hypermlp.provenance import provenance


class Folder:
    """A folder of runs, held by this process from `with` to its end."""

    def __init__(self, path: Path) -> None:
        self.path, self.lines, self.checkpoints = path, path / "runs.jsonl", path / "checkpoints"
        self.plan: dict[str, Any] = {}
        self.start = 0  # the number of this start, which records refer to
        self.records: dict[str, Record] = {}  # the latest of each key

    def __enter__(self) -> Folder:
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self._lock = lock(self.path)
        try:
            self._read()
        except BaseException:
            self._lock.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._lock.close()

    def _read(self) -> None:
        if any(self.checkpoints.glob("*.pt")):
            notice.once(
                f"{self.checkpoints}/*.pt are checkpoints of an earlier version, which are not read: their runs start over"
            )
        with contextlib.suppress(FileNotFoundError):
            self.plan = read_json(self.path / "plan.json")["plan"]
        self.records = self._repair()

    def _repair(self) -> dict[str, Record]:
        """Read what is there; lines that a kill or a full disk left unfinished are dropped, and their runs repeated."""
        records, dropped = read_lines(self.lines)
        if dropped:
            lines = [json.dumps(plain(record), ensure_ascii=False) + "\n" for record in records]
            write_whole(self.lines, "".join(lines).encode())
        end_last_line(self.lines, is_record)
        if dropped:
            notice.once(f"{self.lines}: dropped {dropped} damaged line(s); those runs are repeated")
        return {record["key"]: record for record in records}

    def begin(self, plan: dict[str, Any], *, grows: Mapping[str, int] = MappingProxyType({}), **absent: Any) -> None:
        """Write down what is run, and by whom. What the plan said before must not change.

        grows: its tables that may get more entries (checks.py: same_settings).
        absent: what it means that a plan does not say a number.
        """
        path = self.path / "plan.json"
        starts = read_json(path)["starts"] if path.exists() else []
        new = json.loads(json.dumps(plan))
        if self.plan:
            same_settings(self.path, {**absent, **self.plan}, {**absent, **new}, grows=grows)
        self.plan = merge(self.plan, new)
        self.start = len(starts)
        write_json(path, {"plan": self.plan, "starts": [*starts, {**provenance(), **rounding()}]})

    def append(self, record: Record) -> None:
        """One line, on the disk when this returns; or not at all, with an error."""
        try:
            append_json_line(self.lines, plain(record))
        except OSError as error:
            raise OSError(
                error.errno,
                f"cannot write {self.lines} ({error.strerror}); its {len(self.records)} runs are safe: "
                "make room and start again, it continues from there",
            ) from error
        self.records[record["key"]] = record

    def checkpoint(self, key: str) -> Path:
        """Where a run keeps its checkpoints."""
        return self.checkpoints / hashlib.sha256(key.encode()).hexdigest()[:24]


def read_lines(path: Path) -> tuple[list[Record], int]:
    """The records of a runs.jsonl in order, and how many lines are no records."""
    return read_json_lines(path, is_record)


def is_record(record: Record) -> bool:
    return isinstance(record.get("key"), str)


def plain(value: Any) -> Any:
    """JSON has no numbers that are not finite: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def merge(old: Any, new: Any) -> Any:
    """Both plans together, where they agree in what both have."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return {**old, **new, **{part: merge(old[part], new[part]) for part in old if part in new}}
