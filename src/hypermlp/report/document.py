"""The frame of a page that is about one thing: title, contents, sections; complete in itself, in the style of every report."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

HERE = Path(__file__).parent


def document(title: str, lead: str, sections: Sequence[tuple[str, str]]) -> str:
    """Title and lead are text; sections are (title, HTML), and whoever writes the HTML escapes its text."""
    links = "".join(f'<a href="#x{i}">{escape(name)}</a>' for i, (name, _) in enumerate(sections, 1))
    body = "\n".join(
        f'<section><h2 id="x{i}">{escape(name)}</h2>{html}</section>' for i, (name, html) in enumerate(sections, 1)
    )
    return (
        '<!DOCTYPE html>\n<html lang="en-GB"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="generator" content="hypermlp">'
        f"<title>{escape(title)}</title>"
        f"<style>\n{(HERE / 'page.css').read_text(encoding='utf-8')}</style></head>\n<body><main><h1>{escape(title)}</h1>\n"
        f'<p class="soft">{escape(lead)}</p>{f"<nav>{links}</nav>" if len(sections) > 1 else ""}\n{body}\n</main>'
        f"<script>\n{(HERE / 'page.js').read_text(encoding='utf-8')}</script></body></html>\n"
    )
