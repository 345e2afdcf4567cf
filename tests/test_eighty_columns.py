"""The main commands on a terminal of 80 columns: no line is wider, no word is broken, and notices are outside of the output."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from hypermlp.cli import app
from test_commands import leaves

ROOT: Any = typer.main.get_command(app)
RESULTS = Path(__file__).parents[1] / "results"
COMMANDS = [
    "study list",
    "study show selective-copying",
    "study show demo",
    "study check table1.toml",
    "study run mad steps=2 batch=8 width=16 examples=32 --tasks memorization --scale quick --mixers S-p,R-12! "
    "--workers 1 --out run",
    f"study report {RESULTS / 'train'} --out train.html",
    f"study report {RESULTS / 'tasks' / 'copy'} --out copy.html",
    "train tiny data.corpus=text.txt model.width=16 model.depth=1 train.steps=2 train.batch=2 train.micro=2 "
    "train.evaluate_batches=1 train.sample=4 --out trained",
    "generate 'def main(' --count 8 --model hypermlp:language",
    "eval --model hypermlp:language --corpus text.txt",
    "eval --model hypermlp:copying",
    "explore --out copying.html",
    "explore --over text.txt --model hypermlp:language --out over",
    "data prepare folder --out shards --workers 1",
    "mixers --width 64 --length 64",
    "mixers G-cg-q-12o --width 64 --length 64",
    "mixers --budget --width 64 --length 64",
    "theory 2.1",
    "bench",
    "info",
    "",
    *(f"{' '.join(path)} --help" for path, _ in leaves(ROOT)),
]


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("def add(a, b):\n    return a + b\n" * 400)
    Path("folder").mkdir()
    Path("folder/one.txt").write_text("one\n" * 400)
    Path("folder/two.txt").write_text("two\n" * 400)
    Path("folder/notes-that-nobody-can-read.docx").write_text("is skipped")


def shown(command: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a terminal of this width shows: both streams, without colours and without what is drawn over."""
    for name, value in {"COLUMNS": str(columns), "TERMINAL_WIDTH": str(columns), "FORCE_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", columns)
    done = CliRunner().invoke(app, shlex.split(command), prog_name="hypermlp")
    assert done.exit_code in (0, 2 if not command else 0), f"{command}\n{done.output}\n{done.exception!r}"
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", done.output)
    return "\n".join(line.split("\r")[-1] for line in plain.split("\n"))


def words(text: str) -> set[str]:
    return set(re.findall(r"[^\W\d_]{3,}", text))


@pytest.mark.parametrize("command", COMMANDS)
def test_eighty_columns_are_enough(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wide = shown(command, 400, monkeypatch)
    for left in ("run", "trained", "shards"):
        if (tmp_path / left).exists():
            (tmp_path / left).rename(tmp_path / f"{left}-before")
    narrow = shown(command, 80, monkeypatch)
    too_long = [line for line in narrow.splitlines() if len(line.rstrip()) > 80 and not is_one_word(line)]
    assert not too_long, too_long
    broken = words(narrow) - words(wide)
    assert not broken, f"these are no words of the output at full width: {sorted(broken)}"
    assert "Traceback" not in narrow


def is_one_word(line: str) -> bool:
    """A path may be longer than a line: it is kept whole, so that it can be copied."""
    return max(map(len, line.split())) > 60


def test_notices_are_no_output(capfd: pytest.CaptureFixture[str]) -> None:
    """What is said about the computation goes to stderr, and comes before the text."""
    done = CliRunner().invoke(app, shlex.split("generate 'def main(' --count 8"))
    assert done.exit_code == 0
    assert done.stdout.startswith("def main(")
    assert "hypermlp: " not in done.stdout
    told = done.stderr + capfd.readouterr().err
    assert not [line for line in told.splitlines() if line and not line.startswith("hypermlp: ")]
