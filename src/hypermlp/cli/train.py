"""Train a language model and watch it; let a model write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from hypermlp.allocator import keep_freed_memory
from hypermlp.checks import choose_from
from hypermlp.mixers.int8 import quantize
from hypermlp.models.lm import LanguageModel
from hypermlp.ops import dispatch
from hypermlp.report.style import save
from hypermlp.report.terminal import say, status
from hypermlp.report.training import curves, line, plan_table, printable, sample_panel, state_table
from hypermlp.runs.configs import configure
from hypermlp.runs.cost import RunCost, estimate_cost
from hypermlp.runs.generate import open_model, write_text
from hypermlp.runs.train import Run, start
from hypermlp.train.config import RunConfig
from hypermlp.train.distributed import World, join
from hypermlp.train.training import Step

PICTURE = "loss.png"


def show_plan(console: Console, name: str, overrides: Iterable[str] = (), *, processes: int = 1) -> RunCost:
    """What the run would take; nothing is written."""
    config = configure(name, overrides)
    with status(console, "measuring a step"):
        found = estimate_cost(config, processes)
    console.print(plan_table(config, found, console.width))
    return found


def run_training(
    console: Console,
    name: str,
    overrides: Iterable[str] = (),
    *,
    out: Path,
    resume: bool = False,
    loggers: Sequence[str] = ("tensorboard",),
    begin: Path | None = None,
    lag_extension: str | None = None,
) -> bool:
    """Train, with progress on the console; whether the run is finished, and not stopped by a signal.

    Under torchrun every process calls this, and the first one shows.
    """
    config = configure(name, overrides)
    keep_freed_memory()
    with join() as world:
        run = start(config, out, world, resume=resume, loggers=loggers, begin=begin, lag_extension=lag_extension)
        if not world.main:
            for _ in run.steps():
                pass
            return not run.stopped
        if world.device.type == "cpu":
            dispatch.announce(dispatch.choose())  # compiles, where that is still to be done, before the display starts
        introduce(console, run)
        follow(console, run)
        conclude(console, run)
        return not run.stopped


def introduce(console: Console, run: Run) -> None:
    config, world = run.config, run.world
    mixer = config.model.mixer if isinstance(config.model.mixer, str) else " + ".join(config.model.mixer)
    say(
        console,
        f"{mixer}, {run.parameters:,} parameters, learns {run.corpus.name} ({run.corpus.tokenizer.name}): "
        f"{config.train.steps:,} steps of {config.train.batch} × {config.data.context} tokens on {among(world, config)}",
    )
    if run.begin is not None:
        say(console, f"Beginning with the weights of {run.begin}")
    if run.training.step:
        say(console, f"Resuming after step {run.training.step}")


def among(world: World, config: RunConfig) -> str:
    return world.device.type if world.size == 1 else f"{world.size} processes ({config.train.parallel}, {world.device.type})"


def follow(console: Console, run: Run) -> None:
    """Progress where there is a terminal; a line every now and then where there is none."""
    steps = run.config.train.steps
    progress = Progress(
        TextColumn("step", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TimeRemainingColumn(), console=console, auto_refresh=False,
    )  # fmt: skip
    task = progress.add_task("", total=steps, completed=run.training.step)
    every = max(1, steps // 50)
    evaluated: Step | None = None
    with Live(progress, console=console, refresh_per_second=4, transient=True) as live:
        for step in run.steps():
            evaluated = step if step.validation is not None else evaluated
            progress.update(task, completed=step.step)
            if console.is_terminal:
                live.update(Group(progress, state_table(step, evaluated, console.width), sample_panel(evaluated)))
            elif step.validation is not None or step.step % every == 0:
                say(console, line(step))


def conclude(console: Console, run: Run) -> None:
    folder = run.folder
    records = folder.read_metrics()
    picture = save(curves({"": records}), folder.path / PICTURE) if records else None
    if run.stopped:
        say(console, f"Stopped after step {run.training.step} with a checkpoint; the same command with --resume resumes there")
        return
    validation = [record for record in records if "validation" in record]
    if validation:
        first, last = validation[0], validation[-1]
        there = len(run.corpus.split("validation"))
        read = min(there, run.config.train.evaluate_batches * run.config.train.batch * run.config.data.context)
        before = f" ({first['validation']:.4f} after step {first['step']})" if first is not last else ""
        say(
            console,
            f"Validation loss {last['validation']:.4f} after step {last['step']}{before}, "
            f"on {read:,} of {there:,} held-out tokens",
        )
        if read < there:
            say(console, f"On all of them the loss differs: hypermlp eval --model {folder.path}")
    say(console, f"Model: {folder.model}   Numbers: {folder.metrics}   Curves: {picture}")


WEIGHTS: dict[str, Callable[[LanguageModel], LanguageModel]] = {
    "saved": lambda model: model,
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "int8": lambda model: quantize(model.to(torch.bfloat16)),
}


def write(console: Console, folder: Path, prompt: str, count: int, *, weights: str = "saved", **options: Any) -> None:
    """Stream `count` tokens after the prompt, with weights of that kind; the options are those of write_text."""
    choose_from("--weights", weights, tuple(WEIGHTS))
    model, tokenizer = open_model(folder)
    model = WEIGHTS[weights](model)
    pieces = write_text(model, tokenizer, prompt, count, **options)
    first = next(pieces, "")  # before anything is printed: what there is to say about the computation comes first
    console.print(Text(prompt, style="bold"), end="", soft_wrap=True)
    for piece in chain([first], pieces):
        console.print(Text(printable(piece)), end="", soft_wrap=True)
    console.print()
