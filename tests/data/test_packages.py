"""The corpus of pinned packages: the same bytes for everybody, fetched by digest, and an error with the cure otherwise."""

from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import Path

import pytest

from hypermlp.cli.prepare import run_prepare
from hypermlp.data import packages
from hypermlp.data.packages import COPIES, LARGEST, NOT_TEXT, TABLES, read_pins
from hypermlp.data.text import find_source
from hypermlp.report.terminal import new_console

FILES = {
    "first": {"first/b.py": b"b = 2\n", "first/a.py": b"a = 1\n", "first/data.txt": b"no source", "first/empty.py": b" \n"},
    "second_one": {
        "second/copy.py": b"a = 1\n",
        "second/latin.py": b"# caf\xe9\n",
        "second/table.py": b"x = [" + b"0, " * (LARGEST // 2) + b"]\n",
        "second/own.py": "größe = 3\n".encode(),
    },
}
TEXTS = ["a = 1\n", "b = 2\n", "größe = 3\n"]


def wheel(folder: Path, stem: str, files: dict[str, bytes], version: str = "1.0") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    about = f"{stem}-{version}.dist-info"
    name = stem.replace("_", "-")
    extra = {
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{about}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": b"",
    }
    path = folder / f"{stem}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in {**files, **extra}.items():
            archive.writestr(zipfile.ZipInfo(member), content)
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index of two wheels, which are pinned, and no network."""
    folder, pins = tmp_path / "index", tmp_path / "pins.txt"
    lines = ["# a comment"]
    for stem, files in FILES.items():
        digest = hashlib.sha256(wheel(folder, stem, files).read_bytes()).hexdigest()
        lines.append(f"{stem.replace('_', '-')}==1.0 --hash=sha256:{digest}")
    pins.write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(packages, "PINS", pins)
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PIP_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(name, value)
    return folder


def test_sources_come_in_order_each_content_once(index: Path) -> None:
    source = find_source(f"packages:{index}")
    assert [document.text for document in source.documents()] == TEXTS
    assert source.skipped == {COPIES: ("second/copy.py",), TABLES: ("second/table.py",), NOT_TEXT: ("second/latin.py",)}
    assert source.size == sum(len(text.encode()) for text in TEXTS)


def test_what_is_held_out_goes_by_content_alone(index: Path) -> None:
    held = {d.text for d in find_source(f"packages:{index}", validation=0.5).documents() if d.validation}
    assert 0 < len(held) < 3
    more = {d.text for d in find_source(f"packages:{index}", validation=0.9).documents() if d.validation}
    assert held <= more


def test_one_command_fetches_what_is_missing_and_prepares_it(index: Path, tmp_path: Path) -> None:
    console = new_console(file=io.StringIO(), width=200)
    how = {"tokenizer": "bytes", "end": None, "field": "text", "validation": 0.0, "workers": 1}
    corpora = [
        run_prepare(console, f"packages:{folder}", tmp_path / f"corpus{i}", **how)  # type: ignore[arg-type]
        for i, folder in enumerate((tmp_path / "fetched", index))
    ]
    first, again = (bytes(corpus.split("train").read(0, 99).astype("u2")) for corpus in corpora)
    assert first == again
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "Skipped copies of another file (1): second/copy.py" in shown
    assert sorted(path.name for path in (tmp_path / "fetched").iterdir()) == sorted(pin.wheel for pin in read_pins())


def test_a_package_that_cannot_be_had_is_an_error_with_the_cure(index: Path, tmp_path: Path) -> None:
    (index / "second_one-1.0-py3-none-any.whl").unlink()
    wheel(tmp_path / "mine", "second_one", FILES["second_one"], version="2.0")
    with pytest.raises(ValueError, match=r"could not fetch .*second-one 1\.0 .*second_one-2\.0.*other versions.*pip download"):
        find_source(f"packages:{tmp_path / 'mine'}")


def test_a_python_without_pip_says_so(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages.sys, "executable", str(tmp_path / "python"))
    (tmp_path / "python").write_text("#!/bin/sh\necho 'No module named pip' >&2; exit 1\n")
    (tmp_path / "python").chmod(0o755)
    with pytest.raises(ValueError, match="No module named pip"):
        find_source(f"packages:{tmp_path / 'none'}")


def test_another_file_under_the_pinned_name_is_refused(index: Path) -> None:
    wheel(index, "first", {"first/a.py": b"a = 2\n"})
    with pytest.raises(ValueError, match=r"first-1\.0-py3-none-any\.whl is not the file that was pinned"):
        find_source(f"packages:{index}")


def test_pins_are_whole() -> None:
    lines = [line for line in packages.PINS.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    pins = read_pins()
    assert len(pins) == len(lines) == len({pin.name for pin in pins}) >= 25
    assert pins == sorted(pins)
