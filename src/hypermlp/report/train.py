"""What training shows: the plan before it, progress while it runs, the curves of its losses afterwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from hypermlp import ops
from hypermlp.experiments.configs import RunConfig, configure
from hypermlp.experiments.cost import Cost, estimate_cost
from hypermlp.experiments.generate import open_model, write_text
from hypermlp.experiments.train import MODEL, Run, start
from hypermlp.report.style import new_figure, save
from hypermlp.train.distributed import World, join
from hypermlp.train.metrics import LINES, read_metrics
from hypermlp.train.training import Step

PICTURE = "loss.png"


def show_plan(console: Console, name: str, overrides: Iterable[str] = (), *, processes: int = 1) -> Cost:
    """What the run would take; nothing is written."""
    config = configure(name, overrides)
    with console.status("measuring a step"):
        found = estimate_cost(config, processes)
    console.print(plan_table(config, found))
    return found


def show_training(console: Console, name: str, overrides: Iterable[str] = (), *, out: Path, resume: bool = False) -> bool:
    """Train, with progress on the console; whether the run is finished, and not stopped by a signal.

    Under torchrun every process calls this, and the first one shows.
    """
    config = configure(name, overrides)
    with join() as world:
        run = start(config, out, world, resume=resume)
        if not world.main:
            for _ in run.steps():
                pass
            return not run.stopped
        if world.device.type == "cpu":
            ops.announce(ops.choose())  # compiles, where that is still to be done, before the display starts
        introduce(console, run)
        follow(console, run)
        conclude(console, run)
        return not run.stopped


def introduce(console: Console, run: Run) -> None:
    config, world = run.config, run.world
    mixer = config.model.mixer if isinstance(config.model.mixer, str) else " + ".join(config.model.mixer)
    console.print(
        f"{mixer}, {run.parameters:,} parameters, learns {run.corpus.name} ({run.corpus.tokenizer.name}): "
        f"{config.train.steps:,} steps of {config.train.batch} × {config.data.context} tokens on {among(world, config)}"
    )
    if run.training.step:
        console.print(f"Resuming after step {run.training.step}")


def among(world: World, config: RunConfig) -> str:
    return world.device.type if world.size == 1 else f"{world.size} processes ({config.train.parallel}, {world.device.type})"


def follow(console: Console, run: Run) -> None:
    """Progress where there is a terminal; a line every now and then where there is none."""
    steps = run.config.train.steps
    progress = Progress(
        TextColumn("step"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
        console=console, auto_refresh=False,
    )  # fmt: skip
    task = progress.add_task("", total=steps, completed=run.training.step)
    every = max(1, steps // 50)
    evaluated: Step | None = None
    with Live(progress, console=console, refresh_per_second=4, transient=True) as live:
        for step in run.steps():
            evaluated = step if step.validation is not None else evaluated
            progress.update(task, completed=step.step)
            if console.is_terminal:
                live.update(Group(state_table(step, evaluated), sample_panel(evaluated), progress))
            elif step.validation is not None or step.step % every == 0:
                console.print(line(step), soft_wrap=True)


def state_table(step: Step, evaluated: Step | None) -> Table:
    shown = Table(box=box.SIMPLE_HEAD)
    validation = "" if evaluated is None else f"{evaluated.validation:.4f} (step {evaluated.step})"
    cells = {
        "tokens": f"{step.tokens:,}",
        "loss": f"{step.loss:.4f}",
        "validation": validation,
        "learning rate": f"{step.lr:.2e}",
        "gradient": f"{step.grad_norm:.3f}",
        "tokens/s": f"{step.tokens_per_second:,.0f}",
    }
    for name in cells:
        shown.add_column(name, justify="right")
    shown.add_row(*cells.values())
    return shown


def sample_panel(evaluated: Step | None) -> Panel | Text:
    if evaluated is None or evaluated.sample is None:
        return Text()
    return Panel(Text(printable(evaluated.sample)), title=f"written after step {evaluated.step}")


def printable(text: str) -> str:
    """Text of an untrained model, without what a terminal would obey."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{MIDDLE DOT}" for c in text)


def line(step: Step) -> str:
    words = f"step {step.step:>6}   loss {step.loss:.4f}   lr {step.lr:.2e}   gradient {step.grad_norm:.3f}   "
    words += f"{step.tokens_per_second:,.0f} tokens/s"
    return words if step.validation is None else f"{words}   validation {step.validation:.4f}"


def conclude(console: Console, run: Run) -> None:
    records = read_metrics(run.out / LINES)
    picture = save(curves({"": records}), run.out / PICTURE) if records else None
    if run.stopped:
        console.print(f"Stopped after step {run.training.step} with a checkpoint; the same command with --resume resumes there")
        return
    validation = [record for record in records if "validation" in record]
    if validation:
        first, last = validation[0], validation[-1]
        console.print(
            f"Validation loss {last['validation']:.4f} after step {last['step']} "
            f"(it was {first['validation']:.4f} after step {first['step']})"
        )
    console.print(f"Model: {run.out / MODEL}   Numbers: {run.out / LINES}   Curves: {picture}", soft_wrap=True)


def curves(runs: dict[str, list[dict[str, Any]]]) -> Figure:
    """Losses of one or more runs by tokens: of training, thin, and of validation."""
    figure, (ax,) = new_figure(1, width=7.0, height=4.2)
    for title, records in runs.items():
        (thin,) = ax.plot([r["tokens"] for r in records], [r["loss"] for r in records], linewidth=0.6, alpha=0.5)
        measured = [(r["tokens"], r["validation"]) for r in records if "validation" in r]
        if measured:
            label = f"{title}, validation".removeprefix(", ")
            ax.plot(*zip(*measured, strict=True), color=thin.get_color(), marker="o", markersize=3, label=label)
            ax.legend(frameon=False)
    ax.set(xlabel="tokens", ylabel="loss")
    return figure


def plan_table(config: RunConfig, found: Cost) -> Group:
    table = Table(title="what the run takes", box=box.SIMPLE_HEAD, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, n in found.parameters.items():
        table.add_row(f"parameters, {name}", f"{n:,}")
    table.add_row("parameters", f"{sum(found.parameters.values()):,}", end_section=True)
    update = config.train.batch * config.data.context
    table.add_row("tokens", f"{found.tokens:,}")
    table.add_row("steps", f"{found.steps:,} of {update:,} tokens", end_section=True)
    for name, value in found.flops.items():
        table.add_row(f"FLOPs, {name}", f"{value:.3g}")
    table.add_row("FLOPs", f"{sum(found.flops.values()):.3g}", end_section=True)
    for name, value in found.memory.items():
        table.add_row(f"memory of a process, {name}", in_bytes(value))
    table.add_row("memory of a process", in_bytes(sum(found.memory.values())), end_section=True)
    table.add_row("time", in_time(found.seconds))
    notes = [f"Time on {found.processes} of this device, measured: {found.measured}."]
    if found.uncounted:
        notes.append(f"The mixing of {', '.join(found.uncounted)} is not among the operations.")
    return Group(table, *map(Text, notes), Text(settings(config)))


def settings(config: RunConfig) -> str:
    """Every field, as it would be given."""
    lines = []
    for part in ("model", "data", "train"):
        values = dataclasses.asdict(getattr(config, part))
        lines.append(" ".join(f"{part}.{name}={as_given(value)}" for name, value in values.items()))
    return "\n".join(lines)


def as_given(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return ",".join(map(str, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def in_bytes(value: float) -> str:
    return f"{value / 1e9:,.2f} GB" if value >= 1e8 else f"{value / 1e6:,.2f} MB"


def in_time(seconds: float) -> str:
    for unit, size in (("years", 365 * 86400), ("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.0f} seconds"


def show_text(console: Console, folder: Path, prompt: str, count: int, **options: Any) -> None:
    """Stream `count` tokens after the prompt; the options are those of write_text."""
    model, tokenizer = open_model(folder)
    console.print(Text(prompt, style="bold"), end="", soft_wrap=True)
    for piece in write_text(model, tokenizer, prompt, count, **options):
        console.print(Text(printable(piece)), end="", soft_wrap=True)
    console.print()
