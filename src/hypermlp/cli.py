"""The command line: parsing and printing only."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(
    help="HyperMLP and HyperGLU: attention read as a two-layer MLP whose hidden layer is the context.\n\n"
    "Start with [bold]hypermlp demo[/bold]: about a minute on two cores.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.command()
def info() -> None:
    """Versions, device, and which implementation would be chosen and why."""
    from hypermlp.ops import choose
    from hypermlp.provenance import machine

    shown = Table(show_header=False, box=None)
    for name, value in machine().items():
        shown.add_row(name, "none" if value is None else str(value))
    choice = choose("auto")
    shown.add_row("implementation", f"{choice.impl} ({choice.reason})")
    Console().print(shown)


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each model.")] = 600,
    seed: Annotated[int, typer.Option(help="Of the initial weights and the data.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the picture and the numbers.")] = Path("runs/demo"),
) -> None:
    """Train HyperGLU and softmax attention, equal in parameters, side by side on a copying task."""
    from hypermlp.report.demo import show

    show(Console(), steps=steps, seed=seed, out=out)


def main() -> None:
    """Entry point: a user's mistake ends in one line, not in a traceback."""
    try:
        app()
    except (ValueError, OSError) as error:
        print(f"hypermlp: {error}", file=sys.stderr)
        raise SystemExit(1) from error
    except KeyboardInterrupt:
        print("hypermlp: stopped", file=sys.stderr)
        raise SystemExit(130) from None
