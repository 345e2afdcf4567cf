"""Tables about the kernels for GPUs: what was compiled, what is predicted. Nothing of it was run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group

from hypermlp.bench import kernel_sizes, kernels, predictions
from hypermlp.bench.predictions import LimitCheck
from hypermlp.report.terminal import Column, tabulate

Row = Mapping[str, Any]
NUMBERS = ("registers", "spill", "shared", "instructions", "mma", "macs")


def kernel_table(rows: Sequence[Row], width: int) -> Group:
    names = (
        "kernel",
        "type",
        "for",
        "tile",
        "warps",
        "registers",
        "spill B",
        "shared B",
        "instructions",
        "MMA",
        "MACs",
        "needed",
    )
    cells = []
    for r in rows:
        numbers = [f"{r[name]:g}" if name in r else "–" for name in NUMBERS]
        where = kernels.architecture_name(r["arch"])
        cells.append([r["kernel"], r["dtype"], where, tile_text(r), str(r["warps"]), *numbers, str(r["analytic"])])
    heads = [Column(name, left=name in ("type", "for"), starts=name == "instructions") for name in names]
    return tabulate(width, "Compiled ahead of time; nothing was run", heads, cells, keys=3)


def tile_text(row: Row) -> str:
    return f"{row['tile'][0]}×{row['tile'][1]}"


def markdown(rows: Sequence[Row]) -> str:
    """The table of docs/gpu.md: registers / spill / shared memory / instructions (MMA) per architecture."""
    archs = list(dict.fromkeys(sorted(r["arch"] for r in rows)))
    titles = ["kernel, type", "tile, warps", *map(kernels.architecture_name, archs), "multiply-adds per pair: compiled, needed"]
    lines = ["| " + " | ".join(titles) + " |", "| --- |" + " --- |" * (len(titles) - 1)]
    for dtype in dict.fromkeys(r["dtype"] for r in rows):
        for name in dict.fromkeys(r["kernel"] for r in rows if r["dtype"] == dtype):
            found = {r["arch"]: r for r in rows if r["kernel"] == name and r["dtype"] == dtype}
            tiles = " or ".join(dict.fromkeys(f"{tile_text(r)}, {r['warps']}" for r in found.values()))
            cells = [compiled_text(found[arch]) if arch in found else "" for arch in archs]
            lines.append("| " + " | ".join([f"{name}, {dtype}", tiles, *cells, products_text(list(found.values()))]) + " |")
    for arch in archs:
        share = kernels.against_flash(rows, arch)
        if share is not None:
            parts = f"forward {share['forward']:.3f}, backward {share['backward']:.3f}"
            lines.append(f"\n{kernels.architecture_name(arch)}: {parts} of FlashAttention's multiply-adds.")
    failed = [r for r in rows if "failure" in r]
    lines += [f"\n{r['kernel']}, {r['dtype']}, {kernels.architecture_name(r['arch'])}: {r['failure']}" for r in failed]
    return "\n".join(lines)


def sizes_markdown(record: Mapping[str, Any]) -> str:
    """The table of docs/gpu.md about other widths, heads and ranks."""
    rows = record["rows"]
    titles = ("for", "widths", "heads", "ranks", "kernels", "most shared B", "worst spill B: forward, backward", "do not fit")
    lines = ["| " + " | ".join(titles) + " |", "| --- |" + " --- |" * (len(titles) - 1)]
    for row in kernel_sizes.summary(record):
        where = f"{kernels.architecture_name(row['arch'])}, {row['dtype']}"
        spans = [", ".join(map(str, row[name])) for name in ("width", "heads", "rank")]
        spills = f"{row['forward_spill']}, {row['backward_spill']}"
        numbers = [str(row["kernels"]), str(row["shared"]), spills, str(row["misfits"])]
        lines.append("| " + " | ".join([where, *spans, *numbers]) + " |")
    broken = [f"{kernels.title(r)} at width {r['width']}, {r['heads']} heads, rank {r['rank']}" for r in rows if not r["fits"]]
    return "\n".join([*lines, *(f"\nDoes not fit: {text}." for text in broken)])


def compiled_text(row: Row) -> str:
    if "failure" in row:
        return "does not compile"
    loop = f" / {row['instructions']} ({row['mma']})" if row["arch"] not in kernels.AMD else f" / ({row['mma']})"
    return f"{row['registers']} / {row['spill']} / {row['shared']}{loop}"


def products_text(rows: Sequence[Row]) -> str:
    """Multiply-adds where they are counted, which they are not for AMD."""
    counted = [r for r in rows if "macs" in r and r["arch"] not in kernels.AMD]
    if not counted or not counted[0]["analytic"]:
        return "–"
    return ", ".join(sorted({f"{r['macs']:g}" for r in counted})) + f", {counted[0]['analytic']}"


def predicted_rows(predicted: Sequence[Row]) -> list[list[str]]:
    """What, and for each device the numbers of ours and of FlashAttention-2, with their ratio where there is one."""
    rows = []
    for key in predicted[0]:
        if key in ("device", "predicted", "kernels"):
            continue
        names = ", ".join(name.removesuffix("_ms") for name in predicted[0][key])
        rows.append([f"{key} ({names})", *(", ".join(f"{value:.3g}" for value in row[key].values()) for row in predicted)])
    return rows


def predicted_markdown(predicted: Sequence[Row]) -> str:
    lines = [
        "| predicted, ms | " + " | ".join(row["device"] for row in predicted) + " |",
        "| --- |" + " --- |" * len(predicted),
    ]
    lines += ["| " + " | ".join(row) + " |" for row in predicted_rows(predicted)]
    return "\n".join([*lines, "", *targets_text(predicted)])


def targets_text(predicted: Sequence[Row]) -> list[str]:
    """The paper's measurements, how they scale the prediction, and which targets are met."""
    p = predictions.PAPER
    factors = predictions.machine_factors(next(row for row in predicted if row["device"] == "L40S"))
    lines = [
        f"The paper's Table 5 has, measured on an L40S, {p['forward_ms']} and {p['training_ms']:.0f} ms for HyperGLU and "
        f"{p['flash_forward_ms']} and {p['flash_training_ms']} ms for FlashAttention.",
        "The model knows nothing of that machine's overheads: the paper's FlashAttention row takes "
        f"{factors['forward_ms']:.2f} and {factors['training_ms']:.2f} times what it predicts. In the targets, Table 5's "
        "row is scaled by that.",
        "",
        "| target | predicted | limit | |",
        "| --- | --- | --- | --- |",
    ]
    return lines + [f"| {v.what} | {v.predicted:.2f} | {v.limit:g} | {met_text(v)} |" for v in predictions.verdicts(predicted)]


def met_text(verdict: LimitCheck) -> str:
    return "met" if verdict.met else "missed"


def predicted_table(predicted: Sequence[Row], width: int) -> Group:
    title = "PREDICTED milliseconds (cost model, nothing measured); paper, L40S: 39.5 forward, 119 training"
    heads = [Column("what", wraps=True), *(Column(row["device"]) for row in predicted)]
    return tabulate(width, title, heads, predicted_rows(predicted))


def target_table(predicted: Sequence[Row], width: int) -> Group:
    heads = [Column("target", wraps=True), Column("predicted"), Column("limit"), Column("outcome", left=True)]
    cells = [[v.what, f"{v.predicted:.2f}", f"{v.limit:g}", met_text(v)] for v in predictions.verdicts(predicted)]
    return tabulate(width, "Targets, by the same prediction", heads, cells)


def document_blocks(record: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, str]:
    """What docs/gpu.md prints, by the names of its blocks. record, sizes: kernels.json and kernel_sizes.json."""
    made = {"kernels": markdown(record["rows"]), "predictions": predicted_markdown(record["predicted"])}
    return {**made, "sizes": sizes_markdown(sizes)}
