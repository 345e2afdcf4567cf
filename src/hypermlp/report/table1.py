"""The grid of the paper's Table 1 from any study: measured mean and confidence interval beside the paper's number."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hypermlp.experiments import paper
from hypermlp.report.study import AVERAGE, LOSS, Estimate, Study, estimate, evaluations_until, title_of

NONE = "–"
TITLES = {
    "compression": "Compression",
    "fuzzy-recall": "Fuzzy recall",
    "in-context-recall": "In-context recall",
    "memorization": "Memorisation",
    "noisy-recall": "Noisy recall",
    "selective-copying": "Selective copying",
    AVERAGE: "MAD average",
    LOSS: "Loss",
}


@dataclass(frozen=True)
class Column:
    key: str | float  # a measure of the study, or a threshold of the loss
    title: str
    digits: int
    sign: int  # 1: more is better
    comparable: bool = True  # with the paper's numbers


@dataclass(frozen=True)
class Cell:
    column: Column
    measured: Estimate | None
    paper: float | None
    finished: str = ""  # how many of its runs are, where that is why there is no number

    @property
    def difference(self) -> float | None:
        """Measured minus paper, where that means something."""
        if self.measured is None or self.paper is None or not self.column.comparable:
            return None
        return self.measured.mean - self.paper

    @property
    def text(self) -> str:
        return interval(self.measured, self.column.digits)

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
    def over(self) -> bool:
        """Whether it is outside the budget."""
        return self.mixer.endswith("!")

    @property
    def parameters_text(self) -> str:
        if self.parameters is None or self.share is None:
            return NONE
        return count_text(self.parameters) + (f" (×{self.share:.2f})" if round(self.share, 2) != 1 else "")


def columns(study: Study) -> list[Column]:
    found = [Column(task, TITLES[task], 1, 1) for task in study.tasks]
    if study.tasks:
        partial = "" if len(study.tasks) == len(paper.TASKS) else f" of {len(study.tasks)}"
        found.append(Column(AVERAGE, f"{TITLES[AVERAGE]}{partial}", 1, 1))
    if levels := thresholds(study):
        same = levels == paper.THRESHOLDS
        found.append(Column(LOSS, TITLES[LOSS], 3, -1, same))
        found += [Column(level, f"Evals to {level:.1f}", 0, -1, same) for level in levels]
    return found


def thresholds(study: Study) -> tuple[float, ...]:
    """The lowest final loss of the table's labels, rounded up to a tenth, and three tenths above; in the paper 3.0 to 3.3."""
    labels = [mixer for mixer in study.mixers if mixer in paper.TABLE1] or study.mixers
    scores = [score.mean for mixer in labels if (score := study.score(mixer, LOSS)) is not None]
    if not scores:
        return ()
    lowest = math.ceil(10 * min(scores))
    return tuple((lowest + i) / 10 for i in (3, 2, 1, 0))


def grid(study: Study) -> list[Row]:
    """A row for every mixer that was run."""
    shown = columns(study)
    found = []
    for mixer in study.mixers:
        parameters, share = size(study, mixer)
        cells = [new_cell(study, mixer, column) for column in shown]
        found.append(Row(mixer, title_of(mixer), parameters, share, cells))
    return found


def new_cell(study: Study, mixer: str, column: Column) -> Cell:
    found = measured(study, mixer, column.key)
    settings = study.settings(column.key) if column.key in study.tasks else []
    done = sum(len(study.setting_values(mixer, setting)) for setting in settings)
    finished = f"{done} of {len(settings) * len(study.seeds)} runs" if done and found is None else ""
    return Cell(column, found, published(study, mixer, column.key), finished)


def measured(study: Study, mixer: str, key: str | float) -> Estimate | None:
    if isinstance(key, str):
        return study.score(mixer, key)
    counts = [evaluations_until(record, key) for (name, _), record in study.language_runs.items() if name == mixer]
    reached = [count for count in counts if count is not None]
    return estimate(reached) if len(reached) == len(counts) else None


def published(study: Study, mixer: str, key: str | float) -> float | None:
    row = paper.TABLE1.get(mixer)
    if row is None:
        return None
    if not isinstance(key, str):
        return row.evaluations.get(key)
    if key == AVERAGE:
        return row.average if len(study.tasks) == len(paper.TASKS) else fmean(row.accuracy[task] for task in study.tasks)
    return row.loss if key == LOSS else row.accuracy[key]


def size(study: Study, mixer: str) -> tuple[float | None, float | None]:
    """Parameters of the whole model, and their share of the largest within the budget; both are means over the settings.

    Those of the MAD runs, if there are any.
    """
    budgets: dict[str | None, int] = {}
    own: dict[str | None, int] = {}
    for record in study.mad or study.language:
        count, setting = record.get("parameters"), record.get("setting")
        if count is None:
            continue
        if not record["mixer"].endswith("!"):
            budgets[setting] = max(budgets.get(setting, 0), count)
        if record["mixer"] == mixer:
            own[setting] = count
    if not own:
        return None, None
    return fmean(own.values()), fmean(own[setting] / budgets.get(setting, own[setting]) for setting in own)


def interval(value: Estimate | None, digits: int, sign: str = "") -> str:
    """Mean ± half the interval; the mean alone with one seed."""
    if value is None:
        return NONE
    half = "" if value.half is None else f" ± {value.half:.{digits}f}"
    return signed(value.mean, digits, sign) + half


def signed(value: float, digits: int, sign: str = "+") -> str:
    """With a true minus, and no sign before a zero."""
    text = f"{value:{sign}.{digits}f}"
    return text.lstrip("+-") if float(text) == 0 else text.replace("-", "−")


def count_text(count: float) -> str:
    return f"{count / 1e6:.2f}M" if count >= 1e6 else f"{count / 1e3:.1f}k"


def show_table1(console: Console, study: Study) -> None:
    """The grid on the terminal, one half below the other; below each measured number the paper's, and the difference."""
    rows, shown = grid(study), columns(study)
    mad = len(study.tasks) + (1 if study.tasks else 0)
    for half in (range(mad), range(mad, len(shown))):
        if not half:
            continue
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("mixer", no_wrap=True)
        table.add_column("parameters", justify="right", no_wrap=True)
        for i in half:
            table.add_column(shown[i].title, justify="right")
        for row in rows:
            name = Text(row.mixer).append(f"\n{row.title}" if row.title else "", "dim")
            table.add_row(name, row.parameters_text.replace(" ", "\n"), *(terminal_cell(row.cells[i]) for i in half))
        console.print(table)
    console.print(f"{legend(study)} Below, dim: the paper's number, and measured minus paper.", highlight=False)


def terminal_cell(cell: Cell) -> Text:
    text = Text(cell.text.replace(" ", "")).append(f"\n{cell.paper_text}", "dim")
    if (difference := cell.difference) is not None:
        good = difference * cell.column.sign >= 0
        text.append(f" {signed(difference, cell.column.digits)}", "blue" if good else "yellow")
    return text


def table1_markdown(study: Study) -> str:
    """The grid for a document; the paper's numbers are in parentheses."""
    titles = ["mixer", "parameters", *(column.title for column in columns(study))]
    lines = ["| " + " | ".join(titles) + " |", "| --- |" + " ---: |" * (len(titles) - 1)]
    for row in grid(study):
        name = f"{row.mixer} ({row.title})" if row.title else row.mixer
        cells = [cell.text if cell.paper is None else f"{cell.text} ({cell.paper_text})" for cell in row.cells]
        lines.append("| " + " | ".join([name, row.parameters_text, *cells]) + " |")
    return "\n".join(lines)


def training_markdown(study: Study) -> str:
    """Language models trained side by side, for a document."""
    lines = ["| mixer | parameters | validation loss | minutes |", "| --- | ---: | ---: | ---: |"]
    for record in sorted(study.language, key=lambda record: str(record["mixer"])):
        mixer, title = record["mixer"], title_of(record["mixer"])
        numbers = f"{record['parameters']:,} | {record['final']['loss']:.3f} | {record['seconds'] / 60:.1f}"
        lines.append(f"| {f'{mixer} ({title})' if title else mixer} | {numbers} |")
    return "\n".join(lines)


def legend(study: Study) -> str:
    """How to read the numbers."""
    seeds = max((cell.measured.seeds for row in grid(study) for cell in row.cells if cell.measured is not None), default=0)
    spread = f"mean over {seeds} seeds ± half of the 95 % confidence interval" if seeds > 1 else "one seed, so no interval"
    parts = [f"Accuracy in percent ({spread})." if study.tasks else f"Loss ({spread})."]
    if any(row.over for row in grid(study)):
        parts.append("Labels with ! keep their full ranks, outside the budget (×: share of it).")
    if study.language and thresholds(study) != paper.THRESHOLDS:
        parts.append("Losses are not on the paper's scale, so they are not compared with it.")
    return " ".join(parts)
