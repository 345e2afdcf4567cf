"""Files: written whole or not at all, read past damaged lines, never overwritten by accident, checked, locked."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import stat
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from hypermlp.errors import RunError

Record = dict[str, Any]
TOKENIZER = "tokenizer.json"  # beside a corpus, in checkpoints and saved models
LOCK = "lock"  # in a folder in which one process works at a time


@contextlib.contextmanager
def whole_file(path: Path, folder: Path | None = None, *, mode: int = 0o666) -> Iterator[Path]:
    """An empty file to fill, which gets its name, and replaces what had it, only when it is complete and on the disk.

    Args:
        path: what it will be called.
        folder: where it lies until then, on the same disk; by default beside `path`.
        mode: its permissions, less those that the umask takes away.
    """
    temporary = (folder or path.parent) / f".{path.name}-{uuid.uuid4().hex}"
    try:
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
        granted = stat.S_IMODE(temporary.stat().st_mode)
        yield temporary
        temporary.chmod(granted)  # some writers replace the file by one of their own
        publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # gone already if all went well


def publish(temporary: Path, path: Path) -> None:
    """Give a complete file its name, once its data is on the disk: a power cut cannot leave a name without data."""
    sync(temporary)
    os.replace(temporary, path)


def sync(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    if os.name != "posix" and path.is_dir():
        return  # Windows does not open folders
    handle = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, data: bytes, folder: Path | None = None) -> None:
    """Write `data` whole or not at all: a full disk or a kill leaves the old file as it was."""
    with whole_file(path, folder) as temporary:
        temporary.write_bytes(data)


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
    lines = [parse_line(line, valid) for line in (path.read_bytes().splitlines() if path.exists() else [])]
    records = [record for record in lines if record is not None]
    return records, len(lines) - len(records)


def parse_line(line: bytes, valid: Callable[[Record], bool]) -> Record | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # cut off by a kill, or nested without end
        return None
    return record if isinstance(record, dict) and valid(record) else None


def append_json_line(path: Path, record: Record) -> None:
    """Add a record as one line, on the disk when this returns; or not at all, with an error."""
    data = (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode()
    with open(path, "ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        try:
            written = 0
            while written < len(data):
                written += file.write(data[written:])
            os.fsync(file.fileno())
        except OSError:
            file.truncate(size)
            raise
    if not size:
        sync(path.parent)  # the name too


def end_last_line(path: Path, valid: Callable[[Record], bool]) -> None:
    """Make a file of JSON lines ready to be continued: complete its last line, or drop it if a kill cut it off."""
    data = path.read_bytes() if path.exists() else b""
    whole, newline, last = data.rpartition(b"\n")
    if not last:
        return
    write_whole(path, whole + newline + (last + b"\n" if parse_line(last, valid) is not None else b""))


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


OWN = ('name="generator" content="hypermlp"', "<title>hypermlp")  # in every page that we write


def refuse_foreign(path: Path, own: Sequence[str] = OWN, *, force: bool = False) -> None:
    """Raise if a file is there that we did not write; own: what our files hold, one of which tells them."""
    if force or not path.exists():
        return
    if not path.is_file() or not any(mark in path.read_text(encoding="utf-8", errors="replace") for mark in own):
        raise ValueError(f"{path} is there and was not written by hypermlp; choose another name, or replace it with --force")


def write_own(path: Path, text: str, own: Sequence[str] = OWN, *, force: bool = False) -> None:
    """Write a file whole; only a file of our own may be replaced."""
    refuse_foreign(path, own, force=force)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text.encode())


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def delete(path: Path) -> None:
    """Remove a file, or a folder with its content; of a link, only the link. A missing path is no error."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def lock(folder: Path, *, wait: bool = False) -> TextIO:
    """Keep other processes out of a folder until the file that is returned is closed, by this process or by its end.

    Args:
        folder: gets a file named lock, which stays.
        wait: for a process that works there, instead of a RunError.
    """
    path = folder / LOCK
    if path.is_symlink():
        raise OSError(errno.ELOOP, f"{path} is a link, and a lock must be a file of its own folder; remove it")
    handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
    file = os.fdopen(handle, "w")
    if sys.platform != "win32":
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise RunError(f"{folder} is in use: another process works there") from None
    return file
