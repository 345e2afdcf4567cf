"""metrics.jsonl: a line for every update, none twice and none missing, whatever stops and resumes a run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hypermlp.provenance import write_whole

LINES, TENSORBOARD = "metrics.jsonl", "tensorboard"


class Metrics:
    """Writes to metrics.jsonl and, where it is installed, to TensorBoard."""

    def __init__(self, folder: Path, step: int) -> None:
        """Go on after `step`: what a run that was stopped wrote about later ones is dropped, for they are taken again."""
        self.path = folder / LINES
        kept = [record for record in read_metrics(self.path) if record["step"] <= step]
        write_whole(self.path, "".join(json.dumps(record) + "\n" for record in kept).encode())
        self.file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115  (closed by close)
        self.board = board(folder / TENSORBOARD, step)

    def append(self, record: dict[str, Any]) -> None:
        try:
            self.file.write(json.dumps(record) + "\n")
            self.file.flush()
        except OSError as error:
            raise OSError(
                error.errno, f"cannot write {self.path} ({error.strerror}); make room, and resume from the last checkpoint"
            ) from error
        if self.board is not None:
            for name, value in record.items():
                if isinstance(value, str):
                    self.board.add_text(name, value, record["step"])
                elif name != "step":
                    self.board.add_scalar(name, value, record["step"])

    def sync(self) -> None:
        """To the disk: a checkpoint must not outlive the lines of its steps."""
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()
        if self.board is not None:
            self.board.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records so far; a line that a kill left unfinished is passed over."""
    records = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
            record["step"]
        except (ValueError, TypeError, KeyError):
            continue
        records.append(record)
    return records


def board(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=step + 1)
