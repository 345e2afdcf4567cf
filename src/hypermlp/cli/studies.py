"""Studies of many small models, the demo among them: which there are, run one, what it costs, the page that shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hypermlp.cli.app import app, commands, shows_tables
from hypermlp.cli.console import open_console
from hypermlp.cli.options import (
    Changes,
    DeviceOption,
    ExecutorOption,
    Force,
    MixersOption,
    Retry,
    ScaleOption,
    SearchOption,
    SeedsOption,
    StudyName,
    TasksOption,
    Workers,
)
from hypermlp.report.terminal import say

EXAMPLES = 2  # that are shown of each evaluation set


@app.command()
@shows_tables
def demo(
    quick: Annotated[bool, typer.Option("--quick", help="Take a minute: fewer steps, too few to rank mixers.")] = False,
    seeds: SeedsOption = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the runs. Default: runs/demo, or runs/demo-quick.")] = None,
) -> None:
    """Start here: the paper's claims in minutes. Train six small models on two tasks, and see which claims hold.

    If you stop it, the same command resumes. hypermlp study run demo does the same and has more options.
    """
    run_named("demo", out, scale="quick" if quick else None, seeds=seeds)


study = commands(
    "study",
    "Train models that differ in their mixer (HyperGLU, attention, …) on tasks, and judge them. "
    "Start with: hypermlp study list",
)


@study.command("list")
@shows_tables
def study_list() -> None:
    """List every study: what it asks, and at which scales it runs."""
    from hypermlp.report.tasks import show_studies

    show_studies(open_console())


@study.command("show")
@shows_tables
def study_show(name: StudyName) -> None:
    """Show examples of a task, coloured by what the tokens are, with the answers that are scored."""
    from hypermlp.report.examples import show
    from hypermlp.report.tasks import show_plan
    from hypermlp.studies.catalogue import NAMED, check_names, is_protocol, plan_study
    from hypermlp.studies.tasks import find_tasks
    from hypermlp.tasks import TASKS

    console = open_console()
    if name in NAMED or is_protocol(name):
        show_plan(console, plan_study(name))
        return
    check_names(name)
    for task in find_tasks(name.split(",")):
        show(console, TASKS[task], EXAMPLES, 0)


@study.command("run")
@shows_tables
def study_run(
    name: StudyName,
    changes: Changes = None,
    scale: ScaleOption = None,
    mixers: MixersOption = None,
    tasks: TasksOption = None,
    seeds: SeedsOption = None,
    search: SearchOption = None,
    workers: Workers = None,
    device: DeviceOption = "auto",
    executor: ExecutorOption = "local",
    retry_failed: Retry = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the runs. Default: runs/NAME. A stopped study resumes there.")
    ] = None,
) -> None:
    """Run a study on all cores or GPUs, judge it, and write its page. You may stop it and start it again at any time.

    NAME is demo, table1, scaling, mad, a task or a family of tasks; several tasks are comma-separated. It may also be a task of
    your own (FILE.py:CLASS), or a protocol, which is a study registered before it runs (FILE.toml).

    All studies take the fields steps, batch, width, depth, lr=1e-3,3e-3 and init=paper or decays. mad also takes epochs,
    examples and protocol=faithful; table1 takes corpus; scaling takes corpus, widths=32,64,96 and ratios=20 (tokens per
    parameter); a task takes those of its setting, such as source=my.csv.
    """
    choice = {"scale": scale, "mixers": mixers, "tasks": tasks, "seeds": seeds, "search": search, "changes": changes or ()}
    run_named(name, out, workers, device, executor, retry_failed, **choice)


@study.command("cost")
@shows_tables
def study_cost(
    name: StudyName,
    changes: Changes = None,
    scale: ScaleOption = None,
    mixers: MixersOption = None,
    tasks: TasksOption = None,
    seeds: SeedsOption = None,
    search: SearchOption = None,
) -> None:
    """Estimate how long a study takes on this machine, by training every model for a few steps."""
    from hypermlp.allocator import keep_freed_memory
    from hypermlp.report.cost import show_costs
    from hypermlp.studies.catalogue import StudyOptions, plan_study
    from hypermlp.studies.cost import measure_costs
    from hypermlp.studies.executors import cores

    keep_freed_memory()  # as workers do
    plan = plan_study(
        name, StudyOptions(scale=scale, mixers=mixers, tasks=tasks, seeds=seeds, search=search, changes=changes or ())
    )
    console = open_console()
    say(console, "Each mixer takes a few steps on each setting; that is about a second each.")
    with console.status("") as status:
        costs = [
            cost for part in plan.studies.values() for cost in measure_costs(part, plan.mixers, plan.seeds, tell=status.update)
        ]
    show_costs(console, costs, cores())


@study.command("new")
def study_new(
    file: Annotated[Path, typer.Argument(help="The file to write, such as mine.toml.")],
) -> None:
    """Write a protocol for you to change: which mixers take part, how they train, what is compared and by which rule."""
    from hypermlp.files import write_whole
    from hypermlp.studies.catalogue import SUFFIX, new_protocol

    if file.suffix != SUFFIX:
        raise ValueError(f"a protocol is a TOML file: {file} must end in {SUFFIX}")
    if file.exists():
        raise ValueError(f"{file} exists already; choose another name")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, new_protocol().encode())
    console = open_console()
    say(console, f"{file}: change it, then hypermlp study check {file}, commit it, hypermlp study run {file}")


@study.command("check")
@shows_tables
def study_check(
    name: Annotated[str, typer.Argument(help="FILE.toml, or a name that hypermlp study run takes.")],
) -> None:
    """Check a protocol and say what it would run, without running it. An error names its file and section."""
    from hypermlp.report.tasks import show_plan
    from hypermlp.studies.catalogue import plan_study
    from hypermlp.verdicts.registration import commit_of

    console, plan = open_console(), plan_study(name)
    for part in plan.studies.values():
        part.check(plan.mixers, plan.seeds)
    show_plan(console, plan)
    if plan.file is not None and plan.protocol is not None:
        commit, date = commit_of(plan.file, plan.protocol.text)
        say(
            console,
            f"Committed as it is: {commit[:12]}, {date}" if commit else "Not committed as it is: commit it before you run it.",
        )


@study.command("report")
@shows_tables
def study_report(
    folder: Annotated[Path, typer.Argument(help="A folder with runs, such as results/table1; or the name of a study.")],
    out: Annotated[Path | None, typer.Option(help="The page to write. Default: report.html in the folder.")] = None,
    force: Force = False,
) -> None:
    """Make one page from finished runs: tables beside the paper's, curves, claims with verdicts, budgets, provenance."""
    from hypermlp.cli.watch import leave_scaling, show_verdicts
    from hypermlp.files import refuse_foreign
    from hypermlp.report.page import write_report
    from hypermlp.report.table1 import show_table1
    from hypermlp.report.table5 import write_page
    from hypermlp.report.tasks import task_table
    from hypermlp.studies.catalogue import plan_study, study_names
    from hypermlp.verdicts.judged import judge_folder

    console = open_console()
    if not folder.exists() and str(folder) in study_names():
        folder = plan_study(str(folder)).folder
    refuse_foreign(out or folder / "report.html", force=force)
    if page := write_page(folder, out, force=force):
        say(console, f"Report: {page}")
        return
    if leave_scaling(console, folder, out, force=force):
        return
    studies = judge_folder(folder)
    for found in (judged.results for judged in studies):
        if "tasks" in found.plans:
            console.print(task_table(found.mad, found.mixers, found.all_settings, console.width))
        else:
            show_table1(console, found)
    show_verdicts(console, studies)
    say(console, f"Report: {write_report(folder, out, studies, force=force)}")


@study.command("repeat")
@shows_tables
def study_repeat(
    folder: Annotated[Path, typer.Argument(help="A folder with runs, such as results/table1.")],
    records: Annotated[int, typer.Option(min=1, help="How many of its runs, spread evenly over them.")] = 3,
) -> None:
    """Train some of a folder's runs again, and say whether their numbers are still the same. The folder stays as it is.

    Bit-equal: every number of the curve and the scores is. Within rounding: the first evaluation differs by a thousandth at
    most, as when another processor adds in another order. Changed: it differs by more, and the command ends with exit code 1.
    """
    from hypermlp.cli.watch import repeat_runs
    from hypermlp.studies.executors import LocalPool

    repeat_runs(open_console(), folder, records, LocalPool())


def run_named(
    name: str,
    out: Path | None,
    workers: int | None = None,
    device: str = "auto",
    executor: str = "local",
    retry_failed: bool = False,
    **choice: object,
) -> None:
    """The one way in which studies start."""
    from hypermlp.cli import watch
    from hypermlp.files import refuse_foreign
    from hypermlp.studies.catalogue import StudyOptions, plan_study
    from hypermlp.studies.executors import find_executor

    plan = plan_study(name, StudyOptions(device=device, **choice))  # type: ignore[arg-type]
    workforce = find_executor(executor, workers, device)
    refuse_foreign((out or plan.folder) / "report.html")
    watch.leave(watch.run_plan(open_console(), plan, out, executor=workforce, retry_failed=retry_failed))
