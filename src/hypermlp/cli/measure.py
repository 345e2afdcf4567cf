"""Run a benchmark and show it: progress, the file that grows with it, tables and a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from hypermlp.bench import decode, latency, layer, model, profile
from hypermlp.bench.contestants import BASELINE
from hypermlp.bench.layer import Shape
from hypermlp.files import free_path, write_json
from hypermlp.provenance import provenance
from hypermlp.report.bench_pictures import decode_picture, growth, latency_picture, mixers_picture
from hypermlp.report.bench_tables import decode_table, latency_table, layer_tables, model_tables, profile_table
from hypermlp.report.style import save
from hypermlp.report.terminal import say, status

Row = dict[str, Any]


def record_rows(console: Console, path: Path, run: Callable[..., list[Row]], *arguments: Any, **options: Any) -> list[Row]:
    """Run a benchmark with its progress on the console; the file at `path` grows with every finished row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    finished: list[Row] = []
    record = {"provenance": provenance(), "rows": finished}

    def done(row: Row) -> None:
        finished.append(row)
        write_json(path, record)

    with status(console, "starting") as tell:
        return run(*arguments, tell=tell, done=done, **options)


def run_layer(console: Console, out: Path, shapes: Sequence[Shape], **options: Any) -> None:
    """Whole layers; leaves layer.json and layer.png in `out`."""
    path = free_path(out / "layer.json", ".png")
    rows = record_rows(console, path, layer.run, list(shapes), **options)
    for shape in shapes:
        console.print(*layer_tables(shape, [row for row in rows if row["shape"] == list(shape)], console.width))
    say(console, f"Numbers: {path}   Picture: {save(growth(rows), path.with_suffix('.png'))}")


def run_mixers(console: Console, out: Path, shapes: Sequence[Shape], mixers: Sequence[str], **options: Any) -> None:
    """Layers of mixers at equal parameters; leaves mixers.json and mixers.png in `out`."""
    path = free_path(out / "mixers.json", ".png")
    names = [BASELINE, *mixers]
    rows = record_rows(console, path, layer.run, list(shapes), names=names, match=True, **options)
    for shape in shapes:
        chosen = [row for row in rows if row["shape"] == list(shape)]
        console.print(*layer_tables(shape, chosen, console.width))
        for note in dict.fromkeys(row["note"] for row in chosen if row["note"]):
            say(console, f"{', '.join(row['contestant'] for row in chosen if row['note'] == note)}: {note}")
    say(console, f"Numbers: {path}   Picture: {save(mixers_picture(rows), path.with_suffix('.png'))}")


def run_model(console: Console, out: Path, kinds: Sequence[model.Kind], **options: Any) -> None:
    """Whole models; leaves model.json in `out`."""
    path = free_path(out / "model.json")
    rows = record_rows(console, path, model.run, list(kinds), **options)
    console.print(*model_tables(rows, console.width))
    say(console, f"Numbers: {path}")


def run_decode(console: Console, out: Path, lengths: Sequence[int], batches: Sequence[int], **options: Any) -> None:
    """One token after another; leaves decode.json and decode.png in `out`."""
    path = free_path(out / "decode.json", ".png")
    rows = record_rows(console, path, decode.run, list(lengths), list(batches), **options)
    for batch in batches:
        console.print(decode_table([row for row in rows if row["batch"] == batch], console.width))
    say(console, f"Numbers: {path}   Picture: {save(decode_picture(rows, batches), path.with_suffix('.png'))}")


def run_latency(console: Console, out: Path, **options: Any) -> None:
    """Every token alone; leaves latency.json and latency.png in `out`, with --model model-latency.json."""
    path = out / ("model-latency.json" if options["model"] else "latency.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    with status(console, "starting") as tell:
        rows = latency.run(path, tell=tell, **options)
    for setting in dict.fromkeys((row["context"], row["batch"]) for row in rows):
        console.print(latency_table([row for row in rows if (row["context"], row["batch"]) == setting], console.width))
    say(console, f"Numbers: {path}   Picture: {save(latency_picture(rows), path.with_suffix('.png'))}")


def run_profile(console: Console, out: Path, shapes: Sequence[Shape], names: Sequence[str], **options: Any) -> None:
    """Training steps under the profiler; leaves profile.json in `out`."""
    path = free_path(out / "profile.json")
    rows = record_rows(console, path, profile.run, list(shapes), list(names), **options)
    console.print(profile_table(rows, console.width))
    say(console, f"Numbers: {path}")
