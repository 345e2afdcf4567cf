"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Width = Annotated[int, typer.Option(min=16, help="Width of the layer.")]
Length = Annotated[int, typer.Option(min=1, help="Longest context.")]
MixersOption = Annotated[
    str,
    typer.Option(
        "--mixers",
        help="Names, labels, groups (core, labels, rivals, variants, all), mixers of your own (FILE.py:CLASS), with "
        "commas between them.",
    ),
]
OwnMixers = Annotated[
    list[str] | None,
    typer.Option("--own", help="A mixer of your own that the model is made of, FILE.py:CLASS; the file is executed."),
]
Seeds = Annotated[int, typer.Option(min=1, help="Runs of each, with other weights and data.")]
Workers = Annotated[int | None, typer.Option(min=1, help="Workers at once. Default: one per core, or per GPU.")]
Device = Annotated[str, typer.Option(help="Of the workers: cpu, cuda, or auto, which takes GPUs where there are any.")]
ExecutorName = Annotated[
    str, typer.Option("--executor", help="local (this machine), or ray: a running Ray cluster, else one started here.")
]
InitName = Annotated[
    str | None,
    typer.Option(
        "--init",
        help="How convolutions and lag factors begin: paper, or decays. Default: paper at published scales, else decays.",
    ),
]
Tune = Annotated[
    bool,
    typer.Option(
        "--search",
        help="First choose the learning rate of each mixer on each setting, on the validation split with seeds of its own.",
    ),
]
Retry = Annotated[bool, typer.Option("--retry-failed", help="Run again what failed.")]


def whole_numbers(name: str, text: str) -> list[int]:
    if not all(part.isdigit() and int(part) > 0 for part in text.split(",")):
        raise ValueError(f"{name} ({text}) must be whole numbers with commas between them, such as 2,1")
    return [int(part) for part in text.split(",")]
