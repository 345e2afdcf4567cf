"""`hypermlp explore --over`: its tables, its page and its numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from explored import save_small
from rich.console import Console
from typer.testing import CliRunner

from hypermlp.analysis.statistics import Statistics
from hypermlp.cli import analysis, app
from hypermlp.data.corpus import TokenStream
from hypermlp.report.analyse import show_analyse, take_windows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("analysed")
    save_small(folder / "small", ("hyperglu", "softmax", "gla"), length=32)
    for i in range(4):
        (folder / "text").mkdir(exist_ok=True)
        (folder / "text" / f"{i}.txt").write_text(f"document {i}: " + "the quick brown fox & the <lazy> dog. " * 20)
    return folder


def test_command_prints_tables_and_leaves_a_page(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = folder / "out"
    arguments = ["--model", folder / "small", "--over", folder / "text", "--out", out]
    monkeypatch.setattr(analysis, "WINDOWS", 2)
    done = CliRunner().invoke(app, ["explore", *map(str, arguments)], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    for title in ("Heads over 64 tokens", "Mixing along the sequence", "Noise: 50% of the tokens are random"):
        assert title in done.output
    page = (out / "analysis.html").read_text(encoding="utf-8")
    assert len(re.findall("<figure>", page)) == 3 * 2, "a picture for each of three measures and two layers with slots"
    numbers = json.loads((out / "analysis.json").read_text())
    assert numbers["tokens"] == 64
    assert {"provenance", "model", "corpus", "seed"} <= numbers.keys()


def test_numbers_on_the_page_are_the_statistics(folder: Path) -> None:
    found = show_analyse(Console(quiet=True), folder / "small", str(folder / "text"), out=folder / "again", windows=3)
    assert isinstance(found, Statistics)
    page = (folder / "again" / "analysis.html").read_text(encoding="utf-8")
    for head in found.heads:
        assert f"<td>{head.overall('active'):.1%}</td><td>{head.overall('active_plain'):.1%}</td>" in page
    for op in found.operators:
        assert f"<td>{op.name}</td><td>{op.strength:.3f}</td><td>{op.rank:.1f}</td>" in page
    softmax = [head for head in found.heads if head.layer == 1]
    assert f"<td>{softmax[0].spurious('noise_active'):.1%}</td>" not in page.split('id="x6"')[-1], "it selects nothing"


def test_windows_are_spread_over_the_text() -> None:
    text = TokenStream([np.arange(100, dtype=np.uint16)], [np.array([100], dtype=np.uint64)])
    found = take_windows(text, 3, 11, end=256)
    assert [window[:2].tolist() for window in found] == [[256, 0], [256, 45], [256, 90]]
    assert all(len(window) == 11 for window in found)
    assert len(take_windows(text, 1000, 11, end=256)) == 10
    with pytest.raises(ValueError, match="100 tokens, fewer than one window of 199"):
        take_windows(text, 3, 200, end=256)
