"""How the kernel is compiled, chosen, and done without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hypermlp.ops import choose
from hypermlp.ops.native import build

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
    results = [finish(p) for p in [start(tmp_path) for _ in range(3)]]
    assert [impl for impl, _, _ in results] == ["native"] * 3
    assert sum("compiling the native CPU kernel" in err for _, _, err in results) == 1
    assert sorted(p.suffix for p in tmp_path.iterdir()) == ["", ".sha256", ".so"], "library, checksum, lock, nothing half-made"

    (compiled,) = tmp_path.glob("*.so")
    compiled.write_bytes(compiled.read_bytes()[:1000])  # damaged: made again
    impl, norm, err = finish(start(tmp_path))
    assert impl == "native"
    assert "compiling" in err
    assert norm == results[0][1]


def test_without_a_compiler_strips_give_the_same_and_the_notice_names_the_cure(tmp_path: Path) -> None:
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
        (("auto", "cuda"), "strips on cuda"),
        (("native", "cpu", "float64"), "strips for float64"),
        (("auto", "cpu", "float32", "identity"), "strips for the identity layout"),
    ],
)
def test_what_the_kernel_cannot_do_falls_to_strips_with_the_reason(arguments: tuple[str, ...], words: str) -> None:
    choice = choose(*arguments)
    assert choice.impl == "chunked"
    assert words in choice.reason


def test_the_file_name_depends_on_processor_and_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = build.find_compiler()
    assert compiler is not None
    names = {build.digest(compiler)}
    monkeypatch.setattr(build, "processor", lambda: "another one")
    names.add(build.digest(compiler))
    (tmp_path / "kernel.cpp").write_text("// another")
    monkeypatch.setattr(build, "SOURCE", tmp_path / "kernel.cpp")
    names.add(build.digest(compiler))
    assert len(names) == 3


def test_a_cache_folder_that_cannot_be_written_is_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HYPERMLP_CACHE", str(tmp_path / "file"))
    folder = build.cache_folder()
    assert folder.is_dir()
    assert folder != tmp_path / "file"
