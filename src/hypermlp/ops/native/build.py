"""Compiles kernel.cpp and its headers at first use, for this machine, into the user's cache folder.

The file's name is a digest of everything that it depends on: sources, compiler, flags and the processor's features. So a folder
shared by different machines never gives one of them an instruction it lacks, and an old file is never taken for a new one.
Several processes may start at once: one compiles under a lock, and the finished library appears in one step.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from hypermlp import files, notice

SOURCES = Path(__file__).parent  # kernel.cpp, which includes the headers beside it
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", "-ffp-contract=fast")
TUNING = (("-march=native",), ("-mcpu=native",), ())  # the first that the compiler accepts; HYPERMLP_CXXFLAGS come after it
SECONDS = 600  # for one compilation


class Library(NamedTuple):
    """The loaded kernel, or why there is none."""

    handle: ctypes.CDLL | None
    reason: str


@functools.cache
def library() -> Library:
    """The kernel, compiled if need be; never raises."""
    compiler = find_compiler()
    if compiler is None:
        return Library(None, "no C++ compiler found; install g++ or clang++, or set CXX")
    try:
        return Library(load(compiler), f"{Path(compiler).name} found")
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        return Library(None, f"compiling the native kernel with {compiler} failed: {str(detail).strip()[-400:]}")


def find_compiler() -> str | None:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return next((path for path in map(shutil.which, names) if path), None)


def load(compiler: str) -> ctypes.CDLL:
    folder = cache_folder()
    path = folder / f"kernel-{digest(compiler)}.so"
    with files.lock(folder, wait=True):
        if not is_whole(path):
            notice.once(f"compiling the native CPU kernel into {folder} (once, about half a minute)")
            compile_to(path, compiler)
    return ctypes.CDLL(str(path))


def is_whole(path: Path) -> bool:
    """Whether the library is what this user compiled: loading a damaged one would end the process, a planted one runs."""
    checksum = path.with_suffix(".sha256")
    try:
        if any(distrusted(file) for file in (path, checksum)):
            return False
        return checksum.read_text() == hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return False


def distrusted(path: Path) -> str | None:
    """Why somebody else could have put code at `path`; None if only the user or root could."""
    if sys.platform == "win32":
        return None
    found = path.stat()
    if found.st_uid not in (os.geteuid(), 0):
        return f"{path} belongs to another user"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{path} can be written by others (chmod go-w {path} would do)"
    return None


def compile_to(path: Path, compiler: str) -> None:
    """Compile into a temporary file beside `path` and move it there, so that no process sees half of it."""
    with files.whole_file(path, mode=0o700) as temporary:
        for tuning in TUNING:
            command = [compiler, *FLAGS, *tuning, *more_flags(), str(SOURCES / "kernel.cpp"), "-o", str(temporary)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
            if done.returncode == 0:
                break
        else:
            raise subprocess.CalledProcessError(done.returncode, command, stderr=done.stderr)
        checksum = files.file_sha256(temporary)
    write_private(path.with_suffix(".sha256"), checksum)


def digest(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60).stdout
    sources = sorted(path for path in SOURCES.iterdir() if path.suffix in (".h", ".cpp"))
    texts = [f"{path.name}\0{path.read_text()}" for path in sources]
    parts = (*texts, compiler, version, repr((FLAGS, TUNING, more_flags())), processor())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def more_flags() -> list[str]:
    """HYPERMLP_CXXFLAGS, the user's own: `-march=x86-64-v3` compiles for every processor with AVX2."""
    return shlex.split(os.environ.get("HYPERMLP_CXXFLAGS", ""))


def processor() -> str:
    """Name and features of this processor, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def write_private(path: Path, text: str) -> None:
    """Write a file that the user alone can write, whoever made one of that name before."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def cache_folder() -> Path:
    """HYPERMLP_CACHE, or the user's cache folder; a private temporary one where that cannot be used, or not safely."""
    try:
        given = os.environ.get("HYPERMLP_CACHE")
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(given) if given else Path(base) / "hypermlp"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            reason = distrusted(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home folder
        reason = str(error)
    return folder if reason is None else temporary_folder(reason)


@functools.cache
def temporary_folder(reason: str) -> Path:
    """A folder of this process alone, removed at its end."""
    folder = tempfile.mkdtemp(prefix="hypermlp-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    notice.once(
        f"the native kernel is compiled for this process alone, in {folder}: {reason}; HYPERMLP_CACHE names another folder"
    )
    return Path(folder)
