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
            metavar="[STATEMENT]...",
            help="Only these: a statement (2.3), an appendix (C), examples (example); or several, comma-separated.",
            show_default=False,
        ),
    ] = None,
    show: Annotated[
        bool, typer.Option("--list", help="Only list the statements, or with --faults the faults, as a Markdown table.")
    ] = False,
    faults: Annotated[
        bool, typer.Option("--faults", help="Also seed faults in the operator, and tell which statements notice them.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Also write a page there: a map, every sentence, the pictures. Such as theory.html.")
    ] = None,
    force: Force = False,
) -> None:
    """Check the paper's statements on random instances, and again with their assumptions broken.

    All that the paper numbers is listed: definitions, assumptions, what other checks cover and what only a proof decides are
    marked as such, and all else is checked. The table has the largest error over all instances, for inequalities how close they
    came to equality, and the smallest error under the control, where the check must fail. With one statement, or a few, the
    sentences are printed too.
    """
    from hypermlp.report.theory import faults_markdown, markdown, show_theory
    from hypermlp.theory import select
    from hypermlp.theory.faults import noticed

    if show and out is not None:
        raise ValueError("--list lists the statements and runs none, so there is no page for --out: leave out one of them")
    wanted = [part for text in only or [] for part in text.split(",")]
    if show:
        entries = select(wanted)
        print(faults_markdown({e.number: names for e, names in noticed(entries)}) if faults else markdown(entries), end="")
        return
    if not show_theory(open_console(), wanted, out, faults=faults, force=force):
        raise typer.Exit(1)
