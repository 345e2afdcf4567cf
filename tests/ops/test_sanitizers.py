"""The native kernel under AddressSanitizer and UndefinedBehaviorSanitizer: no report on random layers, caches and scans."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hypermlp.ops.native import build

SCRIPT = Path(__file__).with_name("sanitized.py")
LAYERS = 60  # a number, not a time: a fast machine tries no others than a slow one


def runtime(compiler: str, name: str) -> str | None:
    """A sanitizer's shared library, which must be loaded before Python's own."""
    done = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True)
    found = Path(done.stdout.strip())
    return str(found.resolve()) if done.returncode == 0 and found.is_absolute() and found.exists() else None


def run(code: str | None = None) -> subprocess.CompletedProcess[str]:
    compiler = build.find_compiler()
    libraries = [runtime(compiler, name) for name in ("libasan.so", "libubsan.so")] if compiler else [None]
    if None in libraries:
        pytest.skip("the compiler has no sanitizers that can be loaded into Python")
    env = os.environ | {
        "LD_PRELOAD": " ".join(map(str, libraries)),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=77",  # Python never frees some of its memory
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1:exitcode=78",
        "HYPERMLP_IMPL": "native",
        "PYTHONMALLOC": "malloc",
    }
    command = [sys.executable, *(["-c", code] if code else [str(SCRIPT), "0", str(LAYERS)])]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)


def test_no_report_on_random_layers_and_caches() -> None:
    done = run()
    assert done.returncode == 0, done.stderr[-4000:]
    assert "runtime error" not in done.stderr
    assert "AddressSanitizer" not in done.stderr


def test_the_sanitizer_would_report() -> None:
    """A weight that is too short, handed over past the border check, is found."""
    code = f"""
import sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
import sanitized, torch
from hypermlp.ops.native import kernels
short = torch.zeros(7)
honest = kernels.pointer
kernels.pointer = lambda x, *rest: honest(*((short, (7,)) if x is not None and x.dim() == 2 else (x, *rest)))
kernels.convs_forward(torch.randn(1, 1, 64), torch.randn(64, 4), torch.randn(64, 4), None, None)
"""
    done = run(code)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
