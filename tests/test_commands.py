"""The shape of the command line: how many commands and options, what help shows, what a shell completes, tables as JSON."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from hypermlp.cli import app
from hypermlp.cli.app import ALIASES, ORDER
from hypermlp.cli.console import as_data, value_of
from hypermlp.files import refuse_foreign, write_own
from hypermlp.models.saved import refuse_foreign_folder
from hypermlp.report.terminal import Column, tabulate
from test_words import LONGEST, sentences, words

ROOT: Any = typer.main.get_command(app)


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    inner = getattr(command, "commands", {})
    if not inner:
        yield path, command
    for name, one in inner.items():
        yield from leaves(one, (*path, name))


def options(command: Any) -> list[str]:
    own = [parameter.opts[0] for parameter in command.params if parameter.param_type_name == "option"]
    return own + [name for one in getattr(command, "commands", {}).values() for name in options(one)]


def test_there_are_few_commands_and_few_options() -> None:
    """--help apart, which every command has."""
    assert len(ROOT.commands) < 15
    assert len(options(ROOT)) < 90


def test_help_lists_commands_in_the_order_of_use_and_shows_words_for_values() -> None:
    assert set(ORDER) == set(ROOT.commands)
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "120"}).output
    places = [shown.index(f"│ {name} ") for name in ORDER]
    assert places == sorted(places)
    for path, _ in leaves(ROOT):
        done = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "120"})
        assert done.exit_code == 0
        assert not re.search(r"<[\w\[\] ]+>|\[x[<>]", done.output), f"{path}: a type of Python, where a word belongs"
    assert all(name in shown for name in ALIASES)


def test_help_is_in_short_sentences_and_in_paragraphs_that_fill_the_line() -> None:
    for path, command in [((), ROOT), *leaves(ROOT)]:
        texts = [command.help, *(getattr(parameter, "help", None) or "" for parameter in command.params)]
        assert not [text for text in texts if re.search(r"[^\n]\n[^\n]", text)], path
        assert not [one for text in texts for one in sentences(text) if words(one) > LONGEST], path


def test_the_reference_of_the_site_has_every_command_and_option() -> None:
    docs = Path(__file__).parents[1] / "docs"
    made = runpy.run_path(str(docs / "command_line.py"))
    page = SimpleNamespace(file=SimpleNamespace(src_uri=made["PAGE"]))
    text = made["on_page_markdown"]((docs / made["PAGE"]).read_text(), page=page)
    assert made["PLACE"] not in text
    for path, command in leaves(ROOT):
        (section,) = re.findall(rf"^##+ hypermlp {' '.join(path)}\n(.*?)(?=^##|\Z)", text, re.M | re.S)
        for parameter in command.params:
            if parameter.param_type_name == "option":
                assert f"`{', '.join([*parameter.opts, *parameter.secondary_opts])}`" in section
    assert "[bold]" not in text
    assert "docs/command_line.py" in (docs.parent / "mkdocs.yml").read_text()
    page = SimpleNamespace(file=SimpleNamespace(src_uri=made["CHANGES"]))
    assert "## 0.1.0" in made["on_page_markdown"]((docs / made["CHANGES"]).read_text(), page=page)


@pytest.mark.parametrize("alias", ALIASES)
def test_the_papers_names_are_the_commands_that_they_stand_for(alias: str) -> None:
    short, long = (CliRunner().invoke(app, [*words, "--help"]).output for words in ((alias,), ALIASES[alias]))
    assert short == long


@pytest.mark.parametrize(
    "words, expected",
    [
        ("st", {"study"}),
        ("study run mq", {"mqar", "mqar-forgetting"}),
        ("study run mqar --scale l", {"laptop"}),
        ("study run mqar --device c", {"cpu", "cuda"}),
        ("study run mqar --executor r", {"ray"}),
        ("study run mqar --mixers core,deltan", {"core,deltanet"}),
        ("study run mad --tasks memo", {"memorization"}),
        ("train ti", {"tiny"}),
        ("train tiny --lag-extension h", {"hold"}),
        ("train tiny --logger w", {"wandb"}),
        ("bench de", {"decode"}),
        ("mixers retn", {"retnet"}),
        ("explore --task s", {"selective-copying"}),
        ("eval --size 3", {"340M"}),
        ("table1 --scale p", {"published", "paper"}),
        ("gpu ", {"check", "bench", "tune"}),
    ],
)
def test_shells_complete_closed_choices(words: str, expected: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    line = f"hypermlp {words}"
    for name, value in {
        "_HYPERMLP_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split(" ")) - 1),
    }.items():
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(app, prog_name="hypermlp")
    assert expected <= set(done.output.split()), done.output
    assert all(word.startswith(words.split(" ")[-1]) for word in done.output.split())


def test_every_command_that_prints_a_table_prints_it_as_json() -> None:
    without = {" ".join(path) for path, command in leaves(ROOT) if "--json" not in options(command)}
    assert without == {"generate", "export", "data prepare", "gpu tune", "study new"}
    for command in ("study list", "study show lora", "mixers --width 64 --length 64", "bench", "info"):
        done = CliRunner().invoke(app, [*command.split(), "--json"])
        assert done.exit_code == 0, done.output
        (table, *_) = json.loads(done.stdout)
        assert table["rows"]
        assert len({tuple(row) for row in table["rows"]}) == 1
    listed = {row["study"] for row in json.loads(CliRunner().invoke(app, ["study", "list", "--json"]).stdout)[0]["rows"]}
    assert {"demo", "table1", "mqar", "labels", "table1.toml"} <= listed


def test_cells_become_numbers_where_they_are() -> None:
    table = tabulate(80, "t", [Column("name"), Column("x"), Column("x")], [["gla", "1,234", "–"]])
    assert as_data(table) == {"title": "t", "rows": [{"name": "gla", "x": 1234, "x (2)": None}]}
    assert [value_of(text) for text in ("−0.5", "1e-3", "64%", "1.2.3", "")] == [-0.5, 0.001, "64%", "1.2.3", None]


def test_fields_are_taken_as_other_trainers_write_them() -> None:
    plain, dashed = (
        CliRunner().invoke(app, ["train", "tiny", field, "--print-config"]) for field in ("train.steps=7", "--train.steps=7")
    )
    assert plain.stdout == dashed.stdout
    assert "steps = 7" in plain.stdout
    wrong = CliRunner().invoke(app, ["train", "tiny", "--resum"])
    assert "did you mean '--resume'" in str(wrong.exception)


def test_nothing_foreign_is_replaced(tmp_path: Path) -> None:
    page, model = tmp_path / "report.html", tmp_path / "model"
    page.write_text("<html>mine</html>")
    with pytest.raises(ValueError, match=r"was not written by hypermlp; .*--force"):
        refuse_foreign(page)
    write_own(page, '<meta name="generator" content="hypermlp">', force=True)
    write_own(page, '<meta name="generator" content="hypermlp"> again')  # our own is replaced
    refuse_foreign_folder(model)
    model.mkdir()
    refuse_foreign_folder(model)
    (model / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="--force"):
        refuse_foreign_folder(model)
    (model / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="--force"):
        refuse_foreign_folder(model)
    refuse_foreign_folder(model, force=True)
    (model / "config.json").write_text('{"model_type": "hypermlp"}')
    refuse_foreign_folder(model)


@pytest.mark.parametrize(
    "words",
    [["explore", "text", "--out"], ["theory", "C.1", "--out"], ["study", "report", "runs", "--out"], ["export", "runs"]],
)
def test_commands_refuse_files_that_are_not_theirs(words: list[str], tmp_path: Path) -> None:
    foreign = tmp_path / "mine"
    if words[0] == "export":
        foreign.mkdir()
        (foreign / "notes.txt").write_text("mine")
    else:
        foreign.write_text("mine")
    done = CliRunner().invoke(app, [*words, str(foreign)])
    assert isinstance(done.exception, ValueError)
    assert "--force" in str(done.exception)


def test_results_of_committed_pages_are_our_own() -> None:
    for page in sorted((Path(__file__).parents[1] / "results").glob("*/report.html")):
        refuse_foreign(page)


@pytest.mark.parametrize(
    "command, cure",
    [
        ("study run mad --mixers ''", "names none; hypermlp mixers lists them"),
        ("study run mad steps=-1", "steps of compression (-1) must be at least 1"),
        ("bench layer rounds=0", "rounds (0) must be a whole number of at least 1"),
        ("mixers nope", "hypermlp mixers lists mixers by name"),
        ("explore .", "say with which --model"),
        ("generate hello --model nowhere", "hypermlp train tiny makes one, and hypermlp:language comes with the package"),
        ("generate hello --model hypermlp:copying", "hypermlp:copying is a model of a task"),
    ],
)
def test_a_wrong_call_ends_with_its_cure_before_anything_runs(command: str, cure: str) -> None:
    done = CliRunner().invoke(app, shlex.split(command))
    assert isinstance(done.exception, ValueError)
    assert cure in str(done.exception)


def test_mixers_takes_names_and_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name, shown in (("gla", "gla"), ("hyperglu", "G-cg-q-12o, HyperGLU"), ("softmax", "S-p")):
        done = CliRunner().invoke(app, ["mixers", name, "--width", "64", "--length", "64"])
        assert done.exit_code == 0
        assert shown in done.output
