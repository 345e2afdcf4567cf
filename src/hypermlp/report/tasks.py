"""Tasks on the terminal: the list, and the scores of a study with the trivial answers below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console, Group
from rich.text import Text

from hypermlp.files import Record
from hypermlp.report.progress import accuracies
from hypermlp.report.shown import how_shown, unit_of
from hypermlp.report.table1 import task_title
from hypermlp.report.terminal import Column, say, tabulate
from hypermlp.tasks import TASKS


def show_tasks(console: Console) -> None:
    """Every task by its name, with one line about it."""
    rows = [[Text(task.name), Text(task.family, "dim"), Text(how_shown(task).asks)] for task in TASKS.values()]
    heads = [Column("task"), Column("family", left=True), Column("what is asked", left=True, wraps=True)]
    console.print(tabulate(console.width, "", heads, rows))
    say(console, "Examples: hypermlp tasks show mqar")
    say(console, "A study: hypermlp tasks run mqar --mixers hyperglu,S-c,deltanet --scale laptop")


def task_table(records: Sequence[Record], mixers: Sequence[str], settings: Mapping[str, str], width: int) -> Group:
    """The scores so far of a study on one task, with the trivial baselines below."""
    task = next(iter(settings.values()))
    told = next((str(record["measure"]) for record in records if "measure" in record), "accuracy")
    measure = TASKS[task].measure if task in TASKS else told  # a user's own is not, once its runs are read from a folder
    unit, digits, name = unit_of(measure)
    table = accuracies(records, mixers, settings, f"{task_title(task)}: {name}", width, unit)
    known = [record["baselines"] for record in records if record.get("baselines")]
    if not known:
        return table
    guesses = ", ".join(f"{guess} {unit * scores[measure]:.{digits}f}" for guess, scores in known[0].items())
    return Group(table, Text(f"trivial baselines: {guesses}", "dim"))
