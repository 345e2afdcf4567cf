"""The Ray executor: the same records as the local pool, whatever happens to its workers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_mad_study import MIXERS, TASK, small_study, timeless

from hypermlp.studies.engine import run
from hypermlp.studies.executors import Executor, LocalPool, find_executor
from hypermlp.studies.folder import Folder

ray = pytest.importorskip("ray")

# Trains as the study does; the worker of one job is killed in its third step, unless the file `cured` exists.
KILLER = """
import os, signal
from pathlib import Path
from hypermlp.studies import mad

def train(job, context):
    tick = context.tick
    def watched(step, *rest):
        tick(step, *rest)
        if step == 3 and job.seed == 1 and job.mixer == "softmax" and not Path({cured!r}).exists():
            os.kill(os.getpid(), signal.SIGKILL)
    context.tick = watched
    return mad.train(job, context)
"""
STUDY = small_study("clean", tasks=(TASK,), epochs=None, steps={TASK: 8})


@pytest.fixture
def killer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    (tmp_path / "killer.py").write_text(KILLER.format(cured=str(tmp_path / "cured")))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")  # of Ray's workers
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    import killer

    yield killer.train
    ray.shutdown()


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_ray_cluster_gives_the_records_of_the_local_pool_though_a_worker_is_killed(tmp_path: Path, killer: Any) -> None:
    def study(name: str, executor: Executor, *, retry_failed: bool = False) -> list[dict[str, Any]]:
        with Folder(tmp_path / name) as folder:
            jobs = STUDY.plan_jobs(folder, MIXERS, seeds=2)
            return run(folder, jobs, killer, executor=executor, checkpoint_seconds=0, retry_failed=retry_failed)

    cluster = find_executor("ray", workers=2, device="cpu")
    for name, executor in (("ray", cluster), ("local", LocalPool(1, "cpu"))):
        records = study(name, executor)
        assert [record["key"] for record in records if record["error"] is not None] == [records[-1]["key"]]
        assert "the worker was ended" in records[-1]["error"]
        assert any((tmp_path / name / "checkpoints").glob("*/step-*")), "the killed run can be resumed"
    (tmp_path / "cured").touch()
    found, expected = (study(name, executor, retry_failed=True) for name, executor in (("ray", cluster), ("local", None)))
    assert [timeless(record) for record in found] == [timeless(record) for record in expected]
    assert all(record["error"] is None for record in found)
    assert [(tmp_path / name / "checkpoints").exists() for name in ("ray", "local")] == [True, True]
    assert not any((tmp_path / "ray" / "checkpoints").iterdir())
