"""The application that every group of commands registers with."""

from __future__ import annotations

import os
from typing import Annotated

import typer

DEBUG = "HYPERMLP_DEBUG"

app = typer.Typer(
    help="HyperMLP and HyperGLU: attention read as a two-layer MLP whose hidden layer is the context.\n\n"
    "Start with [bold]hypermlp demo[/bold]: a few minutes on two cores.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def show_version(asked: bool) -> None:
    if asked:
        from hypermlp import __version__

        typer.echo(f"hypermlp {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", envvar=DEBUG, help="Show the traceback of every error, not its message alone.")
    ] = False,
) -> None:
    if debug:
        os.environ[DEBUG] = "1"  # for `main`, and for the processes that commands start
