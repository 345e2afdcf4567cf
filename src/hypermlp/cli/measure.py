"""Show what a benchmark left: tables, a picture and notes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from hypermlp.bench import kernels
from hypermlp.bench.layer import Shape
from hypermlp.bench.record import read_results
from hypermlp.errors import RunError
from hypermlp.report import table5
from hypermlp.report.bench_pictures import decode_picture, growth, latency_picture, mixers_picture
from hypermlp.report.bench_tables import decode_table, latency_table, layer_tables, model_tables, profile_table
from hypermlp.report.gpu import kernel_table, markdown, predicted_markdown, predicted_table, target_table
from hypermlp.report.style import save
from hypermlp.report.terminal import Column, say, show_table

Row = dict[str, Any]


def show(console: Console, name: str, paths: Sequence[Path]) -> None:
    """The results of a benchmark, from the files that it wrote."""
    SHOWN[name](console, paths)
    say(console, f"Numbers: {', '.join(map(str, paths))}")


def rows_of(paths: Sequence[Path]) -> list[Row]:
    rows: list[Row] = read_results(paths[0])["rows"]
    return rows


def show_layers(console: Console, paths: Sequence[Path]) -> None:
    rows = rows_of(paths)
    for shape in dict.fromkeys(tuple(row["shape"]) for row in rows):
        chosen = [row for row in rows if tuple(row["shape"]) == shape]
        console.print(*layer_tables(Shape(*shape), chosen, console.width))
        for note in dict.fromkeys(row["note"] for row in chosen if row["note"]):
            say(console, f"{', '.join(row['contestant'] for row in chosen if row['note'] == note)}: {note}")
    draw = mixers_picture if paths[0].name.startswith("mixers") else growth
    say(console, f"Picture: {save(draw(rows), paths[0].with_suffix('.png'))}")


def show_models(console: Console, paths: Sequence[Path]) -> None:
    if paths[0].name.startswith("equal"):
        console.print(*model_tables(rows_of(paths), console.width))
        return
    folder, scale = paths[0].parent, paths[0].stem.partition("-")[2]
    found = table5.read_folder(folder)
    model, growing, far = (found.get(f"{part}-{scale}") for part in table5.PARTS)
    if model is not None:
        say(console, table5.about(model))
        console.print(*table5.tables(model, console.width))
    if far is not None:
        console.print(table5.long_table(far, console.width))
    if model is not None or growing is not None:
        say(console, f"Picture: {save(table5.picture(model, growing), folder / f'{scale}.png')}")
    say(console, f"Page: {table5.write_page(folder)}")


def show_decoding(console: Console, paths: Sequence[Path]) -> None:
    rows = rows_of(paths)
    batches = list(dict.fromkeys(row["batch"] for row in rows))
    for batch in batches:
        console.print(decode_table([row for row in rows if row["batch"] == batch], console.width))
    say(console, f"Picture: {save(decode_picture(rows, batches), paths[0].with_suffix('.png'))}")


def show_latency(console: Console, paths: Sequence[Path]) -> None:
    rows = rows_of(paths)
    for setting in dict.fromkeys((row["context"], row["batch"]) for row in rows):
        console.print(latency_table([row for row in rows if (row["context"], row["batch"]) == setting], console.width))
    say(console, f"Picture: {save(latency_picture(rows), paths[0].with_suffix('.png'))}")


def show_profile(console: Console, paths: Sequence[Path]) -> None:
    console.print(profile_table(rows_of(paths), console.width))


def show_kernels(console: Console, paths: Sequence[Path]) -> None:
    """Also leaves kernels.md; ends with an error where a promise is broken."""
    found = read_results(paths[0])
    rows, predicted = found["rows"], found.get("predicted")
    console.print(kernel_table(rows, console.width))
    text = markdown(rows)
    if predicted is not None:
        console.print(predicted_table(predicted, console.width), target_table(predicted, console.width))
        text += "\n\n" + predicted_markdown(predicted)
    paths[0].with_suffix(".md").write_text(text + "\n")
    broken = kernels.problems(rows)
    for problem in broken:
        say(console, problem)
    if broken:
        raise RunError(f"{len(broken)} promises are broken, see above; other tile sizes may keep them (ops/triton/tiles.json)")


def show_rows(console: Console, rows: Sequence[Row]) -> None:
    """Rows as they are, those with the same columns in one table."""
    for names in dict.fromkeys(tuple(row) for row in rows):
        own = [row for row in rows if tuple(row) == names]
        cells = [[f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()] for row in own]
        show_table(console, "", [Column(name) for name in names], cells)


def show_gpu(console: Console, paths: Sequence[Path]) -> None:
    show_rows(console, rows_of(paths))


SHOWN: dict[str, Callable[[Console, Sequence[Path]], None]] = {
    "layer": show_layers,
    "mixers": show_layers,
    "model": show_models,
    "decode": show_decoding,
    "latency": show_latency,
    "profile": show_profile,
    "kernels": show_kernels,
    "gpu": show_gpu,
}
