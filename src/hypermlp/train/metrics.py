"""metrics.jsonl: a line for every update, none twice and none missing, whatever stops and resumes a run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hypermlp import notice
from hypermlp.files import Record, read_json_lines, write_whole

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

    def append(self, record: Record) -> None:
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


def read_metrics(path: Path) -> list[Record]:
    """The records so far; damaged lines, such as one that a kill cut off, are dropped with a notice."""
    records, dropped = read_json_lines(path, is_step)
    if dropped:
        notice.once(f"{path}: dropped {dropped} damaged line(s)")
    return records


def is_step(record: Record) -> bool:
    """Whether this is the record of an update: whole steps, and numbers where numbers belong."""
    step, texts = record.get("step"), ("sample",)
    whole = isinstance(step, int) and not isinstance(step, bool)
    return whole and all(isinstance(value, (int, float)) for name, value in record.items() if name not in texts)


def board(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=step + 1)
