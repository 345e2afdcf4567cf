"""The charts of a study: learning curves, and accuracy against difficulty."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from hypermlp.files import Record
from hypermlp.report.charts import COLOURS, Axis, Chart, Line, category_axis, numeric_axis
from hypermlp.report.markup import LABELS, paragraph
from hypermlp.report.markup import charts as side_by_side
from hypermlp.report.table1 import task_title
from hypermlp.verdicts.estimates import ENOUGH, Estimate, estimate, seeds_text
from hypermlp.verdicts.results import AVERAGE, LOSS, Results, mean_curve, plain_name

FIRST = ("G-cg-q-12o", "R-cg-q-12o", "S-pc", "R-pc", "S-p", "R-cg-q")  # coloured wherever they were run, and alike
AXES = {
    "vocab_size": "vocabulary",
    "seq_len": "length",
    "num_train": "training examples",
    "frac_noise": "share of noise",
    "num_tokens_to_copy": "tokens to copy",
}


def coloured(study: Results) -> dict[str, int]:
    """Mixer → colour, for those that stand out: the paper's main ones, then the best others."""
    measure, sign = (AVERAGE, 1) if study.tasks else (LOSS, -1)

    def rank(mixer: str) -> tuple[int, float]:
        score = study.score(mixer, measure)
        return FIRST.index(mixer) if mixer in FIRST else len(FIRST), math.inf if score is None else -sign * score.mean

    chosen = sorted(study.mixers, key=rank)[:COLOURS]
    free = iter([i for i in range(COLOURS) if i >= len(FIRST) or FIRST[i] not in chosen])
    return {mixer: FIRST.index(mixer) if mixer in FIRST else next(free) for mixer in chosen}


def chart_lines(study: Results, points: dict[str, list[tuple[float, Estimate]]]) -> list[Line]:
    colours = coloured(study)
    return [Line(mixer, points[mixer], colours.get(mixer)) for mixer in study.mixers if points[mixer]]


def learning_curves(study: Results) -> Markup:
    charts: list[Markup] = []
    drawn: list[Line] = []
    for task in study.tasks:
        base = study.base_setting(task)
        points = {mixer: mean_curve(runs_of(study, mixer, base), study.measure) for mixer in study.mixers}
        if study.measure == "accuracy":
            points = {mixer: percent(places) for mixer, places in points.items()}
        if lines := chart_lines(study, points):
            x, y = numeric_axis("step", 0, max(line.points[-1][0] for line in lines)), measure_axis(study, lines)
            charts.append(Chart(f"{task_title(task)} ({seeds_of(lines)})", lines, x, y).html())
            drawn += lines
    html = side_by_side(charts)
    if study.language and (lines := loss_lines(study)):
        html += side_by_side([loss_chart(lines)], wide=True)
        drawn += lines
    if not html:
        return paragraph("No run has a curve yet.")
    data = "validation set" if study.mad and study.mad[0]["protocol"] == "clean" else "test set"
    name = study.measure[0].upper() + study.measure[1:]
    about = f"{name} on the {data}, at each task's base setting and chosen learning rate. " if study.mad else ""
    return html + paragraph(about + how_drawn(study, drawn), "note")


def measure_axis(study: Results, lines: Sequence[Line]) -> Axis:
    """All of it for accuracies; else what the lines have."""
    if study.measure == "accuracy":
        return numeric_axis("accuracy, %", 0, 100)
    values = [mean.mean for line in lines for _, mean in line.points]
    pad = 0.05 * (max(values) - min(values)) or 0.1
    return numeric_axis(study.measure, min(values) - pad, max(values) + pad)


def how_drawn(study: Results, lines: Sequence[Line]) -> str:
    """What lines, points and bands are."""
    counts = {mean.seeds for line in lines for _, mean in line.points}
    parts = ["A line is the mean over the seeds that the caption names."] if max(counts) > 1 else []
    if any(1 < count < ENOUGH for count in counts):
        parts.append("Small points are the single seeds.")
    if max(counts) >= ENOUGH:
        parts.append("Bands are 95 % confidence intervals.")
    if len(study.mixers) > COLOURS:
        parts.append(f"{len(study.mixers) - COLOURS} of the {len(study.mixers)} mixers are grey.")
    labels = [mixer for mixer in study.mixers if LABELS.fullmatch(mixer) and plain_name(mixer) != mixer]
    if labels:
        parts.append(f"{', '.join(f'{mixer} is {plain_name(mixer)}' for mixer in labels)}.")
    return " ".join(parts)


def seeds_of(lines: Sequence[Line]) -> str:
    return seeds_text(mean for line in lines for _, mean in line.points)


def runs_of(study: Results, mixer: str, setting: str) -> list[Record]:
    return [record for (name, key, _), record in study.chosen.items() if (name, key) == (mixer, setting)]


def percent(points: list[tuple[float, Estimate]]) -> list[tuple[float, Estimate]]:
    return [(x, Estimate(tuple(100 * value for value in y.values))) for x, y in points]


def loss_lines(study: Results) -> list[Line]:
    runs = {mixer: [r for (name, _), r in study.language_runs.items() if name == mixer] for mixer in study.mixers}
    return chart_lines(study, {mixer: mean_curve(runs[mixer], "loss") for mixer in study.mixers})


def loss_chart(lines: Sequence[Line]) -> Markup:
    """Like the paper's Figure 5; the first tenth, where all losses fall from the same height, may leave the picture."""
    last = max(line.points[-1][0] for line in lines)
    late = [mean.mean for line in lines for step, mean in line.points if step >= last / 10]
    low, high = min(late), max(late)
    pad = 0.05 * (high - low) or 0.1
    x, y = numeric_axis("step", 0, last), numeric_axis("loss", low - pad, high + pad)
    return Chart(f"Language-model loss ({seeds_of(lines)})", lines, x, y, width=800, least_height=360).html()


def difficulty(study: Results) -> Markup:
    charts: list[Markup] = []
    drawn: list[Line] = []
    for task in study.tasks:
        for name, points in study.axes(task).items():
            if lines := chart_lines(study, {mixer: scores(study, mixer, points) for mixer in study.mixers}):
                label = AXES.get(name, name)
                x, y = category_axis(label, [value for value, _ in points]), numeric_axis("accuracy, %", 0, 100)
                charts.append(Chart(f"{task_title(task)}: {label} ({seeds_of(lines)})", lines, x, y).html())
                drawn += lines
    if not charts:
        return Markup()  # each task has one setting
    return side_by_side(charts) + paragraph(
        f"One number is varied, the others stay at the base. {how_drawn(study, drawn)}", "note"
    )


def scores(study: Results, mixer: str, points: list[tuple[float, str]]) -> list[tuple[float, Estimate]]:
    """The mixer's accuracy at each of the settings that it has."""
    found = [(float(i), estimate(study.setting_values(mixer, key).values())) for i, (_, key) in enumerate(points)]
    return [(i, score) for i, score in found if score is not None]
