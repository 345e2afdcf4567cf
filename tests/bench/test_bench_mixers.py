"""The benchmark of layers, for every mixer at equal parameters."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from typer.testing import CliRunner

from helpers import OWN_MIXER
from hypermlp.bench import memory
from hypermlp.bench.cases import BASELINE, Case, build, matched
from hypermlp.cli import app
from hypermlp.mixers import DISTINCT, MIXERS, Entry, SoftmaxAttention
from hypermlp.mixers.labels import TABLE1
from hypermlp.report.bench_pictures import LOOKS, growth, mixers_picture
from hypermlp.report.bench_tables import mixers_markdown

ROOT = Path(__file__).parents[2]
TINY = ("shape=1x24x32", "rounds=1", "threads=1", "memory=false")


def bench_mixers(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "mixers", *arguments])


def test_every_mixer_is_checked_timed_and_recorded(tmp_path: Path) -> None:
    done = bench_mixers("mixers=all", *TINY, "--out", str(tmp_path))
    assert done.exception is None, done.output
    rows = json.loads((tmp_path / "mixers.json").read_text())["rows"]
    assert [row["contestant"] for row in rows] == ["softmax sdpa 2 heads", *TABLE1, *DISTINCT]
    for row in rows:
        assert row["forward_1t"]["seconds"] > 0
        assert row["training_1t"]["ratio"]["median"] > 0
        assert (abs(row["deviation"]) <= 0.01) == (row["note"] == "")
    assert [row["contestant"] for row in rows if row["state_bytes"] is None] == ["R-2!", "G-12!", "R-12!"]
    assert (tmp_path / "mixers.png").stat().st_size > 10_000


def test_a_mixer_of_ones_own_takes_part_and_results_are_kept(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN_MIXER)
    name = f"{tmp_path / 'mine.py'}:Mine"
    shape = TINY[:3]
    for _ in range(2):
        done = bench_mixers(f"mixers={name}", *shape, "--out", str(tmp_path / "out"))
        assert done.exception is None, done.output
        MIXERS.pop(name)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *("mixers-2.json", "mixers-2.png", "mixers.json", "mixers.png")
    ]
    rows = json.loads((tmp_path / "out" / "mixers-2.json").read_text())["rows"]
    assert rows[1]["contestant"] == name
    assert rows[1]["training_extra_bytes"] >= 0


def test_a_shape_wide_enough_gives_equal_parameters() -> None:
    for name in DISTINCT:
        case = matched(Case(name=name, batch=1, time=128, width=256))
        assert case.note == "", name
        assert abs(build(case).parameters / (4 * 256**2) - 1) <= 0.01, name


class Scaled(SoftmaxAttention):
    """Right token by token, wrong at once."""

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        y = super().forward(x, **options)
        return y if options.get("cache") is not None else y * 1.001


class Misled(SoftmaxAttention):
    """Sees the future when it is given all tokens at once."""

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        return super().forward(x, **options) + 0.01 * x.mean(1, keepdim=True)


@pytest.mark.parametrize("wrong", [Scaled, Misled])
def test_wrong_results_are_never_timed(wrong: type, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(MIXERS, "wrong", Entry(lambda d, n, s: wrong(d), "Wrong", "nobody", 2026))
    done = bench_mixers("mixers=softmax,wrong", *TINY, "--out", str(tmp_path))
    assert isinstance(done.exception, RuntimeError)
    assert "wrong differs from the reference" in str(done.exception)
    assert not (tmp_path / "mixers.json").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("mixers", "mixers=softmax,sofmax"), "unknown mixer 'sofmax'"),
        (("mixers", "mixers=G-cg-12o"), "the nearest label is"),
        (("mixers", "only=hyperglu native"), "bench mixers has no field 'only'"),
        (("layer", "only=authors"), "needs against="),
        (("layer", "only=hyperglu nativ"), "did you mean 'hyperglu native'"),
        (("layer", "only=softmax sdpa 12 heads"), "no layer can run at these shapes"),
    ],
)
def test_mistakes_are_refused(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["bench", *arguments, *TINY, "--out", str(tmp_path)])
    assert isinstance(done.exception, ValueError)
    assert message in str(done.exception)


def test_memory_counts_what_is_alive() -> None:
    extra = memory.extra(Case(name="softmax naive", batch=1, time=512, width=16))
    matrix = 2 * 512**2 * 4  # of the scores of both heads
    assert 2 * matrix < extra.forward < 6 * matrix
    assert 2 * matrix < extra.training < 6 * matrix


def row(name: str, time: int, ratio: float, extra: int | None, **others: Any) -> dict[str, Any]:
    timed = {"ratio": {"median": ratio, "low": ratio, "high": ratio}, "seconds": ratio}
    made = {"contestant": name, "shape": [4, time, 256], "parameters": 262144, "deviation": 0.0, "note": ""}
    made |= {"state_bytes": 1000 * time, "training_2t": timed, "training_1t": timed}
    return made | ({} if extra is None else {"training_extra_bytes": extra}) | others


ROWS = [
    *(row("softmax", T, 1.0, 8 * T) for T in (512, 1024, 2048)),
    *(row("R-12!", T, 2.5, T**2, state_bytes=None, deviation=0.25, note="as its label says") for T in (512, 1024)),
    row("mamba", 1024, 3.0, None, state_bytes=4096),
]


def test_the_table_of_mixers() -> None:
    assert mixers_markdown(ROWS).splitlines() == [
        "| mixer | parameters | training step, 512 tokens | training step, 1024 tokens | training step, 2048 tokens"
        " | memory ∝ | state bytes, 1024 tokens |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| softmax | 262,144 | 1.00 | 1.00 | 1.00 | T^1.00 | 1,024,000 |",
        "| R-12! | 262,144 (+25%) | 2.50 | 2.50 | – | T^2.00 | – |",
        "| mamba | 262,144 | – | 3.00 | – | – | 4,096 |",
    ]


def test_the_picture_has_a_line_for_every_mixer() -> None:
    rows = [*(row(BASELINE, T, 1.0, 4 * T) for T in (512, 1024, 2048)), *ROWS]
    figure = mixers_picture(rows)
    left, right = figure.axes
    titles = ["softmax attention (SDPA), 2 heads", "Softmax with RoPE (softmax)", "R-12!", "Mamba"]
    assert [label.get_text() for label in left.get_yticklabels()] == titles
    assert sum(len(points.get_offsets()) for points in left.collections) == len(rows)
    shortest = right.collections[0].get_offsets()
    assert shortest[:, 0].tolist() == pytest.approx([1, 2, 128])  # memory at 512 tokens, relative to the first
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["512 tokens", "1,024 tokens", "2,048 tokens"]


def test_lines_can_be_told_apart_and_axes_read() -> None:
    looks = [(own.colour, own.line, own.marker) for own in LOOKS.values()]
    assert len(set(looks)) >= len(looks) - 1  # "hyperglu" and "hyperglu native" are not in one picture
    rows = json.loads((ROOT / "results" / "bench" / "layer.json").read_text())["rows"]
    for ax in growth(rows).axes:
        assert len(ax.get_yticks()) >= 4
        assert all(re.fullmatch(r"[\d.,]+", label.get_text()) for label in ax.get_yticklabels())
        legend = ax.get_legend()
        assert legend is not None
        assert len(legend.get_texts()) == len(ax.lines)
        assert all("native" not in text.get_text() for text in legend.get_texts())  # names are explained


AUTHORS = """
import dataclasses
import hypermlp

OURS = ("init", "dropout")
fields = [f for f in dataclasses.fields(hypermlp.HyperGLUConfig) if f.name not in OURS]
HyperGLUConfig = dataclasses.make_dataclass("HyperGLUConfig", [f.name for f in fields])


class HyperGLU(hypermlp.HyperGLU):
    def __init__(self, config):
        assert (config.impl_default, config.chunk_T) == ("chunked", 128)
        super().__init__(hypermlp.HyperGLUConfig(**{f.name: getattr(config, f.name) for f in fields}))

    def load_state_dict(self, state):
        self.load_authors_state_dict(state)
"""


def test_the_authors_file_takes_part_with_the_options_that_it_knows(tmp_path: Path) -> None:
    (tmp_path / "hyperglu.py").write_text(AUTHORS)
    case = Case(name="authors", batch=1, time=6, width=16, against=str(tmp_path / "hyperglu.py"))
    build(case).check()
