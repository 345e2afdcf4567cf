"""Registered studies: run one by its protocol, and what it will cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hypermlp.cli.app import app
from hypermlp.cli.options import Device, ExecutorName, Retry, Workers
from hypermlp.files import Record
from hypermlp.report.terminal import new_console, say

study = typer.Typer(
    help="Studies registered before they run: a file says who takes part, how, and what is compared by which rule.",
    no_args_is_help=True,
)
app.add_typer(study, name="study")
ProtocolFile = Annotated[
    str,
    typer.Argument(
        help="A TOML file, or table1, compression, labels, registers, gates, ranks, lora, which come with hypermlp."
    ),
]


@study.command("run")
def study_run(
    protocol: ProtocolFile = "table1",
    workers: Workers = None,
    device: Device = "auto",
    executor: ExecutorName = "local",
    retry_failed: Retry = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the runs; a stopped study resumes there. Default: runs/registered/ and the name."),
    ] = None,
) -> None:
    """Run a registered study: search, then the runs that count; and leave its page. Stop and start it as you like."""
    from hypermlp.cli import watch
    from hypermlp.studies.executors import find_executor
    from hypermlp.studies.protocol import find_protocol, load_protocol
    from hypermlp.verdicts.registration import MARK, deviations, enter, registered_version

    console, path = new_console(), find_protocol(protocol)
    rules = load_protocol(path)
    folder, workforce = out or Path("runs") / "registered" / path.stem, find_executor(executor, workers, device)
    versions = enter(folder, path, rules)
    if registered_version(versions) is None:
        say(console, f"{path.name} is not committed as it is, so these runs will not count as registered.", "red")
    for changed, lines in deviations(versions):
        say(console, f"Changed on {changed.date}, after {changed.records} runs: {'; '.join(lines)}", "red")
    records: list[Record] = []
    for half, part in rules.studies.items():
        records += watch.run_study(
            console,
            folder / half,
            part,
            rules.mixers,
            seeds=rules.seeds,
            executor=workforce,
            retry_failed=retry_failed,
            marks={MARK: rules.digest},
        )
    watch.leave_page(console, folder)
    watch.leave(records)


@study.command("cost")
def study_cost(
    protocol: ProtocolFile = "table1",
    workers: Annotated[int, typer.Option(min=1, help="Cores that will work at once.")] = 2,
) -> None:
    """How long a registered study will take on this machine: every model is trained for a few steps."""
    from hypermlp.allocator import keep_freed_memory
    from hypermlp.report.cost import show_costs
    from hypermlp.studies.cost import measure_costs
    from hypermlp.studies.protocol import find_protocol, load_protocol

    keep_freed_memory()  # as workers do
    rules = load_protocol(find_protocol(protocol))
    costs = [cost for part in rules.studies.values() for cost in measure_costs(part, rules.mixers, rules.seeds)]
    show_costs(new_console(), costs, workers)
