"""Where text comes from: Python's standard library, pinned packages, files and folders, Debian's packages, or the Hub.

A source is a list of parts that can be read on their own, document by document, never whole:

    stdlib            the source of the running interpreter's standard library, a document per file; needs no file of yours
    packages          Python sources of pinned packages (packages.py); packages:FOLDER says where their wheels are
    x.txt             a document per file (over 16 MB: cut at line ends)
    x.jsonl           a document per line, in its field `text`
    x.jsonl.zst       the same, compressed (as OpenWebText2 comes), read as it is; needs pyarrow
    x.parquet         a document per row, in its column `text`
    folder            all of the above in it, in the order of their paths
    debian:NAME       prose of a Debian package: its name, a .deb file, or a folder where it was unpacked (debian.py)
    hub:owner/name    the train split of a Hub dataset, streamed (hub:owner/name:config for one of its configurations)

Some of it is held out for validation: of several text files a twentieth, chosen by the hash of their names; of a single one the
last twentieth; of rows those whose content hashes low, so that a document and its copy are never on both sides.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import io
import json
import math
import os
import platform
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from hypermlp.data.debian import find_package, package_files, package_texts
from hypermlp.data.packages import default_folder, find_wheels, list_sources, read_source

LONGEST = 2**24  # bytes of a part of a file of lines, and so of a document from a text file
WHOLE = (".txt", ".py")  # files that are a document
# Tests are left out, and what is not part of the library or differs between machines with the same Python.
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
NOT_SOURCE = ("_sysconfigdata", "sitecustomize", "usercustomize")


class Document(NamedTuple):
    text: str
    validation: bool  # held out


@dataclass(frozen=True)
class SourcePart:
    """A piece of a source that can be read on its own."""

    kind: str  # which reader
    path: str
    name: str  # what messages call it: the path within the source
    start: int  # bytes of a file of lines, row groups of parquet, members of a wheel, files of a Hub dataset
    stop: int
    size: int  # bytes of text, as far as is known
    field: str
    validation: float  # share of the documents that is held out


@dataclass(frozen=True)
class Source:
    name: str
    parts: tuple[SourcePart, ...]
    version: str  # changes with the files
    field: str
    validation: float
    skipped: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)  # why → the files that are left out

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    def documents(self) -> Iterator[Document]:
        for part in self.parts:
            yield from read(part)

    def sample(self, size: int) -> Iterator[str]:
        """About `size` bytes of training text, from parts all over the source."""
        taken = 0
        for part in self.parts[:: max(1, self.size // size)]:
            for document in read(part):
                if taken >= size:
                    return
                if not document.validation:
                    taken += len(document.text)
                    yield document.text


def find_source(source: str | Path = "stdlib", *, field: str = "text", validation: float = 0.05) -> Source:
    """List the parts of a source without reading them.

    Args:
        source: "stdlib", "packages", "debian:NAME", "hub:owner/name", or the path of a file or folder.
        field: of a JSON line or a parquet row, which holds the text.
        validation: the share of documents to hold out.
    """
    if not 0 <= validation < 1:
        raise ValueError(f"validation ({validation}) is the share that is held out; it must be at least 0 and below 1")
    if source == "stdlib":
        return stdlib(validation)
    if source == "packages" or str(source).startswith("packages:"):
        return packages(str(source).removeprefix("packages").removeprefix(":"), validation)
    if str(source).startswith("debian:"):
        return debian(str(source).removeprefix("debian:"), validation)
    if str(source).startswith("hub:"):
        return hub(str(source), field, validation)
    root = Path(source)
    if root.is_dir():
        found = sorted(p for p in root.rglob("*") if p.is_file())
        names, others = (
            [p.relative_to(root).as_posix() for p in found if (ending(p) in KINDS) is ours] for ours in (True, False)
        )
        if not names:
            raise ValueError(f"the folder {root} holds no file that ends in {', '.join(KINDS)}")
        skipped = {f"files that are not {', '.join(KINDS)}": tuple(others)} if others else {}
        return dataclasses.replace(files(root.resolve().name, root, names, field, validation), skipped=skipped)
    if not root.is_file():
        raise ValueError(
            f"no corpus at {root}; give a file, a folder, 'stdlib', 'packages', 'debian:NAME' for a Debian package, "
            "or 'hub:owner/name' for a dataset of the Hub"
        )
    if ending(root) not in KINDS:
        raise ValueError(f"the corpus {root} must end in {', '.join(KINDS)}, or be a folder of such files")
    return files(root.name, root.parent, [root.name], field, validation)


def stdlib(validation: float) -> Source:
    root = Path(sysconfig.get_paths()["stdlib"])
    names = []
    for folder, inside, found in os.walk(root):
        inside[:] = [name for name in inside if name not in NOT_LIBRARY]
        paths = [Path(folder, name) for name in found if name.endswith(".py") and not name.startswith(NOT_SOURCE)]
        names += [path.relative_to(root).as_posix() for path in paths if path.is_file()]
    if not names:
        raise ValueError(f"this Python has no source of its standard library in {root}; give a corpus by its path")
    return files(f"Python {platform.python_version()} standard library", root, sorted(names), "", validation)


def files(title: str, root: Path, names: list[str], field: str, validation: float) -> Source:
    """A source of the named files below root."""
    whole = [name for name in names if name.endswith(WHOLE)]
    out = set(sorted(whole, key=position)[: math.ceil(validation * len(whole))])
    parts: list[SourcePart] = []
    version = hashlib.sha256()
    for name in names:
        path = root / name
        share = float(name in out) if len(whole) > 1 and name.endswith(WHOLE) else validation
        parts += KINDS.get(ending(path), library_file)(path, name, field, share)
        version.update(json.dumps([name, path.stat().st_size, path.stat().st_mtime_ns]).encode())
    return Source(title, tuple(parts), version.hexdigest(), field, validation)


def debian(wanted: str, validation: float) -> Source:
    """One part: a package is unpacked whole."""
    package = find_package(wanted)
    found = {name: path.stat() for name, path in package_files(package).items()}
    version = hashlib.sha256(json.dumps([[name, s.st_size, s.st_mtime_ns] for name, s in found.items()]).encode())
    name = f"Debian's {package.stem.partition('_')[0]}"
    part = SourcePart("debian", str(package), name, 0, 1, sum(s.st_size for s in found.values()), "", validation)
    return Source(name, (part,), version.hexdigest(), "", validation)


def packages(folder: str, validation: float) -> Source:
    """A part per file; what is held out is chosen by the hash of its content."""
    found, skipped = list_sources(find_wheels(Path(folder) if folder else default_folder()))
    parts = [
        SourcePart(
            "wheel", str(file.wheel), f"{file.wheel.name}/{file.name}", file.number, file.number + 1, file.size, "", validation
        )
        for file in found
    ]
    version = hashlib.sha256(json.dumps([[part.name, part.size] for part in parts]).encode()).hexdigest()
    return Source("Python sources of pinned packages", tuple(parts), version, "", validation, skipped)


def hub(source: str, field: str, validation: float) -> Source:
    """A part per file of the dataset, read over the network when it is needed."""
    name = source.removeprefix("hub:")
    count = hub_dataset(name).num_shards
    parts = [SourcePart("hub", name, f"{source}, file {i}", i, i + 1, LONGEST, field, validation) for i in range(count)]
    return Source(source, tuple(parts), source, field, validation)


def position(text: str) -> float:
    """A number from 0 to 1 by the hash of a text, the same everywhere."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=6).digest(), "big") / 2**48


# From a file to its parts


def library_file(path: Path, name: str, field: str, validation: float) -> list[SourcePart]:
    size = path.stat().st_size
    return [SourcePart("library", str(path), name, 0, size, size, field, validation)]


def text_file(path: Path, name: str, field: str, validation: float) -> list[SourcePart]:
    """The end of a text file is held out."""
    size = path.stat().st_size
    cut = round(size * (1 - validation))
    spans = [(*span, 0.0) for span in ranges(0, cut)] + [(*span, 1.0) for span in ranges(cut, size)]
    return [SourcePart("text", str(path), name, start, stop, stop - start, field, share) for start, stop, share in spans]


def json_lines_file(path: Path, name: str, field: str, validation: float) -> list[SourcePart]:
    spans = ranges(0, path.stat().st_size)
    return [SourcePart("json lines", str(path), name, start, stop, stop - start, field, validation) for start, stop in spans]


def compressed_file(path: Path, name: str, field: str, validation: float) -> list[SourcePart]:
    """One part: what is compressed can only be read from its beginning."""
    optional("pyarrow")
    size = path.stat().st_size
    return [SourcePart("compressed json lines", str(path), name, 0, 1, size, field, validation)]


def parquet_file(path: Path, name: str, field: str, validation: float) -> list[SourcePart]:
    metadata = parquet(str(path)).metadata
    sizes = [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
    return [SourcePart("parquet", str(path), name, i, i + 1, size, field, validation) for i, size in enumerate(sizes)]


def ranges(start: int, stop: int) -> list[tuple[int, int]]:
    return [(a, min(a + LONGEST, stop)) for a in range(start, stop, LONGEST)]


def ending(path: Path) -> str:
    """What names the kind of a file: its last suffix, or both of a compressed one."""
    return "".join(path.suffixes[-2:]) if path.suffix == ".zst" else path.suffix


KINDS: dict[str, Callable[[Path, str, str, float], list[SourcePart]]] = {
    ".txt": text_file,
    ".jsonl": json_lines_file,
    ".jsonl.zst": compressed_file,
    ".parquet": parquet_file,
}


# From a part to its documents


def read(part: SourcePart) -> Iterator[Document]:
    """The documents of a part that are not empty."""
    for text in READERS[part.kind](part):
        if text:
            # What is not Unicode (half of a surrogate pair, which JSON can spell) becomes a question mark.
            text = text.encode("utf-8", "replace").decode()
            yield Document(text, position(text) < part.validation)


def read_library(part: SourcePart) -> Iterator[str]:
    """Files that cannot be read, as some distributions of Python have them, are skipped."""
    try:
        yield Path(part.path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return


def read_text(part: SourcePart) -> Iterator[str]:
    yield decode(b"".join(line for _, line in lines(part)), part, part.start)


def read_json_lines(part: SourcePart) -> Iterator[str]:
    for start, line in lines(part):
        yield from row_text(decode(line, part, start), part.field, partial(place, part, start))


def read_compressed(part: SourcePart) -> Iterator[str]:
    """Line by line, so that memory holds no more than one document and what the decompressor needs."""
    arrow, number = optional("pyarrow"), 0

    def where() -> str:
        return f"{part.name}, line {number},"

    try:
        with arrow.CompressedInputStream(part.path, "zstd") as stream, io.BufferedReader(stream, 2**20) as file:
            for number, line in enumerate(file, 1):  # noqa: B007  (where() reads it)
                yield from row_text(line.decode("utf-8"), part.field, where)
    except OSError as error:
        raise ValueError(f"{where()} cannot be decompressed ({error}): the file is damaged, or not zstandard's") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{where()} is not UTF-8; convert the file first") from error


def row_text(line: str, field: str, where: Callable[[], str]) -> Iterator[str]:
    """The text of a line of JSON, or nothing of an empty one; `where` names the line for messages."""
    if not line.strip():
        return
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where()} is not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(row, dict) or not isinstance(row.get(field), str):
        found = ", ".join(f"{k} ({type(v).__name__})" for k, v in row.items()) if isinstance(row, dict) else "none"
        raise ValueError(f"{where()} has no text in a field {field!r}; its fields are: {found}")
    yield row[field]


def read_parquet(part: SourcePart) -> Iterator[str]:
    file = parquet(part.path)
    if part.field not in file.schema_arrow.names:
        raise ValueError(f"{part.name} has no column {part.field!r}; its columns are: {', '.join(file.schema_arrow.names)}")
    for batch in file.iter_batches(batch_size=256, row_groups=[part.start], columns=[part.field]):
        for value in batch.column(0).to_pylist():
            if not isinstance(value, str):
                raise ValueError(f"{part.name} holds {type(value).__name__} in its column {part.field!r}, where text is needed")
            yield value


def read_hub(part: SourcePart) -> Iterator[str]:
    dataset = hub_dataset(part.path)
    for row in dataset.shard(num_shards=dataset.num_shards, index=part.start):
        if not isinstance(row.get(part.field), str):
            raise ValueError(f"{part.name} has no text in a field {part.field!r}; its fields are: {', '.join(row)}")
        yield row[part.field]


def read_wheel(part: SourcePart) -> Iterator[str]:
    yield read_source(part.path, part.start)


def read_debian(part: SourcePart) -> Iterator[str]:
    yield from package_texts(Path(part.path))


READERS: dict[str, Callable[[SourcePart], Iterator[str]]] = {
    "library": read_library,
    "text": read_text,
    "json lines": read_json_lines,
    "compressed json lines": read_compressed,
    "parquet": read_parquet,
    "wheel": read_wheel,
    "debian": read_debian,
    "hub": read_hub,
}


def lines(part: SourcePart) -> Iterator[tuple[int, bytes]]:
    """The lines that begin within the part, each with its place in the file."""
    with open(part.path, "rb") as file:
        if part.start:
            file.seek(part.start - 1)
            file.readline()  # begins in the part before
        while (start := file.tell()) < part.stop and (line := file.readline()):
            yield start, line


def decode(text: bytes, part: SourcePart, start: int) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{place(part, start + error.start)} is not UTF-8; convert the file first") from error


def place(part: SourcePart, byte: int) -> str:
    """The file and the line of a byte in it, for a message."""
    with open(part.path, "rb") as file:
        before = sum(file.read(min(2**20, byte - start)).count(b"\n") for start in range(0, byte, 2**20))
    return f"{part.name}, line {before + 1},"


def parquet(path: str) -> Any:
    module = optional("pyarrow.parquet")
    try:
        return module.ParquetFile(path)
    except ValueError as error:  # pyarrow's errors about a file's content
        raise ValueError(f"{path} is not a parquet file: {error}") from error


@functools.cache
def hub_dataset(name: str) -> Any:
    path, _, config = name.partition(":")
    return optional("datasets").load_dataset(path, config or None, split="train", streaming=True)


def optional(module: str) -> Any:
    """Import an optional dependency."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        library = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != library:
            raise
        raise ValueError(f"this needs {library}; install it with: pip install 'hypermlp[hf]'") from error
