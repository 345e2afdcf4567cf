"""Protocols whose learning rates another study has found: of labels, registers, gates and ranks."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hypermlp.cli import app
from hypermlp.mixers.labels import TABLE1
from hypermlp.studies.executors import LocalPool
from hypermlp.studies.language import LanguageStudy
from hypermlp.studies.mad import TaskStudy
from hypermlp.studies.protocol import PACKAGED, find_protocol, load_protocol
from made_up import PROTOCOL


def test_every_label_has_a_protocol() -> None:
    found = {name for path in PACKAGED.glob("*.toml") for name in load_protocol(path).mixers}
    assert set(TABLE1) <= found
    assert not any("@" in name for name in load_protocol(find_protocol("labels")).mixers)


def test_a_protocol_with_given_rates_runs_in_a_smaller_copy(tmp_path: Path) -> None:
    protocol = load_protocol(find_protocol("registers"))
    mad, language = protocol.studies["mad"], protocol.studies["language"]
    assert isinstance(mad, TaskStudy)
    assert isinstance(language, LanguageStudy)
    names = ("G-cg-q-12o", "G-cg-q+registers=4")
    assert mad.given is not None
    assert language.given is not None
    rates = {name: mad.given[name] for name in names}
    small = replace(mad, steps=dict.fromkeys(mad.tasks, 2), tests=16, examples=32, given=rates)
    records = small.run(tmp_path / "mad", names, executor=LocalPool(1))
    assert {(r["mixer"], r["task"], r["lr"]) for r in records} == {
        (n, task, lr) for n in names for task, lr in rates[n].items()
    }
    small_language = replace(language, steps=2, evaluations=1, sample=1, given={n: language.given[n] for n in names})
    records = small_language.run(tmp_path / "language", names, executor=LocalPool(1))
    assert {r["mixer"]: r["lr"] for r in records} == small_language.given
    assert all(r["error"] is None for r in records)
    assert "lr" not in json.loads((tmp_path / "language" / "plan.json").read_text())


@pytest.mark.parametrize(
    "given, message",
    [
        ("given = {S = {memorization = 1e-3}}", r"\[mad\]: given lacks a learning rate for \('R', 'memorization'\)"),
        ("given = {S = {memorization = 1e-3}, R = {memorization = 0.0}}", "given must be above 0"),
        (
            "given = {S = {memorization = 1e-3}, R = {memorization = 1e-3, compression = 1e-3}}",
            "compression.*, which no run needs",
        ),
    ],
)
def test_mistakes_in_given_rates_are_named(given: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(PROTOCOL.replace("search = {rates = [1e-3, 1e-2], rungs = [1.0], widen = 0}", given))
    with pytest.raises(ValueError, match=message):
        load_protocol(path)
    path.write_text(PROTOCOL.replace("search =", f"{given}\nsearch ="))
    with pytest.raises(ValueError, match="leave out one of them"):
        load_protocol(path)


def test_check_shows_the_rates_that_the_runs_will_have() -> None:
    done = CliRunner().invoke(app, ["study", "check", "registers.toml"])
    assert done.exit_code == 0, done.output
    lines = [line.split() for line in done.output.splitlines()]
    (language,) = (line for line in lines if line[:2] == ["language", "language"])
    (copying,) = (line for line in lines if line[:2] == ["mad", "selective-copying:"])
    assert language[4:] == ["0.004", "to", "0.008,", "given"]
    assert copying[-2:] == ["0.002,", "given"]
