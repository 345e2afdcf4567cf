"""Files: written whole or not at all, read past damaged lines, never overwritten by accident, checked, locked."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from hypermlp.errors import RunError

Record = dict[str, Any]


@contextlib.contextmanager
def whole_file(path: Path, folder: Path | None = None) -> Iterator[BinaryIO]:
    """A file to write that gets its name, and replaces what had it, only when it is complete and on the disk.

    folder: where the temporary file lies, on the same disk; by default beside `path`.
    """
    handle, temporary = tempfile.mkstemp(dir=folder or path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_whole(path: Path, data: bytes, folder: Path | None = None) -> None:
    """Write `data` whole or not at all: a full disk or a kill leaves the old file as it was."""
    with whole_file(path, folder) as file:
        file.write(data)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps(value, indent=2) + "\n").encode())


def read_json(path: Path) -> Any:
    """What a JSON file holds; a ValueError that names the file if it is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({type(error).__name__}: {error}); restore it, or move its folder away") from None


def read_json_lines(path: Path, valid: Callable[[Record], bool]) -> tuple[list[Record], int]:
    """The records of a file of JSON objects, one per line, in order; and how many lines are not valid records."""
    records, dropped = [], 0
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # cut off by a kill, or nested without end
            record = None
        if isinstance(record, dict) and valid(record):
            records.append(record)
        else:
            dropped += 1
    return records, dropped


def free_path(path: Path, *suffixes: str) -> Path:
    """`path`, or its first numbered variant (layer-2.json) such that neither it nor a file with another suffix exists.

    >>> free_path(Path("nowhere/layer.json"), ".png").name
    'layer.json'
    """
    number = 1
    found = path
    while any(found.with_suffix(suffix).exists() for suffix in (path.suffix, *suffixes)):
        number += 1
        found = path.with_stem(f"{path.stem}-{number}")
    return found


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def delete(path: Path) -> None:
    """Remove a folder with all that is in it, or a file; of a link, the link alone. What does not exist is no error."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def lock(folder: Path) -> TextIO:
    """Keep other processes out of a folder until the file that is returned is closed, by this process or by its end."""
    file = open(folder / "lock", "w")  # noqa: SIM115  (held by the caller)
    if sys.platform != "win32":
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise RunError(f"{folder} is in use: another process works there") from None
    return file
