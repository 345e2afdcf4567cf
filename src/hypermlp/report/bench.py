"""Tables and pictures of the benchmarks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from hypermlp.bench import decode, layer, profile
from hypermlp.bench.contestants import BASELINE
from hypermlp.bench.layer import Shape
from hypermlp.provenance import provenance, write_json
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
    rows = run_and_record(console, out / "layer.json", layer.run, shapes, **options)
    for shape in shapes:
        console.print(*layer_tables(shape, [row for row in rows if row["shape"] == list(shape)]))
    console.print(f"Numbers: {out / 'layer.json'}   Picture: {save(growth(rows), out / 'layer.png')}")


def show_decode(console: Console, out: Path, lengths: list[int], batches: list[int], **options: Any) -> None:
    """Run the benchmark of decoding; leaves decode.json and decode.png in `out`."""
    rows = run_and_record(console, out / "decode.json", decode.run, lengths, batches, **options)
    for batch in batches:
        console.print(decode_table([row for row in rows if row["batch"] == batch]))
    console.print(f"Numbers: {out / 'decode.json'}   Picture: {save(decode_picture(rows, batches), out / 'decode.png')}")


def show_profile(console: Console, out: Path, shapes: list[Shape], names: list[str], **options: Any) -> None:
    """Profile training steps; leaves profile.json in `out`."""
    rows = run_and_record(console, out / "profile.json", profile.run, shapes, names, **options)
    table = Table(title="milliseconds of a training step, under the profiler", box=box.SIMPLE_HEAD)
    groups = list(rows[0]["milliseconds"])
    for column in ("shape", "layer", *groups, "all"):
        table.add_column(column, justify="left" if column in ("shape", "layer") else "right")
    for row in rows:
        spent = row["milliseconds"]
        cells = [f"{spent[group]:.0f}" for group in groups]
        table.add_row(" × ".join(map(str, row["shape"])), row["contestant"], *cells, f"{sum(spent.values()):.0f}")
    console.print(table)
    console.print(f"Numbers: {out / 'profile.json'}")


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
    sizes = Table(title=str(shape), box=box.SIMPLE_HEAD)
    for column in ("layer", "parameters", "GFLOP forward", "memory forward, MB", "memory training, MB"):
        sizes.add_column(column, justify="left" if column == "layer" else "right")
    for row in rows:
        memory = [f"{row[k] / 1e6:.0f}" if k in row else "–" for k in ("forward_extra_bytes", "training_extra_bytes")]
        sizes.add_row(row["contestant"], f"{row['parameters']:,}", f"{row['flops_forward'] / 1e9:.1f}", *memory)
    yield sizes
    for count in sorted(
        {key.split("_")[1] for row in rows for key in row if key.startswith("training_") and key[-2].isdigit()}
    ):
        clock = "one thread, CPU time" if count == "1t" else f"{count[:-1]} threads"
        table = Table(title=f"{shape}, {clock}; ratio to {BASELINE} ± half the quartiles' distance", box=box.SIMPLE_HEAD)
        for column in ("layer", "forward ms", "ratio", "of peak", "training ms", "ratio", "of peak"):
            table.add_column(column, justify="left" if column == "layer" else "right", no_wrap=True)
        for row in rows:
            table.add_row(row["contestant"], *timing_cells(row[f"forward_{count}"]), *timing_cells(row[f"training_{count}"]))
        yield table


def timing_cells(found: dict[str, Any]) -> list[str]:
    ratio = found["ratio"]
    spread = "" if ratio is None else f"{ratio['median']:.2f} ±{(ratio['high'] - ratio['low']) / 2:.2f}"
    return [f"{1e3 * found['seconds']:.1f}", spread, f"{found['share_of_matmul_peak']:.0%}"]


def growth(rows: list[dict[str, Any]]) -> Figure:
    """Time of a training step and its extra memory, per sequence, against T, with the fitted exponents."""
    figure, (left, right) = new_figure(2, width=11, height=4.4)
    width = max((row["shape"][2] for row in rows), default=0)
    rows = [row for row in rows if row["shape"][2] == width]
    key = next((k for row in rows for k in row if k.startswith("training_") and k.endswith("t")), "training_2t")
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


def layer_markdown(rows: list[dict[str, Any]]) -> str:
    """The table that the README quotes: native HyperGLU relative to softmax attention and to the authors' code."""
    lines = [
        "| batch × tokens × width | forward | training step | extra memory, training | training, by the authors' code |",
        "| --- | --- | --- | --- | --- |",
    ]
    for shape in dict.fromkeys(tuple(row["shape"]) for row in rows):
        by_name = {row["contestant"]: row for row in rows if tuple(row["shape"]) == shape}
        ours, rival, authors = (by_name.get(name) for name in ("hyperglu native", BASELINE, "authors"))
        if ours is None or rival is None:
            continue
        forward, training = (two_ratios(ours, phase) for phase in ("forward", "training"))
        memory = ours["training_extra_bytes"] / rival["training_extra_bytes"]
        faster = "" if authors is None else f"{authors['training_2t']['seconds'] / ours['training_2t']['seconds']:.1f}× slower"
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
    lines = ["| context | " + " | ".join(f"time per token, batch {b}" for b in batches) + " | cache bytes |"]
    lines.append("| --- " * (len(batches) + 2) + "|")
    for context in dict.fromkeys(row["context"] for row in ours):
        chosen = [row for row in ours if row["context"] == context]
        times = " | ".join(f"{row['ratio']['median']:.2f}" for row in chosen)
        lines.append(f"| {context} | {times} | {chosen[0]['cache_ratio']:.2f} |")
    return "\n".join(lines)
