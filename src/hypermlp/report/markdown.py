"""Tables and marked blocks of Markdown documents, whose numbers come from results."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

BLOCK = re.compile(r"<!-- (?!end)(.*?) -->.*?<!-- end -->", re.S)


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "| --- " + "| ---: " * (len(heads) - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def fill(document: str, blocks: Mapping[str, str]) -> str:
    """The document with every block between its marks (<!-- name --> … <!-- end -->) written anew."""
    return BLOCK.sub(lambda found: f"<!-- {found[1]} -->\n\n{blocks[found[1]]}\n\n<!-- end -->", document)
