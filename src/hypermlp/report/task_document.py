"""Studies on several tasks side by side, for a document: tables of mixers and tasks, and a picture with every run in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.figure import Figure

from hypermlp.files import Record
from hypermlp.report.markdown import markdown_table
from hypermlp.report.style import new_figure
from hypermlp.report.table1 import task_title
from hypermlp.report.task_page import WAYS, runs, unit
from hypermlp.tasks import TASKS
from hypermlp.verdicts.estimates import NONE
from hypermlp.verdicts.results import Results, full_name, table_order, title_of


class Scored(NamedTuple):
    """One evaluation set of a task, or its score (set is None)."""

    study: Results
    set: str | None

    @property
    def task(self) -> str:
        return self.study.tasks[0]

    @property
    def title(self) -> str:
        name = task_title(self.task) if self.set is None else f"{task_title(self.task)}: {self.set}"
        return f"{name}, {self.study.measure}" if self.study.measure != "accuracy" else name

    def of(self, metrics: Record) -> float:
        """The number of this column in the scores of a run, of another way to run its model, or of a trivial answer."""
        found = metrics[self.study.measure] if self.set is None else metrics["sets"][self.set]
        return unit(self.study)[0] * float(found[self.study.measure] if isinstance(found, dict) else found)

    def values(self, mixer: str) -> list[float]:
        """One per seed."""
        return [self.of(run["metrics"]) for run in runs(self.study, mixer, next(iter(self.study.all_settings)))]

    def trivial(self) -> float:
        """The best of the trivial answers."""
        known = next(run["baselines"] for run in self.study.mad if run.get("baselines"))
        return (max if self.study.measure == "accuracy" else min)(self.of(one) for one in known.values())

    def text(self, values: Sequence[float]) -> str:
        return f"{sum(values) / len(values):.{unit(self.study)[1]}f}" if values else NONE


def columns(study: Results) -> list[Scored]:
    """The score of a task, or both sets of one that has two."""
    sets = list(next(iter(study.chosen.values()))["metrics"]["sets"])
    return [Scored(study, name) for name in (sets if len(sets) == 2 else (None,))]


def ordered(studies: Sequence[Results]) -> list[Results]:
    """Those with runs, in the order of the tasks."""
    known = list(TASKS)
    found = [study for study in studies if study.tasks and study.chosen]
    return sorted(found, key=lambda study: known.index(study.tasks[0]) if study.tasks[0] in known else len(known))


def all_mixers(studies: Sequence[Results]) -> list[str]:
    return sorted({mixer for study in studies for mixer in study.mixers}, key=table_order)


# ---- tables ----


def document_blocks(studies: Sequence[Results]) -> dict[str, str]:
    """What docs/tasks.md prints, by the names of its blocks."""
    shown = ordered(studies)
    return {
        "scores": scores_markdown(shown),
        "rates": rates_markdown(shown),
        "beyond": beyond_markdown(shown),
        "losses": losses_markdown(shown),
    }


def scores_markdown(studies: Sequence[Results]) -> str:
    """Means over seeds; the best trivial answer below."""
    every = [column for study in studies for column in columns(study)]
    rows = [[full_name(mixer), *(column.text(column.values(mixer)) for column in every)] for mixer in all_mixers(studies)]
    rows.append(["*best trivial answer*", *(column.text([column.trivial()]) for column in every)])
    return markdown_table(["mixer", *(column.title for column in every)], rows)


def rates_markdown(studies: Sequence[Results]) -> str:
    """The learning rates that the searches chose."""
    rows = []
    for mixer in all_mixers(studies):
        row = [full_name(mixer)]
        for study in studies:
            found = runs(study, mixer, next(iter(study.all_settings)))
            row.append(", ".join(dict.fromkeys(f"{run['lr']:g}" for run in found)) or NONE)
        rows.append(row)
    return markdown_table(["mixer", *(task_title(study.tasks[0]) for study in studies)], rows)


def beyond_markdown(studies: Sequence[Results]) -> str:
    """Layers with lags on the shortest rows beyond the training length: as a window, and with more lags."""
    rows = []
    for study in studies:
        for mixer in study.mixers:
            found = [run for run in runs(study, mixer, next(iter(study.all_settings))) if run.get("ways")]
            if found:
                ways = [{"window": run["metrics"], **run["ways"]} for run in found]
                column = Scored(study, next(iter(ways[0]["hold"]["sets"])))
                cells = (column.text([column.of(one[way]) for one in ways if way in one]) for way in WAYS)
                rows.append([f"{task_title(study.tasks[0])}: {column.set}", full_name(mixer), *cells])
    return markdown_table(["rows", "mixer", *WAYS], rows)


def losses_markdown(studies: Sequence[Results]) -> str:
    """Copying by length, the loss of a letter: where no string is right as a whole, it tells how far off they are."""
    shown = [study for study in studies if study.tasks[0] in ("copy", "copy-offsets")]
    sets = [(study, name) for study in shown for name in next(iter(study.chosen.values()))["metrics"]["sets"]]
    rows = []
    for mixer in all_mixers(shown):
        row = [full_name(mixer)]
        for study, name in sets:
            found = runs(study, mixer, next(iter(study.all_settings)))
            losses = [run["metrics"]["sets"][name]["loss"] for run in found]
            row.append(f"{sum(losses) / len(losses):.2f}" if losses else NONE)
        rows.append(row)
    return markdown_table(["mixer", *(f"{task_title(study.tasks[0])}: {name}" for study, name in sets)], rows)


# ---- the picture ----


def picture(studies: Sequence[Results]) -> Figure:
    """A panel per task, a line per mixer, a mark per seed; triangles: the second set. Dashed: the best trivial answer."""
    shown = ordered(studies)
    mixers = all_mixers(shown)
    figure, axes = new_figure(2, -(-len(shown) // 2), width=10, height=3.2 * -(-len(shown) // 2))
    for ax, study in zip(axes, shown, strict=False):
        for number, column in enumerate(columns(study)):
            points = [(value, place) for place, mixer in enumerate(mixers) for value in column.values(mixer)]
            (marks,) = ax.plot(*zip(*points, strict=True), "^" if number else "o", color=f"C{number}", label=column.set or "")
            marks.set(markersize=5, markerfacecolor="none" if number else f"C{number}")
            ax.axvline(column.trivial(), linestyle="--", linewidth=1, color=f"C{number}")
        ax.set_yticks(range(len(mixers)), [title_of(mixer) or mixer for mixer in mixers])
        ax.invert_yaxis()
        better = "" if study.measure == "accuracy" else ", lower is better"
        ax.set_title(task_title(study.tasks[0]), loc="left")
        ax.set_xlabel(f"{unit(study)[2]}{better}")
        if study.measure == "accuracy":
            ax.set_xlim(-3, 103)
        if len(columns(study)) > 1:
            close = {"frameon": False, "fontsize": 8, "handletextpad": 0, "columnspacing": 0.5, "borderaxespad": 0}
            ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, **close)  # beside the title
    for ax in axes[len(shown) :]:
        ax.set_visible(False)
    return figure
