"""Tasks on the terminal: the list, and the scores of a study with the trivial answers below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console, Group
from rich.text import Text

from hypermlp.files import Record
from hypermlp.mixers.hybrid import is_hybrid
from hypermlp.models.budget import match
from hypermlp.report.budget import sizes_text
from hypermlp.report.progress import accuracies
from hypermlp.report.shown import how_shown, unit_of
from hypermlp.report.table1 import task_title
from hypermlp.report.terminal import Column, say, tabulate
from hypermlp.studies.catalogue import StudyPlan, packaged_protocols, scales_of
from hypermlp.studies.protocol import load_protocol
from hypermlp.studies.study import Study
from hypermlp.tasks import TASKS


def show_studies(console: Console) -> None:
    """Every study by its name, with one line about it."""
    named = [
        ("demo", "", "Which of the paper's claims hold on two tasks, in minutes?"),
        ("table1", "", "The paper's Table 1: MAD, and small language models on text."),
        ("scaling", "", "Which mixer's loss falls faster as models and their data grow?"),
        *((task.name, task.family, how_shown(task).asks) for task in TASKS.values()),
        *((name, "protocol", load_protocol(path).title) for name, path in packaged_protocols().items()),
    ]
    rows: list[list[str | Text]] = [
        [Text(name), Text(family, "dim"), Text(about), " ".join(scales_of(name))] for name, family, about in named
    ]
    heads = [Column("study"), Column("family", left=True), Column("what is asked", left=True, wraps=True)]
    console.print(tabulate(console.width, "", [*heads, Column("scales", left=True, wraps=True)], rows))
    say(console, "A family is run by its name too. Give several comma-separated; `all` is every task but those of mad.")
    say(console, "Examples: hypermlp study show mqar")
    say(console, "A study: hypermlp study run mqar --mixers hyperglu,S-c,deltanet")


def show_plan(console: Console, plan: StudyPlan) -> None:
    """What a study would run."""
    title = plan.name if plan.protocol is None else plan.protocol.title
    rows = []
    for part, study in plan.studies.items():
        rows += [
            [part or plan.name, in_words(key or study.kind), str(len(plan.mixers)), str(plan.seeds), rates_text(study, key)]
            for key in study.settings()
        ]
    heads = [Column("part"), Column("setting", left=True, wraps=True), *map(Column, ("mixers", "seeds", "learning rates"))]
    console.print(tabulate(console.width, title, heads, rows))
    say(console, f"Mixers: {', '.join(plan.mixers)}")
    show_hybrid_sizes(console, plan)
    say(console, f"Runs go to {plan.folder}. What it takes: hypermlp study cost {plan.name}")


def in_words(key: str) -> str:
    """The key of a setting so that a line can be broken between its numbers."""
    return key.replace("/", ": ").replace(",", ", ")


def show_hybrid_sizes(console: Console, plan: StudyPlan) -> None:
    """At which sizes the mixers of hybrids meet the budget, each for its own layer."""
    rows: list[list[str | Text]] = []
    for part, study in plan.studies.items():
        for key, setting in study.settings().items() if any(map(is_hybrid, plan.mixers)) else ():
            for name in filter(is_hybrid, plan.mixers):
                rows.append([name, key or part or plan.name, sizes_text(match(name, *study.shape(setting)))])
    if rows:
        heads = [
            Column("hybrid"),
            Column("setting", left=True, wraps=True),
            Column("sizes of its layers", left=True, wraps=True),
        ]
        console.print(tabulate(console.width, "", heads, rows))


def rates_text(study: Study, key: str) -> str:
    """How the learning rates of a setting come about."""
    if study.search is not None:
        return "searched"
    if study.given is None:
        return ", ".join(f"{rate:g}" for rate in rates_of(study))
    task = key.partition("/")[0]
    found = sorted({rate[task] if isinstance(rate, dict) else rate for rate in study.given.values()})
    return " to ".join(f"{rate:g}" for rate in dict.fromkeys((found[0], found[-1]))) + ", given"


def rates_of(study: Study) -> Sequence[float]:
    rates = getattr(study, study.rate_field)
    return rates if isinstance(rates, tuple) else (rates,)


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
