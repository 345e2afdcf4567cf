"""Tokenise a source once, into shards that are mapped instead of read (corpus.py says what a shard is).

The work is divided by the source alone, so the shards do not depend on the number of workers. A shard appears under its name
when it is complete; after a kill the same call resumes where the last one stopped. `index.json` comes last: a folder that has
one is complete. One process works in a folder at a time.
"""

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hypermlp.checks import same_settings
from hypermlp.data.corpus import INDEX, SPLITS, Corpus, SplitName, edge_checksum, open_corpus, read_index
from hypermlp.data.text import Source, SourcePart, read
from hypermlp.data.tokenizers import Tokenizer, tokenizer_from_dict
from hypermlp.errors import RunError
from hypermlp.files import LOCK, TOKENIZER, delete, lock, publish, write_whole

UNFINISHED = ".unfinished"  # what is only needed until the index is written
PLAN = "plan.json"


class ShardProgress(NamedTuple):
    read: int  # bytes of text, of tasks that are done
    total: int
    documents: int
    tokens: int


class ShardTask(NamedTuple):
    """The parts that one worker turns into one shard of each split."""

    number: int
    parts: tuple[SourcePart, ...]
    out: Path


def prepare(
    source: Source,
    out: str | Path,
    tokenizer: Tokenizer,
    *,
    workers: int = 1,
    shard: int = 2**24,
    progress: Callable[[ShardProgress], None] = lambda _: None,
    provenance: dict[str, Any] | None = None,
) -> Corpus:
    """Write the tokens of a source to a folder in shards, and open them; what was stopped is continued.

    Args:
        source: the text (text.py: find_source).
        out: the folder.
        tokenizer: kept beside the tokens.
        workers: processes.
        shard: bytes of text of a shard, about.
        progress: told how far it is.
        provenance: written to the index.
    """
    out = Path(out)
    unfinished = out / UNFINISHED
    plan = {
        "source": [source.name, source.version],
        "field": source.field,
        "validation": source.validation,
        "tokenizer": tokenizer.fingerprint,
        "shard": shard,
    }
    refuse_other_files(out)
    out.mkdir(parents=True, exist_ok=True)
    with clear_about_disk(out), lock(out):
        if start(out, plan, tokenizer):
            records = run(tasks(source, shard, out), tokenizer, workers, source.size, progress)
            counts = {name: total(records, name) for name in SPLITS}
            if not any(counted["documents"] for counted in counts.values()):
                (out / TOKENIZER).unlink()
                shutil.rmtree(unfinished)
                raise ValueError(f"the corpus {source.name} holds no text")
            index = {
                "source": {"name": source.name, "parts": len(source.parts), "bytes": source.size},
                "tokenizer": {
                    "name": tokenizer.name,
                    "vocabulary": tokenizer.vocabulary,
                    "end": tokenizer.end,
                    "fingerprint": tokenizer.fingerprint,
                },
                "counts": counts,
                "plan": plan,
                "provenance": provenance,
                "shards": {name: [record[name] for record in records if name in record] for name in SPLITS},
            }
            write_whole(out / INDEX, json.dumps(index, indent=2).encode(), unfinished)
        shutil.rmtree(unfinished, ignore_errors=True)
    return open_corpus(out)


def total(records: list[dict[str, Any]], split: SplitName) -> dict[str, int]:
    return {what: sum(record[split][what] for record in records if split in record) for what in ("documents", "tokens")}


def refuse_other_files(out: Path) -> None:
    """A folder is new, or one of ours."""
    ours = (out / INDEX).is_file() or (out / UNFINISHED / PLAN).is_file()
    if not ours and out.exists() and any(path.name not in (UNFINISHED, LOCK) for path in out.iterdir()):
        raise ValueError(f"{out} holds other files; give a new folder")


def start(out: Path, plan: dict[str, Any], tokenizer: Tokenizer) -> bool:
    """Whether there is work to do; finished shards must have been made with the same plan.

    A plan that led to none (its options had a mistake, say) is forgotten.
    """
    complete, begun = (out / INDEX).is_file(), any((out / UNFINISHED).glob("[0-9]*.json"))
    if complete or begun:
        old = read_index(out)["plan"] if complete else json.loads((out / UNFINISHED / PLAN).read_text())
        same_settings(out, old, plan)
    if not complete:
        if not begun:
            delete(out / UNFINISHED)
        (out / UNFINISHED).mkdir(exist_ok=True)
        write_whole(out / UNFINISHED / PLAN, json.dumps(plan).encode(), out / UNFINISHED)
        write_whole(out / TOKENIZER, json.dumps(tokenizer.to_dict()).encode(), out / UNFINISHED)
    return not complete


def tasks(source: Source, shard: int, out: Path) -> list[ShardTask]:
    """Parts that follow each other, as many as make a shard."""
    groups: list[list[SourcePart]] = []
    size = shard
    for part in source.parts:
        if size >= shard:
            groups.append([])
            size = 0
        groups[-1].append(part)
        size += part.size
    return [ShardTask(number, tuple(group), out) for number, group in enumerate(groups)]


def run(
    todo: list[ShardTask], tokenizer: Tokenizer, workers: int, size: int, progress: Callable[[ShardProgress], None]
) -> list[dict[str, Any]]:
    """Do the tasks that are not done yet; the records of all, in order."""
    records: dict[int, dict[str, Any]] = {}
    so_far = np.zeros(3, np.int64)  # bytes read, documents, tokens

    def done(task: ShardTask, record: dict[str, Any]) -> None:
        nonlocal so_far
        records[task.number] = record
        counts = [[shard["documents"], shard["tokens"]] for shard in record.values()]
        so_far += [sum(part.size for part in task.parts), *np.sum([[0, 0], *counts], axis=0)]
        read, documents, tokens = so_far.tolist()
        progress(ShardProgress(read, size, documents, tokens))

    for task in todo:
        if record := finished(task):
            done(task, record)
    left = [task for task in todo if task.number not in records]
    if workers == 1 or len(left) < 2:
        for task in left:
            done(task, tokenise(task, tokenizer))
    else:
        # A fresh process each: a fork would copy the locks of torch's threads.
        pool = ProcessPoolExecutor(
            min(workers, len(left)), multiprocessing.get_context("spawn"), begin_worker, (tokenizer.to_dict(),)
        )
        futures = {pool.submit(work, task): task for task in left}
        try:
            for future in as_completed(futures):
                done(futures[future], future.result())
        except BrokenProcessPool as error:
            raise RunError(
                "a worker was killed, perhaps for want of memory; run the same command again, with fewer workers: "
                "finished shards are kept"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)
    return [records[task.number] for task in todo]


worker_tokenizer: Tokenizer  # in a worker process


def begin_worker(values: dict[str, Any]) -> None:
    global worker_tokenizer
    worker_tokenizer = tokenizer_from_dict(values)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides; a worker finishes what it has begun
    threading.Thread(target=die_with_parent, daemon=True).start()


def die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def work(task: ShardTask) -> dict[str, Any]:
    return tokenise(task, worker_tokenizer)


def record_path(task: ShardTask) -> Path:
    return task.out / UNFINISHED / f"{task.number:05d}.json"


def finished(task: ShardTask) -> dict[str, Any] | None:
    """The record of a task that was finished before, if its shards are still there."""
    if not record_path(task).is_file():
        return None
    record: dict[str, Any] = json.loads(record_path(task).read_text())
    shards = [(task.out / shard["file"], shard["bytes"]) for shard in record.values()]
    return record if all(path.is_file() and path.stat().st_size == size for path, size in shards) else None


def tokenise(task: ShardTask, tokenizer: Tokenizer) -> dict[str, Any]:
    """Write the shards of a task, then its record, and return that."""
    unfinished = task.out / UNFINISHED
    record: dict[str, Any] = {}
    with Shard(unfinished, tokenizer) as train, Shard(unfinished, tokenizer) as validation:
        for part in task.parts:
            for document in read(part):
                (validation if document.validation else train).add(document.text)
        for name, shard in zip(SPLITS, (train, validation), strict=True):
            if shard.ends:
                record[name] = shard.finish(task.out / f"{name}-{task.number:05d}.bin")
    write_whole(record_path(task), json.dumps(record).encode(), unfinished)
    return record


class Shard:
    """A shard that grows in a temporary file and gets its name when it is complete."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.ends: list[int] = []
        self.digest = hashlib.sha256()
        self.temporary = folder / uuid.uuid4().hex

    def __enter__(self) -> Shard:
        self.file = open(self.temporary, "xb")
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # what could not be written cannot be flushed either
            self.file.close()
        self.temporary.unlink(missing_ok=True)

    def add(self, text: str) -> None:
        tokens = np.append(self.tokenizer.encode(text), np.uint32(self.tokenizer.end))
        self.write(tokens.astype(self.tokenizer.dtype).tobytes())
        self.ends.append((self.ends[-1] if self.ends else 0) + len(tokens))

    def write(self, data: bytes) -> None:
        self.file.write(data)
        self.digest.update(data)

    def finish(self, path: Path) -> dict[str, Any]:
        self.write(bytes(-self.file.tell() % 8))
        self.write(np.array(self.ends, "<u8").tobytes())
        size = self.file.tell()
        self.file.flush()
        edges = edge_checksum(self.temporary)
        publish(self.temporary, path)
        return {
            "file": path.name,
            "documents": len(self.ends),
            "tokens": self.ends[-1],
            "bytes": size,
            "edges": edges,
            "sha256": self.digest.hexdigest(),
        }


@contextmanager
def clear_about_disk(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(
            error.errno, f"no space left for {out}; make room and run the same command again: finished shards are kept"
        ) from error
