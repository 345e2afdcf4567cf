"""Studies on tasks at their scales: slices, baselines and state sizes in the records, searched rates, and users' own tasks."""

import dataclasses
import pickle
from pathlib import Path

import pytest

from hypermlp.mixers import build_mixer
from hypermlp.report.page import build_page
from hypermlp.studies import tasks
from hypermlp.studies.executors import LocalPool
from hypermlp.studies.folder import Folder
from hypermlp.studies.tasks import ScaledStudy, find_tasks, scaled_studies, state_bytes
from hypermlp.tasks import TASKS
from hypermlp.verdicts.folders import read_studies
from hypermlp.verdicts.judged import judge, judge_folder

OWN = """
from dataclasses import dataclass

import numpy as np

from hypermlp.tasks import Rows, Scale, Sizes, Task


@dataclass(frozen=True, kw_only=True)
class Setting(Sizes):
    task: str = "last-token"
    vocab_size: int = 4
    seq_len: int = 8
    num_train: int = 64
    num_test: int = 8


class LastToken(Task):
    name = "last-token"
    baseline = Setting()
    scales = {"quick": Scale(settings=(Setting(),), width=16, depth=1, batch=32, steps=60, rates=(1e-2,), evaluations=20)}

    def training(self, setting, seed, epoch):
        return [self.rows(setting, [seed, 0], setting.num_train)]

    def evaluation(self, setting, seed, part):
        return {"test": [self.rows(setting, [seed, 1 + (part == "test")], setting.num_test)]}

    def rows(self, setting, seed, count):
        inputs = np.random.default_rng(seed).integers(setting.vocab_size, size=(count, setting.seq_len))
        return Rows(inputs, inputs.copy())
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's own task with a worker process, and the smallest MQAR without."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "own.py").write_text(OWN)
    place = f"{folder / 'own.py'}:LastToken"
    (study,) = scaled_studies([place], "quick").values()
    study.run(folder / "runs" / "own", ["hyperglu"], executor=LocalPool(1, "cpu"))
    (study,) = scaled_studies(["mqar"], "quick", steps=2).values()
    with Folder(folder / "runs" / "mqar") as runs:
        (job,) = study.plan_jobs(runs, ["hyperglu"], 1)
        runs.append({"key": job.key, **job.identity, "error": None, **tasks.train(job)})
    yield folder / "runs"
    del TASKS["last-token"]


def test_a_users_own_task_is_trained_until_it_is_solved_and_reported(done: Path) -> None:
    own, mqar = sorted(read_studies(done), key=lambda study: study.tasks[0])
    assert own.tasks == ["last-token"]
    (run,) = own.chosen.values()
    assert run["stopped"].startswith("solved")
    assert run["metrics"]["step"] < 60
    assert run["metrics"]["accuracy"] > 0.99
    assert run["metrics"]["sets"]["test"]["rows"] == 8
    assert 0.1 < run["baselines"]["most frequent"]["accuracy"] < 0.5
    page = build_page([judge(own), judge(mqar)])
    assert "Recall against memory" in page
    assert "a value of the row" in page
    assert "published" in page
    assert "1 of 1 solved" in page


def test_a_page_needs_no_task_of_the_users_own(done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(TASKS, "last-token")
    assert "last-token" in build_page(judge_folder(done))


def test_a_job_travels_without_its_setting_class() -> None:
    (study,) = scaled_studies(["mqar"], "laptop").values()
    assert isinstance(study, ScaledStudy)
    (setting,) = study.settings_of("mqar")
    matched = study.match(setting, ["softmax"])["softmax"]
    job = study.at(1e-3, "0.02").jobs(setting, "softmax", matched, 0)[0]
    again = pickle.loads(pickle.dumps(job))
    assert again == job
    assert again.key == job.key


def test_state_is_counted_from_the_caches() -> None:
    softmax, delta = build_mixer("softmax", 64, 128), build_mixer("deltanet", 64, 128)
    assert state_bytes(softmax, 100) == 4 * 100 * 2 * 64
    cache = delta.new_cache(1)
    states = sum(state.numel() for state in cache.states.values())
    assert states == 2 * 32 * 32
    assert state_bytes(delta, 10) == state_bytes(delta, 1000) == 4 * (states + (cache.taps - 1) * cache.inputs.shape[-1])
    window = build_mixer("hyperglu", 64, 32)
    assert state_bytes(window, 32) == state_bytes(window, 500)


def test_rows_beyond_the_context_are_scored_as_a_window_and_with_more_lags() -> None:
    (study,) = scaled_studies(["parity"], "quick", steps=1).values()
    (setting,) = study.settings().values()
    for mixer, ways in {"hyperglu": ["hold", "decay", "fresh"], "R-cg-q": ["hold"], "softmax": []}.items():
        small = dataclasses.replace(setting, num_test=16)
        (job,) = study.jobs(small, mixer, study.match(small, [mixer])[mixer], 0)
        record = tasks.train(job)
        assert list(record.get("ways", {})) == ways
        assert all(list(found["sets"]) == ["lengths 11-40"] for found in record.get("ways", {}).values())
        assert 0 <= record["metrics"]["accuracy"] <= 1


def test_names_families_and_scales() -> None:
    assert list(find_tasks(["mqar", "mqar-forgetting"])) == ["mqar", "mqar-forgetting"]
    assert "mqar" in find_tasks(["all"])
    assert not {"compression"} & set(find_tasks(["all"]))
    with pytest.raises(ValueError, match="task"):
        find_tasks(["nothing"])
    with pytest.raises(ValueError, match="scale"):
        scaled_studies(["mqar"], "huge")
    assert list(scaled_studies(["mad", "mqar"], "quick")) == ["mad", "mqar"]
    (study,) = scaled_studies(["mqar"], "laptop", lr=[1e-3]).values()
    assert study.search is None
    (study,) = scaled_studies(["mqar"], "laptop").values()
    assert study.search is not None


def test_a_search_is_made_for_mad_too() -> None:
    found = scaled_studies(["mad", "mqar"], "quick", search=True, lr=[1e-2, 1e-3])
    assert [study.search is not None and study.search.rates for study in found.values()] == [(1e-3, 1e-2)] * 2


def test_every_task_has_settings_at_its_scales_and_none_is_called_published_that_is_not() -> None:
    for name, task in TASKS.items():
        if task.family not in ("mad", "own"):
            assert {"quick", "laptop"} <= set(task.scales)
            for scale in task.scales:
                (study,) = scaled_studies([name], scale).values()
                assert all(key == setting.key and setting.task == name for key, setting in study.settings().items())
    with pytest.raises(ValueError, match="copy has no published sizes; use laptop"):
        scaled_studies(["copy"], "published")


def test_settings_are_changed_by_name() -> None:
    (study,) = scaled_studies(["forecast"], "quick", changes=["source=a.csv", "lookback=48"]).values()
    (setting,) = study.settings().values()
    assert (setting.source, setting.lookback, setting.seq_len, setting.num_train) == ("a.csv", 48, 4, 1024)
    (other,) = scaled_studies(["forecast"], "quick", changes=["source=a.csv", "lookback=48", "num_train=64"]).values()
    assert not study.settings().keys() & other.settings().keys(), "their runs are told apart"
    (study,) = scaled_studies(["mqar"], "quick", changes=["noise=false"]).values()
    assert not next(iter(study.settings().values())).noise
    for wrong in ("lookback=48", "noise=0", "seq_len=long", "mix"):
        with pytest.raises(ValueError, match=rf"{wrong}: the settings of mqar have .*mix=small, noise=true"):
            scaled_studies(["mqar"], "quick", changes=[wrong])
    with pytest.raises(ValueError, match="leave seq_len=64 out"):
        scaled_studies(["mad"], "quick", changes=["seq_len=64"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("    del name", "must have a name, a baseline, training and evaluation.*name"),
        ("    evaluation = Task.evaluation", "must have a name, a baseline, training and evaluation.*abstract"),
        ("    name = 'other'", "is called 'other', and so must be the task of its settings, not 'last-token'"),
        ("    name = 'mqar'; baseline = Setting(task='mqar'); scales = {}", "so is a task of the registry"),
    ],
)
def test_own_tasks_that_lack_something_are_explained(change: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(OWN + change + "\n")
    with pytest.raises(ValueError, match=message):
        find_tasks([f"{tmp_path / 'wrong.py'}:LastToken"])
