"""A hybrid by name: mixers that take turns through the layers of a model, wherever a model's mixer is named.

    gated_deltanet+hyperglu        one layer of each, and again to the last layer
    gated_deltanet*3+hyperglu      three layers of the first, then one of the second, and again
    hyperglu+registers=4+gla*2     options (mixers/options.py) belong to the mixer before them

The first mixer is nearest to the input. The depth of a model must be a multiple of the pattern's length. A mixer of somebody's
own (FILE.py:CLASS) takes part like any other, so its path has no + and no *.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

Size = int | tuple[int | None, ...] | None  # of a mixer; of a hybrid one for all layers, or one for each of the pattern
WRITTEN = "a hybrid is written NAME*COUNT+NAME, such as gated_deltanet*3+hyperglu, and options NAME+option=value"


def pattern(name: str) -> tuple[str, ...]:
    """The mixers of consecutive layers, as often as the name says; of a plain mixer itself.

    >>> pattern("hyperglu+registers=4+gla*2")
    ('hyperglu+registers=4', 'gla', 'gla')
    """
    groups: list[list[str]] = []
    for part in name.split("+"):
        if "=" in part and groups and ":" not in part:
            groups[-1].append(part)
        else:
            groups.append([part])
    found: list[str] = []
    for group in groups:
        mixer, star, count = "+".join(group).partition("*")
        if not mixer or (star and not (count.isdigit() and int(count) > 0)):
            raise ValueError(f"{name!r}: {WRITTEN}")
        found += [mixer] * int(count or 1)
    return tuple(found)


def is_hybrid(name: str) -> bool:
    """Whether a name is that of a pattern; a text that is no name is none."""
    try:
        return len(pattern(name)) > 1
    except ValueError:
        return False


def spell(mixers: Sequence[str]) -> str:
    """The name of a pattern.

    >>> spell(["gla", "gla", "hyperglu"])
    'gla*2+hyperglu'
    """
    return "+".join(mixer if count == 1 else f"{mixer}*{count}" for mixer, count in count_runs(mixers))


def count_runs(mixers: Sequence[str]) -> list[tuple[str, int]]:
    """Each mixer with the number of its layers in a row."""
    return [(mixer, len(list(same))) for mixer, same in groupby(mixers)]


def layers(name: str, depth: int, size: Size = None) -> list[tuple[str, int | None]]:
    """The mixer and the size of every layer of a model, from the input on."""
    mixers = pattern(name)
    if depth % len(mixers):
        times = depth + -depth % len(mixers)
        raise ValueError(
            f"depth ({depth}) must be a multiple of the {len(mixers)} layers of {name}; try depth {times}, or another pattern"
        )
    return list(zip(mixers, sizes_of(mixers, size), strict=True)) * (depth // len(mixers))


def sizes_of(mixers: Sequence[str], size: Size | Sequence[int | None]) -> tuple[int | None, ...]:
    """A size for each mixer of a pattern."""
    if size is None or isinstance(size, int):
        return (size,) * len(mixers)
    if len(size) != len(mixers):
        raise ValueError(f"size {tuple(size)} must have one number for each of the {len(mixers)} mixers {', '.join(mixers)}")
    return tuple(size)


def outside_budget(name: str) -> bool:
    """Whether a label with ! takes part: its ranks are full, so nobody is made to match it."""
    mixers = pattern(name) if is_hybrid(name) else (name,)
    return any(mixer.partition("+")[0].endswith("!") for mixer in mixers)
