"""Checkpoints that survive kills, full disks and damage, and can be read by any number of processes.

    checkpoints/step-00000500/
      shard-*.safetensors    tensors, each process its share (torch.distributed.checkpoint)
      …                      small files that say what the tensors are
      complete.json          the step, and size and SHA-256 of every file

A checkpoint is written under another name, forced to the disk and then renamed: one that has its name is complete. The format
is safetensors and JSON throughout, so that reading one runs no code; DCP's own reader would unpickle.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from hypermlp import notice
from hypermlp.files import TOKENIZER, delete, file_sha256, sync, write_json, write_whole
from hypermlp.models.lm import LanguageModel
from hypermlp.models.saved import read_config, weights
from hypermlp.train.distributed import World

COMPLETE = "complete.json"
TEMPORARY, OLD = ".new-", ".old-"
NAME = re.compile(r"step-\d{8,}")


class Checkpoints:
    """The checkpoints of one run. Every process calls the methods, in the same order.

    Args:
        folder: where they lie.
        world: the processes that write them.
        keep: how many are kept.
        files: name → content, written to every checkpoint.
    """

    def __init__(self, folder: Path, world: World, *, keep: int = 2, files: dict[str, str] | None = None) -> None:
        self.folder, self.world, self.keep = folder, world, keep
        self.files = files or {}
        self.pending: Future[None] | None = None
        self.thread = ThreadPoolExecutor(1)
        if world.main:
            folder.mkdir(parents=True, exist_ok=True)
            for leftover in [*folder.glob(TEMPORARY + "step-*"), *folder.glob(OLD + "step-*")]:
                delete(leftover)

    def save(self, step: int, state: dict[str, Tensor], *, wait: bool = True, files: dict[str, str] | None = None) -> None:
        """Write a checkpoint. One is written at a time.

        Args:
            step: updates so far.
            state: all tensors (Training.state).
            wait: until it is written; otherwise a copy is, while training continues.
            files: name → content, written to this checkpoint besides the common ones.
        """
        self.finish()
        files = {**self.files, **(files or {})}
        if wait:
            self._write(step, state, files)
        else:
            copy = {name: tensor.to("cpu", copy=True) for name, tensor in state.items()}
            self.pending = self.thread.submit(self._write, step, copy, files)

    def finish(self) -> None:
        """Wait for the write under way, if any; its error is raised here."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    def latest(self) -> Path | None:
        """The newest undamaged checkpoint."""
        return self.world.share(newest(self.folder) if self.world.main else None)

    def load(self, path: Path, state: dict[str, Tensor]) -> int:
        """Fill `state` in place, however many processes wrote it; returns its step."""
        with single_process_is_meant():
            state_dict_loader.load(state, storage_reader=HuggingFaceStorageReader(str(path)), process_group=self.world.saving)
        return step_of(path)

    def _write(self, step: int, state: dict[str, Tensor], files: dict[str, str]) -> None:
        final = self.folder / name_of(step)
        temporary = final.with_name(TEMPORARY + final.name)
        try:
            with single_process_is_meant():
                writer = Writer(temporary, step, files)
                state_dict_saver.save(state, storage_writer=writer, process_group=self.world.saving)
            if self.world.main:
                until_now = [path for path in complete(self.folder) if step_of(path) <= step]
                for old in until_now[self.keep :]:
                    remove(old)
        except CheckpointException as error:  # of any process; torch does not derive it from Exception
            cause = next((e for e, _ in error.failures.values() if isinstance(e, OSError)), None)
            failure = f"cannot write the checkpoint of step {step} to {self.folder}"
            if cause is None:
                raise RuntimeError(f"{failure}: {error}") from error
            raise OSError(
                cause.errno,
                f"{failure} ({cause.strerror}); what was saved before is untouched: make room, and resume from there",
            ) from error
        finally:
            if self.world.main:
                shutil.rmtree(temporary, ignore_errors=True)  # gone already if all went well


class Writer(HuggingFaceStorageWriter):
    """Each process writes its share; when all have, the first one completes the folder and renames it."""

    def __init__(self, folder: Path, step: int, files: dict[str, str]) -> None:
        super().__init__(str(folder), save_distributed=True)
        self.folder, self.step, self.small_files = folder, step, files

    def finish(self, metadata: Any, results: Any) -> None:
        for name, content in self.small_files.items():
            write_whole(self.folder / name, content.encode())
        found = {path.name: describe(path) for path in sorted(self.folder.iterdir())}
        for name in found:
            sync(self.folder / name)
        write_json(self.folder / COMPLETE, {"step": self.step, "files": found})
        sync(self.folder)
        final = self.folder.with_name(self.folder.name.removeprefix(TEMPORARY))
        if final.exists() or final.is_symlink():
            remove(final)  # damaged: this run resumed from an older one
        os.rename(self.folder, final)
        sync(final.parent)


def read_tokenizer(checkpoint: Path) -> dict[str, Any] | None:
    """What a model's tokenizer is made of; None where there is none."""
    path = checkpoint / TOKENIZER
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def load_checkpoint(checkpoint: Path) -> LanguageModel:
    """The model alone, whole in this process, however many processes wrote it."""
    model = LanguageModel(read_config(checkpoint))
    state = {f"model.{name}": tensor for name, tensor in weights(model).items()}
    with single_process_is_meant():
        state_dict_loader.load(state, storage_reader=HuggingFaceStorageReader(str(checkpoint)), no_dist=True)
    return model


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def complete(folder: Path) -> list[Path]:
    """Checkpoints in a folder, the newest first. Copies under other names, links and files of others are left alone."""
    ours = [path for path in folder.glob("step-*") if NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink()]
    return sorted(ours, key=step_of, reverse=True)


def newest(folder: Path) -> Path | None:
    """The newest undamaged checkpoint; a notice names the damaged ones before it."""
    for path in complete(folder):
        damage = find_damage(path)
        if damage is None:
            return path
        notice.once(f"{path} is damaged ({damage}); going back to the one before")
    return None


def find_damage(path: Path) -> str | None:
    try:
        files = json.loads((path / COMPLETE).read_text())["files"]
        for name, expected in files.items():
            if describe(path / name) != expected:
                return f"{name} was altered"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def describe(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": file_sha256(path)}


def remove(path: Path) -> None:
    """Remove a checkpoint; other processes see it disappear in one step."""
    old = path.with_name(OLD + path.name)
    os.rename(path, old)
    delete(old)


@contextmanager
def single_process_is_meant() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield
