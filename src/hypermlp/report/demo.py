"""What the demo shows: the live table while it runs, the learning curves afterwards."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from hypermlp import ops
from hypermlp.experiments import demo
from hypermlp.experiments.demo import Evaluation
from hypermlp.models.lm import count_parameters
from hypermlp.provenance import provenance, write_json
from hypermlp.report.style import COLOURS, LABELS, new_figure, save


def show(console: Console, *, steps: int, seed: int, out: Path) -> list[Evaluation]:
    """Run the demo on this console; leaves demo.png and demo.json in `out`."""
    out.mkdir(parents=True, exist_ok=True)  # a folder that cannot be made should fail now, not after the run
    ops.announce(ops.choose())  # compiles, where that is still to be done, before the display starts
    models = demo.contestants(seed)
    counts = {name: count_parameters(model) for name, model in models.items()}
    console.print(
        f"Selective copying: {demo.N_CONTENT} tokens hidden in {demo.LENGTH - demo.N_CONTENT}, to be repeated in order. "
        "Two models of two layers learn it from the same batches:"
    )
    for name, count in counts.items():
        console.print(f"  {LABELS[name]:<18} {count:,} parameters")
    history: list[Evaluation] = []
    progress = Progress(
        TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console, auto_refresh=False
    )
    task = progress.add_task("", total=steps)
    with Live(Group(table(history), progress), console=console, refresh_per_second=4, transient=True) as live:
        for event in demo.run(models, steps=steps, seed=seed):
            if isinstance(event, Evaluation):
                history.append(event)
                if not console.is_terminal:
                    console.print(line(event))
            else:
                progress.update(task, completed=event)
            live.update(Group(table(history), progress))
    console.print(table(history))
    picture = save(curves(history), out / "demo.png")
    record = {"provenance": provenance(seed), "parameters": counts, "evaluations": [dataclasses.asdict(e) for e in history]}
    write_json(out / "demo.json", record)
    console.print(verdict(history[-1]))
    console.print(f"Learning curves: {picture}   Numbers: {out / 'demo.json'}")
    return history


def table(history: list[Evaluation]) -> Table:
    shown = Table(title="accuracy on held-out sequences by step")
    shown.add_column("step", justify="right")
    for name in demo.MIXERS:
        shown.add_column(LABELS[name], justify="right")
    for event in history:
        shown.add_row(str(event.step), *(f"{event.accuracy[name]:.1%}" for name in demo.MIXERS))
    return shown


def line(event: Evaluation) -> str:
    return f"step {event.step:>5}   " + "   ".join(f"{LABELS[n]} {event.accuracy[n]:.1%}" for n in demo.MIXERS)


def verdict(last: Evaluation) -> str:
    ours, theirs = last.accuracy["hyperglu"], last.accuracy["softmax"]
    word = "ahead of" if ours > theirs + 0.01 else "behind" if ours < theirs - 0.01 else "level with"
    return (
        f"After {last.step} steps HyperGLU is {word} softmax attention: {ours:.1%} against {theirs:.1%}, "
        f"in {last.seconds['hyperglu']:.0f} s against {last.seconds['softmax']:.0f} s of training."
    )


def curves(history: list[Evaluation]) -> Figure:
    figure, (left, right) = new_figure(2, width=9.0, height=3.6)
    steps = [event.step for event in history]
    for name in demo.MIXERS:
        style: dict[str, Any] = {"color": COLOURS[name], "label": LABELS[name], "marker": "o", "markersize": 3}
        left.plot(steps, [100 * event.accuracy[name] for event in history], **style)
        right.plot(steps, [event.loss[name] for event in history], **style)
    left.set(title="held-out accuracy, selective copying", xlabel="step", ylabel="%", ylim=(0, 101))
    right.set(title="training loss", xlabel="step", yscale="log")
    left.legend(frameon=False)
    return figure
