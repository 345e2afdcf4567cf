"""A training run in words and pictures: the plan before it, its state while it runs, the curves of its losses."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from rich.console import Group
from rich.panel import Panel
from rich.text import Text

from hypermlp.report.style import new_figure, short
from hypermlp.report.terminal import Column, tabulate
from hypermlp.runs.cost import RunCost
from hypermlp.train.config import RunConfig
from hypermlp.train.training import Step


def state_table(step: Step, evaluated: Step | None, width: int) -> Group:
    validation = "" if evaluated is None else f"{evaluated.validation:.4f} (step {evaluated.step})"
    cells = {
        "tokens": f"{step.tokens:,}",
        "loss": f"{step.loss:.4f}",
        "validation": validation,
        "learning rate": f"{step.lr:.2e}",
        "gradient": f"{step.grad_norm:.3f}",
        "tokens/s": f"{step.tokens_per_second:,.0f}",
    }
    return tabulate(width, "", [Column(name) for name in cells], [list(cells.values())], keys=0)


def sample_panel(evaluated: Step | None) -> Panel | Text:
    if evaluated is None or evaluated.sample is None:
        return Text()
    return Panel(Text(printable(evaluated.sample)), title=Text(f"written after step {evaluated.step}"))


def printable(text: str) -> str:
    """Text of an untrained model, without what a terminal would obey."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{MIDDLE DOT}" for c in text)


def line(step: Step) -> str:
    words = f"step {step.step:>6}   loss {step.loss:.4f}   lr {step.lr:.2e}   gradient {step.grad_norm:.3f}   "
    words += f"{step.tokens_per_second:,.0f} tokens/s"
    return words if step.validation is None else f"{words}   validation {step.validation:.4f}"


def curves(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """Losses of one or more runs by tokens: of each training step, thin, and on the validation set, with points."""
    figure, (ax,) = new_figure(width=7.5, height=4.4)
    for title, records in runs.items():
        name = f"{title}: " if title else ""
        steps = [(r["tokens"], r["loss"]) for r in records]
        (thin,) = ax.plot(*zip(*steps, strict=True), linewidth=0.7, alpha=0.45, label=f"{name}training, each step")
        measured = [(r["tokens"], r["validation"]) for r in records if "validation" in r]
        if measured:
            label = f"{name}validation"
            ax.plot(*zip(*measured, strict=True), color=thin.get_color(), marker="o", markersize=4, lw=1.8, label=label)
    ax.xaxis.set_major_formatter(lambda value, place: short(value))
    ax.set(xlabel="tokens trained on", ylabel="loss of a token, nats", title="Loss while training")
    ax.legend(frameon=False)
    return figure


def plan_table(config: RunConfig, found: RunCost, width: int) -> Group:
    counts = {f"parameters, {name}": f"{n:,}" for name, n in found.parameters.items()}
    update = config.train.batch * config.data.context
    values = {
        **counts,
        "parameters": f"{sum(found.parameters.values()):,}",
        "tokens": f"{found.tokens:,}",
        "steps": f"{found.steps:,} of {update:,} tokens",
        **{f"FLOPs, {name}": f"{value:.3g}" for name, value in found.flops.items()},
        "FLOPs": f"{sum(found.flops.values()):.3g}",
        **{f"memory of a process, {name}": in_bytes(value) for name, value in found.memory.items()},
        "memory of a process": in_bytes(sum(found.memory.values())),
        "time": in_time(found.seconds),
    }
    notes = [f"Time on {found.processes} of this device, measured: {found.measured}."]
    if found.uncounted:
        notes.append(f"The mixing of {', '.join(found.uncounted)} is not among the operations.")
    table = tabulate(width, "", [Column("what the run takes"), Column("")], [list(item) for item in values.items()])
    return Group(table, *map(Text, notes), Text(settings(config)))


def settings(config: RunConfig) -> str:
    """Every field, as it would be given."""
    lines = []
    for part in ("model", "data", "train"):
        values = dataclasses.asdict(getattr(config, part))
        lines.append(" ".join(f"{part}.{name}={as_given(value)}" for name, value in values.items()))
    return "\n".join(lines)


def as_given(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return ",".join(map(str, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def in_bytes(value: float) -> str:
    return f"{value / 1e9:,.2f} GB" if value >= 1e8 else f"{value / 1e6:,.2f} MB"


def in_time(seconds: float) -> str:
    for unit, size in (("years", 365 * 86400), ("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.0f} seconds"
