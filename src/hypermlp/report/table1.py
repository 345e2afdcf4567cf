"""The grid of the paper's Table 1 from any study: measured numbers beside the paper's, and gains over softmax attention."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from rich.console import Console
from rich.text import Text

from hypermlp.mixers.hybrid import outside_budget
from hypermlp.paper import tables as paper
from hypermlp.report.markdown import markdown_table
from hypermlp.report.shown import SHOWN, how_shown
from hypermlp.report.terminal import Column as Head
from hypermlp.report.terminal import say, show_table
from hypermlp.tasks import TASKS
from hypermlp.tasks.mad import MAD
from hypermlp.verdicts.estimates import NONE, Estimate, estimate, interval, seeds_text, spread_rule, spread_text
from hypermlp.verdicts.results import (
    AVERAGE,
    LOSS,
    LOSSES,
    VALIDATION,
    Results,
    evaluations_until,
    full_name,
    published,
    title_of,
)

TITLES = {
    **{task: SHOWN[task].title for task in MAD},
    AVERAGE: "MAD average",
    VALIDATION: "Validation loss",
    LOSS: "Loss",  # on a sample of the training text, as in the paper
}
BESIDE = "Training sample"  # the title of that loss beside the validation loss


def task_title(task: str) -> str:
    return TITLES.get(task) or (how_shown(TASKS[task]).title if task in TASKS else task)


@dataclass(frozen=True)
class Measure:
    key: str | float  # a measure of the study, or a threshold of the loss
    title: str
    digits: int
    sign: int  # 1: more is better
    comparable: bool = True  # with the paper's numbers


@dataclass(frozen=True)
class Cell:
    column: Measure
    measured: Estimate | None
    paper: float | None
    finished: str = ""  # how many of its runs are, where that is why there is no number
    gain: float | None = None  # over the study's softmax attention, here
    paper_gain: float | None = None  # and in the paper

    @property
    def shift(self) -> float | None:
        """How much more it gains here than in the paper; None where the scales differ."""
        if self.gain is None or self.paper_gain is None or not self.column.comparable:
            return None
        return self.gain - self.paper_gain

    @property
    def text(self) -> str:
        return interval(self.measured, self.column.digits)

    @property
    def mean_text(self) -> str:
        """Without the range, which `range_text` has."""
        return self.text.partition(" [")[0]

    @property
    def range_text(self) -> str:
        return "" if self.measured is None else spread_text(self.measured, self.column.digits)

    @property
    def paper_text(self) -> str:
        return NONE if self.paper is None else f"{self.paper:.{self.column.digits}f}"


@dataclass(frozen=True)
class Row:
    mixer: str
    title: str
    parameters: float | None  # of the whole model, mean over the settings
    share: float | None  # of the largest model within the budget
    cells: list[Cell]

    @property
    def outside(self) -> str:
        """On which side of the budget a label with ! is; empty for the others."""
        if not outside_budget(self.mixer):
            return ""
        share = self.share or 1.0
        return f"{'above' if share > 1 else 'below'} the budget" if round(share, 2) != 1 else "outside the budget"

    @property
    def parameters_text(self) -> str:
        if self.parameters is None or self.share is None:
            return NONE
        return count_text(self.parameters) + (f" (×{self.share:.2f})" if round(self.share, 2) != 1 else "")


def columns(study: Results) -> list[Measure]:
    found = [Measure(task, TITLES[task], 1, 1) for task in study.tasks]
    if len(study.tasks) > 1:
        partial = "" if len(study.tasks) == len(paper.TASKS) else f" of {len(study.tasks)}"
        found.append(Measure(AVERAGE, f"{TITLES[AVERAGE]}{partial}", 1, 1))
    if levels := thresholds(study):
        same = levels == paper.THRESHOLDS
        first = [Measure(VALIDATION, TITLES[VALIDATION], 3, -1, False)] if VALIDATION in study.losses else []
        found += [*first, Measure(LOSS, BESIDE if first else TITLES[LOSS], 3, -1, same)]
        found += [Measure(level, f"Evals to {level:.1f}", 0, -1, same) for level in levels]
    return found


def thresholds(study: Results) -> tuple[float, ...]:
    """The lowest final loss of the table's labels, rounded up to a tenth, and three tenths above; in the paper 3.0 to 3.3."""
    labels = [mixer for mixer in study.mixers if mixer in paper.TABLE1] or study.mixers
    scores = [score.mean for mixer in labels if (score := study.score(mixer, LOSS)) is not None]
    if not scores:
        return ()
    lowest = math.ceil(10 * min(scores))
    return tuple((lowest + i) / 10 for i in (3, 2, 1, 0))


def grid(study: Results) -> list[Row]:
    """A row for every mixer that was run."""
    shown = columns(study)
    return [new_row(study, mixer, shown) for mixer in study.mixers]


def new_row(study: Results, mixer: str, shown: Sequence[Measure]) -> Row:
    parameters, share = size(study, mixer)
    return Row(mixer, title_of(mixer), parameters, share, [new_cell(study, mixer, column) for column in shown])


def new_cell(study: Results, mixer: str, column: Measure) -> Cell:
    found = measured(study, mixer, column.key)
    settings = study.settings(column.key) if column.key in study.tasks else []
    done = sum(len(study.setting_values(mixer, setting)) for setting in settings)
    finished = f"{done} of {len(settings) * len(study.seeds)} runs" if done and found is None else ""
    ours, theirs = gains(study, mixer, column.key)
    paper = published(study, mixer, column.key) if column.comparable else None
    return Cell(column, found, paper, finished, ours, theirs)


def gains(study: Results, mixer: str, key: str | float) -> tuple[float | None, float | None]:
    """How much better than the study's softmax attention, here and in the paper.

    None where both are at ceiling or floor, and in a quick study, which compares nothing.
    """
    rival = study.reference
    if study.quick or rival is None or rival == mixer or not isinstance(key, str) or study.bound((mixer, rival), key):
        return None, None
    gain = study.gain(mixer, rival, key)
    ours, theirs = published(study, mixer, key), published(study, rival, key)
    sign = -1 if key in LOSSES else 1
    return None if gain is None else gain.mean, None if ours is None or theirs is None else sign * (ours - theirs)


def measured(study: Results, mixer: str, key: str | float) -> Estimate | None:
    if isinstance(key, str):
        return study.score(mixer, key)
    counts = [evaluations_until(record, key) for (name, _), record in study.language_runs.items() if name == mixer]
    reached = [count for count in counts if count is not None]
    return estimate(reached) if len(reached) == len(counts) else None


def size(study: Results, mixer: str) -> tuple[float | None, float | None]:
    """Parameters of the whole model, and their share of the largest within the budget; both are means over the settings.

    Those of the MAD runs, if there are any.
    """
    budgets: dict[str | None, int] = {}
    own: dict[str | None, int] = {}
    for record in study.mad or study.language:
        count, setting = record.get("parameters"), record.get("setting")
        if count is None:
            continue
        if not outside_budget(record["mixer"]):
            budgets[setting] = max(budgets.get(setting, 0), count)
        if record["mixer"] == mixer:
            own[setting] = count
    if not own:
        return None, None
    return fmean(own.values()), fmean(own[setting] / budgets.get(setting, own[setting]) for setting in own)


def count_text(count: float) -> str:
    return f"{count / 1e6:.2f}M" if count >= 1e6 else f"{count / 1e3:.1f}k"


def show_table1(console: Console, study: Results) -> None:
    """The grid on the terminal, one half below the other; below each measured number the paper's."""
    rows, shown = grid(study), columns(study)
    mad = sum(column.key in (*study.tasks, AVERAGE) for column in shown)
    for half in (range(mad), range(mad, len(shown))):
        if not half:
            continue
        heads = [Head("mixer"), Head("parameters"), *(Head(shown[i].title) for i in half)]
        lines: list[list[str | Text]] = []
        for row in rows:
            name = Text(row.mixer).append(f"\n{row.title}" if row.title else "", "dim")
            lines.append([name, row.parameters_text.replace(" ", "\n"), *(terminal_cell(row.cells[i]) for i in half)])
        show_table(console, "", heads, lines)
    compared = any(cell.paper is not None for row in rows for cell in row.cells)
    say(console, f"{legend(study)}{' In parentheses: the number of the paper.' if compared else ''}")


def terminal_cell(cell: Cell) -> Text:
    text = Text(cell.mean_text.replace(" ", ""))
    if cell.range_text:
        text.append(f"\n{cell.range_text}")
    return text if cell.paper is None else text.append(f"\n({cell.paper_text})", "dim")


def table1_markdown(study: Results) -> str:
    """The grid for a document; the paper's numbers are in parentheses."""
    return rows_markdown(grid(study), columns(study))


def rows_markdown(rows: Sequence[Row], shown: Sequence[Measure], searched: Mapping[str, int] | None = None) -> str:
    """Rows of the grid for a document. searched: mixer → the runs of its search, which then stand beside its parameters."""
    titles = ["mixer", "parameters", *([] if searched is None else ["runs of the search"]), *(each.title for each in shown)]
    lines = []
    for row in rows:
        own = [] if searched is None else [str(searched.get(re.split("[@,]", row.mixer)[0], NONE))]
        cells = [cell.text if cell.paper is None else f"{cell.text} ({cell.paper_text})" for cell in row.cells]
        lines.append([full_name(row.mixer), row.parameters_text, *own, *cells])
    return markdown_table(titles, lines)


def training_markdown(study: Results) -> str:
    """Language models trained side by side, for a document."""
    lines = ["| mixer | parameters | learning rate | validation loss |", "| --- | ---: | ---: | ---: |"]
    for record in sorted(study.language, key=lambda record: str(record["mixer"])):
        numbers = f"{record['parameters']:,} | {record['lr']:g} | {record['final']['loss']:.3f}"
        lines.append(f"| {full_name(record['mixer'])} | {numbers} |")
    return "\n".join(lines)


def rates_markdown(study: Results) -> str:
    """Validation losses of training runs by mixer and learning rate, for a document; the best of a mixer is bold."""
    found = rate_losses(study)
    rates = sorted({rate for losses in found.values() for rate in losses})
    lines = [f"| mixer | {' | '.join(f'{rate:g}' for rate in rates)} |", f"| --- |{' ---: |' * len(rates)}"]
    for mixer, losses in sorted(found.items()):
        shown = [f"{losses[rate]:.3f}" if rate in losses else NONE for rate in rates]
        best = rates.index(min(losses, key=lambda rate: losses[rate]))
        shown[best] = f"**{shown[best]}**"
        lines.append(f"| {full_name(mixer)} | {' | '.join(shown)} |")
    return "\n".join(lines)


def rate_losses(study: Results) -> dict[str, dict[float, float]]:
    """Mixer → learning rate → validation loss of its training run."""
    found: dict[str, dict[float, float]] = {}
    for record in study.language:
        mixer = record["mixer"].partition(" (")[0]  # behind it the names of runs that differ say how
        found.setdefault(mixer, {})[record["lr"]] = record["final"]["loss"]
    return found


def legend(study: Results) -> str:
    """How to read the numbers."""
    cells = [cell for row in grid(study) for cell in row.cells]
    accuracies = [cell.measured for cell in cells if cell.column.key in (*study.tasks, AVERAGE)]
    losses = [cell.measured for cell in cells if cell.column.key in LOSSES]
    parts = [
        f"{what}: {'' if seeds_text(found) == 'one seed' else 'mean over '}{seeds_text(found)}, {spread_rule(found)}."
        for what, found in (("Accuracy in percent", accuracies), ("Loss in nats", losses))
        if any(value is not None for value in found)
    ]
    if any(row.outside for row in grid(study)):
        parts.append("Labels with ! keep their full ranks, outside the budget (×: share of it).")
    if VALIDATION in study.losses:
        parts.append("The validation loss comes first. The paper has the loss on a sample of the training text.")
    if study.language and thresholds(study) != paper.THRESHOLDS:
        parts.append("Losses are on another scale than the paper's: compare the sign of a gain with the paper's, not its size.")
    return " ".join(parts)
