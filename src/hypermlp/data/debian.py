"""English prose from Debian's packages, which can be had where there is no Hub: `apt-get download NAME` needs no root.

    anarchism         markdown       a document per page             11 MB
    dict-gcide        dictionary     a document per entry            33 MB
    dict-foldoc       dictionary     a document per entry             5 MB
    bible-kjv-text    compressed     a document per chapter           4 MB
    fortunes          short pieces   a document per piece             2 MB
    jargon-text       text           a document per 64 kB             2 MB

A package is a .deb file (an ar archive with a tar in it), a folder in which one or more were unpacked (`dpkg-deb -x`), or the
list of files that Debian keeps of an installed one. What is read is decided by the names of the files, so other packages with
such files do as well.
"""

from __future__ import annotations

import gzip
import io
import re
import struct
import tarfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

ROOT = Path("/")
INSTALLED = "var/lib/dpkg/info"  # NAME.list: the files of a package
ARCHIVE = b"!<arch>\n"
LONGEST = 2**16  # characters of a document from a plain text
HEADER = 60  # bytes before a member of an ar archive


def find_package(wanted: str) -> Path:
    """The .deb, folder or list of files that is meant by a path or by the name of a package."""
    path = Path(wanted)
    if path.is_dir() or (path.is_file() and path.suffix == ".deb"):
        return path
    downloaded = sorted(Path().glob(f"{wanted}_*.deb"))
    if downloaded:
        return downloaded[-1]
    installed = ROOT / INSTALLED / f"{wanted}.list"
    if re.fullmatch(r"[a-z0-9][a-z0-9+.-]+", wanted) and installed.is_file():
        return installed
    raise ValueError(
        f"no Debian package {wanted!r}: it is not installed, and there is no {wanted}_*.deb here; fetch it with "
        f"`apt-get download {wanted}`, or give the path of a .deb or of a folder where it was unpacked (dpkg-deb -x)"
    )


def package_files(package: Path) -> dict[str, Path]:
    """The files of prose of an unpacked or installed package, by their names within it; of a .deb, the .deb."""
    if package.suffix == ".deb" and package.is_file():
        return {package.name: package}
    if package.is_dir():
        found = {path.relative_to(package).as_posix(): path for path in package.rglob("*")}
    else:
        names = (line.lstrip("/") for line in package.read_text(encoding="utf-8").splitlines())
        found = {name: ROOT / name for name in names}
    prose = {name: path for name, path in sorted(found.items()) if reader_of(name) and path.is_file()}
    if not prose:
        raise no_prose(package)
    return prose


def package_texts(package: Path) -> Iterator[str]:
    """The documents of a package, in the order of its files' names."""
    files = package_files(package)
    contents: Iterator[tuple[str, bytes]] = ((name, path.read_bytes()) for name, path in files.items())
    if list(files.values()) == [package]:
        contents = iter(sorted(members(package)))
    empty = True
    for name, content in contents:
        read = reader_of(name)
        assert read is not None
        for text in read(content):
            empty = False
            yield text
    if empty:
        raise no_prose(package)


def no_prose(package: Path) -> ValueError:
    return ValueError(f"{package} has no text that hypermlp knows; known are {', '.join(KNOWN)}")


def members(package: Path) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the files of prose in a .deb; nothing is written to disk."""
    with open(package, "rb") as file:
        data = data_member(file, package)
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:*") as tar:
            for member in tar:
                name = member.name.removeprefix("./")
                content = tar.extractfile(member) if member.isfile() and reader_of(name) else None
                if content is not None:
                    yield name, content.read()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ValueError(f"{package} cannot be read ({error}); unpack it with dpkg-deb -x and give the folder") from error


def data_member(file: IO[bytes], package: Path) -> bytes:
    """The tar with a package's files, still compressed."""
    if file.read(len(ARCHIVE)) != ARCHIVE:
        raise ValueError(f"{package} is not a Debian package: it does not begin as an ar archive does")
    while len(header := file.read(HEADER)) == HEADER:
        name, size = header[:16].decode("ascii", "replace").strip(" /"), int(header[48:58])
        if name.startswith("data.tar"):
            return file.read(size)
        file.seek(size + size % 2, io.SEEK_CUR)
    raise ValueError(f"{package} is not a Debian package: it has no data.tar")


# From a file to its documents


def decode(content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return content.decode("latin-1")


def plain(content: bytes) -> Iterator[str]:
    """Long texts in pieces of 64 kB, cut at empty lines, so that some of one can be held out."""
    text, start = decode(content), 0
    while len(text) - start > LONGEST and (end := text.find("\n\n", start + LONGEST)) >= 0:
        yield text[start : end + 1]
        start = end + 2
    yield text[start:]


def markdown(content: bytes) -> Iterator[str]:
    """Links and pictures become their words."""
    yield re.sub(r"!?\[([^][]*)\]\([^()\s]*(?:\s+\"[^\"]*\")?\)", r"\1", decode(content))


def dictionary(content: bytes) -> Iterator[str]:
    """An entry begins at the margin; its body is indented. References' braces and the sources' marks are left out."""
    entry: list[str] = []
    for line in [*decode(gzip.decompress(content)).splitlines(), "end"]:
        at_margin = bool(line) and not line[0].isspace()
        if at_margin and len(entry) > 1 and not entry[-1].strip():
            head, body = entry[0], textwrap.dedent("\n".join(entry[1:])).strip()
            if body and not head.startswith("00-database"):
                text = re.sub(r"[ \t]*\[(?:1913 Webster|WordNet [\d.]+|PJC|Webster 1913 Suppl\.)\]|[{}]", "", f"{head}\n{body}")
                yield re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
            entry = []
        entry.append(line)


def fortunes(content: bytes) -> Iterator[str]:
    yield from (piece.strip() + "\n" for piece in re.split(r"^%.*$", decode(content), flags=re.MULTILINE) if piece.strip())


def bible(content: bytes) -> Iterator[str]:
    """Windows of 64 kB, each compressed as Unix's compress does; then a verse per line, such as "Ge1:1 In the beginning"."""
    if content[:4] != b"EC02":
        raise ValueError("this bible.data has an unknown format: it does not begin with EC02")
    size, count = struct.unpack_from(">II", content, 0x54)
    begin = struct.unpack_from(f">{count + 1}I", content, 0x5C)
    text = b"".join(expand(content[begin[i] : begin[i + 1]])[:size] for i in range(count))
    chapter, verses = "", list[str]()
    for line in [*decode(text).splitlines(), "end0:0"]:
        found = re.match(r"(\w+?\d+):\d+ ?", line)
        if found is None:
            continue  # the title
        if found[1] != chapter and verses:
            yield "\n".join(verses) + "\n"
            verses = []
        chapter = found[1]
        verses.append(line[found.end() :])


def expand(codes: bytes) -> bytes:
    """What Unix's compress made codes of 9 to 16 bits from (LZW); they come in groups of eight of one width."""
    clear, most = 256, 16
    words = [bytes([i]) for i in range(clear)] + [b""]
    out, width, last, at = list[bytes](), 9, b"", 0
    while at < len(codes):
        group = codes[at : at + width]
        bits, at = int.from_bytes(group, "little"), at + width
        for i in range(8 * len(group) // width):
            code = bits >> (i * width) & (1 << width) - 1
            if code == clear:
                del words[clear + 1 :]
                width, last = 9, b""
                break
            word = words[code] if code < len(words) else last + last[:1]
            out.append(word)
            if last and len(words) < 1 << most:
                words.append(last + word[:1])
            last = word
            if len(words) == 1 << width and width < most:
                width += 1
                break
    return b"".join(out)


def unzipped(read: Callable[[bytes], Iterator[str]]) -> Callable[[bytes], Iterator[str]]:
    return lambda content: read(gzip.decompress(content))


KNOWN: dict[str, Callable[[bytes], Iterator[str]]] = {
    "usr/share/dictd/*.dict.dz": dictionary,
    "usr/share/doc/*/markdown/*.md": markdown,
    "usr/share/doc/*/markdown/*.md.gz": unzipped(markdown),
    "usr/share/doc/*/*.txt": plain,
    "usr/share/doc/*/*.txt.gz": unzipped(plain),
    "usr/share/games/fortunes/*": fortunes,
    "usr/lib/bible.data": bible,
}
NOT_PROSE = re.compile(r".*/((alinks|biblio)\.md(\.gz)?|copyright|[^/]*\.(dat|u8))")  # lists of links; indices of fortunes


def reader_of(name: str) -> Callable[[bytes], Iterator[str]] | None:
    """What reads a file of a package, by its name; None: it is no prose."""
    if NOT_PROSE.fullmatch(name):
        return None
    for pattern, read in KNOWN.items():
        if re.fullmatch(re.escape(pattern).replace(r"\*", "[^/]*"), name):
            return read
    return None
