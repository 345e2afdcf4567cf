"""The paper's statements, run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hypermlp.cli.app import app, shows_tables
from hypermlp.cli.console import open_console
from hypermlp.cli.options import Force


@app.command()
@shows_tables
def theory(
    only: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="STATEMENT",
            help="Check only these: a statement (2.3), an appendix (C) or the examples (example); several are comma-separated.",
            show_default=False,
        ),
    ] = None,
    faults: Annotated[
        bool, typer.Option("--faults", help="Also plant faults in the operator, and say which statements notice them.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Also write a page (theory.html): a map, every sentence, the pictures.")
    ] = None,
    force: Force = False,
) -> None:
    """Check the paper's statements on random instances, and again with their assumptions broken.

    The table lists everything that the paper numbers. Definitions, assumptions, statements that other checks cover and
    statements that only a proof can decide are marked; all others are checked. Its columns are the largest error over all
    instances, how close inequalities came to equality, and the smallest error of the control, where the check must fail.
    If you name one statement or a few, their sentences are printed too.
    """
    from hypermlp.report.theory import show_theory

    wanted = [part for text in only or [] for part in text.split(",")]
    if not show_theory(open_console(), wanted, out, faults=faults, force=force):
        raise typer.Exit(1)
