"""Looking into a model: the explorer's page, and statistics of its memory over a text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hypermlp.cli.app import app


@app.command()
def explore(
    text: Annotated[str, typer.Argument(help="Text to read with the model, up to some hundreds of words.")],
    model: Annotated[
        list[Path] | None,
        typer.Option("--model", help="Folder of a saved model or of a training run. Give two to see their difference."),
    ] = None,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("explore.html"),
) -> None:
    """See what every head of a model reads at every token: one page to open in a browser, with nothing to install or load.

    Choose a token, a layer and a head. The page shows the pool of slots, which of them are active, what each adds to the
    output, and what would be active without mixing.
    """
    from hypermlp.report.explore import show_explore

    show_explore(Console(), text, model or [Path("runs/tiny")], out)
