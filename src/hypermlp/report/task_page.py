"""The page of a study on a task: scores by evaluation set and slice, trivial baselines, and memory against recall."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from hypermlp.files import Record
from hypermlp.report.charts import COLOURS, Axis, Chart, Line, numeric_axis
from hypermlp.report.curves import chart_lines, how_drawn
from hypermlp.report.markup import TableCell, cell, duration, facts, heading, name_cell, paragraph, table, words
from hypermlp.report.markup import charts as side_by_side
from hypermlp.report.opening import inside, with_name
from hypermlp.report.shown import how_shown, unit_of
from hypermlp.report.table1 import task_title
from hypermlp.tasks import TASKS
from hypermlp.train.fit import SOLVED
from hypermlp.verdicts.estimates import NONE, Estimate, estimate, interval
from hypermlp.verdicts.predictions import HYPERGLU
from hypermlp.verdicts.results import Results, table_order

MEMORY = ("mqar",)  # families whose scores depend on how much a model remembers
ROOM = 46  # letters that stand side by side below a chart
PLAIN = ("accuracy", "loss", "rows", "slices")  # of a set's scores: what else there is gets a chart of its own


def runs(study: Results, mixer: str, setting: str) -> list[Record]:
    """The chosen run of every seed."""
    return [record for (name, key, _), record in study.chosen.items() if (name, key) == (mixer, setting)]


def unit(study: Results) -> tuple[float, int, str]:
    """What a score is multiplied by, its digits, and how it is called."""
    return unit_of(study.measure)


def summary(study: Results) -> Markup:
    task = study.tasks[0]
    _, digits, name = unit(study)
    sign = 1 if study.measure == "accuracy" else -1
    ranked = {mixer: score for mixer in study.mixers if (score := study.score(mixer, task)) is not None}
    best = sorted(ranked, key=lambda mixer: -sign * ranked[mixer].mean)[:3]
    shown = ", ".join(f"{with_name(mixer)} {interval(ranked[mixer], digits)}" for mixer in best)
    lead = f"Best {name.removesuffix(', %')}: {shown}." if best else "No run has a score yet."
    if study.quick:
        lead = ""
    plan = study.plans["tasks"]
    known = {
        "runs": f"{len(study.records):,}",
        "mixers": f"{len(study.mixers)}: {', '.join(study.mixers)}",
        "seeds": ", ".join(map(str, study.seeds)),
        "models": f"width {plan.get('width')}, {plan.get('depth')} layers, batch {plan.get('batch')}, "
        f"{max((plan.get('steps') or {'': 0}).values())} steps at most",
        "a run ends early": f"once every validation set is above {plan['solved']}" if plan.get("solved") else "never",
        "training time": duration(sum(record.get("seconds") or 0 for record in study.records)) + " over all runs",
    }
    if task in TASKS:
        look = how_shown(TASKS[task])
        known = {"task": look.asks, **known} | ({"published": look.published} if look.published else {})
    return (paragraph(lead) if lead else Markup()) + facts(known)


def across(studies: Sequence[Results]) -> Markup:
    """Every mixer's score on every task, where several tasks were run; empty otherwise."""
    own = [study for study in studies if "tasks" in study.plans and len(study.tasks) == 1]
    if len(own) < 2 or len({study.tasks[0] for study in own}) < len(own):
        return Markup()
    rows = []
    for mixer in sorted({mixer for study in own for mixer in study.mixers}, key=table_order):
        cells = []
        for study in own:
            score = study.score(mixer, study.tasks[0]) if mixer in study.mixers else None
            cells.append(cell(NONE) if score is None else cell(f"{score.mean:.{unit(study)[1]}f}", score.mean))
        rows.append([name_cell(mixer), *cells])
    heads = [f"{task_title(study.tasks[0])}{'' if study.measure == 'accuracy' else f', {study.measure}'}" for study in own]
    lower = any(study.measure != "accuracy" for study in own)
    note = f"Means over the seeds; accuracy in percent{', and of errors less is better' if lower else ''}."
    return table(["mixer", *heads], rows, sorts=True) + paragraph(note, "note")


def widest(studies: Sequence[Results]) -> str:
    """Where HyperGLU differs most from softmax attention, of several tasks; empty where they do not show it."""
    found = []
    for study in (study for study in studies if study.measure == "accuracy" and len(study.tasks) == 1 and not study.quick):
        ours = study.score(HYPERGLU, study.tasks[0]) if HYPERGLU in study.mixers else None
        theirs = None if study.reference is None else study.score(study.reference, study.tasks[0])
        if ours is not None and theirs is not None:
            found.append((abs(ours.mean - theirs.mean), study.tasks[0], ours.mean, theirs.mean))
    if len(found) < 2:
        return ""
    _, task, ours_mean, theirs_mean = max(found)
    return (
        f"Over {len(found)} tasks HyperGLU differs most from softmax attention at {inside(task_title(task))}: "
        f"{ours_mean:.1f}\N{NO-BREAK SPACE}% against {theirs_mean:.1f}\N{NO-BREAK SPACE}%."
    )


def scores(study: Results) -> Markup:
    """Every mixer over the headline and in each evaluation set, and the trivial answers below."""
    html = Markup()
    times, digits, name = unit(study)
    for setting in study.all_settings:
        found = {mixer: chosen for mixer in study.mixers if (chosen := runs(study, mixer, setting))}
        if not found:
            continue
        sets = list(dict.fromkeys(key for chosen in found.values() for run in chosen for key in run["metrics"].get("sets", {})))
        rows = []
        for mixer, chosen in found.items():
            row = [name_cell(mixer), mean_cell([run["metrics"][study.measure] for run in chosen], times, digits)]
            for key in sets:
                row.append(mean_cell([run["metrics"]["sets"][key][study.measure] for run in chosen], times, digits))
            rows.append([*row, *run_cells(chosen)])
        html += heading(f"{setting}: {name}")
        heads = ["mixer", "score", *sets, "steps", "learning rate", "state, kB"]
        html += table(heads, [*rows, *baseline_rows(study, setting, sets, times, digits)], sorts=True)
    note = (
        "The score is the mean over the evaluation sets that count. Trivial answers are computed from the test data of the "
        "first seed. Steps: as many as the runs took; a run ends early when it has solved every validation set. State: what "
        "all layers keep of the longest row, float32."
    )
    return html + paragraph(note, "note") if html else paragraph("No run has a score yet.")


def mean_cell(values: Sequence[float], times: float, digits: int) -> TableCell:
    found = estimate(times * value for value in values)
    if found is None:
        return cell(NONE)
    mean, _, spread = interval(found, digits).partition(" [")
    return cell(mean, found.mean, small=spread.rstrip("]"))


def run_cells(chosen: Sequence[Record]) -> list[TableCell]:
    steps = [run["metrics"]["step"] for run in chosen]
    mean = sum(steps) / len(steps)
    solved = sum((run.get("stopped") or "").startswith(SOLVED) for run in chosen)
    rates = dict.fromkeys(f"{run['lr']:g}" for run in chosen)
    kept = chosen[0].get("state_bytes")
    return [
        cell(f"{mean:.0f}", mean, small=f"{solved} of {len(chosen)} solved" if solved else ""),
        cell(", ".join(rates)),
        cell(NONE if kept is None else f"{kept / 1000:.1f}", kept),
    ]


def baseline_rows(study: Results, setting: str, sets: Sequence[str], times: float, digits: int) -> list[list[TableCell]]:
    known = [run["baselines"] for run in study.mad if run["setting"] == setting and run.get("baselines")]
    rows = []
    for name, found in (known[0] if known else {}).items():
        values = [found[study.measure], *(found["sets"].get(key) for key in sets)]
        shown = [cell(NONE) if value is None else cell(f"{times * value:.{digits}f}", times * value) for value in values]
        rows.append([cell(name, small="trivial", head=True), *shown, *[cell("")] * 3])
    return rows


# ---- slices ----


def slices(study: Results) -> Markup:
    """A chart for every set and fact that its scores are broken down by, and for every other measure."""
    charts: list[Markup] = []
    drawn: list[Line] = []
    for setting in study.all_settings:
        samples = [run["metrics"].get("sets", {}) for (_, key, _), run in study.chosen.items() if key == setting]
        for key, scored in (samples[0] if samples else {}).items():
            for fact, parts in scored["slices"].items():
                if len(parts) > 1:
                    for measure in measures(study, parts):
                        lines = slice_lines(study, setting, key, fact, measure)
                        if lines:
                            title = key if len(study.all_settings) == 1 else f"{setting}, {key}"
                            charts.append(slice_chart(title, fact, list(parts), measure, lines))
                            drawn += lines
    if not charts:
        return Markup()
    return side_by_side(charts) + paragraph(how_drawn(study, drawn), "note")


def measures(study: Results, parts: Mapping[str, Any]) -> list[str]:
    one = next(iter(parts.values()))
    return (
        [study.measure]
        if isinstance(one, float)
        else [study.measure, *(name for name in one if name not in (*PLAIN, study.measure))]
    )


def value_of(part: Any, measure: str) -> float:
    return float(part if isinstance(part, float) else part[measure])


def slice_lines(study: Results, setting: str, key: str, fact: str, measure: str) -> list[Line]:
    times = 100 if measure == "accuracy" else 1
    points: dict[str, list[tuple[float, Estimate]]] = {}
    for mixer in study.mixers:
        found = [run["metrics"]["sets"][key]["slices"][fact] for run in runs(study, mixer, setting)]
        labels = list(found[0]) if found else []
        points[mixer] = []
        for i, label in enumerate(labels):
            mean = estimate(times * value_of(parts[label], measure) for parts in found if label in parts)
            if mean is not None:
                points[mixer].append((float(i), mean))
    return chart_lines(study, points)


def slice_chart(title: str, fact: str, labels: Sequence[str], measure: str, lines: Sequence[Line]) -> Markup:
    room = max(1, min(8, ROOM // (1 + max(map(len, labels)))))
    every = math.ceil(len(labels) / room)
    ticks = [(float(i), label) for i, label in enumerate(labels) if i % every == 0]
    x = Axis(fact, -0.3, len(labels) - 0.7, ticks)
    if measure == "accuracy":
        y = numeric_axis("accuracy, %", 0, 100)
    else:
        values = [mean.mean for line in lines for _, mean in line.points]
        y = numeric_axis(measure, min(0.0, *values), max(values) or 1)
    return Chart(f"{title}: {measure} by {fact}", lines, x, y).html()


# ---- other ways to go beyond the training length ----

WAYS = {
    "window": "as trained: a layer with lags sees a window of the training length",
    "hold": "more lags, each like the longest trained one",
    "decay": "more lags, falling from the longest trained one to zero",
    "fresh": "more lags, untrained: as a new layer has them",
}


def beyond(study: Results) -> Markup:
    """Layers whose parameters belong to lags can be extended in several ways."""
    html = Markup()
    times, digits, name = unit(study)
    for setting in study.all_settings:
        rows = []
        sets: list[str] = []
        for mixer in study.mixers:
            found = [run for run in runs(study, mixer, setting) if run.get("ways")]
            if not found:
                continue
            sets = sets or list(found[0]["ways"][next(iter(found[0]["ways"]))]["sets"])
            as_trained = [{key: run["metrics"]["sets"][key][study.measure] for key in sets} for run in found]
            ways = {"window": as_trained, **{way: [run["ways"][way]["sets"] for run in found] for way in found[0]["ways"]}}
            for way, by_seed in ways.items():
                cells = [mean_cell([one[key] for one in by_seed], times, digits) for key in sets]
                rows.append([name_cell(mixer), words(WAYS.get(way, way)), *cells])
        if rows:
            heads = ("mixer", "beyond the training length", *sets)
            html += heading(f"{setting}: {name}") + table(heads, rows, left=(heads[1],))
    return html


# ---- memory ----


def memory(studies: Sequence[Results]) -> Markup:
    """Score against the bytes that a model keeps of the longest row, one point per mixer and width."""
    charts = []
    for task in dict.fromkeys(study.tasks[0] for study in studies if "tasks" in study.plans and study.tasks):
        if task in TASKS and TASKS[task].family in MEMORY:
            points: dict[str, list[tuple[float, Estimate]]] = {}
            for study in (one for one in studies if one.tasks == [task]):
                for mixer in study.mixers:
                    if point := memory_point(study, mixer):
                        points.setdefault(mixer, []).append(point)
            if points:
                charts.append(memory_chart(task, points))
    if not charts:
        return Markup()
    note = "Bytes in float32 that all layers keep of the longest row, from their caches; attention's grow with its length."
    return side_by_side(charts, wide=True) + paragraph(note, "note")


def memory_point(study: Results, mixer: str) -> tuple[float, Estimate] | None:
    found = [run for (name, _, _), run in study.chosen.items() if name == mixer and run.get("state_bytes")]
    mean = estimate(100 * run["metrics"]["accuracy"] for run in found)
    return None if mean is None else (math.log2(found[0]["state_bytes"] / 1000), mean)


def memory_chart(task: str, points: Mapping[str, Sequence[tuple[float, Estimate]]]) -> Markup:
    lines = []
    for i, (mixer, places) in enumerate(points.items()):
        lines.append(Line(mixer, sorted(places, key=lambda place: place[0]), i if i < COLOURS else None))
    at = [x for places in points.values() for x, _ in places]
    low, high = math.floor(min(at)), math.ceil(max(at) + 0.01)
    x = Axis("state, kB", low, high, [(float(power), f"{2**power:g}") for power in range(low, high + 1)])
    return Chart(f"{task_title(task)}: accuracy against state", lines, x, numeric_axis("accuracy, %", 0, 100), width=800).html()
