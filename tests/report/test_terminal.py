"""What is printed: foreign text as it stands, and nothing cut at 80 columns."""

from __future__ import annotations

import ast
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

import hypermlp
from hypermlp.bench.layer import Shape
from hypermlp.cli.watch import watch
from hypermlp.mixers import MIXERS
from hypermlp.notice import for_terminal
from hypermlp.paper.tables import TABLE1
from hypermlp.report.bench_tables import decode_table, layer_tables, profile_table
from hypermlp.report.budget import show_budget, show_mixers
from hypermlp.report.progress import accuracies
from hypermlp.report.table1 import show_table1
from hypermlp.report.terminal import Column, new_console, say, show_table, status
from hypermlp.verdicts.folders import read_studies
from made_up import mad, write

ROOT = Path(__file__).parents[2]
FOREIGN = "a/[/run] [bold]x[/bold] :smile: [red"


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_foreign_text_is_printed_as_it_stands() -> None:
    console = new_console(width=200, file=io.StringIO())
    say(console, FOREIGN)
    console.print(FOREIGN)
    show_table(console, FOREIGN, [Column(FOREIGN), Column("b")], [[FOREIGN, "1"]])
    with status(console, FOREIGN) as tell:
        tell(FOREIGN)
    assert printed(console).count(FOREIGN) == 6


def test_a_path_is_never_broken() -> None:
    console = new_console(width=20, file=io.StringIO())
    say(console, f"Report: {'folder/' * 10}report.html")
    assert f"{'folder/' * 10}report.html\n" in printed(console)


def test_a_terminal_breaks_lines_between_words_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "No word of a sentence like this is broken in the middle, however narrow it gets: a/path/that/is/longer/than/that"
    for terminal in (True, False):
        console = new_console(width=30, file=io.StringIO(), force_terminal=terminal, color_system=None)
        say(console, words + "\n")
        lines = printed(console).split("\n")
        assert " ".join(lines).split() == words.split()
        assert (max(map(len, lines)) <= 35) == terminal, "a pipe gets the line whole"
        assert lines[-2:] == ["", ""]
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert max(map(len, for_terminal(words).split("\n"))) <= 35


def test_a_name_that_is_a_long_path_leaves_numbers_whole() -> None:
    console = new_console(width=80, file=io.StringIO())
    show_table(console, "", [Column("name"), Column("state bytes")], [[f"{'folder/' * 20}mixer.py:Own", "1,234,567"]])
    assert "1,234,567" in printed(console)


def test_there_is_one_way_to_a_console() -> None:
    """Anything else would read markup in paths and names."""
    for path in Path(hypermlp.__file__).parent.rglob("*.py"):
        calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        made = [call for call in calls if isinstance(call, ast.Name) and call.id == "Console"]
        assert not made or path.name == "terminal.py", f"{path} should use new_console()"


def test_a_failed_run_with_brackets_in_its_error_is_shown(tmp_path: Path) -> None:
    failed = mad("FILE.py:[/opt/x]", "compression", 0, error="no [/opt/x] here", metrics=None)
    console = new_console(width=80, file=io.StringIO())
    settings = {"compression/baseline": "compression"}
    out = tmp_path / "[/run]"
    watch(
        console,
        out,
        lambda **told: [failed],
        lambda found, width: accuracies(found, [failed["mixer"]], settings, "clean", width),
    )
    assert "no [/opt/x] here" in printed(console)
    assert f"{out}/runs.jsonl" in printed(console)
    write(out, [mad("S", "compression", 50)])
    (study,) = read_studies(out)
    show_table1(console, study)


@pytest.mark.parametrize("width", [50, 80, 120])
def test_nothing_is_cut(width: int) -> None:
    console = new_console(width=width, file=io.StringIO())
    show_budget(console, 768, 1024)
    show_mixers(console, 768, 1024)
    (study,) = read_studies(ROOT / "results" / "table1")
    show_table1(console, study)
    rows = {name: json.loads((ROOT / "results" / "bench" / f"{name}.json").read_text())["rows"] for name in BENCHES}
    console.print(decode_table([row for row in rows["decode"] if row["batch"] == 8], width))
    console.print(profile_table(rows["profile"], width))
    shape = rows["mixers"][0]["shape"]
    console.print(*layer_tables(Shape(*shape), [row for row in rows["mixers"] if row["shape"] == shape], width))
    text = printed(console)
    assert "…" not in text
    words = set(text.split())
    assert {*TABLE1, *MIXERS} <= words
    assert {"2,359,296", "16,384"} <= words
    assert {f"{row['ms_per_token']:.3f}" for row in rows["decode"] if row["batch"] == 8} <= words
    tables = [line for line in text.splitlines() if "  " in line.strip()]
    assert max(map(len, tables)) <= width


BENCHES = ("decode", "profile", "mixers")


def test_columns_that_do_not_fit_stand_below_with_the_names_again() -> None:
    console = new_console(width=26, file=io.StringIO())
    heads = [Column("mixer"), Column("first"), Column("second", starts=True), Column("third")]
    show_table(console, "", heads, [["G-cg-q-12o", "1,000,000", "22", "333"]])
    assert [line.split() for line in printed(console).splitlines() if line.strip() and "─" not in line] == [
        ["mixer", "first"],
        ["G-cg-q-12o", "1,000,000"],
        ["mixer", "second", "third"],
        ["G-cg-q-12o", "22", "333"],
    ]
