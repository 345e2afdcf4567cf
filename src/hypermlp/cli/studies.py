"""Studies of many small models: demo, MAD, Table 1, and the page that reports them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hypermlp.cli.app import app
from hypermlp.cli.options import Device, ExecutorName, InitName, MixersOption, Retry, Seeds, Tune, Workers
from hypermlp.files import Record
from hypermlp.report.terminal import new_console, say


@app.command()
def demo(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer steps: to see it work, in a minute.")] = False,
    seeds: Seeds = 1,
    workers: Workers = None,
    device: Device = "auto",
    executor: ExecutorName = "local",
    retry_failed: Retry = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for runs and page; a stopped demo resumes there. Default: runs/demo, runs/demo-quick."),
    ] = None,
) -> None:
    """The paper's claims in minutes: train HyperGLU, HyperMLP and rivals on two MAD tasks, and see which claims hold."""
    from hypermlp.cli import watch
    from hypermlp.studies.demo import demo_study
    from hypermlp.studies.executors import find_executor

    folder, workforce = out or Path("runs/demo-quick" if quick else "runs/demo"), find_executor(executor, workers, device)
    study = demo_study(quick=quick)
    watch.leave(watch.run_demo(new_console(), folder, study, seeds=seeds, executor=workforce, retry_failed=retry_failed))


mad = typer.Typer(help="The MAD benchmark: six small tasks that tell architectures apart.", no_args_is_help=True)
app.add_typer(mad, name="mad")


@mad.command("show")
def mad_show(
    task: Annotated[str, typer.Argument(help="Such as selective-copying; `all` shows every task.")] = "all",
    count: Annotated[int, typer.Option(min=1, help="Examples of each.")] = 2,
    seed: Annotated[int, typer.Option(help="Of the examples.")] = 0,
) -> None:
    """Examples of a task, coloured by what the tokens are, with the answers that are scored."""
    from hypermlp.checks import choose_from
    from hypermlp.report.examples import show
    from hypermlp.tasks.mad import MAD

    choose_from("task", task, ("all", *MAD))
    for name in MAD if task == "all" else (task,):
        show(new_console(), MAD[name], count, seed)


@mad.command("run")
def mad_run(
    mixers: MixersOption = "G-cg-q-12o,S-pc",
    tasks: Annotated[str, typer.Option(help="Tasks with commas between them, or `all`.")] = "all",
    protocol: Annotated[
        str, typer.Option(help="clean, or faithful: as the published benchmark behaves, selection on the test set included.")
    ] = "clean",
    scale: Annotated[
        str, typer.Option(help="full (66 settings), baseline (6), both as published; laptop; quick (minutes).")
    ] = "quick",
    seeds: Seeds = 1,
    workers: Workers = None,
    device: Device = "auto",
    executor: ExecutorName = "local",
    epochs: Annotated[int | None, typer.Option(min=1, help="Instead of the scale's.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Instead of the scale's, for every task.")] = None,
    examples: Annotated[int | None, typer.Option(min=1, help="To train on, at most.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Instead of the scale's.")] = None,
    width: Annotated[int | None, typer.Option(min=16, help="Of the models, instead of the scale's.")] = None,
    lr: Annotated[list[float] | None, typer.Option(help="Learning rate; may be given several times.")] = None,
    init: InitName = None,
    search: Tune = False,
    retry_failed: Retry = False,
    out: Annotated[Path, typer.Option(help="Folder for the runs; started again with it, finished runs are kept.")] = Path(
        "runs/mad"
    ),
) -> None:
    """Train models on MAD, all cores at work, and score them. Stop and start it as you like."""
    from hypermlp.cli import watch
    from hypermlp.studies.executors import find_executor
    from hypermlp.studies.mad import task_study
    from hypermlp.studies.search import choose_search
    from hypermlp.studies.table1 import contestants
    from hypermlp.tasks.mad import MAD

    console = new_console()
    study = task_study(
        protocol,
        scale,
        list(MAD) if tasks == "all" else tasks.split(","),
        epochs=epochs,
        steps=steps,
        examples=examples,
        batch=batch,
        width=width,
        lr=None if search else lr,
        init=init,
        search=choose_search(lr) if search else None,
    )
    workforce = find_executor(executor, workers, device)
    names = contestants(mixers)
    records = watch.run_study(console, out, study, names, seeds=seeds, executor=workforce, retry_failed=retry_failed)
    watch.leave_page(console, out)
    watch.leave(records)


@app.command()
def table1(
    mixers: MixersOption = "core",
    scale: Annotated[
        str, typer.Option(help="paper (faithful protocol, 66 settings, GPUs, --corpus), laptop, or quick: to see it work.")
    ] = "laptop",
    half: Annotated[str, typer.Option(help="mad, language, or both.")] = "both",
    seeds: Seeds = 2,
    workers: Workers = None,
    device: Device = "auto",
    executor: ExecutorName = "local",
    corpus: Annotated[
        str | None, typer.Option(help="A prepared corpus for the language half. Default: Python's own source.")
    ] = None,
    init: InitName = None,
    search: Tune = False,
    retry_failed: Retry = False,
    out: Annotated[Path, typer.Option(help="Folder for the runs; started again with it, finished runs are kept.")] = Path(
        "runs/table1"
    ),
) -> None:
    """The paper's Table 1: MAD and language models for labels and rivals, and the page that compares them with the paper."""
    from hypermlp.cli import watch
    from hypermlp.studies.executors import find_executor
    from hypermlp.studies.search import choose_search
    from hypermlp.studies.table1 import contestants, table1_studies

    console, names = new_console(), contestants(mixers)
    tuning = choose_search() if search else None
    studies = table1_studies(scale, half, corpus=corpus, device=device, init=init, search=tuning)
    workforce = find_executor(executor, workers, device)
    records: list[Record] = []
    for folder, study in studies.items():
        part = out / folder
        records += watch.run_study(console, part, study, names, seeds=seeds, executor=workforce, retry_failed=retry_failed)
    watch.leave_page(console, out)
    watch.leave(records)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="A folder with runs, such as results/table1.")],
    out: Annotated[Path | None, typer.Option(help="Where the page goes. Default: report.html in the folder.")] = None,
) -> None:
    """One page from finished runs: the table beside the paper's, curves, claims with verdicts, budgets, provenance."""
    from hypermlp.cli.watch import show_verdicts
    from hypermlp.report.page import write_report
    from hypermlp.report.table1 import show_table1
    from hypermlp.report.table5 import write_page
    from hypermlp.report.tasks import task_table
    from hypermlp.verdicts.judged import judge_folder

    console = new_console()
    if page := write_page(folder, out):
        say(console, f"Report: {page}")
        return
    studies = judge_folder(folder)
    for study in (judged.results for judged in studies):
        if "tasks" in study.plans:
            console.print(task_table(study.mad, study.mixers, study.all_settings, console.width))
        else:
            show_table1(console, study)
    show_verdicts(console, studies)
    say(console, f"Report: {write_report(folder, out, studies)}")
