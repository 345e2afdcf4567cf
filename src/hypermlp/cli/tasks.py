"""Tasks beside MAD: the list, examples, and studies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hypermlp.cli.app import app
from hypermlp.cli.options import Device, ExecutorName, InitName, MixersOption, Retry, Seeds, Workers
from hypermlp.files import Record
from hypermlp.report.terminal import new_console, say

tasks = typer.Typer(
    help="Small tasks that tell mixers apart: recall, in-context languages, state tracking and more. Alone: the list.",
    invoke_without_command=True,
)
app.add_typer(tasks, name="tasks")


@tasks.callback()
def list_tasks(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        from hypermlp.report.tasks import show_tasks

        show_tasks(new_console())


@tasks.command("show")
def tasks_show(
    task: Annotated[str, typer.Argument(help="Such as mqar, or one of your own: FILE.py:CLASS.")],
    count: Annotated[int, typer.Option(min=1, help="Examples of each evaluation set.")] = 2,
    seed: Annotated[int, typer.Option(help="Of the examples.")] = 0,
) -> None:
    """Examples of a task, coloured by what the tokens are, with the answers that are scored."""
    from hypermlp.report.examples import show
    from hypermlp.studies.tasks import find_tasks
    from hypermlp.tasks import TASKS

    for name in find_tasks([task]):
        show(new_console(), TASKS[name], count, seed)


@tasks.command("run")
def tasks_run(
    names: Annotated[
        str, typer.Argument(help="Tasks or families with commas between them, `all` but MAD, or your own: FILE.py:CLASS.")
    ] = "",
    mixers: MixersOption = "G-cg-q-12o,S-pc",
    more: Annotated[str, typer.Option("--tasks", help="The same as the argument.")] = "",
    scale: Annotated[
        str, typer.Option(help="quick (to see it work), laptop (minutes a mixer, searched rates), published.")
    ] = "quick",
    seeds: Seeds = 1,
    workers: Workers = None,
    device: Device = "auto",
    executor: ExecutorName = "local",
    steps: Annotated[int | None, typer.Option(min=1, help="Instead of the scale's.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Instead of the scale's.")] = None,
    width: Annotated[int | None, typer.Option(min=16, help="Of the models, instead of the scale's.")] = None,
    depth: Annotated[int | None, typer.Option(min=1, help="Layers, instead of the scale's.")] = None,
    lr: Annotated[list[float] | None, typer.Option(help="Learning rate; may be given several times.")] = None,
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="NAME=VALUE of the task's setting, such as source=my.csv, mix=based; may be given several times."
        ),
    ] = None,
    search: Annotated[
        bool | None,
        typer.Option(help="Choose each mixer's learning rate first, on validation data. Default: where there are several."),
    ] = None,
    init: InitName = None,
    retry_failed: Retry = False,
    out: Annotated[
        Path, typer.Option(help="Folder; every task has one in it. Started again with it, finished runs are kept.")
    ] = Path("runs/tasks"),
) -> None:
    """Train models of equal size on tasks, score them by slice, and write the page. Stop and start it as you like."""
    from hypermlp.cli import watch
    from hypermlp.studies.executors import find_executor
    from hypermlp.studies.table1 import contestants
    from hypermlp.studies.tasks import scaled_studies

    chosen = [name for text in (names, more) for name in text.split(",") if name]
    if not chosen:
        raise ValueError("which tasks? `hypermlp tasks` lists them; for example: hypermlp tasks run mqar")
    console, workforce = new_console(), find_executor(executor, workers, device)
    numbers = {"steps": steps, "batch": batch, "width": width, "depth": depth}
    studies = scaled_studies(chosen, scale, **numbers, lr=lr, search=search, init=init, changes=change or ())
    records: list[Record] = []
    for folder, study in studies.items():
        say(console, f"{folder}, {scale} scale:")
        records += watch.run_study(
            console, out / folder, study, contestants(mixers), seeds=seeds, executor=workforce, retry_failed=retry_failed
        )
    watch.leave_page(console, out)
    watch.leave(records)
