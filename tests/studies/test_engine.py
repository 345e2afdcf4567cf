"""Runs in worker processes: what is finished stays finished, whatever happens."""

import importlib
import json
import logging
import os
import resource
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from hypermlp.errors import RunError
from hypermlp.files import read_json
from hypermlp.studies.engine import Progress, run
from hypermlp.studies.executors import LocalPool
from hypermlp.studies.folder import Folder
from hypermlp.studies.worker import PROGRESS, RunContext
from hypermlp.train.checkpoint import newest


@dataclass(frozen=True)
class Sum:
    """Adds 1, 2, … n, slowly; on the way it may fail."""

    key: str
    n: int = 3
    accident: str = ""  # happens unless the file `cured` exists
    cured: str = "nowhere"
    seconds: float = 0.0  # per step

    @property
    def identity(self) -> dict[str, int]:
        return {"n": self.n}

    @property
    def cost(self) -> float:
        return self.n


def add(job: Sum, context: RunContext) -> dict[str, float]:
    tensors = {"total": torch.zeros(1)}
    state = context.load(tensors) or {"step": 0, "resumed": -1}
    total = tensors["total"]
    state["resumed"] += 1
    while state["step"] < job.n:
        state["step"] += 1
        total += state["step"]
        time.sleep(job.seconds)
        if job.accident and state["step"] == 2 and not Path(job.cured).exists():
            if job.accident == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if job.accident == "killed while it speaks":
                os.write(context.connection.fileno(), struct.pack("!i", 1000) + b"the begin")  # type: ignore[attr-defined]
                os.kill(os.getpid(), signal.SIGKILL)
            if job.accident == "raised":
                raise ZeroDivisionError("an accident")
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))  # from now on the disk is as good as full
        context.tick(state["step"], job.n, {"total": float(total)}, lambda: (tensors, state))
    return {
        "total": float(total),
        "resumed": state["resumed"],
        "threads": torch.get_num_threads(),
        "odd": float("nan"),
    }


def test_failures_are_recorded_the_rest_goes_on_and_only_what_is_asked_for_is_repeated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cured = str(tmp_path / "cured")
    jobs = [Sum("a"), Sum("b", accident="raised", cured=cured), Sum("c", accident="killed", cured=cured), Sum("d", n=4)]
    seen: list[Progress] = []
    ended: list[str] = []
    with Folder(tmp_path / "out") as folder:
        folder.begin({"plan": 1})
        records = run(
            folder,
            jobs,
            add,
            executor=LocalPool(2),
            checkpoint_seconds=0,
            tell=seen.append,
            done=lambda r: ended.append(r["key"]),
        )
    assert [record["key"] for record in records] == list("abcd")
    assert sorted(ended) == list("abcd")
    assert [record.get("total") for record in records] == [6, None, None, 10]
    assert records[0]["threads"] == 1
    assert records[0]["n"] == 3
    assert records[0]["error"] is None
    assert records[0]["odd"] is None  # JSON has no NaN
    assert records[1]["error"] == "ZeroDivisionError: an accident"
    assert "in add" in records[1]["traceback"]
    assert "SIGKILL" in records[2]["error"]
    assert (len(seen[-1].finished), seen[-1].failed, seen[-1].total, seen[-1].running) == (4, 2, 4, ())
    assert any(progress.running for progress in seen)
    assert seen[-1].seconds_left == 0
    assert [path.name for path in (tmp_path / "out" / "checkpoints").iterdir()] == [folder.checkpoint("c").name]

    with Folder(tmp_path / "out") as folder:
        assert run(folder, jobs, add) == records  # nothing is left to do, so nothing starts
        Path(cured).touch()
        (folder.checkpoint("b") / "step-00000001").mkdir(parents=True)
        caplog.set_level(logging.INFO)
        again = run(folder, jobs, add, executor=LocalPool(1), retry_failed=True)
    assert [record["total"] for record in again] == [6, 6, 6, 10]
    assert [record["resumed"] for record in again] == [0, 0, 1, 0]  # the killed run had saved its first step
    assert f"{folder.checkpoint('b') / 'step-00000001'} is damaged" in caplog.text  # what a worker says is heard here
    assert again[0] == records[0]
    assert len((tmp_path / "out" / "runs.jsonl").read_text().splitlines()) == 6
    assert list((tmp_path / "out" / "checkpoints").iterdir()) == []


def test_a_worker_killed_in_the_middle_of_a_message_takes_down_its_run_alone(tmp_path: Path) -> None:
    jobs = [Sum("a", accident="killed while it speaks"), Sum("b")]
    with Folder(tmp_path) as folder:
        records = run(folder, jobs, add, executor=LocalPool(1))
    assert [record["error"] is None for record in records] == [False, True]
    assert "the worker was ended by SIGKILL" in records[0]["error"]
    assert records[1]["total"] == 6


SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_engine import LocalPool, Sum, add
from hypermlp.studies.engine import run
from hypermlp.studies.folder import Folder
if __name__ == "__main__":
    with Folder(Path({out!r})) as folder:
        folder.begin({{}})
        run(folder, [Sum("a"), Sum("b", n=1000, seconds=0.01)], add, executor=LocalPool(1), checkpoint_seconds=0)
"""


def test_workers_wait_for_jobs_that_follow_from_runs_at_work(tmp_path: Path) -> None:
    """Two runs at once, the second of which ends first: its worker is there for the jobs that the first leads to."""
    started: list[int] = []

    class Counting(LocalPool):
        def start(self, *arguments: Any) -> Any:
            started.append(len(started))
            return super().start(*arguments)

    def follow(record: dict[str, Any]) -> list[Sum]:
        return [Sum("c", n=1), Sum("d", n=2)] if record["key"] == "a" else []

    with Folder(tmp_path / "out") as folder:
        records = run(folder, [Sum("a", seconds=0.3), Sum("b", n=1)], add, executor=Counting(2), follow=follow)
        assert [record["key"] for record in records] == ["a", "b"]
        assert {key: record["total"] for key, record in folder.records.items()} == {"a": 6, "b": 1, "c": 1, "d": 3}
    assert len(started) == 2


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


FRAGILE = """
import os, signal
from pathlib import Path
if os.getpid() != {parent}:  # a worker, on its way to be ready
    tries = Path(__file__).with_suffix(".tries")
    tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
    if len(tries.read_text()) <= {deaths}:
        os.kill(os.getpid(), signal.SIGKILL)

def work(job, context):
    return {{}}
"""


@pytest.mark.parametrize("deaths", [2, 1000])
def test_workers_that_die_before_they_are_ready_are_started_again_a_few_times(
    deaths: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"fragile_{deaths}.py").write_text(FRAGILE.format(deaths=deaths, parent=os.getpid()))
    monkeypatch.syspath_prepend(tmp_path)
    work = importlib.import_module(f"fragile_{deaths}").work
    with Folder(tmp_path / "out") as folder:
        if deaths < 3:
            assert [r["error"] for r in run(folder, [Sum("a"), Sum("b")], work, executor=LocalPool(1))] == [None, None]
        else:
            with pytest.raises(RunError, match=r"4 in a row: the worker was ended by SIGKILL"):
                run(folder, [Sum("a")], work, executor=LocalPool(1))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_study_leaves_no_process_and_continues(number: signal.Signals, tmp_path: Path) -> None:
    script, out = tmp_path / "script.py", tmp_path / "out"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parent), out=str(out)))
    process = subprocess.Popen([sys.executable, str(script)], stderr=subprocess.PIPE, text=True, start_new_session=True)
    checkpoint = Folder(out).checkpoint("b")
    wait_for(lambda: newest(checkpoint) is not None)
    with pytest.raises(RuntimeError, match="in use"), Folder(out):
        pass
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as the keyboard does: to all processes
    else:
        process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    assert errors.count("Traceback") == (number == signal.SIGINT)  # of the parent alone
    assert errors.count("hypermlp: stopping, saving") == (number == signal.SIGINT)
    assert ("1 of 2 runs are finished; the same command resumes" in errors) == (number == signal.SIGINT)
    wait_for(lambda: not session_alive(process.pid))
    with Folder(out) as folder:
        assert list(folder.records) == ["a"]
        assert newest(checkpoint) is not None
        records = run(folder, [Sum("a"), Sum("b", n=1000)], add, executor=LocalPool(1))
    assert records[1]["total"] == 500500
    assert records[1]["resumed"] == 1


def session_alive(leader: int) -> bool:
    """Whether a process of that session runs; one that ended and was not waited for does not."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(session) == leader and state != "Z":
            return True
    return False


@pytest.mark.parametrize(
    "tail, kept, dropped",
    [
        (b'{"key": "c", "err', "ab", 1),
        (b'{"key": "c", "error": null}', "abc", 0),  # whole but for its line end
        (b"\0\0\0\0", "ab", 1),
        (b'\xff{\n{"key": "c", "error": null}\n', "abc", 1),
        (b'{"key": ["c"], "error": null}\n[1]\n', "ab", 2),
        (b"[" * 200_000 + b"\n", "ab", 1),
    ],
)
def test_a_half_written_line_is_dropped_with_a_notice(
    tail: bytes, kept: str, dropped: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    lines = tmp_path / "runs.jsonl"
    lines.write_bytes(b'{"key": "a", "error": null}\n{"key": "b", "error": null}\n' + tail)
    with Folder(tmp_path) as folder:
        assert list(folder.records) == list(kept)
        folder.append({"key": "d", "error": None})
    assert [json.loads(line)["key"] for line in lines.read_text().splitlines()] == [*kept, "d"]
    assert (f"dropped {dropped} damaged" in caplog.text) == (dropped > 0)


def test_checkpoints_of_an_earlier_version_are_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "0123.pt").write_bytes(b"")
    caplog.set_level(logging.INFO)
    with Folder(tmp_path):
        assert "checkpoints of an earlier version, which are not read: their runs start over" in caplog.text


def test_a_full_disk_is_reported_and_nothing_is_lost(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Folder(tmp_path) as folder:
        folder.append({"key": "a", "text": "x" * 5000})
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (8000, before[1]))  # no file may grow beyond
            with pytest.raises(OSError, match="its 1 runs are safe"):
                folder.append({"key": "b", "text": "x" * 5000})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert list(folder.records) == ["a"]
        folder.append({"key": "c"})
    with Folder(tmp_path) as folder:
        assert list(folder.records) == ["a", "c"]


def test_checkpoints_that_cannot_be_written_stop_the_study_and_are_not_the_runs_fault(tmp_path: Path) -> None:
    with Folder(tmp_path) as folder:
        with pytest.raises(OSError, match=r"cannot write checkpoints to .* finished runs are safe"):
            run(folder, [Sum("a"), Sum("b", n=9, accident="disk")], add, executor=LocalPool(1), checkpoint_seconds=0)
        assert list(folder.records) == ["a"]
        saved = newest(folder.checkpoint("b"))
        assert saved is not None
        assert read_json(saved / PROGRESS)["step"] == 1  # the last one that was whole


def test_a_plan_may_grow_where_it_is_said_but_not_change(tmp_path: Path) -> None:
    def begin(plan: dict[str, Any]) -> Folder:
        with Folder(tmp_path) as folder:
            folder.begin(plan, grows={"steps": 1}, init="paper", search=None)
        return folder

    numbers: dict[str, Any] = {"width": 64, "steps": {"a": {"n": 1}}, "rates": (0.1,)}
    begin(numbers)
    folder = begin({**numbers, "steps": {"b": {"n": 2}}})
    assert folder.plan == {"width": 64, "steps": {"a": {"n": 1}, "b": {"n": 2}}, "rates": [0.1]}
    assert folder.start == 1
    begin({**numbers, "init": "paper", "search": None})  # which it meant before
    saved = (tmp_path / "plan.json").read_text()
    for change, message in (
        ({"steps": {"a": {"n": 3}}}, r"steps\.a\.n was 1, not 3"),
        ({"steps": {"a": {"n": 1, "m": 1}}}, r"steps\.a\.m was None, not 1"),
        ({"width": 32}, "width was 64, not 32"),
        ({"init": "decays"}, "init was 'paper', not 'decays'"),
        ({"search": {"rungs": [1.0]}}, "search was None, not {'rungs'"),
        ({"depth": 2}, "depth was None, not 2"),
    ):
        with pytest.raises(ValueError, match=f"begun with other settings: {message}"):
            begin({**numbers, **change})
    assert (tmp_path / "plan.json").read_text() == saved
    starts = json.loads(saved)["starts"]
    assert len(starts) == 3
    assert all(start["torch"] == torch.__version__ for start in starts)


def test_mistakes_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with Folder(tmp_path) as folder:
        with pytest.raises(ValueError, match=r"workers \(0\) must be at least 1"):
            LocalPool(0)
        with pytest.raises(ValueError, match="2 jobs have the key 'a'"):
            run(folder, [Sum("a"), Sum("a")], add)
    assert not (tmp_path / "runs.jsonl").exists()
