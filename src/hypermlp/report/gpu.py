"""Tables about the kernels for GPUs: what was compiled, what is predicted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group

from hypermlp.bench import kernels, roofline
from hypermlp.report.terminal import Column, tabulate


def kernel_table(rows: Sequence[dict[str, Any]], width: int) -> Group:
    names = (
        "kernel",
        "type",
        "sm",
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
        tile = f"{r['tile'][0]}×{r['tile'][1]}"
        numbers = (r["registers"], r["spill"], r["shared"], r["instructions"], r["mma"], f"{r['macs']:g}", r["analytic"])
        cells.append([r["kernel"], r["dtype"], str(r["arch"]), tile, str(r["warps"]), *map(str, numbers)])
    heads = [Column(name, left=name == "type", starts=name == "instructions") for name in names]
    return tabulate(width, "Compiled ahead of time; nothing was run", heads, cells, keys=3)


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table of docs/gpu.md: registers / spill / shared memory / instructions (MMA) per architecture."""
    archs = sorted({r["arch"] for r in rows})
    lines = [
        "| kernel, type | tile, warps | "
        + " | ".join(f"sm_{a}" for a in archs)
        + " | multiply-adds per pair: compiled, needed |",
        "| --- | --- |" + " --- |" * (len(archs) + 1),
    ]
    for dtype in dict.fromkeys(r["dtype"] for r in rows):
        for name in dict.fromkeys(r["kernel"] for r in rows):
            found = {r["arch"]: r for r in rows if r["kernel"] == name and r["dtype"] == dtype}
            if not found:
                continue
            first = next(iter(found.values()))
            cells = [
                f"{r['registers']} / {r['spill']} / {r['shared']} / {r['instructions']} ({r['mma']})"
                for _, r in sorted(found.items())
            ]
            products = ", ".join(sorted({f"{r['macs']:g}" for r in found.values()})) + f", {first['analytic']}"
            tile = f"{first['tile'][0]}×{first['tile'][1]}, {first['warps']}"
            lines.append(
                f"| {name}, {dtype} | {tile} | " + " | ".join(cells) + f" | {products if first['analytic'] else '–'} |"
            )
    for arch in archs:
        if any(r["arch"] == arch and r["dtype"] == "bfloat16" for r in rows):
            share = kernels.against_flash(rows, arch)
            parts = f"forward {share['forward']:.3f}, backward {share['backward']:.3f}"
            lines.append(f"\nsm_{arch}: {parts} of FlashAttention's multiply-adds.")
    return "\n".join(lines) + "\n"


def predicted_markdown(predicted: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| predicted, ms | " + " | ".join(row["device"] for row in predicted) + " |",
        "| --- |" + " --- |" * len(predicted),
    ]
    for key in predicted[0]:
        if key in ("device", "predicted"):
            continue
        cells = [", ".join(f"{value:.3g}" for value in row[key].values()) for row in predicted]
        names = ", ".join(name.removesuffix("_ms") for name in predicted[0][key])
        lines.append(f"| {key} ({names}) | " + " | ".join(cells) + " |")
    p, first = roofline.PAPER, predicted[0]
    ratios = [p[f"flash_{phase}"] / first["flash model"][phase] for phase in ("forward_ms", "training_ms")]
    scaled = [first["hyperglu model"][phase] * r for phase, r in zip(("forward_ms", "training_ms"), ratios, strict=True)]
    lines.append(
        f"\nThe paper's Table 5 has, measured on an L40S, {p['forward_ms']} and {p['training_ms']:.0f} ms for HyperGLU and "
        f"{p['flash_forward_ms']} and {p['flash_training_ms']} ms for FlashAttention."
    )
    lines.append(
        f"The model knows nothing of that machine's overheads: the paper's FlashAttention row takes {ratios[0]:.2f} and "
        f"{ratios[1]:.2f} times what it predicts. Scaled by that, HyperGLU is predicted at {scaled[0]:.0f} and "
        f"{scaled[1]:.0f} ms."
    )
    return "\n".join(lines) + "\n"


def predicted_table(predicted: Sequence[dict[str, Any]], width: int) -> Group:
    title = "PREDICTED milliseconds (cost model, nothing measured); paper, L40S: 39.5 forward, 119 training"
    cells = []
    for key in predicted[0]:
        if key not in ("device", "predicted"):
            names = ", ".join(name.removesuffix("_ms") for name in predicted[0][key])
            cells.append([f"{key} ({names})", *(", ".join(f"{v:.3g}" for v in row[key].values()) for row in predicted)])
    heads = [Column("what", wraps=True), *(Column(row["device"]) for row in predicted)]
    return tabulate(width, title, heads, cells)
