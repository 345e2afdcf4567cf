"""The user's own mixers, FILE.py:NAME or MODULE:NAME, wherever a registered name or a label may stand.

NAME is a subclass of Mixer that is made with the width alone, or an Entry (mixers/registry.py) that says more. Code is imported
only where somebody names it in a command or a call: what a file names (a plan, a model's configuration) is looked up in the
registry and nowhere else, so that loading runs no code.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
from collections.abc import Iterable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from hypermlp.mixers import MIXERS, Entry, Mixer
from hypermlp.mixers.hybrid import pattern


def adopt(names: Iterable[str]) -> dict[str, str]:
    """Import mixers with a colon in their name, also those within hybrids; returns the digests of their sources, by name.

    Call it with names from a command line or a caller, never with names read from a file.
    """
    return {mixer: adopt_one(mixer) for name in names if ":" in name for mixer in pattern(name) if ":" in mixer}


def adopt_one(name: str) -> str:
    place, _, attribute = name.rpartition(":")
    module = load(place)
    found: Any = getattr(module, attribute, None)
    if not is_mixer(found):
        offered = [key for key, value in vars(module).items() if is_mixer(value)]
        raise ValueError(
            f"{name}: {attribute} must be a subclass of hypermlp.mixers.Mixer or a hypermlp.mixers.Entry; "
            f"{place} has {', '.join(offered) or 'none'}"
        )
    MIXERS[name] = found if isinstance(found, Entry) else Entry(lambda d, n, s: found(d), attribute, place, year=0, size="")
    return hashlib.sha256(inspect.getsource(module).encode()).hexdigest()[:16]


def is_mixer(value: Any) -> bool:
    return isinstance(value, Entry) or (isinstance(value, type) and issubclass(value, Mixer) and value is not Mixer)


def load(place: str) -> ModuleType:
    try:
        return load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:
        raise ValueError(f"{place} cannot be imported: {type(error).__name__}: {error}") from error


def load_file(path: Path) -> ModuleType:
    """Its module, under a name that hides no other; it may import what lies beside it."""
    name = f"own_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}"
    if name not in sys.modules:
        if (folder := str(path.resolve().parent)) not in sys.path:
            sys.path.append(folder)
        module = sys.modules[name] = ModuleType(name)
        module.__file__ = str(path)
        try:
            SourceFileLoader(name, str(path)).exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
