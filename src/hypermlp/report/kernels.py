"""The lag kernels that a demo's HyperGLU has learned, as pictures on a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from hypermlp.report.charts import Axis, Chart, Line, numeric_axis
from hypermlp.report.markup import charts, heading, paragraph
from hypermlp.report.table1 import TITLES
from hypermlp.studies.demo import SHOWN
from hypermlp.verdicts.estimates import Estimate
from hypermlp.verdicts.results import Results


def lag_kernels(study: Results) -> Markup:
    """D by lag and the strongest head's mixing from lag to lag, for the first seed of every task; empty without records."""
    shown = [record for record in study.mad if record.get("lag_kernels") and record["seed"] == 0]
    if not shown:
        return Markup()
    html = paragraph(
        f"What {SHOWN} (HyperGLU) has learned with its first seed: R = D + A Diag(s) Bᵀ works on the scores of a token’s past, "
        "sorted by lag (0 is the token itself). R1 mixes them before the activation, R2 after it. Before training D is 1 for "
        "every lag and A Diag(s) Bᵀ is near 0; of the latter the head is drawn where it has become largest, with s averaged "
        "over the test set."
    )
    html += paragraph(
        "How to read a map: a row is the lag from which a score is taken, a column the lag to which it is added. A blue cell "
        "in row 5, column 2 says that a good score five tokens back raises the slot two tokens back. A stripe beside the "
        "diagonal shifts all scores by the same distance. The curves of D say how much of a score stays where it is: all of "
        "it at 1, nothing at 0, and below 0 it is turned round."
    )
    for record in shown:
        figures = [*map(mixing_map, record["lag_kernels"]), *map(diagonal_chart, record["lag_kernels"])]
        html += heading(TITLES[record["task"]]) + charts(figures)
    key = "Blue: a score at one lag adds to another; orange: it subtracts. The colours of a map end at its own largest entry."
    return html + paragraph(key, "note")


def place(kernel: dict[str, Any]) -> str:
    return f"Layer {kernel['layer']}, {kernel['operator']}"


def diagonal_chart(kernel: dict[str, Any]) -> Markup:
    rows: list[list[float]] = kernel["diagonal"]
    lines = [
        Line(f"head {i + 1}", [(float(lag), Estimate((value,))) for lag, value in enumerate(row)], i)
        for i, row in enumerate(rows)
    ]
    values = [value for row in rows for value in row]
    x, y = numeric_axis("lag", 0, len(rows[0]) - 1), numeric_axis("D", min(values), max(values))
    return Chart(f"{place(kernel)}: D", lines, x, y).html()


LEVELS = 8  # shades of a map's colour
SIDE, MARGIN = 200, 38  # of the map, and beside it


def mixing_map(kernel: dict[str, Any]) -> Markup:
    """A heat map as SVG; the cells of a shade are one path."""
    values: Sequence[Sequence[float]] = kernel["mixing"]
    L = len(values)
    largest = max((abs(value) for row in values for value in row), default=0.0)
    shades: dict[int, list[str]] = {}
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            if level := round(LEVELS * value / (largest or 1)):
                shades.setdefault(level, []).append(f"M{x} {y}h1v1h-1z")
    paths = "".join(
        f'<path style="fill:rgb(var(--{"up" if level > 0 else "down"}))" fill-opacity="{abs(level) / LEVELS:.3f}" '
        f'd="{"".join(cells)}"/>'
        for level, cells in sorted(shades.items())
    )
    title = f"{place(kernel)}, head {kernel['head']}: mixing, up to {largest:.2g}"
    width, height = SIDE + 2 * MARGIN + 124, SIDE + MARGIN + 8  # as wide as a chart
    left = (width - SIDE) / 2
    frame = f'<path class="grid" style="fill:none" d="M{left} 4h{SIDE}v{SIDE}h-{SIDE}z"/>'
    axis = numeric_axis("", 0, L - 1)
    turned = f'transform="rotate(-90 {left - 28} {SIDE / 2})" text-anchor="middle"'
    texts = (
        f'<text x="{left + SIDE / 2}" y="{height - 4}" text-anchor="middle">to lag</text>'
        f'<text x="{left - 28}" y="{SIDE / 2}" {turned}>from lag</text>{ticks(axis, left, L)}'
    )
    cells = f'<svg x="{left}" y="4" width="{SIDE}" height="{SIDE}" viewBox="0 0 {L} {L}">{paths}</svg>'
    figure = '<figure><figcaption>{0}</figcaption><svg viewBox="0 0 {1} {2}" role="img" aria-label="{0}">{3}</svg></figure>'
    return Markup(figure).format(title, width, height, Markup(cells + frame + texts))


def ticks(axis: Axis, left: float, cells: int) -> str:
    parts = []
    for value, text in axis.ticks:
        at = SIDE * (value + 0.5) / cells
        parts.append(f'<text x="{left + at:.1f}" y="{SIDE + 18}" text-anchor="middle">{text}</text>')
        parts.append(f'<text x="{left - 5}" y="{at + 7.5:.1f}" text-anchor="end">{text}</text>')
    return "".join(parts)
