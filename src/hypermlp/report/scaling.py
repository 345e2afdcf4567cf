"""What a scaling study found, on the terminal and as a page: a sentence, curves, and the tables behind them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
from markupsafe import Markup
from rich.console import Console, Group

from hypermlp.files import Record, write_own
from hypermlp.report.charts import Axis, Chart, Line, log_axis, numeric_axis
from hypermlp.report.markup import cell, document, duration, facts, name_cell, paragraph, plural, table, verdict_cell, words
from hypermlp.report.markup import charts as side_by_side
from hypermlp.report.progress import mixer_cell
from hypermlp.report.registered import registration
from hypermlp.report.table1 import count_text
from hypermlp.report.terminal import Cell, Column, say, show_table, tabulate
from hypermlp.studies.scaling import RULE, ScalingStudy
from hypermlp.studies.scaling_law import RESAMPLES, Crossing, Interval
from hypermlp.studies.search import FINAL
from hypermlp.verdicts.claims import CONTRADICTED, NOT_RUN, SUPPORTED, Verdict
from hypermlp.verdicts.estimates import NONE, Estimate
from hypermlp.verdicts.scaling import BEYOND, LossForecast, ScalingResults, TrainedSize, read_scaling

PLACES = 60  # of a fitted curve that are drawn
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


# ---- the sentence ----


def lead(study: ScalingResults) -> str:
    """What the largest size shows, in a sentence."""
    size = study.curve_sizes[-1]
    (first, best), *others = study.ranked(size)
    place = f"At {size_words(size)}"
    if study.short:
        return (
            f"{place}, {study.ratio:g} for each parameter, losses are {spread_words(study, size)}: too short to rank mixers, "
            "enough to see that all works."
        )
    second = f"; {others[0][0]} follows, {ahead(study.gain(first, others[0][0], size.key))}" if others else ""
    return f"{place}, {first} has the lowest loss, {best.mean:.3f}{second}."


def outlook(study: ScalingResults) -> str:
    """Where the curves lead, and how far they may be trusted."""
    first, high, found = study.ranked(study.curve_sizes[-1])[0][0], study.compute[1], []
    later = [item for item in study.crossings if first in item[:2] and item[2].compute > high]
    for one, two, crossing in later:
        found.append(f"The fitted curves let {two if one == first else one} pass it at {power(crossing.compute)} operations")
    if not later and study.curves[first].fitted is not None and len(study.mixers) > 1:
        found.append(f"No fitted curve passes it up to {BEYOND:g} times the operations")
    held = [item.holds for item in study.forecasts if item.holds is not None]
    if held:
        found.append(f"{sum(held)} of {len(held)} losses of the largest models lay where the smaller ones had predicted them")
    return "".join(f"{text}. " for text in found).strip() if not study.short else ""


def spread_words(study: ScalingResults, size: TrainedSize) -> str:
    means = [score.mean for _, score in study.ranked(size)]
    return f"{min(means):.3f} to {max(means):.3f}" if len(means) > 1 else f"{means[0]:.3f}"


def ahead(gain: Estimate | None) -> str:
    """The distance of the second, and whether all seeds agree."""
    if gain is None:
        return "without a seed in common"
    every = all(value > 0 for value in gain.values)
    seeds = {1: "one seed", 2: "both seeds"}.get(gain.seeds, f"{gain.seeds} seeds")
    return f"{gain.mean:.3f} behind in {'the mean of ' if gain.seeds > 1 and not every else ''}{seeds}"


def size_words(size: TrainedSize) -> str:
    return f"{count_words(size.parameters)} parameters and {count_words(size.tokens)} tokens"


def count_words(count: float) -> str:
    """Without digits that say nothing: 95 thousand, 1.37 million."""
    return f"{count / 1e6:.3g} million" if count >= 999_500 else f"{count / 1e3:.3g} thousand"


def power(value: float) -> str:
    """A number as it is written by hand: 2.6·10¹³."""
    exponent = math.floor(math.log10(value))
    digits = f"{value / 10**exponent:.1f}"
    return f"{digits}·10{str(exponent).translate(SUPERSCRIPTS)}"


def power_of_ten(value: float) -> str:
    exponent = math.floor(math.log10(value) + 1e-9)
    factor = round(value / 10.0**exponent)
    return f"{'' if factor == 1 else f'{factor}·'}10{str(exponent).translate(SUPERSCRIPTS)}"


# ---- the terminal ----


def losses_so_far(records: Sequence[Record], mixers: Sequence[str], study: ScalingStudy, width: int) -> Group:
    """Mixers down, sizes across: mean validation losses of the runs that count."""
    found: dict[tuple[str, str], list[float]] = {}
    for record in records:
        if record.get("phase", FINAL) == FINAL and record["error"] is None and record["final"] is not None:
            found.setdefault((record["mixer"], record["setting"]), []).append(record["final"]["validation_loss"])
    settings = study.settings()
    rows: list[list[Cell]] = [
        [mixer_cell(mixer), *(f"{fmean(found[mixer, key]):.4f}" if (mixer, key) in found else "" for key in settings)]
        for mixer in mixers
    ]
    ratios = len(study.ratios) > 1
    heads = [f"width {one.width}" + (f", {one.ratio:g} a parameter" if ratios else "") for one in settings.values()]
    return tabulate(width, "validation loss, nats", [Column("mixer"), *map(Column, heads)], rows)


def show_scaling(console: Console, study: ScalingResults) -> None:
    """The tables of the page."""
    sizes = study.sizes
    rows = []
    for mixer in study.mixers:
        scores = [study.losses(mixer, size.key) for size in sizes]
        rows.append([mixer, *(f"{fmean(own.values()):.4f}" if own else NONE for own in scores)])
    heads = [f"{count_text(size.parameters)} × {size.ratio:g}" for size in sizes]
    show_table(console, "validation loss by parameters × tokens per parameter", [Column("mixer"), *map(Column, heads)], rows)
    fits = [[mixer, *fit_texts(study, mixer)] for mixer in study.mixers]
    show_table(console, "L = a + b·C^−α", [Column("mixer"), *map(Column, FIT_HEADS)], fits)
    if study.forecasts:
        lines = [[item.mixer, *forecast_texts(item)] for item in study.forecasts]
        show_table(
            console, "predicted before it was run, then measured", [Column("mixer"), *map(Column, FORECAST_HEADS)], lines
        )
    for first, second, crossing in study.crossings:
        say(console, f"{crossing_words(first, second, crossing)}.")
    for test in study.rate_tests:
        say(console, f"Rate of {test.mixer}, {test.rate:g}: {test_words(test.rate, test.best, test.lost)}.")
    say(console, f"\n{lead(study)} {outlook(study)}\n")


FIT_HEADS = ("α", "α, 95 %", "a", "b at 10¹² operations")
FORECAST_HEADS = ("predicted", "95 %", "measured", "difference", "")


def fit_texts(study: ScalingResults, mixer: str) -> list[str]:
    fitted = study.curves[mixer].fitted
    if fitted is None:
        return [NONE] * len(FIT_HEADS)
    law, spread = fitted.law, fitted.interval(lambda one: one.exponent)
    return [f"{law.exponent:.3f}", range_text(spread), f"{law.floor:.3f}", f"{law.loss(1e12) - law.floor:.3f}"]


def forecast_texts(item: LossForecast) -> list[str]:
    measured = NONE if item.measured is None else f"{item.measured.mean:.4f}"
    off = NONE if item.measured is None else f"{item.measured.mean - item.predicted:+.4f}".replace("-", "−")
    return [f"{item.predicted:.4f}", range_text(item.interval), measured, off, holds_words(item)]


def holds_words(item: LossForecast) -> str:
    if item.measured is None:
        return "not measured yet"
    return {None: "one seed: no interval", True: "as predicted", False: "outside"}[item.holds]


def range_text(found: Interval, digits: int = 3) -> str:
    return NONE if not found.half else f"{found.low:.{digits}f} to {found.high:.{digits}f}"


def crossing_words(first: str, second: str, crossing: Crossing) -> str:
    winner, loser = (first, second) if crossing.first_wins else (second, first)
    spread = f"{power(crossing.interval.low)} to {power(crossing.interval.high)}"
    return (
        f"{winner} falls below {loser} at {power(crossing.compute)} operations ({spread}; the curves cross in "
        f"{crossing.share:.0%} of the resamples)"
    )


def test_words(rate: float, best: float, lost: float) -> str:
    if rate == best:
        return "better than half and twice of it"
    return f"{best:g} was better by {lost:.4f}"


# ---- the page ----


def write_scaling(folder: Path, out: Path | None = None, *, force: bool = False) -> Path:
    """The page of a scaling study."""
    study, out = read_scaling(folder), out or folder / "report.html"
    sections = {
        "Curves": curves(study),
        "Losses": loss_table(study),
        "Fitted curves": fit_table(study),
        "Predicted, then measured": forecast_table(study),
        "Rates and initial scales": rate_table(study),
        "Protocol": registration(study.versions, study.objections) if study.versions else Markup(),
        "Runs": runs(study),
    }
    shown = [(title, html) for title, html in sections.items() if html]
    text = document("How losses fall with size", lead(study), shown, outlook(study))
    write_own(out, text, force=force)
    return out


def colours(study: ScalingResults) -> dict[str, int]:
    return {mixer: i % 8 for i, mixer in enumerate(study.mixers)}


def curves(study: ScalingResults) -> Markup:
    """Loss against operations on logarithmic axes, and what each mixer saves against the reference at every size."""
    low, high = study.compute
    end, own = BEYOND * high, colours(study)
    lines: list[Line] = []
    for mixer, curve in study.curves.items():
        points = [(compute, Estimate(tuple(losses.values()))) for compute, losses in curve.points.items()]
        fitted = curve.fitted
        lines.append(Line(mixer, points, own[mixer], named=fitted is None))
        if fitted is not None:
            places = np.geomspace(min(curve.points), end, PLACES)
            law = [(float(c), Estimate((fitted.law.loss(float(c)),))) for c in places]
            lines.append(Line(mixer, law, own[mixer], fitted=True))
    values = [value for line in lines for _, mean in line.points for value in mean.values]
    y = loss_axis(0.985 * min(values), 1.015 * max(values))
    x = log_axis("operations of training", 0.8 * low, 1.1 * end, power_of_ten)
    figures = [Chart("Validation loss, nats; dashed: fitted curves", lines, x, y, least_height=290).html()]
    if (gap := gap_chart(study, own)) is not None:
        figures.append(gap.html())
    note = (
        f"Models of one size have equal parameters, and {study.ratio:g} tokens for each of them. A point is a mean over seeds, "
        "which are the small dots. Dashed: a + b·C^−α through the points, drawn on to ten times the most operations, where "
        "nothing was measured."
    )
    return side_by_side(figures, pair=True) + paragraph(note, "note")


def loss_axis(low: float, high: float) -> Axis:
    """Logarithmic, with round numbers."""
    plain = numeric_axis("", low, high)
    return Axis("", low, high, plain.ticks, logarithmic=True)


def gap_chart(study: ScalingResults, own: Mapping[str, int]) -> Chart | None:
    """Loss saved against the reference, seed by seed, by parameters."""
    reference, sizes = study.reference, study.curve_sizes
    lines = []
    for mixer in (mixer for mixer in study.mixers if mixer != reference):
        points = [
            (float(size.parameters), gain)
            for size in sizes
            if reference is not None and (gain := study.gain(mixer, reference, size.key)) is not None
        ]
        if points:
            lines.append(Line(mixer, points, own[mixer]))
    if not lines or reference is None:
        return None
    nothing = [(float(size.parameters), Estimate((0.0,))) for size in (sizes[0], sizes[-1])]
    lines.append(Line(reference, nothing, None))
    values = [value for line in lines for _, mean in line.points for value in mean.values]
    margin = 0.06 * (max(values) - min(values) or 1)
    least, most = sizes[0].parameters, sizes[-1].parameters
    ticks = [(float(size.parameters), short_count(size.parameters)) for size in sizes]
    x = Axis("parameters", 0.92 * least, 1.08 * most, ticks, logarithmic=True)
    y = numeric_axis("", min(values) - margin, max(values) + margin)
    title = f"Loss saved against {reference} at the same size, nats (higher is better)"
    return Chart(title, lines, x, y, least_height=290)


def short_count(count: float) -> str:
    return f"{count / 1e6:.3g}M" if count >= 999_500 else f"{count / 1e3:.3g}k"


def loss_table(study: ScalingResults) -> Markup:
    sizes = study.sizes
    best = {size.key: study.ranked(size)[0][0] for size in sizes}
    rows = []
    for mixer in study.mixers:
        cells = []
        for size in sizes:
            losses = study.losses(mixer, size.key)
            values = ", ".join(f"{loss:.3f}" for _, loss in sorted(losses.items()))
            kind = "chosen" if best[size.key] == mixer else ""
            mean = fmean(losses.values()) if losses else None
            cells.append(
                cell(NONE if mean is None else f"{mean:.4f}", mean, small=values if len(losses) > 1 else "", kind=kind)
            )
        rows.append([name_cell(mixer), *cells])
    heads = ["mixer", *(f"{short_count(size.parameters)} parameters, {short_count(size.tokens)} tokens" for size in sizes)]
    note = "Nats a token on held-out text, means over seeds; below them the seeds. The lowest of a size is bold."
    return table(heads, rows, sorts=True) + paragraph(note, "note")


def fit_table(study: ScalingResults) -> Markup:
    if not any(curve.fitted for curve in study.curves.values()):
        return paragraph("A curve needs three sizes.")
    rows = [[name_cell(mixer), *map(cell, fit_texts(study, mixer))] for mixer in study.mixers]
    html = table(("mixer", *FIT_HEADS), rows)
    html += paragraph(
        "L = a + b·C^−α by least squares, C the operations of training; neither a nor b is below 0. Intervals are of "
        f"{RESAMPLES} draws of the seeds of every point. The longest runs took {power(study.compute[1])} operations.",
        "note",
    )
    if not study.short:
        crossings = ". ".join(crossing_words(*item) for item in study.crossings)
        html += paragraph(f"{crossings or f'No two curves cross up to {BEYOND:g} times the operations'}.")
    if laws := {mixer: law for mixer in study.mixers if (law := study.parametric(mixer)) is not None}:
        heads = ("mixer", "E", "A at N parameters", "α", "B at D tokens", "β", "N", "D")
        lines = []
        for mixer, law in laws.items():
            numbers = (law.floor, law.of_parameters, law.alpha, law.of_tokens, law.beta)
            units = (short_count(unit) for unit in law.units)
            lines.append([name_cell(mixer), *(cell(f"{value:.3f}") for value in numbers), *map(cell, units)])
        html += paragraph("L = E + A·N^−α + B·D^−β, through all sizes and numbers of tokens.") + table(heads, lines)
    return html


def forecast_table(study: ScalingResults) -> Markup:
    if not study.forecasts:
        return Markup()
    signs = {True: SUPPORTED, False: CONTRADICTED, None: NOT_RUN}
    rows = []
    for item in study.forecasts:
        *numbers, outcome = forecast_texts(item)
        rows.append([name_cell(item.mixer), *map(cell, numbers), verdict_cell(Verdict(signs[item.holds]), outcome)])
    commits = ", ".join(dict.fromkeys(item.commit[:12] for item in study.forecasts))
    note = (
        f"Each is made of {study.forecasts[0].records} runs of smaller models and was written to predictions.json before the "
        f"first model of the largest size was trained, at commit {commits}. The interval has the seeds of the curve and of the "
        "new mean in it, not that the curve may be of another form."
    )
    return table(("mixer", *FORECAST_HEADS[:-1], "outcome"), rows, left=("outcome",)) + paragraph(note, "note")


def rate_table(study: ScalingResults) -> Markup:
    sizes, rows = study.sizes, []
    for mixer in study.mixers:
        chosen = [(study.rates.get((mixer, size.key)), study.scales.get((mixer, size.key), "")) for size in sizes]
        rows.append([name_cell(mixer), *(cell(NONE if rate is None else f"{rate:g}", rate, small=own) for rate, own in chosen)])
    html = table(("mixer", *(short_count(size.parameters) for size in sizes)), rows)
    if study.plan.get("search"):
        html += paragraph(f"Searched at the {study.plan['searched']} smallest widths. {RULE} Below a rate: the scale.", "note")
    if tests := study.rate_tests:
        lines = [
            [
                name_cell(test.mixer),
                *(
                    cell(f"{loss:.4f}", small=f"at {rate:g}", kind="chosen" if rate == test.best else "")
                    for rate, loss in test.losses.items()
                ),
                words(test_words(test.rate, test.best, test.lost)),
            ]
            for test in tests
            if len(test.losses) == 3
        ]
        html += paragraph("The first width without a search, one seed: the rate that followed, half and twice of it.")
        html += table(("mixer", "half", "as it followed", "twice", "outcome"), lines, left=("outcome",))
    return html


def runs(study: ScalingResults) -> Markup:
    records, last = study.records, study.starts[-1]
    epochs = max(record["epochs"] for record in study.counted)
    uncounted = sorted({name for record in study.counted for name in record["uncounted"]})
    found = {
        "runs": f"{len(records)}, of which {len(study.counted)} count"
        + (f" and {plural(len(study.failed), 'run')} failed" if study.failed else ""),
        "training time": duration(sum(record.get("seconds") or 0 for record in records)),
        "corpus": f"{study.plan['corpus']}, the largest models saw {epochs:.2g} times its tokens",
        "context": f"{study.plan['length']} tokens, batches of {study.plan['batch']}, {study.plan['depth']} layers",
        "state": state_words(study),
        "commit": str(last.get("commit") or "unknown"),
        "command": str(last.get("command") or "unknown"),
    }
    if uncounted:
        found["not counted"] = f"operations between tokens of {', '.join(uncounted)}, for which there is no formula"
    return facts(found)


def state_words(study: ScalingResults) -> str:
    """What decoding keeps after a context, at the largest size."""
    size = study.curve_sizes[-1].key
    found = {r["mixer"]: r["bytes"]["state"] for r in study.counted if r["setting"] == size}
    return "; ".join(f"{mixer} {NONE if state is None else f'{state:,} bytes'}" for mixer, state in found.items())
