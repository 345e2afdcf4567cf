"""The map of the paper's Figure 4: its statements by thread, coloured by what their checks found, linked by what cites what.

The text names the three threads and what belongs to them; the figure's own boxes are a picture, so the boxes here are ours.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from markupsafe import Markup

from hypermlp.theory import Result
from hypermlp.theory.numbered import NUMBERED
from hypermlp.theory.registry import FAILS, HOLDS, NOT_RUN, TOOTHLESS

THREADS: dict[str, dict[str, tuple[str, ...]]] = {
    "Mechanism and analysis": {
        "ReLU selects a sub-network": ("C.1", "C.2"),
        "A head is a dynamic two-layer MLP": ("2.1", "C.3", "H.3"),
        "Normalisation keeps the gate": ("B.1", "B.2", "C.4"),
        "Space, pool, activated memory": ("C.5", "E.1", "E.2", "E.3", "E.4", "H.10", "H.11"),
        "Pools grow with the context": ("C.8", "C.9", "E.5", "H.1", "H.5", "H.6"),
        "Measures and total variation": ("D.1", "D.2", "D.3", "D.4", "D.5", "D.6", "D.7", "E.6", "E.7", "E.8", "E.9"),
        "Tangent kernel and stability": ("D.8", "D.9", "D.10", "D.11", "E.10"),
    },
    "Geometry and function classes": {
        "Static mixing: polyhedra": ("2.2", "C.10", "C.11", "C.12", "C.16", "H.7"),
        "Dynamic mixing: warped cells": ("C.13", "C.14", "C.15", "H.8", "H.9"),
        "More functions than attention": ("I.1", "I.2", "I.3", "example 1", "example 2", "example 3"),
    },
    "Parameterisation and efficiency": {
        "Lag order and extension": ("2.3", "C.6", "C.7", "F.1", "F.2", "H.2", "H.4"),
        "Where a rank is felt": ("2.5", "2.6", "F.3", "F.4", "F.5"),
        "HyperGLU": ("2.4",),
        "Cost": ("G.1", "G.2", "G.3", "G.4", "G.5"),
    },
}
KEY = {
    "holds": "holds",
    "corrected": "holds, corrected",
    "fails": "fails",
    "listed": "definition, assumption, …",
    "open": "not run",
}


def anchor(number: str) -> str:
    return "s-" + re.sub(r"[^0-9A-Za-z]+", "-", number).strip("-")


def joined(parts: Iterable[str], between: str = "") -> Markup:
    """Pieces of a page in a row; what is text is escaped."""
    return Markup(between).join(parts)


def link_to(number: str, text: str) -> Markup:
    """A link to a statement's card."""
    return Markup('<a href="#{}">{}</a>').format(anchor(number), text)


def base(number: str) -> str:
    """The paper's number of an entry: 2.6 of 2.6 (ii)."""
    return number.partition(" (")[0]


def colour(results: Sequence[Result]) -> str:
    """One word for all entries of a number: the worst of them."""
    verdicts = {result.verdict for result in results}
    if verdicts & {FAILS, TOOTHLESS}:
        return "fails"
    if not verdicts or NOT_RUN in verdicts:
        return "open"
    if HOLDS not in verdicts:
        return "listed"
    return "corrected" if any(result.statement.printed for result in results) else "holds"


def cited_by(number: str) -> list[str]:
    return [entry.number for entry in NUMBERED.values() if number in entry.cites]


def html_map(results: Sequence[Result]) -> Markup:
    """The threads side by side; a script draws the links."""
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(base(result.statement.number), []).append(result)
    key = joined(Markup('<span class="node {}">{}</span>').format(word, text) for word, text in KEY.items())
    intro = (
        "The paper's Figure 4 orders its results in three threads. Lines join a statement to those that its text or proof "
        "names; point at one, or tap it, to see its own."
    )
    threads = joined(html_thread(name, boxes, found) for name, boxes in THREADS.items())
    page = Markup('<p>{}</p><p class="map-key">{}</p><div class="map">{}<svg aria-hidden="true"></svg></div>')
    return page.format(intro, key, threads)


def html_thread(name: str, boxes: Mapping[str, Iterable[str]], found: Mapping[str, Sequence[Result]]) -> Markup:
    shown = []
    for title, numbers in boxes.items():
        nodes = joined(html_node(number, found.get(number, ())) for number in numbers)
        shown.append(Markup('<div class="map-box"><h4>{}</h4><ul>{}</ul></div>').format(title, nodes))
    return Markup('<section class="thread"><h3>{}</h3>{}</section>').format(name, joined(shown))


def html_node(number: str, results: Sequence[Result]) -> Markup:
    """A statement: its number, coloured and linked to its card where it was run, and its title in our words."""
    title = results[0].statement.title if results else f"{NUMBERED[number].kind}, not run"
    if len(results) > 1 and number == "2.6":
        title = "Design principles that follow"
    attributes = Markup('class="node {}" data-number="{}" data-cites="{}"').format(
        colour(results), number, "|".join(NUMBERED[number].cites)
    )
    shown = number.replace("example", "Ex.")
    if not results:
        return Markup("<li><span {}>{}</span> {}</li>").format(attributes, shown, title)
    return Markup('<li><a {} href="#{}">{}</a> {}</li>').format(attributes, anchor(results[0].statement.number), shown, title)


def links_of(number: str, known: Collection[str]) -> Markup:
    """What a statement cites and what cites it, linked where the page has it."""
    entry = NUMBERED.get(base(number))
    if entry is None:
        return Markup()

    def linked(numbers: Iterable[str]) -> Markup:
        target = {base(n): n for n in sorted(known, reverse=True)}  # of several entries the first
        return joined((link_to(target[n], n) if n in target else n for n in numbers), ", ")

    parts = [(word, numbers) for word, numbers in (("rests on", entry.cites), ("used by", cited_by(entry.number))) if numbers]
    told = joined((Markup("{} {}").format(word, linked(numbers)) for word, numbers in parts), "; ")
    return Markup('<p class="note">{}</p>').format(told) if parts else Markup()
