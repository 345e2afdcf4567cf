"""The paper's Table 5: what every system costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hypermlp.cli.app import app
from hypermlp.report.terminal import new_console, say, status


@app.command()
def table5(
    scale: Annotated[
        str,
        typer.Option(help="paper (12 layers, batch 8; on a GPU in bfloat16, compiled), laptop (2 layers, batch 1), or quick."),
    ] = "laptop",
    part: Annotated[
        str, typer.Option(help="model (whole models), growth (layers from 256 to 16,384 tokens), long (to 65,536), or all.")
    ] = "all",
    mixers: Annotated[
        str | None, typer.Option(help="Systems, with commas between them; softmax attention always takes part. Default: all.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences at once in whole models. Default: as the scale says.")
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Rounds in which the systems take turns. Default: 5 of models, 2 of growing layers."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the numbers; started again with it, what was measured is kept.")] = Path(
        "runs/table5"
    ),
) -> None:
    """The paper's Table 5: operations, latency, tokens per second and memory of whole models, beside the paper's figures.

    Systems: hyperglu, hypermlp, sdpa, sdpa-2, naive, naive-2, linear, hgrn2, gla, mamba, gsa, path, rwkv7, mamba2, deltanet,
    gated_deltanet, retnet, differential. The laptop scale takes about half an hour on two cores.
    """
    from hypermlp.bench import table5 as run
    from hypermlp.bench.systems import choose_systems
    from hypermlp.checks import choose_from
    from hypermlp.report.style import save
    from hypermlp.report.table5 import about, long_table, picture, read_folder, tables, write_page

    choose_from("--scale", scale, tuple(run.SCALES))
    choose_from("--part", part, (*run.PARTS, "all"))
    console, names = new_console(), choose_systems(mixers)
    with status(console, "starting") as tell:
        if part in ("model", "all"):
            run.run_model(out, scale, names, batch=batch, rounds=rounds, tell=tell)
        if part in ("growth", "all"):
            run.run_growth(out, scale, names, rounds=rounds, tell=tell)
        if part in ("long", "all"):
            run.run_long(out, scale, names, tell=tell)
    found = read_folder(out)
    model, growth, far = (found.get(f"{name}-{scale}") for name in run.PARTS)
    if model is not None:
        say(console, about(model))
        console.print(*tables(model, console.width))
    if far is not None:
        console.print(long_table(far, console.width))
    if model is not None or growth is not None:
        say(console, f"Picture: {save(picture(model, growth), out / f'{scale}.png')}")
    say(console, f"Numbers: {out}   Page: {write_page(out)}")
