"""What the program itself says on the site, whenever it is built (a hook of mkdocs): its version, its commands, its changes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from hypermlp import __version__
from hypermlp.cli import app

PAGE, PLACE = "api/command-line.md", "<!-- commands -->"
CHANGES, LIST = "changes.md", "<!-- changes -->"


def on_config(config: Any) -> None:
    """At the foot of every page."""
    config.copyright = (
        f"hypermlp {__version__}, {config.copyright}. Each tag of the repository has the documents of its version."
    )


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    if page.file.src_uri == CHANGES:
        changes = (Path(__file__).parents[1] / "CHANGELOG.md").read_text(encoding="utf-8")
        return markdown.replace(LIST, changes.partition("\n")[2])
    return markdown.replace(PLACE, reference()) if page.file.src_uri == PAGE else markdown


def reference() -> str:
    """Every command with its arguments and options, in the order of --help."""
    root: Any = typer.main.get_command(app)
    context = typer.Context(root)
    names = root.list_commands(context)
    return "\n\n".join(part for name in names for part in command(root.commands[name], f"hypermlp {name}"))


def command(one: Any, name: str) -> Iterator[str]:
    inner = getattr(one, "commands", {})
    arguments = [parameter for parameter in one.params if parameter.param_type_name == "argument"]
    usage = " ".join([name, *map(shown, arguments), *(["COMMAND"] if inner else []), "[OPTIONS]"])
    yield f"## {name}"
    yield plain(one.help or "")
    if not inner:
        yield f"```text\n{usage}\n```"
        yield table(arguments, one.params)
    for word, below in inner.items():
        yield from (
            part.replace("## ", "### ", 1) if part.startswith("## ") else part for part in command(below, f"{name} {word}")
        )


def shown(argument: Any) -> str:
    return argument.metavar or (argument.name.upper() if argument.required else f"[{argument.name.upper()}]")


def table(arguments: list[Any], parameters: list[Any]) -> str:
    rows = [(shown(argument), argument.help) for argument in arguments]
    rows += [
        (", ".join([*parameter.opts, *parameter.secondary_opts]), parameter.help)
        for parameter in parameters
        if parameter.param_type_name == "option"
    ]
    lines = [f"| `{name}` | {plain(text or '').replace('|', chr(92) + '|')} |" for name, text in rows]
    return "\n".join(["| argument or option | meaning |", "| --- | --- |", *lines]) if lines else ""


def plain(text: str) -> str:
    """Help without the marks that a terminal takes for bold; a paragraph is one line."""
    parts = re.split(r"\n\s*\n", re.sub(r"\[/?bold\]", "", text).strip())
    return "\n\n".join(" ".join(part.split()) for part in parts)
