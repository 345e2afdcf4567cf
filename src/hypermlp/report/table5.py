"""What every mixer costs, beside the paper's Table 5: tables for terminal, documents and page, and the picture."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup
from matplotlib.figure import Figure
from rich.console import Group

from hypermlp.bench import flops
from hypermlp.bench.record import PHASES, entry, grouped, lengths, names, read_results, timings
from hypermlp.bench.table5_mixers import BASELINE, TABLE5_MIXERS
from hypermlp.files import write_own
from hypermlp.paper.tables import TABLE5, Table5Row
from hypermlp.report.bench_pictures import LOOKS, curves, exponent, key, look
from hypermlp.report.markdown import markdown_table
from hypermlp.report.markup import cell, document, heading, paragraph, table
from hypermlp.report.style import new_figure, themed
from hypermlp.report.terminal import Column, tabulate

Data = dict[str, Any]
NONE = "–"
PAPER_BASELINE = "SM(Flash)"
PARTS = ("model", "growth", "long")  # with a file each and scale


class CostCell(NamedTuple):
    """A quantity here and in the paper, each with its ratio to SDPA's; None: not measured, or not in the paper."""

    ours: float | None
    ratio: float | None
    paper: float | None
    paper_ratio: float | None


@dataclass(frozen=True)
class Quantity:
    title: str
    unit: str
    ours: Callable[[Data, str, int], float | None]  # record, mixer, phase
    paper: Callable[[Table5Row, int], float]
    digits: Callable[[float], str]

    def cell(self, data: Data, name: str, phase: int) -> CostCell:
        own, base = (self.ours(data, who, phase) for who in (name, BASELINE))
        row = TABLE5.get(TABLE5_MIXERS[name].paper)
        theirs = None if row is None else self.paper(row, phase)
        ratio = None if own is None or not base else own / base
        if self.unit in ("s", "K/s") and ratio is not None:  # of times, the median within rounds
            found = timings(data, name, data["settings"]["time"], BASELINE)
            assert found is not None
            inside = found[PHASES[phase]]["ratio"]
            ratio = ratio if inside is None else inside["median"] if self.unit == "s" else 1 / inside["median"]
        return CostCell(own, ratio, theirs, None if theirs is None else theirs / self.paper(TABLE5[PAPER_BASELINE], phase))


def work_of(data: Data, name: str, phase: int) -> float | None:
    found: float | None = data["work"].get(name, {}).get(PHASES[phase])
    return found


def seconds_of(data: Data, name: str, phase: int) -> float | None:
    found = timings(data, name, data["settings"]["time"], BASELINE)
    return None if found is None else float(found[PHASES[phase]]["seconds"])


def tokens_of(data: Data) -> int:
    return int(data["settings"]["batch"] * data["settings"]["time"])


def peak_bytes(data: Data, name: str, phase: int) -> float | None:
    """Parameters, their gradients in a training step, and what the step needs beside them."""
    found = data["memory"].get(entry(name, data["settings"]["time"]))
    if found is None:
        return None
    size = 2 if data["settings"]["dtype"] == "bfloat16" else 4
    return float(size * (phase + 1) * data["work"][name]["parameters"] + found[PHASES[phase]])


def per_token(data: Data, name: str, phase: int) -> float | None:
    found = work_of(data, name, phase)
    return None if found is None else found / tokens_of(data)


def scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def speed(data: Data, name: str, phase: int) -> float | None:
    found = seconds_of(data, name, phase)
    return None if found is None else tokens_of(data) / found / 1e3


QUANTITIES = (
    Quantity("FLOPs", "T", lambda d, n, p: scaled(work_of(d, n, p), 1e-12), lambda r, p: r.flops[p], "{:.3g}".format),
    Quantity(
        "FLOPs per token",
        "M",
        lambda d, n, p: scaled(per_token(d, n, p), 1e-6),
        lambda r, p: r.flops_per_token[p],
        "{:.1f}".format,
    ),
    Quantity("latency", "s", seconds_of, lambda r, p: r.seconds[p], "{:.3g}".format),
    Quantity("tokens", "K/s", speed, lambda r, p: r.tokens_per_second[p], "{:.3g}".format),
    Quantity(
        "peak memory", "GB", lambda d, n, p: scaled(peak_bytes(d, n, p), 1e-9), lambda r, p: r.gigabytes[p], "{:.2f}".format
    ),
)


def text(value: float | None, show: Callable[[float], str] = "{:.2f}".format) -> str:
    return NONE if value is None else show(value)


def about(data: Data) -> str:
    s = data["settings"]
    return (
        f"GPT-2 style, {s['depth']} layers, width {s['width']}, vocabulary {s['vocabulary']:,}, batch {s['batch']} × "
        f"{s['time']} tokens; {s['dtype']}, {s['machine']}, {s['threads']} threads"
    )


# ---- terminal ----


def tables(data: Data, width: int) -> Iterator[Group]:
    """One table per quantity and phase: here, ÷ SDPA, the paper, ÷ its Flash."""
    found = names(data, list(TABLE5_MIXERS))
    for quantity in QUANTITIES:
        heads = [Column("mixer", left=True)]
        for title in PHASES:
            heads += [Column(title, starts=True), Column("÷ SDPA"), Column("paper"), Column("÷ Flash")]
        if quantity.title == "FLOPs per token":
            heads.append(Column("seen by the paper's counter"))
        rows = []
        for name in found:
            cells = [TABLE5_MIXERS[name].title]
            for phase in (0, 1):
                c = quantity.cell(data, name, phase)
                cells += [text(c.ours, quantity.digits), text(c.ratio), text(c.paper, quantity.digits), text(c.paper_ratio)]
            if quantity.title == "FLOPs per token":
                cells.append(f"{data['work'][name]['seen'] / tokens_of(data) / 1e6:.1f}")
            rows.append(cells)
        yield tabulate(width, f"{quantity.title}, {quantity.unit}", heads, rows)


LONG_HEADS = ("tokens", "forward, s", "per pair, ns", "training, s", "per pair, ns", "share of peak", "memory, MB")


def long_table(data: Data, width: int) -> Group:
    heads = ("mixer", *LONG_HEADS, "T^")
    return tabulate(width, "long contexts, one layer", [Column(h) for h in heads], [list(row) for row in long_rows(data)])


def long_rows(data: Data) -> Iterator[tuple[str, ...]]:
    """Pairs are of a token and one that it sees; memory is that of a training step, its exponent fitted over all lengths."""
    for name in names(data, list(TABLE5_MIXERS)):
        at = {T: data["memory"][entry(name, T)] for T in lengths(data) if entry(name, T) in data["memory"]}
        grows = exponent([(T, found["training"]) for T, found in at.items()]) if len(at) > 1 else None
        for T, found in at.items():
            times = [found[f"{phase}_seconds"] for phase in PHASES]
            each = [f"{1e9 * seconds / flops.pairs(T):.2f}" for seconds in times]
            last = text(grows) if max(at) == T else ""
            share = share_of_peak(data, name, T)
            cells = (f"{times[0]:.2f}", each[0], f"{times[1]:.2f}", each[1], share, f"{found['training'] / 1e6:.0f}")
            yield TABLE5_MIXERS[name].title, f"{T:,}", *cells, last


def share_of_peak(data: Data, name: str, T: int) -> str:
    """Operations per second of a training step, by those of matrix products in the same process."""
    found, work = data["memory"][entry(name, T)], data["work"].get(entry(name, T))
    if not found.get("matmul") or work is None:
        return NONE
    needed = 2 * flops.TRAINING * data["settings"]["batch"] * (work["weights"] + work["mixing"])
    return f"{needed / found['training_seconds'] / found['matmul']:.0%}"


# ---- documents ----


class Grid(NamedTuple):
    """A table, for a document or the page."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


def model_grid(data: Data) -> Grid:
    """The table of whole models: here and ÷ SDPA, with the paper's ratio in brackets."""
    heads = ["mixer", "parameters, M", "FLOPs per token, M", "forward, ms", "÷ SDPA (paper)", "training, ms", "÷ SDPA (paper)"]
    heads += ["tokens/s, training", "memory, GB", "÷ SDPA (paper)"]
    work, latency, tokens, memory = QUANTITIES[1], QUANTITIES[2], QUANTITIES[3], QUANTITIES[4]
    rows = []
    for name in names(data, list(TABLE5_MIXERS)):
        row = [
            TABLE5_MIXERS[name].title,
            f"{data['work'][name]['parameters'] / 1e6:.1f}",
            text(work.cell(data, name, 0).ours, work.digits),
        ]
        for phase in (0, 1):
            c = latency.cell(data, name, phase)
            row += [text(scaled(c.ours, 1e3), "{:.0f}".format), both(c)]
        c = memory.cell(data, name, 1)
        row += [text(scaled(tokens.cell(data, name, 1).ours, 1e3), "{:,.0f}".format), text(c.ours, memory.digits), both(c)]
        rows.append(row)
    return Grid(heads, rows)


def both(cell: CostCell) -> str:
    return text(cell.ratio) + ("" if cell.paper_ratio is None else f" ({cell.paper_ratio:.2f})")


def work_grid(data: Data) -> Grid:
    """Forward operations per token of all mixers by both counts, beside the paper's."""
    heads = ["mixer", "needed, M", "of which mixing", "the head", "seen by the paper's counter, M", "paper, M"]
    rows = []
    for name, found in data["work"].items():
        row = TABLE5.get(TABLE5_MIXERS[name].paper)
        parts = [f"{found[part] / tokens_of(data) / 1e6:.1f}" for part in ("forward", "mixing", "head", "seen")]
        rows.append([TABLE5_MIXERS[name].title, *parts, NONE if row is None else f"{row.flops_per_token[0]:.2f}"])
    return Grid(heads, rows)


def growth_grid(data: Data) -> Grid:
    """A training step of one layer: milliseconds at each length, and the exponents of T over all of them."""
    found = lengths(data)
    heads = ["layer", *(f"{T:,} tokens, ms" for T in found), "time ∝", "memory ∝"]
    rows = []
    for name in names(data, list(TABLE5_MIXERS)):
        at = growth_rows(data, name)
        times = {row["shape"][1]: row["seconds"] for row in at}
        shown = [f"{1e3 * times[T]:.0f}" if T in times else NONE for T in found]
        rows.append([TABLE5_MIXERS[name].title, *shown, *(power(at, what) for what in ("seconds", "bytes"))])
    return Grid(heads, rows)


def power(rows: Sequence[Data], what: str) -> str:
    points = [(row["shape"][1], row[what]) for row in rows if row[what] > 0]
    return f"T^{exponent(points):.2f}" if len(points) > 1 else NONE


def growth_rows(data: Data, name: str) -> list[Data]:
    """Rows as bench_pictures.curves takes them: a training step at each length."""
    rows = []
    for T in lengths(data):
        found, memory = timings(data, name, T, BASELINE), data["memory"].get(entry(name, T))
        if found is not None:
            extra = 0 if memory is None else memory["training"]
            shape = [data["settings"]["batch"], T, data["settings"]["width"]]
            rows.append({"contestant": name, "shape": shape, "seconds": found["training"]["seconds"], "bytes": extra})
    return rows


def long_grid(data: Data) -> Grid:
    heads = ["layer", *LONG_HEADS, "∝ T^"]
    return Grid(heads, [list(row) for row in long_rows(data)])


def summary(data: Data) -> str:
    """What the README says of whole models: training steps relative to softmax attention's."""
    s, latency, memory = data["settings"], QUANTITIES[2], QUANTITIES[4]
    found = {
        name: latency.cell(data, name, 1).ratio
        for name in names(data, list(TABLE5_MIXERS))
        if name not in ("hyperglu", BASELINE)
    }
    rivals = ", ".join(f"{TABLE5_MIXERS[name].title} {text(ratio)}" for name, ratio in found.items())
    ours, size = latency.cell(data, "hyperglu", 1).ratio, memory.cell(data, "hyperglu", 1).ratio
    return (
        f"- A whole GPT-2 ({s['depth']} layers, {s['batch']} × {s['time']} tokens): {text(ours)} of the time and {text(size)} "
        f"of the memory. Others take of the time: {rivals}."
    )


GRIDS: dict[str, Callable[[Data], Grid]] = {"model": model_grid, "growth": growth_grid, "long": long_grid}


def document_blocks(records: dict[str, Data]) -> dict[str, str]:
    """What docs/efficiency.md prints, by the names of its blocks."""
    made = {name: markdown_table(*GRIDS[name.split("-")[0]](data)) for name, data in records.items()}
    if "model-paper" in records:
        made |= {"work": markdown_table(*work_grid(records["model-paper"])), "summary": summary(records["model-paper"])}
    for name, data in records.items():
        if name.startswith("model"):
            made[f"about {name}"] = about(data) + "."
    return made


# ---- the picture ----


def picture(model: Data | None, growth: Data | None) -> Figure:
    """Latency against memory of a training step; then how time and memory of the layers grow."""
    panels = (model is not None) + 2 * (growth is not None)
    figure, axes = new_figure(rows=panels, width=9.5, height=4.6 * panels)
    remaining = list(axes)
    if model is not None:
        draw_trade(remaining.pop(0), model)
    if growth is not None:
        rows = [row for name in names(growth, list(TABLE5_MIXERS)) for row in growth_rows(growth, name)]
        time, memory = remaining
        curves(time, rows, lambda row: 1e3 * row["seconds"], fit=True)
        curves(memory, [row for row in rows if row["bytes"] > 1e6], lambda row: row["bytes"] / 1e6, fit=True)
        width = growth["settings"]["width"]
        time.set(title=f"Training step of one layer, width {width}", ylabel="milliseconds", xlabel="tokens T")
        memory.set(title="Its memory beyond the layer and the input", ylabel="MB", xlabel="tokens T")
        for ax in (time, memory):
            key(ax, "in brackets: grows as T to the power of")
    return figure


def draw_trade(ax: Any, data: Data) -> None:
    points = {}
    for name in names(data, list(TABLE5_MIXERS)):
        seconds, size = seconds_of(data, name, 1), peak_bytes(data, name, 1)
        if seconds is not None and size is not None:
            points[name] = (1e3 * seconds, size / 1e9)
    others = [name for name in points if name not in LOOKS]
    for name, (x, y) in sorted(points.items(), key=lambda item: item[1]):
        own = look(name, others.index(name) if name in others else 0)
        ax.plot(x, y, color=own.colour, marker=own.marker, ms=6.5, ls="", label=TABLE5_MIXERS[name].title)
    key(ax, "from the fastest to the slowest")
    s = data["settings"]
    title = f"Training step of a GPT-2, {s['depth']} layers, width {s['width']}, {s['batch']} × {s['time']} tokens"
    ax.set(title=title, xlabel="milliseconds (left is better)", ylabel="peak memory, GB (lower is better)")


# ---- the page ----


def read_folder(folder: Path) -> dict[str, Data]:
    """Name of a part and its scale ("model-laptop") → its record."""
    found = [path for part in PARTS for path in sorted(folder.glob(f"{part}-*.json"))]
    return {path.stem: grouped(read_results(path)) for path in found}


def write_page(folder: Path, out: Path | None = None, *, force: bool = False) -> Path | None:
    """The page of what `hypermlp bench model` left in a folder (None: report.html in it); None if it left nothing there."""
    made = sections(folder)
    if not made:
        return None
    path = out or folder / "report.html"
    write_own(path, document("What each mixer costs", lead(read_folder(folder)), made), force=force)
    return path


def lead(records: dict[str, Data]) -> str:
    """What HyperGLU costs beside softmax attention, where both were measured."""
    models = [data for name, data in records.items() if name.startswith("model")]
    for data in sorted(models, key=lambda data: -data["settings"]["depth"]):  # the largest first
        if "hyperglu" not in names(data, list(TABLE5_MIXERS)):
            continue
        time, memory = (QUANTITIES[i].cell(data, "hyperglu", 1).ratio for i in (2, 4))
        if time is not None and memory is not None:
            return (
                f"A training step with HyperGLU takes {text(time)} of the time and {text(memory)} of the memory that softmax "
                f"attention takes, in a GPT-2 of {data['settings']['depth']} layers. The paper's Table 5 is beside it."
            )
    return "What mixers cost on this machine; the paper's Table 5 is beside it."


def sections(folder: Path) -> list[tuple[str, Markup]]:
    """Titles and HTML of what was measured in a folder; empty if nothing was."""
    records = read_folder(folder)
    if not records:
        return []
    made = []
    by_part = {part: next((d for n, d in records.items() if n.startswith(part)), None) for part in ("model", "growth")}
    if any(by_part.values()):
        made.append(("Latency, memory, growth", image(partial(picture, by_part["model"], by_part["growth"]))))
    for name, data in records.items():
        part = name.split("-")[0]
        lead = (
            about(data) if part == "model" else f"One layer of width {data['settings']['width']}; {data['settings']['machine']}"
        )
        html = paragraph(lead) + as_html(GRIDS[part](data))
        if part == "model":
            html += heading("Operations of a forward pass per token") + as_html(work_grid(data))
        made.append((f"Table 5: {name.replace('-', ', ')}", html + origins(data)))
    return made


def origins(data: Data) -> Markup:
    lines = [f"{s['date']}: {s['command']} (commit {s['commit']}, torch {s['torch']})" for s in data["sessions"]]
    return Markup().join(paragraph(line, "soft") for line in lines)


def as_html(grid: Grid) -> Markup:
    return table(grid.heads, [[cell(name, head=True), *map(cell, row)] for name, *row in grid.rows], sorts=True)


def image(draw: Callable[[], Figure]) -> Markup:
    """A picture as wide as the page, drawn for light and for dark screens; on a phone it scrolls and stays legible."""
    light, dark = (f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in themed(draw))
    shown = (
        '<figure><div class="scroll" tabindex="0" role="region" aria-label="picture"><picture>'
        '<source media="(prefers-color-scheme: dark)" srcset="{}">'
        '<img alt="latency, memory and growth" style="width:100%;min-width:640px;height:auto" src="{}">'
        "</picture></div></figure>"
    )
    return Markup(shown).format(dark, light)
