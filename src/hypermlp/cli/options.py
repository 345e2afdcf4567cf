"""Options that several commands share, and what a shell completes for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hypermlp import notice
from hypermlp.models.bundled import COPYING, LANGUAGE, find_model


def complete(words: Callable[[], Sequence[str]]) -> Callable[[str], list[str]]:
    """For a shell: the words that begin as what is typed, also behind a comma."""

    def find(incomplete: str) -> list[str]:
        done, comma, last = incomplete.rpartition(",")
        return [f"{done}{comma}{word}" for word in words() if word.startswith(last)]

    return find


def closed(*words: str) -> Callable[[str], list[str]]:
    return complete(lambda: words)


def mixer_names() -> list[str]:
    from hypermlp.mixers import MIXERS
    from hypermlp.mixers.groups import GROUPS
    from hypermlp.mixers.labels import TABLE1

    return [*GROUPS, *TABLE1, *MIXERS]


def study_names() -> list[str]:
    from hypermlp.studies import catalogue

    return catalogue.study_names()


def task_names() -> list[str]:
    from hypermlp.tasks import TASKS

    return ["mad", "language", *TASKS]


def config_names() -> list[str]:
    from hypermlp.runs.configs import CONFIGS

    return list(CONFIGS)


StudyName = Annotated[
    str, typer.Argument(help="A name that hypermlp study list shows, or FILE.toml.", autocompletion=complete(study_names))
]
Changes = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FIELD=VALUE", help="Fields to change, such as steps=200 width=64 lr=1e-3,3e-3.", show_default=False
    ),
]
MixersOption = Annotated[
    str | None,
    typer.Option(
        "--mixers",
        metavar="MIXERS",
        help="Mixers to train, comma-separated: names, labels, groups (core, labels, rivals, variants, all), hybrids such as "
        "gated_deltanet*3+hyperglu, or your own FILE.py:CLASS. Default: HyperGLU and softmax attention; for table1, core.",
        autocompletion=complete(mixer_names),
    ),
]
TasksOption = Annotated[
    str | None,
    typer.Option(
        "--tasks",
        metavar="TASKS",
        help="Only these tasks, comma-separated; for table1: mad, language.",
        autocompletion=complete(task_names),
    ),
]
ScaleOption = Annotated[
    str | None,
    typer.Option(
        "--scale",
        metavar="SCALE",
        help="quick (too short to rank mixers), laptop (the default) or published; mad also has baseline, table1 has paper.",
        autocompletion=closed("quick", "laptop", "baseline", "published", "paper"),
    ),
]
SeedsOption = Annotated[
    int | None,
    typer.Option("--seeds", min=1, help="Runs of each mixer, with different weights and data. Default: 1; for table1, 2."),
]
SearchOption = Annotated[
    bool | None,
    typer.Option(
        "--search/--no-search",
        help="Choose each mixer's learning rate on validation data first. Default: for tasks that list several rates.",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option("--workers", min=1, help="Processes that work at the same time. Default: one per core, or per GPU."),
]
DeviceOption = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="DEVICE",
        help="cpu, cuda, or auto: GPUs if there are any.",
        autocompletion=closed("auto", "cpu", "cuda"),
    ),
]
ExecutorOption = Annotated[
    str,
    typer.Option(
        "--executor",
        metavar="NAME",
        help="local (this machine), or ray: a running Ray cluster, or else one that it starts here.",
        autocompletion=closed("local", "ray"),
    ),
]
Retry = Annotated[bool, typer.Option("--retry-failed", help="Repeat runs that failed.")]
Force = Annotated[bool, typer.Option("--force", help="Replace a file or folder that hypermlp did not write.")]
OwnMixers = Annotated[
    list[str] | None,
    typer.Option("--own", metavar="FILE.py:CLASS", help="A mixer of your own that the model uses. The file is executed."),
]


def model_folder(text: str) -> Path:
    try:
        return find_model(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


FOLDER: dict[str, Any] = {"parser": model_folder, "metavar": "FOLDER"}
COMES = f"{LANGUAGE} or {COPYING}, which come with the package"
Model = Annotated[
    Path | None,
    typer.Option(
        "--model",
        help=f"Folder of a saved model or training run; or {COMES}. Default: runs/tiny, else {LANGUAGE}.",
        **FOLDER,
    ),
]


def default_model() -> Path:
    """What `hypermlp train tiny` left here, else the language model that comes with the package."""
    own = Path("runs/tiny")
    if own.exists():
        return own
    notice.once(f"--model {LANGUAGE}, which comes with the package: there is no {own} here, which hypermlp train tiny makes")
    return find_model(LANGUAGE)
