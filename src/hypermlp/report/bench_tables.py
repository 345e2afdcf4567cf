"""Tables of the benchmarks, for the terminal and for documents."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rich.console import Group

from hypermlp.bench import decode
from hypermlp.bench.cases import BASELINE
from hypermlp.bench.layer import Shape
from hypermlp.report.bench_pictures import clock_name, exponent, thread_counts
from hypermlp.report.markdown import markdown_table
from hypermlp.report.terminal import Column, tabulate

Row = dict[str, Any]


# ---- for the terminal ----


def decode_table(rows: Sequence[Row], width: int) -> Group:
    """Of one batch size."""
    title = f"batch {rows[0]['batch']}, width {rows[0]['width']}; ratios to {decode.BASELINE}"
    heads = [
        Column("context"),
        Column("layer", left=True),
        Column("parameters"),
        Column("ms per token", starts=True),
        Column("ratio"),
        Column("cache MB"),
        Column("ratio of the cache"),
        Column("prefill / forward"),
    ]
    cells = [
        [
            f"{row['context']:,}",
            row["contestant"],
            f"{row['parameters']:,}",
            f"{row['ms_per_token']:.3f}",
            ratio_text(row["ratio"]),
            f"{row['cache_bytes'] / 1e6:.1f}",
            f"{row['cache_ratio']:.3f}",
            "" if row["prefill_by_forward"] is None else f"{row['prefill_by_forward']['median']:.2f}",
        ]
        for row in rows
    ]
    return tabulate(width, title, heads, cells, keys=2)


def latency_table(rows: Sequence[Row], width: int) -> Group:
    """Of one window and batch size."""
    title = f"window {rows[0]['context']:,}, batch {rows[0]['batch']}; milliseconds of each token"
    names = ("p50", "p99", "p99.9", "worst")
    limits = list(rows[0]["met"])
    heads = [
        Column("mixer", left=True),
        Column("weights", left=True),
        *(Column(name, starts=name == "p50") for name in names),
        Column("p99.9 / p50"),
        *(Column(f"within {limit} ms") for limit in limits),
        Column("first token"),
        Column("MB"),
    ]
    cells = [
        [
            row["contestant"],
            row["weights"],
            *(f"{row[name]:.3f}" for name in names),
            f"{row['p99.9'] / row['p50']:.2f}",
            *(f"{row['met'][limit]:.2%}" for limit in limits),
            f"{row['first_ms']:.0f}",
            f"{row['bytes'] / 1e6:.1f}",
        ]
        for row in rows
    ]
    return tabulate(width, title, heads, cells, keys=2)


def ratio_text(found: dict[str, float] | None) -> str:
    return "" if found is None else f"{found['median']:.2f} ±{(found['high'] - found['low']) / 2:.2f}"


def layer_tables(shape: Shape, rows: Sequence[Row], width: int) -> Iterator[Group]:
    """Sizes and memory, then a table of times for each number of threads."""
    heads = ("layer", "parameters", "÷ baseline's", "GFLOP", "forward, MB", "training, MB", "state, bytes")
    cells = []
    for row in rows:
        memory = [f"{row[k] / 1e6:.0f}" if k in row else "–" for k in ("forward_extra_bytes", "training_extra_bytes")]
        work = "–" if row["flops_forward"] is None else f"{row['flops_forward'] / 1e9:.1f}"
        state = "–" if row["state_bytes"] is None else f"{row['state_bytes']:,}"
        cells.append([row["contestant"], f"{row['parameters']:,}", f"{1 + row['deviation']:.2f}", work, *memory, state])
    yield tabulate(width, f"{shape}: parameters, operations of a forward pass, extra memory", [*map(Column, heads)], cells)
    for count in thread_counts(rows):
        title = f"{shape}, {clock_name(count)}: ms; ratio to {BASELINE} ± half the quartiles' distance; share of peak"
        times = ("layer", "forward", "ratio", "peak", "training", "ratio", "peak")
        columns = [Column(name, starts=name == "training") for name in times]
        found = [[*timing_cells(row[f"forward_{count}"]), *timing_cells(row[f"training_{count}"])] for row in rows]
        yield tabulate(width, title, columns, [[row["contestant"], *own] for row, own in zip(rows, found, strict=True)])


def timing_cells(found: Row) -> list[str]:
    share = found["share_of_matmul_peak"]
    return [f"{1e3 * found['seconds']:.1f}", ratio_text(found["ratio"]), "–" if share is None else f"{share:.0%}"]


def profile_table(rows: Sequence[Row], width: int) -> Group:
    groups = list(rows[0]["milliseconds"])
    heads = [Column("shape"), Column("layer", left=True), *map(Column, groups), Column("all")]
    cells = []
    for row in rows:
        spent = row["milliseconds"]
        times = [f"{spent[group]:.0f}" for group in groups]
        cells.append([" × ".join(map(str, row["shape"])), row["contestant"], *times, f"{sum(spent.values()):.0f}"])
    return tabulate(width, "milliseconds of a training step, under the profiler", heads, cells, keys=2)


def model_tables(rows: Sequence[Row], width: int) -> Iterator[Group]:
    for kind in dict.fromkeys(row["model"] for row in rows):
        chosen = [row for row in rows if row["model"] == kind]
        first = chosen[0]
        title = f"{kind} model, {Shape(*first['shape'])}, {first['depth']} layers; ratios to {first['baseline']}"
        heads = ("mixer", "parameters", "clock", "step, ms", "ratio", "tokens/s")
        cells = []
        for count in thread_counts(chosen):
            for row in chosen:
                found = row[f"training_{count}"]
                time, speed = f"{1e3 * found['seconds']:.1f}", f"{found['tokens_per_second']:,.0f}"
                cells.append(
                    [row["mixer"], f"{row['parameters']:,}", clock_name(count), time, ratio_text(found["ratio"]), speed]
                )
        yield tabulate(width, title, [Column(name, left=name == "clock") for name in heads], cells)


# ---- for documents ----


class Growth(NamedTuple):
    """One mixer over the lengths of a benchmark."""

    at: dict[int, Row]  # tokens → row
    memory: float | None  # exponent of T in the extra memory of a training step


def by_mixer(rows: Sequence[Row]) -> dict[str, Growth]:
    found = {}
    for name in dict.fromkeys(row["contestant"] for row in rows):
        at = {row["shape"][1]: row for row in rows if row["contestant"] == name}
        points = [(T, row.get("training_extra_bytes", 0) / row["shape"][0]) for T, row in at.items()]
        fits = len(points) > 1 and all(y > 0 for _, y in points)
        found[name] = Growth(at, exponent(points) if fits else None)
    return found


def mixers_markdown(rows: Sequence[Row]) -> str:
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


def model_markdown(rows: Sequence[Row]) -> str:
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


def layer_markdown(rows: Sequence[Row]) -> str:
    """A table for the documents: native HyperGLU relative to softmax attention and to the authors' code."""
    heads = ["batch × tokens × width", "forward ÷ softmax's", "training step ÷ softmax's", "its memory ÷ softmax's"]
    heads += ["authors' training step ÷ ours"] if any(row["contestant"] == "authors" for row in rows) else []
    lines = [f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
    for shape in dict.fromkeys(tuple(row["shape"]) for row in rows):
        by_name = {row["contestant"]: row for row in rows if tuple(row["shape"]) == shape}
        ours, rival, authors = (by_name.get(name) for name in ("hyperglu native", BASELINE, "authors"))
        if ours is None or rival is None:
            continue
        forward, training = (two_ratios(ours, phase) for phase in ("forward", "training"))
        memory = ours["training_extra_bytes"] / rival["training_extra_bytes"]
        cells = [" × ".join(map(str, shape)), forward, training, f"{memory:.2f}"]
        cells += [] if authors is None else [f"{authors['training_2t']['seconds'] / ours['training_2t']['seconds']:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def speed_markdown(
    rows: Sequence[Row], narrow: Sequence[Row], small: Sequence[Row], later: Sequence[Row], later_small: Sequence[Row]
) -> str:
    """What the README says of a layer's speed: training steps relative to softmax attention's, with two threads.

    later: narrow and small shapes again, on another processor.
    """
    wide = [found for found in training_ratios(rows) if found.width == 768]
    long = training_ratios(narrow)
    (least,), (again,) = training_ratios(small), training_ratios(later_small)
    tokens = [found.tokens for found in wide]
    times, memories, many = ([getattr(found, what) for found in wide] for what in ("time", "memory", "beside_12_heads"))
    return "\n".join(
        [
            f"- Width 768, {min(tokens):,} to {max(tokens):,} tokens: {min(times):.2f} to {max(times):.2f} of the time, "
            f"{min(memories):.2f} to {max(memories):.2f} of the memory. "
            f"Beside 12 heads: {min(many):.2f} to {max(many):.2f} of the time.",
            f"- Width 256: {words([f'{found.time:.2f}' for found in long])} of the time at "
            f"{words([f'{found.tokens:,}' for found in long])} tokens.",
            f"- Width {least.width}, {least.rows} rows of {least.tokens} tokens: {least.time:.2f} of the time.",
            "- Later, newer code on another processor: width 256 "
            f"{words([f'{found.time:.2f}' for found in training_ratios(later)])}, "
            f"width {again.width} {again.time:.2f} of the time.",
        ]
    )


class TrainingRatio(NamedTuple):
    """A training step of native HyperGLU relative to softmax attention's, two threads; nan: not measured."""

    rows: int
    tokens: int
    width: int
    time: float
    memory: float
    beside_12_heads: float  # the time relative to softmax attention with 12 heads instead of two


def training_ratios(rows: Sequence[Row]) -> list[TrainingRatio]:
    found = []
    for shape in dict.fromkeys(tuple(row["shape"]) for row in rows):
        there = {row["contestant"]: row for row in rows if tuple(row["shape"]) == shape}
        ours, rival, many = (there.get(name, {}) for name in ("hyperglu native", BASELINE, "softmax sdpa 12 heads"))
        memory = ours.get("training_extra_bytes", math.nan) / rival.get("training_extra_bytes", math.nan)
        time = ours["training_2t"]["ratio"]["median"]
        beside = time / many["training_2t"]["ratio"]["median"] if many else math.nan
        rows_at_once, tokens, width = shape
        found.append(TrainingRatio(rows_at_once, tokens, width, time, memory, beside))
    return found


def latency_markdown(warm: Sequence[Row], cold: Sequence[Row], model: Sequence[Row]) -> str:
    """Milliseconds of one token: each stream alone for a while, streams in turns of one token, and a whole language model."""
    heads = ["stream", "weights", "window", "turns of", "p50, ms", "p99", "p99.9", "÷ p50", "worst"]
    made = []
    for rows, turns in ((warm, "many tokens"), (cold, "one token"), (model, "many tokens")):
        for row in rows:
            times = [f"{row[name]:.2f}" for name in ("p50", "p99", "p99.9")]
            tail = [f"{row['p99.9'] / row['p50']:.1f}", f"{row['worst']:.1f}"]
            made.append([row["contestant"], row["weights"], f"{row['context']:,}", turns, *times, *tail])
    return markdown_table(heads, made)


def words(items: Sequence[str]) -> str:
    """a, b and c."""
    return f"{', '.join(items[:-1])} and {items[-1]}"


def two_ratios(row: Row, phase: str) -> str:
    """With two threads, and with one in brackets."""
    two, one = (row[f"{phase}_{count}"]["ratio"]["median"] for count in ("2t", "1t"))
    return f"{two:.2f} ({one:.2f})"


def profile_markdown(rows: Sequence[Row]) -> str:
    """Where a training step's time goes, for the documents: milliseconds under the profiler."""
    cells = []
    for row in rows:
        spent = row["milliseconds"].values()
        times = [f"{time:.0f}" for time in (*spent, sum(spent))]
        cells.append([row["contestant"], " × ".join(map(str, row["shape"])), *times])
    return markdown_table(["layer", "batch × tokens × width", *rows[0]["milliseconds"], "all"], cells)


def decode_markdown(rows: Sequence[Row]) -> str:
    """The table of decoding, for the documents: beside two heads, and in brackets beside twelve."""
    ours = [row for row in rows if row["contestant"] == "hyperglu"]
    twelve = {(row["context"], row["batch"]): row for row in rows if row["contestant"] == "softmax sdpa 12 heads"}
    batches = list(dict.fromkeys(row["batch"] for row in ours))
    cells = []
    for context in dict.fromkeys(row["context"] for row in ours):
        chosen = [row for row in ours if row["context"] == context]
        beside = [row["ms_per_token"] / twelve[context, row["batch"]]["ms_per_token"] for row in chosen]
        times = [f"{row['ratio']['median']:.2f} ({many:.2f})" for row, many in zip(chosen, beside, strict=True)]
        cells.append([str(context), *times, f"{chosen[0]['cache_ratio']:.2f}"])
    return markdown_table(["context", *(f"time ÷ softmax's, batch {b}" for b in batches), "cache bytes ÷ softmax's"], cells)
