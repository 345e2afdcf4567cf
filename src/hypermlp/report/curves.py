"""The charts of a study: learning curves, and accuracy against difficulty."""

from __future__ import annotations

import math

from hypermlp.experiments.runs import Record
from hypermlp.report.charts import COLOURS, Chart, Line, category_axis, numeric_axis
from hypermlp.report.markup import paragraph
from hypermlp.report.study import AVERAGE, LOSS, Estimate, Study, estimate, mean_curve
from hypermlp.report.table1 import TITLES

FIRST = ("G-cg-q-12o", "R-cg-q-12o", "S-pc", "R-pc", "S-p", "R-cg-q")  # coloured wherever they were run, and alike
AXES = {
    "vocab_size": "vocabulary",
    "seq_len": "length",
    "num_train": "training examples",
    "frac_noise": "share of noise",
    "num_tokens_to_copy": "tokens to copy",
}


def coloured(study: Study) -> dict[str, int]:
    """Mixer → colour, for those that stand out: the paper's main ones, then the best others."""
    measure, sign = (AVERAGE, 1) if study.tasks else (LOSS, -1)

    def rank(mixer: str) -> tuple[int, float]:
        score = study.score(mixer, measure)
        return FIRST.index(mixer) if mixer in FIRST else len(FIRST), math.inf if score is None else -sign * score.mean

    chosen = sorted(study.mixers, key=rank)[:COLOURS]
    free = iter([i for i in range(COLOURS) if i >= len(FIRST) or FIRST[i] not in chosen])
    return {mixer: FIRST.index(mixer) if mixer in FIRST else next(free) for mixer in chosen}


def chart_lines(study: Study, points: dict[str, list[tuple[float, Estimate]]]) -> list[Line]:
    colours = coloured(study)
    return [Line(mixer, points[mixer], colours.get(mixer)) for mixer in study.mixers if points[mixer]]


def learning_curves(study: Study) -> str:
    charts = []
    for task in study.tasks:
        base = study.base_setting(task)
        points = {mixer: percent(mean_curve(runs_of(study, mixer, base), "accuracy")) for mixer in study.mixers}
        if lines := chart_lines(study, points):
            steps = max(line.points[-1][0] for line in lines)
            x, y = numeric_axis("step", 0, steps), numeric_axis("accuracy, %", 0, 100)
            charts.append(Chart(TITLES[task], lines, x, y).html())
    html = f'<div class="charts">{"".join(charts)}</div>' if charts else ""
    if study.language and (shown := loss_chart(study)):
        html += f'<div class="charts wide">{shown}</div>'
    if not html:
        return paragraph("No run has a curve yet.")
    grey = "" if len(study.mixers) <= COLOURS else f" {len(study.mixers) - COLOURS} further mixers are grey."
    data = "validation set" if study.mad and study.mad[0]["protocol"] == "clean" else "test set"
    about = f"accuracy on the {data}, at each task's base setting and chosen learning rate; " if study.mad else ""
    text = f"Mean over seeds: {about}bands are 95 % confidence intervals.{grey}"
    return html + paragraph(text, "note")


def runs_of(study: Study, mixer: str, setting: str) -> list[Record]:
    return [record for (name, key, _), record in study.chosen.items() if (name, key) == (mixer, setting)]


def percent(points: list[tuple[float, Estimate]]) -> list[tuple[float, Estimate]]:
    return [(x, Estimate(100 * y.mean, None if y.half is None else 100 * y.half, y.seeds)) for x, y in points]


def loss_chart(study: Study) -> str:
    """Like the paper's Figure 5; the first tenth, where all losses fall from the same height, may leave the picture."""
    runs = {mixer: [r for (name, _), r in study.language_runs.items() if name == mixer] for mixer in study.mixers}
    lines = chart_lines(study, {mixer: mean_curve(runs[mixer], "loss") for mixer in study.mixers})
    if not lines:
        return ""
    last = max(line.points[-1][0] for line in lines)
    late = [mean.mean for line in lines for step, mean in line.points if step >= last / 10]
    low, high = min(late), max(late)
    pad = 0.05 * (high - low) or 0.1
    x, y = numeric_axis("step", 0, last), numeric_axis("loss", low - pad, high + pad)
    return Chart("Language-model loss", lines, x, y, width=800, height=360).html()


def difficulty(study: Study) -> str:
    charts = []
    for task in study.tasks:
        for name, points in study.axes(task).items():
            if lines := chart_lines(study, {mixer: scores(study, mixer, points) for mixer in study.mixers}):
                label = AXES.get(name, name)
                x, y = category_axis(label, [value for value, _ in points]), numeric_axis("accuracy, %", 0, 100)
                charts.append(Chart(f"{TITLES[task]}: {label}", lines, x, y).html())
    if not charts:
        return paragraph("Every task was run at one setting only, so there is nothing to compare.")
    return f'<div class="charts">{"".join(charts)}</div>' + paragraph(
        "One number is varied, the others stay at the base.", "note"
    )


def scores(study: Study, mixer: str, points: list[tuple[float, str]]) -> list[tuple[float, Estimate]]:
    """The mixer's accuracy at each of the settings that it has."""
    found = [(float(i), estimate(study.setting_values(mixer, key).values())) for i, (_, key) in enumerate(points)]
    return [(i, score) for i, score in found if score is not None]
