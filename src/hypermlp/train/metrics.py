"""metrics.jsonl: a line per update, none twice and none missing, whatever stops and resumes a run; and loggers beside it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from hypermlp import notice
from hypermlp.checks import choose_from
from hypermlp.files import Record, read_json, read_json_lines, write_json, write_whole

TENSORBOARD, WANDB = "tensorboard", "wandb"


class Logger(Protocol):
    """Something that is told the record of every update: numbers and texts by name, and the step."""

    def log(self, record: Record) -> None: ...
    def close(self) -> None: ...


class Metrics:
    """Writes a file of records, and tells the loggers.

    Args:
        path: the file. What a stopped run wrote there about steps after `step` is dropped, since they are taken again.
        step: updates so far.
        loggers: told every record besides.
    """

    def __init__(self, path: Path, step: int, loggers: Sequence[Logger] = ()) -> None:
        self.path = path
        kept = [record for record in read_metrics(self.path) if record["step"] <= step]
        write_whole(self.path, "".join(json.dumps(record) + "\n" for record in kept).encode())
        self.file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115  (closed by close)
        self.loggers = loggers

    def append(self, record: Record) -> None:
        try:
            self.file.write(json.dumps(record) + "\n")
            self.file.flush()
        except OSError as error:
            raise OSError(
                error.errno, f"cannot write {self.path} ({error.strerror}); make room, and resume from the last checkpoint"
            ) from error
        for logger in self.loggers:
            logger.log(record)

    def sync(self) -> None:
        """To the disk: a checkpoint must not outlive the lines of its steps."""
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()
        for logger in self.loggers:
            logger.close()


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


class TensorBoard:
    """Event files in the run's folder."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / TENSORBOARD), purge_step=step + 1)

    def log(self, record: Record) -> None:
        for name, value in record.items():
            if isinstance(value, str):
                self.writer.add_text(name, value, record["step"])
            elif name != "step":
                self.writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases, which a resumed run continues; offline or not, as WANDB_MODE says."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        import wandb  # type: ignore[import-not-found,unused-ignore]

        identity = folder / f"{WANDB}.json"
        if not identity.exists():
            write_json(identity, {"id": wandb.util.generate_id()})
        self.run = wandb.init(
            project="hypermlp", name=folder.name, id=read_json(identity)["id"], resume="allow", dir=str(folder), config=config
        )

    def log(self, record: Record) -> None:
        self.run.log({name: value for name, value in record.items() if name != "step"}, step=record["step"])

    def close(self) -> None:
        self.run.finish()


LOGGERS = {TENSORBOARD: "tensorboard", WANDB: "wandb"}  # name → what pip installs


def check_loggers(names: Sequence[str]) -> None:
    """Refuse unknown loggers, and those that are not installed; TensorBoard, the default, is then left out in silence."""
    for name in names:
        choose_from("--logger", name, tuple(LOGGERS))
        if name != TENSORBOARD and importlib.util.find_spec(name) is None:
            raise ImportError(f"--logger {name} needs {name}: pip install {LOGGERS[name]}")


def open_loggers(names: Sequence[str], folder: Path, step: int, config: dict[str, Any]) -> list[Logger]:
    """The loggers of a run.

    Args:
        names: of LOGGERS; TensorBoard is left out where it is not installed.
        folder: the run's.
        step: after which it continues.
        config: what they are told about the run.
    """
    found: list[Logger] = []
    for name in dict.fromkeys(names):
        if name == WANDB:
            found.append(WeightsAndBiases(folder, config))
            continue
        with contextlib.suppress(ImportError):  # the default, where it is installed
            found.append(TensorBoard(folder, step))
    return found
