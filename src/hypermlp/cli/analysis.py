"""Looking into a model: the explorer's page, and statistics of its memory over a text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from hypermlp.cli.app import app, shows_tables
from hypermlp.cli.console import open_console
from hypermlp.cli.options import COMES, FOLDER, Force, OwnMixers, closed, default_model
from hypermlp.models.bundled import COPYING, LANGUAGE, find_model

WINDOWS = 16  # of held-out text, as long as the model's context


@app.command()
@shows_tables
def explore(
    text: Annotated[
        str | None,
        typer.Argument(help="Text to read with the model, up to a few hundred words; or the folder of a demo: runs/demo."),
    ] = None,
    model: Annotated[
        list[Path] | None,
        typer.Option(
            "--model",
            help=f"Folder of a saved model or training run; or {COMES}. Two show their difference. "
            f"Default: runs/tiny, else {LANGUAGE}.",
            **FOLDER,
        ),
    ] = None,
    over: Annotated[
        str | None,
        typer.Option(
            help="Statistics of all heads over held-out text, instead of one text: stdlib, a path or a prepared corpus.",
            autocompletion=closed("stdlib"),
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="TASK",
            help="For the folder of a demo: selective-copying (the default) or noisy-recall.",
            autocompletion=closed("selective-copying", "noisy-recall"),
        ),
    ] = None,
    mixer: Annotated[
        list[str] | None,
        typer.Option(
            "--mixer",
            metavar="MIXER",
            help="For the folder of a demo: a mixer; may be repeated. Default: HyperGLU and softmax attention.",
        ),
    ] = None,
    example: Annotated[int, typer.Option(min=0, help="For a model of a task: the test example that it reads.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="The page to write (default: explore.html); with --over, a folder (default: runs/analysis)."),
    ] = None,
    own: OwnMixers = None,
    force: Force = False,
) -> None:
    """See what every head of a model reads at every token: one page to open in a browser, with nothing to install or load.

    Choose a token, a layer and a head. The page shows the slots that the head can read, which of them are active, what each
    adds to the output, and what would be active without mixing. With --over it shows active slots and weights by lag, what
    mixing switches on and off, and what becomes of noise. Without a text, a model or --over, hypermlp:copying reads a test
    example.
    """
    from hypermlp.mixers.own import adopt
    from hypermlp.report.analyse import show_analyse
    from hypermlp.report.explore import show_explore
    from hypermlp.studies.demo import READERS, TASKS
    from hypermlp.studies.task_models import find_task_models

    adopt(own or ())
    console, alone = open_console(), not (text or model or over or task or mixer)
    folders = model or ([find_model(COPYING)] if alone else [])
    demo = text is not None and os.path.isfile(os.path.join(text, "runs.jsonl"))  # false for a text, however long
    if over is not None:
        if text or task or mixer or len(folders) > 1:
            raise ValueError(
                "--over reads its own text with one model: leave out the text, --task, --mixer and a second --model"
            )
        show_analyse(
            console,
            folders[0] if folders else default_model(),
            over,
            out=out or Path("runs/analysis"),
            windows=WINDOWS,
            force=force,
        )
        return
    path = text is not None and (os.path.isdir(text) or (os.sep in text and not any(map(str.isspace, text))))
    if path and not (demo or model):
        raise ValueError(f"{text} holds no runs of a demo (runs.jsonl); if it is a text to read, say with which --model")
    if demo or task is not None or mixer:
        if model or (text is not None and not demo):
            raise ValueError("a demo brings its own models and examples: give its folder, and neither a text nor --model")
        folders = find_task_models(Path(text or "runs/demo"), task or TASKS[0], mixer or READERS)
    text = None if demo else text
    show_explore(console, text, folders or [default_model()], out or Path("explore.html"), example=example, force=force)
