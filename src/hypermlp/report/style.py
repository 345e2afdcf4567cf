"""One look for every picture: quiet axes, readable numbers, no screen needed."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no screen is needed, or wanted, to save a file

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure


def new_figure(columns: int = 1, rows: int = 1, *, width: float = 6.4, height: float = 4.0) -> tuple[Figure, list[Axes]]:
    """A figure and its panels, row by row."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = [ax for row in figure.subplots(rows, columns, squeeze=False) for ax in row]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(True, alpha=0.25)
    return figure, axes


def log_axis(axis: Axis, values: Iterable[float]) -> None:
    """A logarithmic axis with ticks at 1, 2 and 5 times powers of ten, written out: "0.2", "50", not "10⁻¹"."""
    found = [value for value in values if value > 0]
    axis._set_axes_scale("log")  # type: ignore[attr-defined]
    if not found:
        return
    low, high = min(found) / 1.3, max(found) * 1.3
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if math.log10(high / low) < 3.2 else (1,)
    ticks = [k * 10.0**e for e in exponents for k in steps if low <= k * 10.0**e <= high]
    axis.set_ticks(ticks, labels=[short(tick) for tick in ticks])
    axis.set_ticks([], minor=True)


def short(value: float) -> str:
    """A number of an axis: 0.05, 20, 1,024, 20k, 1.5M."""
    for size, unit in ((1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (size if unit == 'M' else 1e3):g}{unit}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"


# matplotlib's settings for a dark screen
LINES = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color")
DARK: Any = dict.fromkeys(LINES, "#e7e0d8")


def themed(draw: Callable[[], Figure]) -> list[bytes]:
    """A picture drawn twice as PNG, for light screens and for dark ones, with no ground of its own."""
    found = []
    settings: Any
    for settings in ({}, DARK):
        with matplotlib.rc_context(settings):
            data = io.BytesIO()
            draw().savefig(data, format="png", dpi=130, transparent=True)
            found.append(data.getvalue())
    return found


def save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path
