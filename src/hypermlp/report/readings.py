"""What the answers of a demo's models read: the text once per answer, each token coloured by its share."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from hypermlp.report.markup import charts, heading, paragraph, render
from hypermlp.report.table1 import TITLES
from hypermlp.verdicts.results import Results, plain_name

CELL, ROW, LEFT, TOP = 15, 17, 74, 20  # sizes of the picture


def what_answers_read(study: Results) -> Markup:
    """One picture per task and model, for the first seed; empty without records."""
    shown = [record for record in study.mad if record.get("reading") and record["seed"] == 0]
    if not shown:
        return Markup()
    html = paragraph(
        "One test example, read by the head of the last layer that adds most. Each line is one answer that the model has to "
        "give; the colour of a token is the share of the head’s output that its value makes. Blue adds, orange takes away. A "
        "value holds a token and, through the convolution, the three before it. On a page of its own, for every token, layer "
        "and head: hypermlp explore and the folder of this study."
    )
    for task in dict.fromkeys(record["task"] for record in shown):
        figures = [figure(record["mixer"], record["reading"]) for record in shown if record["task"] == task]
        html += heading(TITLES[task]) + charts(figures, wide=True)
    return html


def figure(mixer: str, found: dict[str, Any]) -> Markup:
    tokens: list[str] = found["tokens"]
    right = sum(given == wanted for given, wanted in zip(found["given"], found["right"], strict=True))
    layer = f"layer {found['layer']}, head {found['head']}"
    return render(
        "reading.html",
        title=f"{plain_name(mixer)} ({mixer}), {layer}: {right} of {len(found['right'])} answers are right",
        width=LEFT + CELL * len(tokens) + 4,
        height=TOP + ROW * len(found["answers"]) + 4,
        left=LEFT,
        side=CELL,
        row=ROW,
        heads=[(LEFT + CELL * (i + 0.5), token if len(token) <= 2 else "▸") for i, token in enumerate(tokens)],
        lines=[line(found, i) for i in range(len(found["answers"]))],
    )


def line(found: dict[str, Any], i: int) -> dict[str, Any]:
    """An answer: what was given, right or wrong, and the tokens by their shares."""
    shares, given, wanted = found["shares"][i], found["given"][i], found["right"][i]
    largest = max(max(map(abs, shares)), 1e-9)
    cells = [
        {
            "x": LEFT + CELL * c,
            "kind": "up" if share > 0 else "down",
            "opacity": f"{abs(share) / largest:.3f}",
            "title": f"{found['tokens'][c]}: {share:.1%}",
        }
        for c, share in enumerate(shares)
        if abs(share) >= 0.005 * largest
    ]
    words = f"{given} ✓" if given == wanted else f"{given} ✗ ({wanted})"
    return {"y": TOP + ROW * i, "words": words, "cells": cells, "own": LEFT + CELL * found["answers"][i]}
