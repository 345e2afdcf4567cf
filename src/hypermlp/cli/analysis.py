"""Looking into a model: the explorer's page, and statistics of its memory over a text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from hypermlp.cli.app import app
from hypermlp.report.terminal import new_console


@app.command()
def explore(
    text: Annotated[
        str | None,
        typer.Argument(help="Text to read with the model, up to some hundreds of words; or a demo's folder: runs/demo."),
    ] = None,
    model: Annotated[
        list[Path] | None,
        typer.Option("--model", help="Folder of a saved model or of a training run; two show their difference."),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(help="With the folder of a demo: selective-copying (the default) or noisy-recall."),
    ] = None,
    mixer: Annotated[
        list[str] | None, typer.Option("--mixer", help="With it: which; by default HyperGLU and softmax attention.")
    ] = None,
    example: Annotated[int, typer.Option(min=0, help="With it: which of the test examples is read.")] = 0,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("explore.html"),
) -> None:
    """See what every head of a model reads at every token: one page to open in a browser, with nothing to install or load.

    Choose a token, a layer and a head. The page shows the pool of slots, which of them are active, what each adds to the
    output, and what would be active without mixing.
    """
    from hypermlp.report.explore import show_explore
    from hypermlp.studies.demo import READERS, TASKS
    from hypermlp.studies.task_models import find_task_models

    folders = model or [Path("runs/tiny")]
    demo = text is not None and os.path.isfile(os.path.join(text, "runs.jsonl"))  # false for a text, however long
    if demo or task is not None or mixer:
        if model or (text is not None and not demo):
            raise ValueError("a demo brings its own models and examples: give its folder, and neither a text nor --model")
        folders = find_task_models(Path(text or "runs/demo"), task or TASKS[0], mixer or READERS)
    show_explore(new_console(), text, folders, out, example=example)


@app.command()
def analyse(
    model: Annotated[Path, typer.Option("--model", help="Folder of a saved model or of a training run.")] = Path("runs/tiny"),
    corpus: Annotated[str, typer.Option(help="Text to read: stdlib, a path, a prepared corpus.")] = "stdlib",
    windows: Annotated[int, typer.Option(min=1, help="How many windows of held-out text.")] = 16,
    context: Annotated[int | None, typer.Option(min=2, help="Tokens of a window. Default: the model's context.")] = None,
    seed: Annotated[int, typer.Option(help="Of the random tokens that serve as noise.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the page and the numbers.")] = Path("runs/analysis"),
) -> None:
    """What the heads of a model do over a text: active slots and weights by lag, what mixing switches, how noise fares."""
    from hypermlp.report.analyse import show_analyse

    show_analyse(new_console(), model, corpus, out=out, windows=windows, context=context, seed=seed)
