"""`hypermlp bench model`: who takes part, what is measured, that it resumes, and what is shown."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hypermlp.bench import memory, table5, table5_mixers
from hypermlp.bench.record import RoundsFile, grouped, read_results, timings
from hypermlp.bench.table5_mixers import TABLE5_MIXERS, choose_table5_mixers
from hypermlp.cli import app
from hypermlp.errors import RunError
from hypermlp.paper.tables import TABLE5
from hypermlp.report import table5 as report

TINY = replace(
    table5.SCALES["quick"], depth=1, width=64, vocabulary=32, time=16, rounds=2, growth_width=64, growth=(8, 16), long=(8, 16)
)
NAMES = ["hyperglu", "gla"]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A scale of milliseconds; processes of their own are tested with memory itself. Returns whose memory was measured."""
    measured: list[str] = []

    def extra(case: Any, build: Any, repeats: int) -> memory.Extra:
        measured.append(case.name)
        build(case).train_step(build(case).input(1, case.time))
        return memory.Extra(10**6 * case.time, 2 * 10**6 * case.time, 1e-6 * case.time**2, 2e-6 * case.time**2)

    monkeypatch.setitem(table5.SCALES, "quick", TINY)
    monkeypatch.setattr(memory, "extra", extra)
    monkeypatch.setattr(table5, "matmul_peak", lambda: 1e11)
    return measured


def test_the_systems_are_the_papers_and_more() -> None:
    assert {s.paper for s in TABLE5_MIXERS.values()} - {""} == set(TABLE5)
    with torch.device("meta"):
        heads = {name: getattr(mixer.build(768, 64), "n_head", None) for name, mixer in TABLE5_MIXERS.items()}
    others = {
        "hyperglu": 2,
        "hypermlp": 2,
        "mamba": None,
        "sdpa-2": 2,
        "naive-2": 2,
        "mamba2": 24,
    }  # 24 of 64: twice as wide
    assert heads == dict.fromkeys(TABLE5_MIXERS, 12) | others


def test_gpt2_small_has_its_size() -> None:
    sizes = {"time": 1024, "width": 768, "depth": 12, "vocabulary": 50304}
    found = table5.model_work(table5.ModelCase(name="sdpa", batch=8, **sizes))
    assert 120e6 < found["parameters"] < 125e6
    assert found["seen"] / 8192 == 24 * 12 * 768**2  # the paper's 169.87 M, its additions apart
    assert found["forward"] - found["head"] - found["mixing"] == found["seen"]


def test_a_killed_run_resumes_where_it_was(tiny: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    turn, turns = table5.Field.turn, []

    def stop(self: table5.Field, name: str) -> list[float]:
        turns.append(name)
        if len(turns) == 5:  # in the second round
            raise KeyboardInterrupt
        return turn(self, name)

    def run(names: list[str]) -> dict[str, Any]:
        path = table5.run_model(tmp_path, "quick", names, batch=None, rounds=None, tell=lambda text: None)
        return grouped(read_results(path))

    monkeypatch.setattr(table5.Field, "turn", stop)
    with pytest.raises(KeyboardInterrupt):
        run(NAMES)
    kept = grouped(read_results(tmp_path / "model-quick.json"))["rounds"]
    assert len(kept) == 1
    data = run(NAMES)
    assert data["rounds"][0] == kept[0]
    assert [sorted(r["seconds"]) for r in data["rounds"]] == [["gla", "hyperglu", "sdpa"]] * 2
    assert tiny == ["sdpa", "hyperglu", "gla"]
    assert len(data["sessions"]) == 2
    assert run(NAMES) == data  # finished: nothing is measured again
    more = run(["path"])
    assert [sorted(r["seconds"]) for r in more["rounds"][2:]] == [["path", "sdpa"]] * 2  # the baseline in every round
    assert timings(more, "path", 16, "sdpa")["training"]["ratio"]["median"] > 0
    with pytest.raises(ValueError, match=r"model-quick.json was begun with other settings: batch was 1, not 3"):
        table5.run_model(tmp_path, "quick", NAMES, batch=3, rounds=None, tell=lambda text: None)


def test_the_command_measures_and_shows_all_parts(tiny: list[str], tmp_path: Path) -> None:
    """`hypermlp bench model scale=quick` by the paper's name."""
    done = CliRunner().invoke(app, ["table5", "scale=quick", "mixers=hyperglu,gla,naive", "rounds=1", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    shown = done.output
    assert "about 0 minutes" in shown
    assert "seen by" in shown
    records = report.read_folder(tmp_path)
    assert list(records) == ["model-quick", "growth-quick", "long-quick"]
    assert (
        sum(row.count("T^1.00") for row in report.growth_grid(records["growth-quick"]).rows) == 4
    )  # the memory made up above is linear
    assert [row[0] for row in report.model_grid(records["model-quick"]).rows] == [
        *("HyperGLU", "softmax, SDPA", "softmax, written out", "GLA")
    ]
    page = (tmp_path / "report.html").read_text()
    assert "data:image/png" in page
    assert "hypermlp" in page
    assert (tmp_path / "quick.png").stat().st_size > 10_000


def test_long_contexts_are_shown_per_pair() -> None:
    found = {f"{name} {T}": {"forward": T, "training": 2 * T, "forward_seconds": T**2 / 1e9, "training_seconds": 0.0}
             for name in ("hyperglu", "sdpa") for T in (100, 200)}  # fmt: skip
    rows = report.long_grid({"memory": found, "work": {}, "rounds": [], "settings": {}}).rows
    assert rows[1] == ["HyperGLU", "200", "0.00", "1.99", "0.00", "0.00", "–", "0", "1.00"]


def test_a_wrong_system_is_not_timed(tiny: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Wrong(table5_mixers.SoftmaxAttention):
        def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
            return super().forward(x, **options) * (1 if options.get("cache") is not None else 1.001)

    monkeypatch.setitem(TABLE5_MIXERS, "path", table5_mixers.Table5Mixer("wrong", lambda d, h, n: Wrong(d, h)))
    with pytest.raises(RunError, match="path differs from the reference"):
        table5.run_model(tmp_path, "quick", ["path"], batch=None, rounds=1, tell=lambda text: None)
    assert not list(tmp_path.iterdir())


def test_mistakes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did you mean 'gla'"):
        choose_table5_mixers("gla,glla")
    with pytest.raises(ValueError, match="mixers is empty"):
        choose_table5_mixers(" , ")
    refused = CliRunner().invoke(app, ["bench", "model", "scale=huge", "--out", str(tmp_path)])
    assert "scale (huge) must be one of paper, laptop, quick" in str(refused.exception)
    with pytest.raises(ValueError, match="multiple of 64"):
        TABLE5_MIXERS["gla"].build(100, 16)
    assert table5_mixers.too_large("naive", 1, 16384, 256) is not None
    assert table5_mixers.too_large("sdpa", 1, 16384, 256) is None
    assert RoundsFile(tmp_path / "new.json", {}).rounds(1) == []


def test_the_page_begins_with_what_the_readme_says() -> None:
    records = report.read_folder(Path(__file__).parents[2] / "results" / "table5")
    said = re.search(r": (\S+) of the time and (\S+) of the memory", report.summary(records["model-paper"]))
    assert said is not None
    assert f"takes {said[1]} of the time and {said[2]} of the memory" in report.lead(records)
    assert "12 layers" in report.lead(records), "the largest model that was measured"
    assert report.lead({}).startswith("What mixers cost")
