"""Prose of Debian's packages: from a .deb, from the folder where it was unpacked, and from an installed one."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
from pathlib import Path

import pytest

from hypermlp.cli.prepare import run_prepare
from hypermlp.data import debian
from hypermlp.data.text import find_source
from hypermlp.report.terminal import new_console

PAGE = "Anarchism is a [theory](http://example.org/a_b) of _order_.\n"
DICTIONARY = """00-database-info
   About this file.

Abate \\A*bate"\\, v. t. [OF. abatre.]
   1. To beat down. [Obs.]
      [1913 Webster]

            The {King} of Scots.                  --Hall.
      [1913 Webster]

Abbey \\Ab"bey\\, n.
   A monastery. [PJC]

"""
VERSES = "Holy Bible.\nGe1:1 In the beginning.\nGe1:2 And the earth.\nGe2:1 Thus.\n1Jo1:1 That which was.\n"
FILES = {
    "usr/share/doc/anarchism/markdown/secA.md.gz": gzip.compress(PAGE.encode()),
    "usr/share/doc/anarchism/markdown/biblio.md": b"left out",
    "usr/share/doc/anarchism/copyright": b"left out",
    "usr/share/dictd/gcide.dict.dz": gzip.compress(DICTIONARY.encode()),
    "usr/share/games/fortunes/wise": "Caf\xe9 first.\n%\nThen think.\n".encode("latin-1"),
    "usr/share/games/fortunes/wise.dat": b"left out",
}
TEXTS = [
    'Abate \\A*bate"\\, v. t. [OF. abatre.]\n1. To beat down. [Obs.]\n\n         The King of Scots.                  --Hall.\n',
    'Abbey \\Ab"bey\\, n.\nA monastery.\n',
    "Anarchism is a theory of _order_.\n",
    "Caf\xe9 first.\n",
    "Then think.\n",
]


def compress(text: bytes) -> bytes:
    """Unix's compress without its first three bytes: LZW in codes of 9 bits and more, in groups of eight of one width."""
    words: dict[bytes, int] = {bytes([i]): i for i in range(256)}
    groups, group, width, known, word = list[bytes](), list[int](), 9, 256, b""

    def write() -> None:
        bits = sum(code << (i * width) for i, code in enumerate(group))
        groups.append(bits.to_bytes(width if len(group) == 8 else -(-len(group) * width // 8), "little"))
        group.clear()

    for i in range(len(text) + 1):
        byte = text[i : i + 1]
        if byte and word + byte in words:
            word += byte
            continue
        group.append(words[word])
        if len(group) == 8:
            write()
        known += 1
        words[word + byte] = known
        if known == 1 << width:  # after 256, 512, … codes, so a group is never cut short
            assert not group
            width += 1
        word = byte
    if group:
        write()
    return b"".join(groups)


def bible(text: bytes, size: int) -> bytes:
    """The private form of bible.data: a title, the size and number of windows, where each begins, and the windows."""
    windows = [compress(text[i : i + size]) for i in range(0, len(text), size)]
    begin = [0x5C + 4 * (len(windows) + 1) + 3]
    for window in windows:
        begin.append(begin[-1] + len(window))
    header = b"EC02".ljust(0x54, b"\0") + struct.pack(f">II{len(begin)}I", size, len(windows), *begin)
    return header + b"\x1f\x9d\x90" + b"".join(windows)


def package(path: Path, files: dict[str, bytes], kind: str = "xz") -> Path:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode=f"w:{kind}") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    members = {"debian-binary": b"2.0\n", "control.tar.gz": b"odd", f"data.tar.{kind}": data.getvalue()}
    archive = b"!<arch>\n"
    for name, content in members.items():
        archive += (
            f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode() + content + b"\n" * (len(content) % 2)
        )
    path.write_bytes(archive)
    return path


def unpack(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def texts(source: str) -> list[str]:
    return [document.text for document in find_source(source).documents()]


@pytest.mark.parametrize("kind", ["xz", "gz"])
def test_a_deb_and_the_folder_it_was_unpacked_to_have_the_same_documents(kind: str, tmp_path: Path) -> None:
    assert texts(f"debian:{package(tmp_path / 'mixed_1.deb', FILES, kind)}") == TEXTS
    assert texts(f"debian:{unpack(tmp_path / 'mixed', FILES)}") == TEXTS
    assert find_source(f"debian:{tmp_path / 'mixed_1.deb'}").name == "Debian's mixed"


def test_a_package_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(debian, "ROOT", tmp_path / "root")
    with pytest.raises(ValueError, match="fetch it with `apt-get download words`"):
        find_source("debian:words")
    listed = "\n".join(["/.", *(f"/{name}" for name in FILES)])
    unpack(tmp_path / "root", {**FILES, "var/lib/dpkg/info/words.list": listed.encode()})
    assert texts("debian:words") == TEXTS, "installed"
    package(tmp_path / "words_1.2_all.deb", {"usr/share/doc/words/a.txt": b"of the file\n"})
    assert texts("debian:words") == ["of the file\n"], "a file beside us comes first"


def test_the_bible_is_unpacked_window_by_window(tmp_path: Path) -> None:
    content = bible(VERSES.encode(), 30)
    assert len(VERSES) > 60
    source = f"debian:{package(tmp_path / 'kjv_1.deb', {'usr/lib/bible.data': content})}"
    assert texts(source) == ["In the beginning.\nAnd the earth.\n", "Thus.\n", "That which was.\n"]
    with pytest.raises(ValueError, match="does not begin with EC02"):
        texts(f"debian:{package(tmp_path / 'other_1.deb', {'usr/lib/bible.data': b'EC03'})}")


def test_codes_of_more_than_nine_bits() -> None:
    text = bytes(i * i % 251 for i in range(3000)) * 2
    assert len(compress(text)) < len(text)
    assert debian.expand(compress(text)) == text


def test_long_texts_are_cut_at_empty_lines_so_that_some_is_held_out(tmp_path: Path) -> None:
    paragraph = "words " * 2000
    long = "\n\n".join(f"{i} {paragraph}" for i in range(40))
    found = texts(f"debian:{unpack(tmp_path, {'usr/share/doc/long/long.txt.gz': gzip.compress(long.encode())})}")
    assert len(found) == 7
    assert "\n".join(found) == long


def test_what_is_no_package_is_refused(tmp_path: Path) -> None:
    (tmp_path / "odd_1.deb").write_bytes(b"PK")
    with pytest.raises(ValueError, match="does not begin as an ar archive"):
        texts(f"debian:{tmp_path / 'odd_1.deb'}")
    broken = package(tmp_path / "broken_1.deb", FILES)
    broken.write_bytes(broken.read_bytes()[:-200])
    with pytest.raises(ValueError, match="unpack it with dpkg-deb -x"):
        texts(f"debian:{broken}")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="has no text that hypermlp knows"):
        find_source(f"debian:{tmp_path / 'empty'}")
    with pytest.raises(ValueError, match="has no text that hypermlp knows"):
        texts(f"debian:{package(tmp_path / 'program_1.deb', {'usr/bin/program': b'x'})}")


def test_data_prepare_reads_it(tmp_path: Path) -> None:
    source = f"debian:{package(tmp_path / 'mixed_1.deb', FILES)}"
    corpus = run_prepare(
        new_console(quiet=True), source, tmp_path / "out", tokenizer="bytes", end=None, field="text", validation=0.0, workers=1
    )
    assert corpus.name == "Debian's mixed"
    assert len(corpus.split("train")) == sum(len(text.encode()) + 1 for text in TEXTS)
