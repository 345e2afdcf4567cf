"""A mixer with some of its options changed, by name: NAME+option=value+option=value, wherever a name or a label may stand.

    hyperglu+registers=4            HyperGLU with four registers
    R-cg-q-12o+op1_rank=8+n_head=4  HyperMLP with R1 of rank 8 and four heads
    gsa+slowness=4                  gated slot attention whose state decays faster at first

Options of HyperGLU, HyperMLP and the labels are fields of HyperGLUConfig; those of rivals are arguments of their classes.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

WORDS = {"true": True, "false": False}


def split(name: str) -> tuple[str, dict[str, Any]]:
    """The name without its options, and these; somebody's own code (FILE.py:CLASS) has none.

    >>> split("hyperglu+registers=4+use_qk_gate=false")
    ('hyperglu', {'registers': 4, 'use_qk_gate': False})
    """
    if ":" in name:
        return name, {}
    base, *parts = name.split("+")
    found: dict[str, Any] = {}
    for part in parts:
        option, equals, value = part.partition("=")
        if not (option and equals and value) or option in found:
            raise ValueError(f"{name!r}: options are written NAME+option=value, each once, such as hyperglu+registers=4")
        found[option] = read(value)
    return base, found


def read(value: str) -> bool | int | float | str:
    if value in WORDS:
        return WORDS[value]
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def check(name: str, options: Collection[str], known: Collection[str]) -> None:
    """Refuse an option that the mixer does not have."""
    for option in options:
        if option not in known:
            has = f"its options are {', '.join(sorted(known))}" if known else "it has none"
            raise ValueError(f"{name!r}: {option} is no option of this mixer; {has}")
