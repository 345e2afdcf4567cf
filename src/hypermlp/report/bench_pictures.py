"""Pictures of the benchmarks: how time and memory grow, and mixers side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hypermlp.bench.cases import BASELINE
from hypermlp.mixers import MIXERS
from hypermlp.report.style import log_axis, new_figure

Row = dict[str, Any]


class Look(NamedTuple):
    """How a mixer is drawn: models differ in colour, implementations in line and marker."""

    title: str
    colour: str
    line: str
    marker: str


LOOKS = {
    "hyperglu": Look("HyperGLU", "#c2410c", "-", "o"),
    "hypermlp": Look("HyperMLP", "#a16207", "--", "s"),
    "hyperglu native": Look("HyperGLU, compiled kernel", "#c2410c", "-", "o"),
    "hyperglu chunked": Look("HyperGLU, strips in PyTorch", "#c2410c", ":", "v"),
    "hyperglu dense": Look("HyperGLU, dense reference", "#c2410c", "-.", "x"),
    "hypermlp native": Look("HyperMLP, compiled kernel", "#a16207", "-", "s"),
    "hypermlp chunked": Look("HyperMLP, strips in PyTorch", "#a16207", ":", "^"),
    "softmax sdpa 2 heads": Look("softmax attention (SDPA), 2 heads", "#2563eb", "-", "o"),
    "softmax sdpa 12 heads": Look("softmax attention (SDPA), 12 heads", "#0891b2", "--", "D"),
    "softmax naive": Look("softmax attention, all scores kept", "#2563eb", ":", "x"),
    "sdpa": Look("softmax (SDPA)", "#2563eb", "-", "D"),
    "sdpa-2": Look("softmax (SDPA), 2 heads", "#0891b2", "-", "s"),
    "naive": Look("softmax written out", "#2563eb", ":", "+"),
    "naive-2": Look("softmax written out, 2 heads", "#0891b2", ":", "x"),
    "authors": Look("the authors' HyperGLU", "#57534e", "-.", "P"),
}
OTHERS = ("#7c3aed", "#be185d", "#4d7c0f", "#0f766e")
MARKERS = "*v^<>pPh"


def look(name: str, place: int = 0) -> Look:
    """place: among those that have no look of their own."""
    colour, marker = OTHERS[place % len(OTHERS)], MARKERS[place // len(OTHERS) % len(MARKERS)]
    return LOOKS.get(name) or Look(title(name), colour, "-", marker)


def title(name: str) -> str:
    """A mixer in words, with the name that commands take."""
    if name in LOOKS and name not in MIXERS:
        return LOOKS[name].title
    own = MIXERS[name].title if name in MIXERS else ""
    if not own:
        return name
    return own if own.lower() == name.lower() else f"{own} ({name})"


def thread_counts(rows: Sequence[Row]) -> list[str]:
    """Of the measured training steps, as their keys end: 1t, 2t, …"""
    return sorted({key.split("_")[1] for row in rows for key in row if key.startswith("training_") and key[-2].isdigit()})


def clock_name(count: str) -> str:
    return "one thread, CPU time" if count == "1t" else f"{count[:-1]} threads"


def growth(rows: Sequence[Row]) -> Figure:
    """Time of a training step and its extra memory, per sequence, against T, with the fitted exponents."""
    width = max(row["shape"][2] for row in rows)
    rows = [row for row in rows if row["shape"][2] == width]
    count = thread_counts(rows)[-1]
    figure, (top, bottom) = new_figure(rows=2, width=9.5, height=8.0)
    curves(top, rows, lambda row: row[f"training_{count}"]["seconds"] / row["shape"][0], fit=True)
    top.set(title=f"Time of a training step, width {width}, {clock_name(count)}", ylabel="seconds per sequence")
    measured = [row for row in rows if row.get("training_extra_bytes", 0) > 0]  # small ones drown in the noise
    curves(bottom, measured, lambda row: row["training_extra_bytes"] / row["shape"][0] / 1e6, fit=True)
    bottom.set(title="Extra peak memory of a training step", ylabel="MB per sequence")
    for ax in (top, bottom):
        ax.set_xlabel("tokens T of a sequence")
        key(ax, "in brackets: grows as T to the power of")
    return figure


def decode_picture(rows: Sequence[Row], batches: Sequence[int]) -> Figure:
    figure, axes = new_figure(len(batches) + 1, width=4.4 * (len(batches) + 1), height=4.4)
    for ax, batch in zip(axes, batches, strict=False):
        curves(ax, [row for row in rows if row["batch"] == batch], lambda row: row["ms_per_token"], context)
        ax.set(title=f"Decoding, batch {batch}", xlabel="tokens in the cache", ylabel="milliseconds per token")
    chosen = [row for row in rows if row["batch"] == batches[0]]
    curves(axes[-1], chosen, lambda row: row["cache_bytes"] / row["batch"] / 1e6, context)
    axes[-1].set(title="Size of the cache", xlabel="tokens in the cache", ylabel="MB per sequence")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    return figure


def latency_picture(rows: Sequence[Row]) -> Figure:
    """For the last window and smallest batch that were measured: how many tokens take longer than a time, and the trace."""
    setting = (max(row["context"] for row in rows), min(row["batch"] for row in rows))
    chosen = [row for row in rows if (row["context"], row["batch"]) == setting]
    figure, axes = new_figure(2, width=11.0, height=4.6)
    colours = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(row["contestant"] for row in chosen))}
    lines = dict(zip(dict.fromkeys(row["weights"] for row in chosen), ("-", "--", ":"), strict=False))
    for row in chosen:
        label, drawn = f"{row['contestant']}, {row['weights']}", (colours[row["contestant"]], lines[row["weights"]])
        total, left, slower = sum(n for _, n in row["distribution"]), 0, []
        for border, number in row["distribution"]:
            slower.append((border, 1 - left / total))
            left += number
        axes[0].step(*zip(*slower, strict=True), where="post", color=drawn[0], ls=drawn[1], lw=1.4, label=label)
        worst = [most for _, most in row["trace"]]
        axes[1].plot([i * row["piece"] for i in range(len(worst))], worst, color=drawn[0], ls=drawn[1], lw=0.9)
    axes[0].set(xscale="log", yscale="log", xlabel="milliseconds", ylabel="share of tokens that take longer")
    axes[0].set_title(f"Window {setting[0]:,}, batch {setting[1]}")
    axes[1].set(yscale="log", xlabel="token", ylabel="milliseconds", title=f"The slowest of every {chosen[0]['piece']} tokens")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure


def context(row: Row) -> int:
    found: int = row["context"]
    return found


def tokens(row: Row) -> int:
    found: int = row["shape"][1]
    return found


def curves(
    ax: Axes, rows: Sequence[Row], value: Callable[[Row], float], place: Callable[[Row], int] = tokens, *, fit: bool = False
) -> None:
    """A line per mixer on logarithmic axes, named from the highest at the right to the lowest."""
    found = {}
    for name in dict.fromkeys(row["contestant"] for row in rows):
        found[name] = sorted((place(row), value(row)) for row in rows if row["contestant"] == name)
    unknown = [name for name in found if name not in LOOKS]
    for name, points in sorted(found.items(), key=lambda item: -item[1][-1][1]):
        own = look(name, unknown.index(name) if name in unknown else 0)
        label = f"{own.title}  [{exponent(points):.2f}]" if fit and len(points) > 1 else own.title
        above = 2 if own.line == "-" else 3  # where two lines coincide, both are seen
        ax.plot(
            *zip(*points, strict=True),
            color=own.colour,
            ls=own.line,
            lw=1.5,
            marker=own.marker,
            ms=4.5,
            zorder=above,
            label=label,
        )
    log_axis(ax.yaxis, [y for points in found.values() for _, y in points])
    ticks = sorted({place(row) for row in rows})
    ax.set_xscale("log")
    ax.set_xticks(ticks, labels=[f"{tick:,}" for tick in ticks])
    ax.minorticks_off()


def key(ax: Axes, heading: str) -> None:
    """The names beside the plot."""
    if not ax.lines:
        return
    ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9, title=heading, title_fontsize=8.5)


def exponent(points: Sequence[tuple[int, float]]) -> float:
    """Slope of the least-squares line through log-log points."""
    xs, ys = [math.log(t) for t, _ in points], [math.log(y) for _, y in points]
    mx, my = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - mx) * (y - my) for x, y in zip(xs, ys, strict=True)) / sum((x - mx) ** 2 for x in xs)


# ---- mixers side by side ----

LENGTHS = (("#fbbf24", "o"), ("#ea580c", "s"), ("#7f1d1d", "^"), ("#1c1917", "D"), ("#57534e", "v"))


def mixers_picture(rows: Sequence[Row]) -> Figure:
    """A row per mixer: time and extra memory of a training step relative to softmax attention, at every length."""
    names, lengths = list(dict.fromkeys(row["contestant"] for row in rows)), sorted({tokens(row) for row in rows})
    count = thread_counts(rows)[-1]
    at = {(row["contestant"], tokens(row)): row for row in rows}
    figure, (left, right) = new_figure(2, width=12, height=1.9 + 0.25 * len(names))

    def time_ratio(name: str, T: int) -> float | None:
        row = at.get((name, T))
        return None if row is None else row[f"training_{count}"]["ratio"]["median"]

    def memory_ratio(name: str, T: int) -> float | None:
        own, other = (at.get((n, T), {}).get("training_extra_bytes") for n in (name, BASELINE))
        return own / other if own and other else None

    for ax, ratio in ((left, time_ratio), (right, memory_ratio)):
        seen: list[float] = []
        for T, (colour, marker) in zip(lengths, LENGTHS, strict=False):
            points = [(value, place) for place, name in enumerate(names) if (value := ratio(name, T)) is not None]
            if points:
                xs, ys = zip(*points, strict=True)
                ax.scatter(xs, ys, color=colour, marker=marker, s=26, label=f"{T:,} tokens", zorder=3)
                seen += xs
        ax.axvline(1, color=LOOKS[BASELINE].colour, linewidth=1.2)
        log_axis(ax.xaxis, seen)
        ax.set_yticks(
            range(len(names)), labels=[title(name) for name in names] if ax is left else [""] * len(names), fontsize=9
        )
        ax.set_ylim(len(names) - 0.5, -0.5)
    softmax = "relative to softmax attention (SDPA, 2 heads); left of the line is better"
    left.set(title=f"Time of a training step, {clock_name(count)}", xlabel=softmax)
    right.set(title="Extra peak memory of a training step", xlabel=softmax)
    for ax in (left, right):
        ax.xaxis.label.set_fontsize(9)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False, fontsize=9)
    return figure
