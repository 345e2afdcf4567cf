"""The trained models that come with the package, so that commands have something to answer with before anybody trains.

    hypermlp:language    writes Python, byte by byte: what `hypermlp train tiny` trains
    hypermlp:copying     copies what it has read: HyperGLU of `hypermlp demo` on selective copying

Such a name may stand wherever a command or `load_model` takes a folder. docs/make_models.py makes the folders; about.json says
what each is, what it scored and the digest of its weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypermlp.checks import choose_from
from hypermlp.files import read_json

PREFIX = "hypermlp:"
LANGUAGE, COPYING = f"{PREFIX}language", f"{PREFIX}copying"
BUNDLED = Path(__file__).parents[1] / "bundled"
ABOUT = "about.json"


def bundled_models() -> dict[str, dict[str, Any]]:
    """What about.json says of each model, by its name."""
    return {f"{PREFIX}{name}": about for name, about in read_json(BUNDLED / ABOUT).items()}


def find_model(model: str | Path) -> Path:
    """The folder of a bundled model by its name; any other path as it is.

    >>> find_model("hypermlp:language").name, find_model("runs/tiny").name
    ('language', 'tiny')
    """
    name = str(model)
    if not name.startswith(PREFIX):
        return Path(model)
    choose_from("model", name, tuple(bundled_models()))
    return BUNDLED / name.removeprefix(PREFIX)


def full_name(folder: Path) -> str:
    """What a message calls the model of a folder: hypermlp:language, or its path."""
    return short_name(folder) if folder.parent == BUNDLED else str(folder)


def short_name(folder: Path) -> str:
    """What a page calls the model of a folder: hypermlp:language, or the end of its path.

    >>> short_name(find_model("hypermlp:language")), short_name(Path("runs/tiny/model"))
    ('hypermlp:language', 'tiny')
    """
    path = folder.resolve()
    if path.parent == BUNDLED.resolve():
        return f"{PREFIX}{path.name}"
    return path.parent.name if path.name == "model" else path.name  # what a training run saves is called model
