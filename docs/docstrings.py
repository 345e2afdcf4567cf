"""Docstrings to Markdown for the site: examples become code, and indented lists of names become lists."""

from __future__ import annotations

import re
from typing import Any

import griffe

ITEM = re.compile(r"^ {4}(\w[\w, ]*): (.*)$")


def to_markdown(text: str) -> str:
    return "\n\n".join(map(paragraph, re.split(r"\n{2,}", text)))


def paragraph(text: str) -> str:
    if text.startswith(">>> "):
        return f"```python\n{text}\n```"
    head, *lines = text.split("\n")
    if not head.endswith(":") or not lines or not ITEM.match(lines[0]):
        return text
    items: list[str] = []
    for line in lines:
        if found := ITEM.match(line):
            names = ", ".join(f"`{name.strip()}`" for name in found[1].split(","))
            items.append(f"- {names}: {found[2]}")
        else:
            items[-1] += f" {line.strip()}"
    return f"**{head[:-1]}**\n\n" + "\n".join(items)


class Docstrings(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)
