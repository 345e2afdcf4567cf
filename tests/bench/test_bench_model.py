"""The benchmark of whole models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hypermlp.bench import cases, model
from hypermlp.bench.layer import Shape
from hypermlp.cli import app
from hypermlp.report.bench_tables import model_markdown


def test_models_of_equal_size_are_checked_timed_and_recorded(tmp_path: Path) -> None:
    sizes = ["mad=2x24x32", "language=1x32x32", "depth=2", "vocabulary=64"]
    done = CliRunner().invoke(
        app, ["bench", "model", "part=equal", *sizes, "rounds=2", "threads=1", "--out", str(tmp_path)], catch_exceptions=False
    )
    assert done.exit_code == 0
    record = json.loads((tmp_path / "equal.json").read_text())
    assert "torch" in record["sessions"][0]
    assert record["settings"]["rounds"] == 2
    rows = record["rows"]
    assert [(row["model"], row["mixer"]) for row in rows] == [
        ("mad", "G-cg-q-12o"),
        ("mad", "S-pc"),
        ("language", "hyperglu"),
        ("language", "softmax"),
    ]
    for row in rows:
        assert abs(row["deviation"]) < 0.01
        assert row["training_1t"]["tokens_per_second"] > 0
    assert [row["training_1t"]["ratio"]["median"] for row in rows[1::2]] == [1, 1]


@pytest.mark.parametrize(
    "kind", [model.mad(Shape(2, 24, 32)), model.language(Shape(1, 32, 32), 2, 64)], ids=lambda kind: kind.name
)
def test_a_step_trains_the_model_that_was_counted(kind: model.ModelKind) -> None:
    for name, found in kind.match().items():
        learner = model.Learner(kind, kind.build(name, found.mixer.size, found.inner))
        assert sum(p.numel() for p in learner.model.parameters()) == found.parameters
        before = [p.detach().clone() for p in learner.model.parameters()]
        learner.step()
        assert all((p != old).any() for p, old in zip(learner.model.parameters(), before, strict=True))


def test_the_default_sizes_are_equal_in_parameters() -> None:
    for kind in (model.mad(Shape(128, 128, 128)), model.language(Shape(1, 1024, 512), 8, 32000)):
        ours, rival = (found.parameters for found in kind.match().values())
        assert abs(ours / rival - 1) < 0.01


def test_a_wrong_mixer_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: cases.BuiltCase) -> None:
        raise RuntimeError(f"{self.case.name} differs")

    monkeypatch.setattr(cases.BuiltCase, "check", refuse)
    with pytest.raises(RuntimeError, match="G-cg-q-12o differs"):
        model.run([model.mad(Shape(2, 24, 32))], rounds=1, thread_counts=(1,))


def made_up(kind: str, mixer: str, shape: list[int], seconds: float, ratio: float) -> dict[str, Any]:
    timed = {
        "seconds": seconds,
        "ratio": {"median": ratio, "low": ratio, "high": ratio},
        "tokens_per_second": shape[0] * shape[1] / seconds,
    }
    return {"model": kind, "mixer": mixer, "shape": shape, "depth": 2, "parameters": 123456, "training_2t": timed}


def test_the_table_of_models() -> None:
    rows = [
        made_up("mad", "G-cg-q-12o", [128, 128, 128], 0.75, 1.5),
        made_up("mad", "S-pc", [128, 128, 128], 0.5, 1.0),
        made_up("language", "hyperglu", [1, 1024, 512], 0.5, 0.8),
        made_up("language", "softmax", [1, 1024, 512], 0.625, 1.0),
    ]
    assert model_markdown(rows).splitlines()[2:] == [
        "| mad, 128 × 128 × 128, 2 layers | 123,456 | 123,456 | 2 | 21,845 | 32,768 | 1.50 |",
        "| language, 1 × 1024 × 512, 2 layers | 123,456 | 123,456 | 2 | 2,048 | 1,638 | 0.80 |",
    ]
