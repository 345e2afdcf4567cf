"""Checks of what users give: a ValueError says the rule, the value and the remedy."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any


def choose_from(name: str, value: object, allowed: Collection[str]) -> None:
    """Raise if `value` is not one of the `allowed` words, and suggest the one that was probably meant."""
    if value not in allowed:
        raise ValueError(f"{name} ({value!r}) must be one of {', '.join(map(repr, allowed))}{did_you_mean(value, allowed)}")


def did_you_mean(value: object, allowed: Collection[str], most: int = 1) -> str:
    """The end of a message about an unknown word, with the closest known ones; empty where none is close."""
    same = {word.lower(): word for word in allowed}
    found = get_close_matches(str(value).lower(), same, n=most)
    return f"; did you mean {' or '.join(repr(same[word]) for word in found)}?" if found else ""


def divisible(name: str, value: int, by: int, why: str) -> None:
    """Raise unless `value` is a positive multiple of `by`, and suggest the nearest ones."""
    if value % by:
        below = value - value % by
        remedy = f"{below} or {below + by}" if below else str(by)
        raise ValueError(f"{name} ({value}) must be divisible by {why}; try {remedy}")


def only_fields(kind: type, what: str, values: Mapping[str, Any]) -> None:
    """Raise a ValueError where `values` has a name that is no field of the dataclass `kind`."""
    known = sorted(field.name for field in dataclasses.fields(kind))
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(f"unknown {what} fields {unknown}; known are {known}")


def at_least_one(name: str, value: object) -> None:
    """Raise unless `value` is a whole number of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} ({value!r}) must be a whole number of at least 1")


@contextlib.contextmanager
def naming(place: str) -> Iterator[None]:
    """A mistake found within says where it is: in which file, in which section."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def same_settings(
    place: object,
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    *,
    free: Collection[str] = (),
    grows: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Raise unless what was begun in `place` with the old settings may go on with the new ones.

    Settings are equal, but for those that are free. Those in tables are compared one by one, and called by dotted names.

    grows: table → how deep below it each side may have entries that the other has not.
    """
    changed = [f"{key} was {a!r}, not {b!r}" for key, a, b in differences(old, new, grows) if key not in free]
    if changed:
        raise ValueError(f"{place} was begun with other settings: {'; '.join(changed)}. Give the old values, or another folder")


def differences(
    old: Any, new: Any, grows: Mapping[str, int] = MappingProxyType({}), name: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        table, _, below = name.partition(".")
        grown = bool(name) and below.count(".") + bool(below) < grows.get(table, 0)
        for key in [*old, *(key for key in new if key not in old)]:
            if not grown or (key in old and key in new):
                yield from differences(old.get(key), new.get(key), grows, f"{name}.{key}" if name else str(key))
    elif old != new:
        yield name, old, new
