"""The folder of a training run.

run.json          the configuration, the corpus, and where, when and by which command it was started
metrics.jsonl     a line per update; loggers have files of their own beside it (metrics.py)
checkpoints/      the last ones
model/            the trained model, when the run is finished
corpus/           shards of a large corpus
lock              held by the process that works here
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from hypermlp.files import LOCK, Record, lock, read_json, write_json
from hypermlp.models.saved import CONFIG, save_model
from hypermlp.train.checkpoint import Checkpoints, complete, load_checkpoint, newest, read_tokenizer, step_of
from hypermlp.train.distributed import World
from hypermlp.train.metrics import Metrics, open_loggers, read_metrics

RUN = "run.json"


class RunFolder:
    """All that reads and writes the files of a run, but for a corpus, which data/shards.py does.

    Args:
        path: the folder; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run, self.metrics = path / RUN, path / "metrics.jsonl"
        self.checkpoints, self.model, self.corpus = path / "checkpoints", path / "model", path / "corpus"

    def take(self, resume: bool) -> TextIO:
        """Make the folder and lock it until what is returned is closed, or this process ends."""
        used = self.path.exists() and any(path.name not in (LOCK, self.corpus.name) for path in self.path.iterdir())
        if resume and not used and not self.corpus.exists():
            raise ValueError(
                f"{self.path} holds no training run to resume; give its folder, or leave out --resume to start one there"
            )
        if used and not self.run.is_file():
            raise ValueError(f"{self.path} holds other files; give a new folder")
        if used and not resume:
            raise ValueError(f"{self.path} holds a run already; resume it (--resume), or give a new folder")
        self.path.mkdir(parents=True, exist_ok=True)
        return lock(self.path)

    def read(self) -> Record:
        """What run.json says; nothing where there is none."""
        found = read_json(self.run) if self.run.is_file() else {}
        if not isinstance(found, dict):
            raise ValueError(f"{self.run} describes no run; restore it, or move its folder away")
        return found

    def write(self, run: Record) -> None:
        """Write run.json."""
        write_json(self.run, run)

    def read_metrics(self) -> list[Record]:
        """The records of the updates so far."""
        return read_metrics(self.metrics)

    def open_metrics(self, step: int, loggers: Sequence[str], config: Record) -> Metrics:
        """To write the records of the updates after `step`, also to these loggers, which are told the configuration."""
        return Metrics(self.metrics, step, open_loggers(loggers, self.path, step, config))

    def open_checkpoints(self, world: World, keep: int, files: dict[str, str]) -> Checkpoints:
        """Its checkpoints, of which so many are kept; files: name → content, written to every one."""
        return Checkpoints(self.checkpoints, world, keep=keep, files=files)

    def newest(self) -> Path | None:
        """The newest undamaged checkpoint."""
        return newest(self.checkpoints)

    def finished_model(self) -> Path | None:
        """The trained model; None where there is none, or the run was resumed and is not finished."""
        if not (self.model / CONFIG).is_file():
            return None
        latest, run = next(iter(complete(self.checkpoints)), None), self.read()
        finished = latest is None or not run or step_of(latest) >= run["config"]["train"]["steps"]
        return self.model if finished else None

    def save_model(self) -> None:
        """Turn the last checkpoint of a finished run into its trained model."""
        checkpoint = self.newest()
        assert checkpoint is not None
        save_model(load_checkpoint(checkpoint), self.model, read_tokenizer(checkpoint))

    def export(self, out: Path) -> Path:
        """Turn the newest undamaged checkpoint into a folder for Hugging Face; returns which one it was."""
        from hypermlp.models.hf import export  # late: transformers takes seconds
        from hypermlp.models.hf.card import model_card

        checkpoint = self.newest()
        if checkpoint is None:
            raise ValueError(f"{self.path} holds no training run with a checkpoint; give the folder that hypermlp train wrote")
        evaluated = [r for r in self.read_metrics() if "validation" in r and r["step"] <= step_of(checkpoint)]
        net = load_checkpoint(checkpoint)
        export(net, out, read_tokenizer(checkpoint), model_card(net, self.read(), evaluated[-1] if evaluated else {}))
        return checkpoint
