"""Tables and pictures of the benchmarks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from hypermlp.bench import decode, layer, model, profile
from hypermlp.bench.contestants import BASELINE
from hypermlp.bench.layer import Shape
from hypermlp.files import free_path, write_json
from hypermlp.provenance import provenance
from hypermlp.report.style import new_figure, save

COLOURS = {
    "hyperglu": "#c2410c",
    "hypermlp": "#a16207",
    "hyperglu native": "#c2410c",
    "hyperglu chunked": "#fb923c",
    "hyperglu dense": "#fed7aa",
    "hypermlp native": "#a16207",
    "hypermlp chunked": "#facc15",
    "softmax sdpa 2 heads": "#2563eb",
    "softmax sdpa 12 heads": "#60a5fa",
    "softmax naive": "#bfdbfe",
    "authors": "#6b7280",
}


def run_and_record(
    console: Console, path: Path, run: Callable[..., list[dict[str, Any]]], *arguments: Any, **options: Any
) -> list[dict[str, Any]]:
    """Run a benchmark with its progress on the console; the file at `path` grows with every finished row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    finished: list[dict[str, Any]] = []
    record = {"provenance": provenance(), "rows": finished}

    def done(row: dict[str, Any]) -> None:
        finished.append(row)
        write_json(path, record)

    with console.status("starting") as status:

        def tell(text: str) -> None:
            status.update(text)
            if not console.is_terminal:
                console.print(text)

        return run(*arguments, tell=tell, done=done, **options)


def show_layer(console: Console, out: Path, shapes: list[Shape], **options: Any) -> None:
    """Run the benchmark of whole layers; leaves layer.json and layer.png in `out`."""
    path = free_path(out / "layer.json", ".png")
    rows = run_and_record(console, path, layer.run, shapes, **options)
    for shape in shapes:
        console.print(*layer_tables(shape, [row for row in rows if row["shape"] == list(shape)]))
    console.print(f"Numbers: {path}   Picture: {save(growth(rows), path.with_suffix('.png'))}")


def show_mixers(console: Console, out: Path, shapes: list[Shape], mixers: list[str], **options: Any) -> None:
    """Run the benchmark of layers for mixers at equal parameters; leaves mixers.json and mixers.png in `out`."""
    path = free_path(out / "mixers.json", ".png")
    names = [BASELINE, *mixers]
    rows = run_and_record(console, path, layer.run, shapes, names=names, match=True, **options)
    for shape in shapes:
        chosen = [row for row in rows if row["shape"] == list(shape)]
        console.print(*layer_tables(shape, chosen))
        for note in dict.fromkeys(row["note"] for row in chosen if row["note"]):
            console.print(f"{', '.join(row['contestant'] for row in chosen if row['note'] == note)}: {note}")
    console.print(f"Numbers: {path}   Picture: {save(mixers_picture(rows), path.with_suffix('.png'))}")


def show_model(console: Console, out: Path, kinds: list[model.Kind], **options: Any) -> None:
    """Run the benchmark of whole models; leaves model.json in `out`."""
    path = free_path(out / "model.json")
    rows = run_and_record(console, path, model.run, kinds, **options)
    console.print(*model_tables(rows))
    console.print(f"Numbers: {path}")


def show_decode(console: Console, out: Path, lengths: list[int], batches: list[int], **options: Any) -> None:
    """Run the benchmark of decoding; leaves decode.json and decode.png in `out`."""
    path = free_path(out / "decode.json", ".png")
    rows = run_and_record(console, path, decode.run, lengths, batches, **options)
    for batch in batches:
        console.print(decode_table([row for row in rows if row["batch"] == batch]))
    console.print(f"Numbers: {path}   Picture: {save(decode_picture(rows, batches), path.with_suffix('.png'))}")


def show_profile(console: Console, out: Path, shapes: list[Shape], names: list[str], **options: Any) -> None:
    """Profile training steps; leaves profile.json in `out`."""
    path = free_path(out / "profile.json")
    rows = run_and_record(console, path, profile.run, shapes, names, **options)
    table = Table(title="milliseconds of a training step, under the profiler", box=box.SIMPLE_HEAD)
    groups = list(rows[0]["milliseconds"])
    for column in ("shape", "layer", *groups, "all"):
        table.add_column(column, justify="left" if column in ("shape", "layer") else "right")
    for row in rows:
        spent = row["milliseconds"]
        cells = [f"{spent[group]:.0f}" for group in groups]
        table.add_row(" × ".join(map(str, row["shape"])), row["contestant"], *cells, f"{sum(spent.values()):.0f}")
    console.print(table)
    console.print(f"Numbers: {path}")


def decode_table(rows: list[dict[str, Any]]) -> Table:
    title = f"batch {rows[0]['batch']}, width {rows[0]['width']}; ratios to {decode.BASELINE}"
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for column in ("context", "layer", "parameters", "ms/token", "ratio", "cache MB", "ratio", "prefill / forward"):
        table.add_column(column, justify="left" if column == "layer" else "right", no_wrap=True)
    for row in rows:
        spread = (row["ratio"]["high"] - row["ratio"]["low"]) / 2
        table.add_row(
            str(row["context"]),
            row["contestant"],
            f"{row['parameters']:,}",
            f"{row['ms_per_token']:.3f}",
            f"{row['ratio']['median']:.2f} ±{spread:.2f}",
            f"{row['cache_bytes'] / 1e6:.1f}",
            f"{row['cache_ratio']:.3f}",
            "" if row["prefill_by_forward"] is None else f"{row['prefill_by_forward']['median']:.2f}",
        )
    return table


def decode_picture(rows: list[dict[str, Any]], batches: list[int]) -> Figure:
    figure, axes = new_figure(len(batches) + 1, width=4.6 * (len(batches) + 1), height=3.8)
    for ax, batch in zip(axes, batches, strict=False):
        chosen = [row for row in rows if row["batch"] == batch]
        curves(ax, chosen, lambda row: row["ms_per_token"], lambda row: row["context"], fit=False)
        ax.set(title=f"decoding, batch {batch}", xlabel="context", ylabel="milliseconds per token")
    chosen = [row for row in rows if row["batch"] == batches[0]]
    curves(axes[-1], chosen, lambda row: row["cache_bytes"] / row["batch"], lambda row: row["context"], fit=False)
    axes[-1].set(title="cache", xlabel="context", ylabel="bytes per sequence")
    return figure


def layer_tables(shape: Shape, rows: list[dict[str, Any]]) -> Iterator[Table]:
    """Sizes and memory, then a table of times for each number of threads."""
    sizes = Table(title=f"{shape}; extra memory in MB, parameters by the baseline's", box=box.SIMPLE_HEAD, padding=0)
    for column in ("layer", "parameters", "by", "GFLOP", "forward MB", "training MB", "state bytes"):
        sizes.add_column(column, justify="left" if column == "layer" else "right", no_wrap=True)
    for row in rows:
        memory = [f"{row[k] / 1e6:.0f}" if k in row else "–" for k in ("forward_extra_bytes", "training_extra_bytes")]
        work = "–" if row["flops_forward"] is None else f"{row['flops_forward'] / 1e9:.1f}"
        state = "–" if row["state_bytes"] is None else f"{row['state_bytes']:,}"
        sizes.add_row(row["contestant"], f"{row['parameters']:,}", f"{1 + row['deviation']:.2f}", work, *memory, state)
    yield sizes
    for count in thread_counts(rows):
        title = f"{shape}, {clock_name(count)}; milliseconds, ratio to {BASELINE} ± half the quartiles' distance, share of peak"
        table = Table(title=title, box=box.SIMPLE_HEAD, padding=0)
        for column in ("layer", "forward", "ratio", "peak", "training", "ratio", "peak"):
            table.add_column(column, justify="left" if column == "layer" else "right", no_wrap=True)
        for row in rows:
            table.add_row(row["contestant"], *timing_cells(row[f"forward_{count}"]), *timing_cells(row[f"training_{count}"]))
        yield table


def thread_counts(rows: list[dict[str, Any]]) -> list[str]:
    """Of the measured training steps, as their keys end: 1t, 2t, …"""
    return sorted({key.split("_")[1] for row in rows for key in row if key.startswith("training_") and key[-2].isdigit()})


def clock_name(count: str) -> str:
    return "one thread, CPU time" if count == "1t" else f"{count[:-1]} threads"


def timing_cells(found: dict[str, Any]) -> list[str]:
    share = found["share_of_matmul_peak"]
    return [*time_and_ratio(found), "–" if share is None else f"{share:.0%}"]


def time_and_ratio(found: dict[str, Any]) -> tuple[str, str]:
    ratio = found["ratio"]
    spread = "" if ratio is None else f"{ratio['median']:.2f} ±{(ratio['high'] - ratio['low']) / 2:.2f}"
    return f"{1e3 * found['seconds']:.1f}", spread


def growth(rows: list[dict[str, Any]]) -> Figure:
    """Time of a training step and its extra memory, per sequence, against T, with the fitted exponents."""
    figure, (left, right) = new_figure(2, width=11, height=4.4)
    width = max(row["shape"][2] for row in rows)
    rows = [row for row in rows if row["shape"][2] == width]
    key = f"training_{thread_counts(rows)[-1]}"
    curves(left, rows, lambda row: row[key]["seconds"] / row["shape"][0])
    left.set(title=f"training step, width {width}", xlabel="tokens", ylabel="seconds per sequence")
    curves(
        right,
        [row for row in rows if row.get("training_extra_bytes")],
        lambda row: row["training_extra_bytes"] / row["shape"][0],
    )
    right.set(title="extra peak memory of a training step", xlabel="tokens", ylabel="bytes per sequence")
    return figure


def curves(
    ax: Axes,
    rows: list[dict[str, Any]],
    value: Callable[[dict[str, Any]], float],
    place: Callable[[dict[str, Any]], int] = lambda row: row["shape"][1],
    *,
    fit: bool = True,
) -> None:
    for name in dict.fromkeys(row["contestant"] for row in rows):
        points = sorted((place(row), value(row)) for row in rows if row["contestant"] == name)
        label = f"{name}   T^{exponent(points):.2f}" if fit and len(points) > 1 else name
        ax.plot(*zip(*points, strict=True), color=COLOURS.get(name), marker="o", markersize=3, label=label)
    ax.set(xscale="log", yscale="log")
    ticks = sorted({place(row) for row in rows})
    ax.set_xticks(ticks, labels=[str(t) for t in ticks])
    ax.minorticks_off()
    if rows:
        ax.legend(frameon=False, fontsize=7)


def exponent(points: list[tuple[int, float]]) -> float:
    """Slope of the least-squares line through log-log points."""
    xs, ys = [math.log(t) for t, _ in points], [math.log(y) for _, y in points]
    mx, my = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - mx) * (y - my) for x, y in zip(xs, ys, strict=True)) / sum((x - mx) ** 2 for x in xs)


class Growth(NamedTuple):
    """One mixer over the lengths of a benchmark."""

    at: dict[int, dict[str, Any]]  # tokens → row
    memory: float | None  # exponent of T in the extra memory of a training step


def by_mixer(rows: list[dict[str, Any]]) -> dict[str, Growth]:
    found = {}
    for name in dict.fromkeys(row["contestant"] for row in rows):
        at = {row["shape"][1]: row for row in rows if row["contestant"] == name}
        points = [(T, row.get("training_extra_bytes", 0) / row["shape"][0]) for T, row in at.items()]
        fits = len(points) > 1 and all(y > 0 for _, y in points)
        found[name] = Growth(at, exponent(points) if fits else None)
    return found


def mixers_markdown(rows: list[dict[str, Any]]) -> str:
    """The table of all mixers at equal parameters, for the documents."""
    lengths = sorted({row["shape"][1] for row in rows})
    middle, key = lengths[len(lengths) // 2], f"training_{thread_counts(rows)[-1]}"
    columns = [
        "mixer",
        "parameters",
        *(f"training step, {T} tokens" for T in lengths),
        "memory ∝",
        f"state bytes, {middle} tokens",
    ]
    lines = ["| " + " | ".join(columns) + " |", "| --- " + "| ---: " * (len(columns) - 1) + "|"]
    for name, growth in by_mixer(rows).items():
        ratios = [f"{growth.at[T][key]['ratio']['median']:.2f}" if T in growth.at else "–" for T in lengths]
        memory = "–" if growth.memory is None else f"T^{growth.memory:.2f}"
        row = growth.at.get(middle) or next(iter(growth.at.values()))
        off = f" ({row['deviation']:+.0%})" if row["note"] else ""
        state = "–" if row["state_bytes"] is None else f"{row['state_bytes']:,}"
        lines.append("| " + " | ".join([name, f"{row['parameters']:,}{off}", *ratios, memory, state]) + " |")
    return "\n".join(lines)


def mixers_picture(rows: list[dict[str, Any]]) -> Figure:
    """A line a mixer: the ratio of a training step at every length, and how its memory grows."""
    found = by_mixer(rows)
    count, lengths = thread_counts(rows)[-1], sorted({row["shape"][1] for row in rows})
    figure, (left, right) = new_figure(2, width=11, height=1.6 + 0.21 * len(found))
    ratios = []
    for T, colour in zip(lengths, sample_colours(len(lengths)), strict=True):
        places = [place for place, growth in enumerate(found.values()) if T in growth.at]
        values = [growth.at[T][f"training_{count}"]["ratio"]["median"] for growth in found.values() if T in growth.at]
        left.scatter(values, places, color=colour, s=22, label=f"{T} tokens", zorder=3)
        ratios += values
    left.axvline(1, color="#2563eb", linewidth=1)
    left.set(title=f"training step, {clock_name(count)}", xlabel=f"time by that of {BASELINE}", xscale="log")
    ticks = [x for x in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if min(ratios) / 2 < x < max(ratios) * 2]
    left.set_xticks(ticks, labels=[f"{x:g}" for x in ticks])
    left.minorticks_off()
    left.legend(frameon=False, fontsize=8)
    exponents = [math.nan if growth.memory is None else growth.memory for growth in found.values()]
    right.scatter(exponents, range(len(found)), color="#c2410c", s=22, zorder=3)
    right.set(title="extra memory of a training step", xlabel="grows as T to the power of", xlim=(0, 2.2))
    for ax in (left, right):
        ax.set_yticks(range(len(found)), labels=list(found), fontsize=8)
        ax.set_ylim(len(found) - 0.5, -0.5)
    return figure


def sample_colours(count: int) -> list[Any]:
    """From light to dark."""
    return [colormaps["YlOrRd"](0.35 + 0.6 * i / max(count - 1, 1)) for i in range(count)]


def model_tables(rows: list[dict[str, Any]]) -> Iterator[Table]:
    for kind in dict.fromkeys(row["model"] for row in rows):
        chosen = [row for row in rows if row["model"] == kind]
        first = chosen[0]
        title = f"{kind} model, {Shape(*first['shape'])}, {first['depth']} layers; ratios to {first['baseline']}"
        table = Table(title=title, box=box.SIMPLE_HEAD, padding=0)
        for column in ("mixer", "parameters", "clock", "step, ms", "ratio", "tokens/s"):
            table.add_column(column, justify="left" if column in ("mixer", "clock") else "right", no_wrap=True)
        for count in thread_counts(chosen):
            for row in chosen:
                found = row[f"training_{count}"]
                milliseconds, spread = time_and_ratio(found)
                speed = f"{found['tokens_per_second']:,.0f}"
                table.add_row(row["mixer"], f"{row['parameters']:,}", clock_name(count), milliseconds, spread, speed)
        yield table


def model_markdown(rows: list[dict[str, Any]]) -> str:
    """The table of whole models for the documents: HyperGLU's beside softmax attention's of equal size."""
    lines = [
        "| model | parameters | softmax's | threads | tokens/s | softmax's | time ÷ softmax's |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for ours, rival in zip(rows[::2], rows[1::2], strict=True):
        sizes = f"{ours['model']}, {' × '.join(map(str, ours['shape']))}, {ours['depth']} layers"
        for count in thread_counts([ours]):
            a, b = (row[f"training_{count}"] for row in (ours, rival))
            speeds = [f"{found['tokens_per_second']:,.0f}" for found in (a, b)]
            counts = [f"{row['parameters']:,}" for row in (ours, rival)]
            cells = [sizes, *counts, count[:-1], *speeds, f"{a['ratio']['median']:.2f}"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def layer_markdown(rows: list[dict[str, Any]]) -> str:
    """The table that the README quotes: native HyperGLU relative to softmax attention and to the authors' code."""
    lines = [
        "| batch × tokens × width | forward ÷ softmax's | training step ÷ softmax's | its memory ÷ softmax's "
        "| authors' training step ÷ ours |",
        "| --- | --- | --- | --- | --- |",
    ]
    for shape in dict.fromkeys(tuple(row["shape"]) for row in rows):
        by_name = {row["contestant"]: row for row in rows if tuple(row["shape"]) == shape}
        ours, rival, authors = (by_name.get(name) for name in ("hyperglu native", BASELINE, "authors"))
        if ours is None or rival is None:
            continue
        forward, training = (two_ratios(ours, phase) for phase in ("forward", "training"))
        memory = ours["training_extra_bytes"] / rival["training_extra_bytes"]
        faster = "" if authors is None else f"{authors['training_2t']['seconds'] / ours['training_2t']['seconds']:.1f}"
        lines.append(f"| {' × '.join(map(str, shape))} | {forward} | {training} | {memory:.2f} | {faster} |")
    return "\n".join(lines)


def two_ratios(row: dict[str, Any], phase: str) -> str:
    """With two threads, and with one in brackets."""
    two, one = (row[f"{phase}_{count}"]["ratio"]["median"] for count in ("2t", "1t"))
    return f"{two:.2f} ({one:.2f})"


def decode_markdown(rows: list[dict[str, Any]]) -> str:
    """The table of decoding that the README quotes."""
    ours = [row for row in rows if row["contestant"] == "hyperglu"]
    batches = list(dict.fromkeys(row["batch"] for row in ours))
    lines = ["| context | " + " | ".join(f"time ÷ softmax's, batch {b}" for b in batches) + " | cache bytes ÷ softmax's |"]
    lines.append("| --- " * (len(batches) + 2) + "|")
    for context in dict.fromkeys(row["context"] for row in ours):
        chosen = [row for row in ours if row["context"] == context]
        times = " | ".join(f"{row['ratio']['median']:.2f}" for row in chosen)
        lines.append(f"| {context} | {times} | {chosen[0]['cache_ratio']:.2f} |")
    return "\n".join(lines)
