"""Checks of what users give: a ValueError says the rule, the value and the remedy."""

from __future__ import annotations


def choose_from(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise if `value` is not one of the `allowed` words."""
    if value not in allowed:
        raise ValueError(f"{name} ({value!r}) must be one of {', '.join(map(repr, allowed))}")


def divisible(name: str, value: int, by: int, why: str) -> None:
    """Raise, naming the nearest values that would do, unless `value` is a positive multiple of `by`."""
    if value % by:
        below = value - value % by
        remedy = f"{below} or {below + by}" if below else str(by)
        raise ValueError(f"{name} ({value}) must be divisible by {why}; try {remedy}")


def at_least_one(name: str, value: object) -> None:
    """Raise unless `value` is a whole number of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} ({value!r}) must be a whole number of at least 1")
