"""How the kernel is compiled, chosen, and done without."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hypermlp.ops import choose
from hypermlp.ops.native import bindings, build

SCRIPT = """
import torch
from hypermlp import HyperGLU, HyperGLUConfig
from hypermlp.ops import choose
torch.manual_seed(0)
layer = HyperGLU(HyperGLUConfig(n_embd=16, n_head=2, block_size=8))
print(choose().impl, float(layer(torch.randn(1, 20, 16)).norm()))
"""


def start(cache: Path, **environment: str) -> subprocess.Popen[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("CXX", "HYPERMLP_IMPL")}
    env |= {"HYPERMLP_CACHE": str(cache), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen([sys.executable, "-c", SCRIPT], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[str, float, str]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    impl, norm = out.split()
    return impl, float(norm), err


def test_processes_that_start_at_once_compile_once(tmp_path: Path) -> None:
    found = build.find_compiler()
    hasty = tmp_path / "hasty-c++"  # does not optimise, which is most of the time
    hasty.write_text(f'#!/bin/sh\nexec {found} "$@" -O0\n')
    hasty.chmod(0o700)
    cache = tmp_path / "cache"
    results = [finish(p) for p in [start(cache, CXX=str(hasty)) for _ in range(3)]]
    assert [impl for impl, _, _ in results] == ["native"] * 3
    assert sum("compiling the native CPU kernel" in err for _, _, err in results) == 1
    assert sorted(p.suffix for p in cache.iterdir()) == ["", ".sha256", ".so"], "library, checksum, lock, nothing half-made"

    (compiled,) = cache.glob("*.so")
    compiled.write_bytes(compiled.read_bytes()[:1000])  # damaged: made again
    impl, norm, err = finish(start(cache, CXX=str(hasty)))
    assert impl == "native"
    assert "compiling" in err
    assert norm == results[0][1]


def test_without_a_compiler_chunks_give_the_same_and_the_notice_names_the_cure(tmp_path: Path) -> None:
    reference = finish(start(tmp_path / "none", HYPERMLP_IMPL="dense"))
    for compiler, words in (("/nowhere/c++", "no C++ compiler found; install g++"), ("/bin/false", "/bin/false failed")):
        impl, norm, err = finish(start(tmp_path / "none", CXX=compiler))
        assert impl == "chunked"
        assert norm == pytest.approx(reference[1], rel=1e-5)
        assert err.count(words) == 1, err


def test_the_environment_overrules_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPERMLP_IMPL", "dense")
    assert choose() == ("dense", "HYPERMLP_IMPL")
    assert choose("chunked") == ("chunked", "asked for")
    monkeypatch.setenv("HYPERMLP_IMPL", "fastest")
    with pytest.raises(ValueError, match=r"HYPERMLP_IMPL \('fastest'\) must be one of"):
        choose()


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("native", "cuda"), "on cuda"),
        (("native", "cpu", "float64"), "for float64"),
        (("auto", "cpu", "float32", "identity"), "for the identity layout"),
    ],
)
def test_what_the_kernel_cannot_do_is_chunked_with_the_reason(arguments: tuple[str, ...], words: str) -> None:
    choice = choose(*arguments)
    assert choice.impl == "chunked"
    assert words in choice.reason


def test_the_file_name_depends_on_processor_and_every_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = build.find_compiler()
    assert compiler is not None
    names = {build.digest(compiler)}
    copy = shutil.copytree(build.SOURCES, tmp_path / "native")
    monkeypatch.setattr(build, "SOURCES", copy)
    assert build.digest(compiler) in names
    sources = sorted([*copy.glob("*.h"), *copy.glob("*.cpp")])
    for source in sources:
        source.write_text(source.read_text() + "// another\n")
        names.add(build.digest(compiler))
    monkeypatch.setattr(build, "processor", lambda: "another one")
    names.add(build.digest(compiler))
    assert len(names) == 2 + len(sources) > 8


def test_flags_of_the_user_come_last_and_name_another_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit\nfor last; do :; done\necho "$@" > "$last"\n')
    compiler.chmod(0o700)
    names = set()
    for flags in ("", "-march=x86-64-v3", "-march=x86-64 -DNAME='a b'"):
        monkeypatch.setenv("HYPERMLP_CXXFLAGS", flags)
        names.add(build.digest(str(compiler)))
        build.compile_to(tmp_path / "kernel.so", str(compiler))
        command = (tmp_path / "kernel.so").read_text()
        assert f"-march=native {flags.replace(chr(39), '')}".strip() + f" {build.SOURCES}" in command
    assert len(names) == 3


def test_a_cache_folder_that_cannot_be_written_is_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HYPERMLP_CACHE", str(tmp_path / "file"))
    folder = build.cache_folder()
    assert folder.is_dir()
    assert folder != tmp_path / "file"


@pytest.fixture
def victim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder as the user finds it."""
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("HYPERMLP_CACHE", str(folder))
    build.temporary_folder.cache_clear()
    return folder


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o702])
def test_a_folder_that_others_can_write_is_not_used(victim: Path, mode: int, caplog: pytest.LogCaptureFixture) -> None:
    assert build.cache_folder() == victim
    victim.chmod(mode)
    with caplog.at_level("INFO", logger="hypermlp"):
        folder = build.cache_folder()
    assert folder != victim
    assert folder.stat().st_mode & 0o077 == 0
    assert "can be written by others" in caplog.text
    assert build.cache_folder() == folder, "one for the whole process"


def test_a_folder_of_another_user_is_not_used(victim: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = victim.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    expected = build.cache_folder() == victim  # root's folders are trusted
    assert expected == (owner == 0)
    os.chown(victim, 12345, -1) if owner == 0 else None
    assert build.cache_folder() != victim


@pytest.mark.parametrize("planted", [".so", ".sha256"])
def test_a_planted_library_is_not_loaded(victim: Path, planted: str) -> None:
    """With the right name and checksum, but written by others."""
    library, checksum = victim / "kernel-1.so", victim / "kernel-1.sha256"
    library.write_bytes(b"code")
    checksum.write_text(hashlib.sha256(b"code").hexdigest())
    for file in (library, checksum):
        file.chmod(0o600)
    assert build.is_whole(library)
    library.with_suffix(planted).chmod(0o622)
    assert not build.is_whole(library)


def test_what_is_compiled_can_be_written_by_its_owner_alone(
    victim: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit\nfor last; do :; done\nrm -f "$last"; echo code > "$last"\n')
    compiler.chmod(0o700)
    before = os.umask(0)
    try:
        build.compile_to(victim / "kernel-1.so", str(compiler))
    finally:
        os.umask(before)
    assert build.is_whole(victim / "kernel-1.so")


def test_a_user_without_a_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("HYPERMLP_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nobody)
    build.temporary_folder.cache_clear()
    assert build.cache_folder().is_dir()


def test_a_structure_of_another_size_than_the_compiled_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = build.library().handle
    assert handle is not None
    bindings.check_sizes(handle)

    class Longer(ctypes.Structure):
        _fields_ = (*bindings.STRUCTURES["hm_view"]._fields_, ("more", ctypes.c_int64))

    monkeypatch.setitem(bindings.STRUCTURES, "hm_view", Longer)
    monkeypatch.setitem(bindings.STRUCTURES, "hm_new_args", Longer)
    with pytest.raises(RuntimeError, match=r"differ from the compiled ones: hm_view, hm_new_args$"):
        bindings.check_sizes(handle)


def test_the_structures_are_those_of_the_header() -> None:
    header = """#pragma once
#include <cstdint>
using i64 = int64_t;
// A comment; with struct hm_x { in it }
struct hm_pair {
    const float *a, *b[3];  // two
    i64 n, m[2];
};
struct hm_all {
    double eps;
    hm_pair first, second;
    const unsigned char *begins;
};
"""
    found = bindings.read_structures(header)
    assert {name: ctypes.sizeof(made) for name, made in found.items()} == {"hm_pair": 56, "hm_all": 128}
    assert [name for name, *_ in found["hm_all"]._fields_] == ["eps", "first", "second", "begins"]
    assert found["hm_pair"].m.offset == 40


@pytest.mark.parametrize(
    "line", ["int n;", "float x;", "i64 n : 3;", "hm_later x;", "float *x = nullptr;", "i64 (*f)();", "std::vector<i64> x;"]
)
def test_a_line_of_the_header_that_cannot_be_read_is_an_error(line: str) -> None:
    with pytest.raises(ValueError, match=r"bindings\.py (cannot read|knows no type)"):
        bindings.read_structures(f"struct hm_x {{\n    i64 a;\n    {line}\n}};\n")


@pytest.mark.parametrize("line", ['#include "other.h"', "typedef int hm_int;", "struct other { i64 a; };", "#pragma pack(1)"])
def test_a_line_outside_the_structures_that_cannot_be_read_is_an_error(line: str) -> None:
    with pytest.raises(ValueError, match=r"bindings\.py cannot read"):
        bindings.read_structures(f"#pragma once\n{line}\n")


def test_failures_of_the_kernel_are_errors_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    for status, error, words in (
        (1, MemoryError, "out of memory"),
        (2, RuntimeError, "do not agree"),
        (3, IndexError, "token"),
    ):
        monkeypatch.setattr(bindings, "entry_point", lambda name, status=status: lambda a: status)
        with pytest.raises(error, match=words):
            bindings.call("hm_step", bindings.STRUCTURES["hm_step_args"]())
