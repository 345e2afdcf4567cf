"""A mixer of the user's own takes part in a study like any other, and is imported only where it is named."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hypermlp.mixers import MIXERS, build_mixer
from hypermlp.mixers.own import adopt
from hypermlp.models.lm import LanguageModel, ModelConfig
from hypermlp.report.page import write_report
from hypermlp.studies.executors import LocalPool
from hypermlp.studies.folder import Folder
from hypermlp.studies.language import LanguageStudy
from hypermlp.studies.mad import TaskStudy

SOURCE = """
from __future__ import annotations
from dataclasses import dataclass
from torch import nn
from hypermlp.cache import CacheSpec
from hypermlp.mixers import Entry, Mixer

@dataclass
class Settings:  # needs its module while that is being imported
    rank: int = 4

class Linear(Mixer):
    def __init__(self, width, rank=Settings().rank):
        super().__init__()
        self.width = width
        self.proj = nn.Sequential(nn.Linear(width, rank), nn.Linear(rank, width))

    def cache_spec(self):
        return CacheSpec()

    def mix(self, tokens, cache):
        return self.proj(tokens.x)

sized = Entry(lambda width, length, size: Linear(width, size or 4), "Linear", "nobody", 2026, "rank", 1)
"""
PLAN = TaskStudy(
    tasks=("memorization",),
    protocol="clean",
    scale="baseline",
    width=16,
    depth=1,
    batch=8,
    examples=16,
    tests=8,
    epochs=1,
    rates=(1e-3,),
    decays=(0.0,),
    changes={"memorization": {"vocab_size": 16, "seq_len": 8}},
)


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "Given.py"  # begins like a label
    path.write_text(SOURCE)
    yield path
    for name in [name for name in MIXERS if ":" in name]:
        del MIXERS[name]


def test_a_study_trains_it_in_its_workers_and_the_page_shows_it(source: Path, tmp_path: Path) -> None:
    name = f"{source}:Linear"
    records = PLAN.run(tmp_path / "out", [name, "S"], executor=LocalPool(2))
    assert [record["error"] for record in records] == [None, None]
    mine, softmax = records
    assert mine["inner"] > softmax["inner"], "the smaller mixer gets the wider feed-forward"
    assert abs(mine["parameters"] / softmax["parameters"] - 1) < 0.01
    assert "it comes in one size" in mine["budget"]
    assert name in write_report(tmp_path / "out").read_text()


def test_an_entry_has_a_size_that_budgets_turn(source: Path, tmp_path: Path) -> None:
    name = f"{source}:sized"
    study = LanguageStudy(width=16, depth=1, length=16, batch=2, steps=1, lr=1e-3, evaluations=1, sample=1)
    adopt([name])
    with Folder(tmp_path / "out") as folder:
        (job,) = study.plan_jobs(folder, [name], seeds=1)
    assert study.work(job, None)["size"] == 31, "2 · 16 · 31 + 31 + 16 is nearest to 4 · 16²"


def test_another_source_is_another_mixer(source: Path, tmp_path: Path) -> None:
    name = f"{source}:Linear"
    adopt([name])
    with Folder(tmp_path / "out") as folder:
        PLAN.plan_jobs(folder, [name], seeds=1)
    changed = source.with_name("Changed.py")
    changed.write_text(SOURCE.replace("tokens.x)", "-tokens.x)"))
    plan = tmp_path / "out" / "plan.json"
    plan.write_text(plan.read_text().replace(str(source), str(changed)))
    with pytest.raises(ValueError, match=r"Changed\.py:Linear was .* or another folder"):
        PLAN.run(tmp_path / "out", [f"{changed}:Linear"])


def test_what_a_file_names_is_not_imported(tmp_path: Path) -> None:
    path = tmp_path / "evil.py"
    path.write_text("raise SystemExit('imported')")
    with pytest.raises(ValueError, match="code of its own"):
        build_mixer(f"{path}:Linear", 16, 16)
    with pytest.raises(ValueError, match="code of its own"):
        LanguageModel(ModelConfig(vocabulary=16, width=16, depth=1, length=16, mixer=f"{path}:Linear"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.py:Linear", "nowhere.py cannot be imported: FileNotFoundError"),
        ("no_such_module:Linear", "no_such_module cannot be imported: ModuleNotFoundError"),
        (":Linear", "cannot be imported"),
        ("{source}:Nothing", "Nothing must be a subclass .* has Linear, sized"),
        ("{source}:nn", "nn must be a subclass"),
        ("{source}:Mixer.base", "must be a subclass"),
        ("json:loads", "json has none"),
    ],
)
def test_what_cannot_be_used_is_said_before_anything_starts(source: Path, tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PLAN.run(tmp_path / "out", [name.format(source=source)])
    assert not (tmp_path / "out").exists()


def test_a_source_with_a_mistake_is_named(tmp_path: Path) -> None:
    path = tmp_path / "wrong.py"
    path.write_text("1 / 0")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"wrong.py cannot be imported: ZeroDivisionError"):
            adopt([f"{path}:Linear"])
