"""The application that every group of commands registers with."""

from __future__ import annotations

import typer

app = typer.Typer(
    help="HyperMLP and HyperGLU: attention read as a two-layer MLP whose hidden layer is the context.\n\n"
    "Start with [bold]hypermlp demo[/bold]: a few minutes on two cores.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)
