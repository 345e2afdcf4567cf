"""What a study tells its display: an estimate only after a measurement, and lines that a worker prints."""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hypermlp import notice
from hypermlp.studies import engine
from hypermlp.studies.engine import MEASURED, Engine, Running
from hypermlp.studies.executors import LocalPool
from hypermlp.studies.folder import Folder
from hypermlp.studies.worker import ForwardLines


@dataclass(frozen=True)
class Steps:
    key: str
    cost: float = 100.0

    @property
    def identity(self) -> dict[str, str]:
        return {"name": self.key}


def test_the_time_left_waits_for_a_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the start of the workers nor the first second decides it."""
    now = 1000.0
    monkeypatch.setattr(engine, "time", SimpleNamespace(monotonic=lambda: now))
    with Folder(tmp_path) as folder:
        jobs = [Steps("a"), Steps("b")]
        study = Engine(folder, jobs, lambda job, context: {}, LocalPool(1), False, 60.0, {}, None, lambda record: None)
        run = Running(study.todo.popleft())
        study.workers = [SimpleNamespace(run=run)]  # type: ignore[list-item]
        now += 60  # imports, compilation
        assert study.progress().seconds_left is None
        study._advance(run, 1, 101, {})
        now += 1
        study._advance(run, 2, 101, {})
        assert study.progress().seconds_left is None
        now += MEASURED - 1
        study._advance(run, 11, 101, {})
        assert study.progress().seconds_left == pytest.approx(MEASURED / 10 * (90 + 101), rel=0.01)


def test_what_a_worker_prints_reaches_the_parent_in_lines() -> None:
    sent: list[Any] = []
    lines = ForwardLines(SimpleNamespace(send=sent.append))  # type: ignore[arg-type]
    print("a warning", "of a library", file=lines)
    lines.write("half ")
    lines.write("a line\n\nrest")
    assert sent == [("notice", "a warning of a library"), ("notice", "half a line")]


def test_a_notice_goes_to_the_stderr_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A live display replaces it; a notice beside the display would leave its title behind."""
    handler = notice.Stderr()
    display = io.StringIO()
    monkeypatch.setattr(sys, "stderr", display)
    handler.emit(notice.logger.makeRecord("hypermlp", 20, "", 0, "compiling", (), None))
    assert display.getvalue() == "compiling\n"
