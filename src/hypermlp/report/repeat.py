"""Runs that were made again, on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from hypermlp.files import Record
from hypermlp.report.progress import describe
from hypermlp.report.terminal import Column, say, show_table
from hypermlp.studies.repeat import EQUAL, ROUNDED, ROUNDING, Repeated


def show_repeated(console: Console, repeated: Sequence[Repeated], now: dict[str, Any]) -> None:
    """Each run with its score then and now, and what is not as it was where the numbers differ."""
    heads = [Column("run", wraps=True), *map(Column, ("seed", "score then", "now", "first difference", "outcome"))]
    rows = []
    for one in repeated:
        old, first = one.recorded.record, one.first
        difference = "" if first is None else "none" if first == 0 else f"{first:.0e}"
        rows.append([describe(old), str(old["seed"]), score(old), score(one.again), difference, one.outcome])
    show_table(console, "recorded runs, made again", heads, rows)
    for one in repeated:
        if one.again["error"] is not None:
            say(console, f"failed: {describe(one.again)}: {one.again['error']}", "red")
    if any(one.outcome == ROUNDING for one in repeated):
        rounded = f"Within rounding: at the first evaluation no number differs by more than {ROUNDED:g} of itself."
        say(console, f"{rounded} Training makes such a difference larger with every step, so scores may differ by more.")
    causes: dict[str, None] = {}
    for one in repeated:
        if one.outcome != EQUAL:
            causes |= dict.fromkeys(cause(name, *values) for name, values in one.causes(now).items())
    if causes:
        say(console, f"Not as it was: {'; '.join(causes)}.")


def score(record: Record) -> str:
    found = record.get("final") or record.get("metrics") or {}
    if "accuracy" in found:
        return f"{found['accuracy']:.2%}"
    loss = found.get("validation_loss", found.get("loss"))
    return "none" if loss is None else f"{loss:.4f}"


def cause(name: str, then: Any, now: Any) -> str:
    """
    >>> cause("cpu_capability", "AVX2", "AVX512"), cause("kernel", None, "1f")
    ('cpu capability AVX2, now AVX512', 'kernel not recorded, now 1f')
    """
    old, new = ("none" if value in ({}, "") else value for value in (then, now))
    return f"{name.replace('_', ' ')} {'not recorded' if old is None else old}, now {'none' if new is None else new}"
