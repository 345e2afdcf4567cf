"""Looking into a model: the explorer's page, and statistics of its memory over a text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hypermlp.cli.app import app, shows_tables
from hypermlp.cli.console import open_console
from hypermlp.cli.options import Force, closed
from hypermlp.report.terminal import status

WINDOWS = 16  # of held-out text, as long as the model's context


@app.command()
@shows_tables
def explore(
    text: Annotated[str | None, typer.Argument(help="Text to read with the model, up to some hundreds of words.")] = None,
    model: Annotated[
        list[Path] | None,
        typer.Option(
            "--model", help="Folder of a saved model or of a training run; two show their difference. Default: runs/tiny."
        ),
    ] = None,
    over: Annotated[
        str | None,
        typer.Option(
            help="Instead of one text: statistics of all heads over held-out text: stdlib, a path, a prepared corpus.",
            autocompletion=closed("stdlib"),
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="Instead of a model: selective-copying or noisy-recall, with the demo's models, trained if missing.",
            autocompletion=closed("selective-copying", "noisy-recall"),
        ),
    ] = None,
    mixer: Annotated[list[str] | None, typer.Option("--mixer", help="With --task: which; two show their difference.")] = None,
    example: Annotated[int, typer.Option(min=0, help="With --task: which of the test examples is read.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="With --task: train for fewer steps, to see it work.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="The page to write; with --over a folder. Default: explore.html, runs/analysis.")
    ] = None,
    force: Force = False,
) -> None:
    """See what every head of a model reads at every token: one page to open in a browser, with nothing to install or load.

    Choose a token, a layer and a head. The page shows the pool of slots, which of them are active, what each adds to the
    output, and what would be active without mixing. With --over: active slots and weights by lag, what mixing switches, how
    noise fares.
    """
    from hypermlp.report.analyse import show_analyse
    from hypermlp.report.explore import show_explore
    from hypermlp.studies.kept import is_kept, keep_model

    console, folders = open_console(), model or [Path("runs/tiny")]
    if over is not None:
        if text or task or len(folders) > 1:
            raise ValueError("--over reads its own text with one model: leave out the text, --task and a second --model")
        show_analyse(console, folders[0], over, out=out or Path("runs/analysis"), windows=WINDOWS, force=force)
        return
    if task is not None:
        if model or text:
            raise ValueError("--task brings its own models and examples: leave out the text and --model")
        names = {name: f"{task}-{name.replace('!', '')}{'-quick' if quick else ''}" for name in mixer or ["G-cg-q-12o"]}
        folders = [Path("runs/explore") / folder for folder in names.values()]
        for name, folder in zip(names, folders, strict=True):
            if not is_kept(folder):
                with status(console, f"training {name} on {task}, as the demo does: half a minute on a free core"):
                    keep_model(folder, task, name, quick=quick)
    show_explore(console, text, folders, out or Path("explore.html"), example=example, force=force)
