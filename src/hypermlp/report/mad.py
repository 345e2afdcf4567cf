"""The MAD study on the terminal: how far it is, what runs, and the accuracies so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from hypermlp import ops
from hypermlp.experiments import language, mad
from hypermlp.experiments.runs import Progress, Record, Running


def show_mad_run(
    console: Console,
    out: Path,
    mixers: Sequence[str],
    tasks: Sequence[str],
    protocol: str,
    scale: str,
    seeds: int,
    workers: int | None,
    *,
    retry_failed: bool = False,
    **overrides: Any,
) -> list[Record]:
    """Run the study in `out`, or what is missing of it. overrides: of the scale's numbers (experiments/mad.py: make_plan)."""
    plan = mad.make_plan(protocol, scale, **overrides)
    mad.check(mixers, tasks, seeds)
    ops.announce(ops.choose())  # compiles, where that is still to be done, before the workers all want it
    study = partial(mad.study, out, mixers, tasks, plan, seeds=seeds, workers=workers, retry_failed=retry_failed)
    settings = {setting.key: task for task in tasks for setting in plan.settings_of(task)}
    return watch(console, out, study, lambda records: accuracies(records, mixers, settings, protocol))


def show_language_run(
    console: Console,
    out: Path,
    mixers: Sequence[str],
    scale: str,
    seeds: int,
    workers: int | None,
    *,
    retry_failed: bool = False,
    **overrides: Any,
) -> list[Record]:
    """The same for the language half of Table 1 (experiments/language.py)."""
    plan = language.make_plan(scale, **overrides)
    language.check(mixers, seeds, plan)
    ops.announce(ops.choose())
    study = partial(language.study, out, mixers, plan, seeds=seeds, workers=workers, retry_failed=retry_failed)
    return watch(console, out, study, lambda records: losses(records, mixers))


def watch(
    console: Console, out: Path, study: Callable[..., list[Record]], table: Callable[[Sequence[Record]], Table]
) -> list[Record]:
    """Show a study while it runs, and its outcome."""
    screen = Screen(console, table)
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        records = study(tell=lambda progress: live.update(screen.render(progress)), done=screen.done)
    console.print(table(records))
    failed = [record for record in records if record["error"] is not None]
    for record in failed:
        console.print(f"[red]failed[/red] {record['key']}: {record['error']}", highlight=False)
    if failed:
        console.print(f"{len(failed)} of {len(records)} runs failed; --retry-failed runs them again")
    console.print(f"Runs: {out / 'runs.jsonl'}   Plan: {out / 'plan.json'}")
    return records


class Screen:
    """What is shown while the study runs; without a terminal, a line for every run that ends."""

    def __init__(self, console: Console, table: Callable[[Sequence[Record]], Table]) -> None:
        self.console, self.table = console, table
        self.progress: Progress | None = None
        self.bar = Bar(TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), console=console)
        self.task = self.bar.add_task("")

    def done(self, record: Record) -> None:
        if not self.console.is_terminal:
            left = f"   {time_left(self.progress)}" if self.progress is not None else ""
            self.console.print(outcome(record) + left, highlight=False, markup=False, soft_wrap=True)

    def render(self, progress: Progress) -> RenderableType:
        self.progress = progress
        failed = f", {progress.failed} failed" if progress.failed else ""
        description = time_left(progress) + failed
        self.bar.update(self.task, total=progress.total, completed=len(progress.finished), description=description)
        running = [Text(line(run)) for run in progress.running]
        return Group(self.table(progress.finished), *running, self.bar)


def accuracies(records: Sequence[Record], mixers: Sequence[str], settings: Mapping[str, str], protocol: str) -> Table:
    """Mixers down, tasks across: accuracies in per cent, means over finished seeds. settings: setting → task, of the study."""
    scores, tasks = mad.task_scores(records, settings), list(dict.fromkeys(settings.values()))
    table = Table(title=f"MAD, {protocol} protocol: accuracy, %", box=box.SIMPLE_HEAD)
    table.add_column("mixer")
    for column in (*tasks, "mean"):
        table.add_column(column, justify="right")
    for mixer in mixers:
        by_task = [scores.get((mixer, task), {}) for task in tasks]
        cells = [mean(by_seed.values()) if by_seed else None for by_seed in (*by_task, mad.common_mean(by_task))]
        table.add_row(mixer, *("" if cell is None else f"{100 * cell:.1f}" for cell in cells))
    return table


def losses(records: Sequence[Record], mixers: Sequence[str]) -> Table:
    """Final losses of the language models, means over seeds."""
    table = Table(title="language models: loss of a token, nats", box=box.SIMPLE_HEAD)
    for column in ("mixer", "training text", "validation", "runs"):
        table.add_column(column, justify="left" if column == "mixer" else "right")
    for mixer in mixers:
        found = [r["final"] for r in records if r["mixer"] == mixer and r["error"] is None and r["final"] is not None]
        cells = [f"{mean(final[name] for final in found):.4f}" if found else "" for name in ("loss", "validation_loss")]
        table.add_row(mixer, *cells, str(len(found)))
    return table


def line(run: Running) -> str:
    metrics = "   ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in run.metrics.items())
    return f"{run.job.key}   step {run.step}/{run.steps or '?'}   {metrics}"


def outcome(record: Record) -> str:
    if record["error"] is not None:
        return f"{record['key']}   failed: {record['error']}"
    score = record["final"] if record.get("kind") == "language" else record["metrics"]
    if score is None:
        return f"{record['key']}   no score: {record['stopped']}"
    shown = f"accuracy {score['accuracy']:.1%}" if "accuracy" in score else f"loss {score['loss']:.4f}"
    return f"{record['key']}   {shown}   {record['seconds']:.0f} s"


def time_left(progress: Progress) -> str:
    if progress.seconds_left is None:
        return "time left unknown"
    minutes = round(progress.seconds_left / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min left" if minutes >= 60 else f"{minutes} min left"
