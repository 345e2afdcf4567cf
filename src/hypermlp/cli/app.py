"""The application that every command registers with, and what all commands have in common."""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from hypermlp.cli.console import tables_as_json

DEBUG = "HYPERMLP_DEBUG"
# The paper's names, for the command that they stand for.
ALIASES = {"table1": ("study", "run", "table1"), "table5": ("bench", "model")}


# In the order in which one needs them.
ORDER = ("demo", "study", "train", "generate", "eval", "explore", "export", "data", "mixers", "theory", "bench", "gpu", "info")


class Plain:
    """Help in words: paragraphs that fill the line, and TEXT, NUMBER or PATH for a value, not its type in Python."""

    help: str | None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if text := getattr(self, "help", None):
            self.help = "\n\n".join(" ".join(part.split()) for part in re.split(r"\n\s*\n", text.strip()))

    def get_params(self, ctx: Any) -> Any:
        found = super().get_params(ctx)  # type: ignore[misc]
        for parameter in found:
            if parameter.param_type_name == "argument":
                parameter.metavar = parameter.metavar or parameter.name.upper()
                parameter.display_type_rich = lambda ctx: None  # the name says it
            elif getattr(parameter, "is_flag", False):
                parameter.metavar = ""
            else:
                parameter.metavar = parameter.metavar or placeholder(type_of(parameter))
            parameter._get_number_range_help_str = lambda: None  # a number outside is refused with the range
        return found


def type_of(parameter: Any) -> str:
    described = getattr(parameter, "type_descriptor", None)  # of newer versions of typer; older ones have click's type
    return str(parameter.type if described is None else described.annotation)


def placeholder(kind: str) -> str:
    """What stands for a value in help.

    >>> [placeholder(kind) for kind in ("<class str>", "<IntRange x>=1>", "FLOAT", "Path")]
    ['TEXT', 'NUMBER', 'NUMBER', 'PATH']
    """
    return next((word for word, kinds in PLACEHOLDERS.items() if re.search(kinds, kind, re.I)), "TEXT")


PLACEHOLDERS = {"NUMBER": r"\b(int|float)", "PATH": r"\bpath"}


class Command(Plain, TyperCommand):
    pass


class Group(Plain, TyperGroup):
    pass


class App(typer.Typer):
    def command(self, name: str | None = None, **options: Any) -> Callable[..., Any]:
        return super().command(name, **{"cls": Command, **options})


class Commands(Group):
    """Lists commands in the order of use, and knows the paper's names too."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=ORDER.index)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        return super().resolve_command(ctx, [*ALIASES.get(args[0], args[:1]), *args[1:]])


app = App(
    cls=Commands,
    help="Train, measure and look into HyperGLU and HyperMLP, drop-in replacements for causal self-attention.\n\n"
    "Start with [bold]hypermlp demo[/bold], which takes a few minutes on two cores. Or try a model that comes with the "
    "package: [bold]hypermlp generate 'def main('[/bold].",
    epilog="[bold]hypermlp table1[/bold] is short for study run table1, [bold]hypermlp table5[/bold] for bench model: "
    "the paper's tables.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def commands(name: str, about: str) -> typer.Typer:
    """A group of commands."""
    group = App(cls=Group, help=about, no_args_is_help=True)
    app.add_typer(group, name=name)
    return group


def shows_tables(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command that prints tables the option --json."""
    option = Annotated[bool, typer.Option("--json", help="Print the tables as JSON on stdout, everything else on stderr.")]

    @functools.wraps(command)
    def run(*arguments: Any, as_json: bool = False, **options: Any) -> None:
        if not as_json:
            command(*arguments, **options)
            return
        with tables_as_json():
            command(*arguments, **options)

    own = inspect.signature(command, eval_str=True)
    asked = inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=option)
    run.__signature__ = own.replace(parameters=[*own.parameters.values(), asked])  # type: ignore[attr-defined]
    run.__annotations__ = {**command.__annotations__, "as_json": option}
    return run


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
        bool, typer.Option("--debug", envvar=DEBUG, help="Show the full traceback of an error, not only its message.")
    ] = False,
) -> None:
    if debug:
        os.environ[DEBUG] = "1"  # for `main`, and for the processes that commands start
