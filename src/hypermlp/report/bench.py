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

from hypermlp.bench import layer
from hypermlp.bench.contestants import BASELINE
from hypermlp.bench.layer import Shape
from hypermlp.provenance import provenance, write_json
from hypermlp.report.style import new_figure, save

COLOURS = {
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


def show_layer(console: Console, out: Path, shapes: list[Shape], **options: Any) -> list[dict[str, Any]]:
    """Run the benchmark; leaves layer.json and layer.png in `out`, the numbers after every shape."""
    out.mkdir(parents=True, exist_ok=True)
    finished: list[dict[str, Any]] = []
    record = {"provenance": provenance(), "rows": finished}

    def done(row: dict[str, Any]) -> None:
        finished.append(row)
        write_json(out / "layer.json", record)

    with console.status("starting") as status:

        def tell(text: str) -> None:
            status.update(text)
            if not console.is_terminal:
                console.print(text)

        layer.run(shapes, tell=tell, done=done, **options)
    for shape in shapes:
        console.print(*layer_tables(shape, [row for row in finished if row["shape"] == list(shape)]))
    picture = save(growth(finished), out / "layer.png")
    console.print(f"Numbers: {out / 'layer.json'}   Picture: {picture}")
    return finished


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


def curves(ax: Axes, rows: list[dict[str, Any]], value: Callable[[dict[str, Any]], float]) -> None:
    for name in dict.fromkeys(row["contestant"] for row in rows):
        points = sorted((row["shape"][1], value(row)) for row in rows if row["contestant"] == name)
        label = name if len(points) < 2 else f"{name}   T^{exponent(points):.2f}"
        ax.plot(*zip(*points, strict=True), color=COLOURS.get(name), marker="o", markersize=3, label=label)
    ax.set(xscale="log", yscale="log")
    ax.set_xticks(sorted({row["shape"][1] for row in rows}), labels=[str(t) for t in sorted({row["shape"][1] for row in rows})])
    ax.minorticks_off()
    if rows:
        ax.legend(frameon=False, fontsize=7)


def exponent(points: list[tuple[int, float]]) -> float:
    """Slope of the least-squares line through log-log points."""
    xs, ys = [math.log(t) for t, _ in points], [math.log(y) for _, y in points]
    mx, my = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - mx) * (y - my) for x, y in zip(xs, ys, strict=True)) / sum((x - mx) ** 2 for x in xs)
