"""A study that runs, on the terminal: how far it is, what runs now, and the scores so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import mean

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from rich.text import Text

from hypermlp.files import Record
from hypermlp.report.table1 import task_title
from hypermlp.report.terminal import Column, say, tabulate
from hypermlp.studies.engine import Progress, Running
from hypermlp.studies.scores import common_mean, task_scores
from hypermlp.studies.search import PHASE
from hypermlp.verdicts.results import full_name, title_of

Scores = Callable[[Sequence[Record], int], Group]  # the table of finished runs, for a width


class Screen:
    """What is shown while a study runs; without a terminal, a line for every run that ends."""

    def __init__(self, console: Console, scores: Scores) -> None:
        self.console, self.scores = console, scores
        self.progress: Progress | None = None
        left = TextColumn("{task.description}", markup=False)
        self.bar = Bar(TextColumn("runs", markup=False), BarColumn(), MofNCompleteColumn(), left, console=console)
        self.task = self.bar.add_task("")

    def done(self, record: Record) -> None:
        if not self.console.is_terminal:
            left = f"   {time_left(self.progress)}" if self.progress is not None else ""
            say(self.console, outcome(record) + left)

    def render(self, progress: Progress) -> RenderableType:
        """The bar comes first, since a low window cuts off the end."""
        self.progress = progress
        failed = f", {progress.failed} failed" if progress.failed else ""
        phase = f", {progress.phase}" if progress.phase else ""
        description = "stopping, saving …" if progress.stopping else time_left(progress) + failed + phase
        self.bar.update(self.task, total=progress.total, completed=len(progress.finished), description=description)
        width = self.console.width
        parts = [self.bar, Text(), running_table(progress.running, width), self.scores(progress.finished, width)]
        return Group(*parts)


def running_table(running: Sequence[Running], width: int) -> RenderableType:
    if not running:
        return Text()
    names = dict.fromkeys(name for run in running for name in run.metrics)
    heads = [Column("running", wraps=True), Column("seed"), Column("step"), *(Column(n.replace("_", " ")) for n in names)]
    rows = []
    for run in running:
        metrics = [f"{run.metrics[name]:.3f}" if name in run.metrics else "" for name in names]
        rows.append([describe(run.job.identity), str(run.job.identity["seed"]), f"{run.step}/{run.steps or '?'}", *metrics])
    return tabulate(width, "", heads, rows)


def describe(run: Record) -> str:
    """The mixer and what it is trained on, in words; of hyperparameters only what differs from the plain case."""
    mixer = full_name(run["mixer"])
    if run.get("kind") in ("language", "scaling"):
        rate = f", learning rate {run['lr']:g}" if run.get("phase") or run.get("rung") else ""
        size = f", {run['setting'].replace('=', ' ').replace(',', ', ')}" if run.get("setting") else ""
        return f"{mixer}, language model{size}{rate}"
    changes = [part for part in run["setting"].partition("/")[2].split(",") if "=" in part and "num_test" not in part]
    setting = f" ({changes[0].replace('_', ' ').replace('=', ' ')})" if len(changes) == 1 else ""  # several: of all runs alike
    rate = f", learning rate {run['lr']:g}" if run.get("lr") is not None else ""
    return f"{mixer}, {task_title(run['task'])}{setting}{rate}"


def outcome(record: Record) -> str:
    run = f"{describe(record)}, seed {record['seed']}:"
    if record["error"] is not None:
        return f"{run} failed: {record['error']}"
    if record.get("phase") == PHASE:
        loss = "no loss" if record["score"] is None else f"validation loss {record['score']:.4f}"
        return f"{run} {PHASE}, {loss} after {record['step']} steps, {record['seconds']:.0f} s"
    score = record["final"] if "final" in record else record["metrics"]
    if score is None:
        return f"{run} no score: {record['stopped']}"
    loss = f"validation loss {score['validation_loss']:.4f}" if "validation_loss" in score else f"loss {score['loss']:.4f}"
    shown = f"accuracy {score['accuracy']:.1%}" if "accuracy" in score else loss
    return f"{run} {shown}, {record['seconds']:.0f} s"


def time_left(progress: Progress) -> str:
    if progress.seconds_left is None:
        return "time left: being measured"
    minutes = round(progress.seconds_left / 60)
    more = progress.phase == PHASE  # jobs that follow from the search are not known yet
    if minutes < 1:
        return "time left: unknown until the search ends" if more else "less than a minute left"
    left = f"{minutes // 60} h {minutes % 60:02d} min left" if minutes >= 60 else f"{minutes} min left"
    return f"at least {left}" if more else left


# ---- scores ----


def mixer_cell(mixer: str) -> Text:
    title = title_of(mixer)
    return Text(mixer).append(f" {title}" if title else "", "dim")


def accuracies(
    records: Sequence[Record], mixers: Sequence[str], settings: Mapping[str, str], title: str, width: int, unit: float = 100
) -> Group:
    """Mixers down, tasks across, their mean if there are several: accuracies in per cent, means over finished seeds.

    settings: setting → task, of the study.
    """
    scores, tasks = task_scores(records, settings), list(dict.fromkeys(settings.values()))
    digits = 1 if unit == 100 else 4
    rows: list[list[str | Text]] = []
    for mixer in mixers:
        by_task = [scores.get((mixer, task), {}) for task in tasks]
        shown = by_task if len(tasks) == 1 else [*by_task, common_mean(by_task)]
        cells = [mean(by_seed.values()) if by_seed else None for by_seed in shown]
        rows.append([mixer_cell(mixer), *("" if cell is None else f"{unit * cell:.{digits}f}" for cell in cells)])
    heads = [Column("mixer"), *(Column(task_title(task)) for task in tasks), *([] if len(tasks) == 1 else [Column("mean")])]
    return tabulate(width, title, heads, rows)


def losses(records: Sequence[Record], mixers: Sequence[str], width: int) -> Group:
    """Final losses of the language models, means over seeds: on the validation split, then on a sample of the training text."""
    rows: list[list[str | Text]] = []
    for mixer in mixers:
        found = [r["final"] for r in records if r["mixer"] == mixer and r["error"] is None and r["final"] is not None]
        cells = [f"{mean(final[name] for final in found):.4f}" if found else "" for name in ("validation_loss", "loss")]
        rows.append([mixer_cell(mixer), *cells, str(len(found))])
    heads = [Column("mixer"), Column("validation"), Column("training sample"), Column("runs")]
    return tabulate(width, "language models: loss of a token, nats", heads, rows)
