"""One thread a worker, reproducible examples, and uninitialised memory that can be poisoned."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("TRITON_INTERPRET", "1")  # there is no GPU; must be set before anything imports triton

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)  # pytest-xdist runs one worker a core

settings.register_profile("laws", deadline=None, derandomize=True, max_examples=20, database=None)
settings.load_profile("laws")


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fill uninitialised memory with NaN, so that an element nobody wrote shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


@pytest.fixture(autouse=True)
def own_mixers_leave() -> Iterator[None]:
    """The registry is as it was: a test's own mixers, named by long paths, are in no other test's list."""
    from hypermlp.mixers import MIXERS

    before = set(MIXERS)
    yield
    for name in set(MIXERS) - before:
        del MIXERS[name]


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Graphs of other tests' models count towards Dynamo's limit of recompilations of one forward."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The table of executed cases: compiled Triton kernels, their largest relative error and its bound."""
    lines = sorted(
        value
        for report in terminalreporter.getreports("passed")
        for name, value in getattr(report, "user_properties", ())
        if name == "executed" and report.when == "call"
    )
    if lines:
        terminalreporter.section("compiled Triton kernels, executed on a CPU")
        terminalreporter.write("\n".join(lines) + "\n")
