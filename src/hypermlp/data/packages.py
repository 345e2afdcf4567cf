"""Python sources of pinned packages, a corpus of more than 100 MB that needs no Hub: the package index, or a folder of wheels.

packages.txt names the packages, each with its version and the digest of its wheel, so everybody gets the same bytes: wheels of
pure Python, which no machine builds. What the folder lacks is fetched by pip; a wheel is never taken without its digest.
Nothing is installed, and nothing in a wheel is run.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

PINS = Path(__file__).with_name("packages.txt")
LARGEST = 2**20  # bytes of a file; larger ones are tables rather than source
COPIES, TABLES, NOT_TEXT = "copies of another file", f"files of more than {LARGEST // 1024} kB", "files that are not UTF-8"


class Pin(NamedTuple):
    """A line of packages.txt."""

    line: str
    name: str
    version: str
    digest: str  # sha256 of the wheel

    @property
    def wheel(self) -> str:
        return f"{self.stem}-{self.version}-py3-none-any.whl"

    @property
    def stem(self) -> str:
        return self.name.replace("-", "_")


class SourceFile(NamedTuple):
    wheel: Path
    name: str  # in the wheel
    number: int  # its place there
    size: int


def read_pins() -> list[Pin]:
    lines = [line for line in PINS.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    found = [re.fullmatch(r"(\S+)==(\S+) --hash=sha256:(\w{64})", line) for line in lines]
    return [Pin(line, *match.groups()) for line, match in zip(lines, found, strict=True) if match is not None]


def default_folder() -> Path:
    """Where wheels are kept that no folder was given for."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hypermlp" / "wheels"


def find_wheels(folder: Path) -> list[Path]:
    """The wheels of all pins, in their order, each with its digest; what the folder lacks is fetched into it."""
    pins = read_pins()
    missing = [pin for pin in pins if not (folder / pin.wheel).is_file()]
    if missing:
        fetch(missing, folder)
    for pin in pins:
        if (found := hashlib.sha256((folder / pin.wheel).read_bytes()).hexdigest()) != pin.digest:
            raise ValueError(
                f"{folder / pin.wheel} is not the file that was pinned: its sha256 begins {found[:12]}, not {pin.digest[:12]}; "
                "remove it, and the same command fetches it again"
            )
    return [folder / pin.wheel for pin in pins]


def fetch(pins: Iterable[Pin], folder: Path) -> None:
    """Have pip download these wheels, and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    pins = list(pins)
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as wanted:
        wanted.write("\n".join(pin.line for pin in pins))
        wanted.flush()
        how = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes"]
        command = [sys.executable, "-m", "pip", *how, "--dest", str(folder), "--requirement", wanted.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    absent = [pin for pin in pins if not (folder / pin.wheel).is_file()]
    if absent:
        others = [path.name for pin in absent for path in sorted(folder.glob(f"{pin.stem}-*.whl"))]
        there = f" {folder} has {', '.join(others)}, of other versions." if others else ""
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["pip says no more"]
        reason = next((line for line in reversed(said) if line.startswith("ERROR")), said[-1])
        raise ValueError(
            f"pip could not fetch {', '.join(f'{pin.name} {pin.version}' for pin in absent)} ({reason}).{there} "
            f"With a network the same command fetches them; without one, carry the wheels to {folder}: "
            f"pip download --no-deps --only-binary=:all: --require-hashes -r {PINS} -d {folder}"
        )


def list_sources(wheels: Iterable[Path]) -> tuple[list[SourceFile], dict[str, tuple[str, ...]]]:
    """The Python files of wheels in the order of their names, each content once; and what is left out, by the reason."""
    found: list[SourceFile] = []
    skipped: dict[str, list[str]] = {COPIES: [], TABLES: [], NOT_TEXT: []}
    seen: set[bytes] = set()
    for wheel in wheels:
        archive = zipfile.ZipFile(wheel)
        files = [(info, number) for number, info in enumerate(archive.infolist()) if info.filename.endswith(".py")]
        for info, number in sorted(files, key=lambda pair: pair[0].filename):
            if info.file_size > LARGEST:
                skipped[TABLES].append(info.filename)
                continue
            content = archive.read(info)
            if not content.strip():
                continue
            digest = hashlib.sha256(content).digest()
            if digest in seen:
                skipped[COPIES].append(info.filename)
            elif not is_text(content):
                skipped[NOT_TEXT].append(info.filename)
            else:
                seen.add(digest)
                found.append(SourceFile(wheel, info.filename, number, info.file_size))
    return found, {reason: tuple(names) for reason, names in skipped.items() if names}


def is_text(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


@cache
def archive_of(wheel: str) -> zipfile.ZipFile:
    """Opened once in a process."""
    return zipfile.ZipFile(wheel)


def read_source(wheel: str, number: int) -> str:
    archive = archive_of(wheel)
    return archive.read(archive.infolist()[number]).decode("utf-8")
