"""What the answers of a demo's models read: the text once per answer, each token coloured by its share."""

from __future__ import annotations

from html import escape
from typing import Any

from hypermlp.report.markup import paragraph
from hypermlp.report.study import Study
from hypermlp.report.table1 import TITLES

CELL, ROW, LEFT, TOP = 15, 17, 74, 20  # sizes of the picture


def what_answers_read(study: Study) -> str:
    """One picture per task and model, for the first seed; empty without records."""
    shown = [record for record in study.mad if record.get("reading") and record["seed"] == 0]
    if not shown:
        return ""
    html = paragraph(
        "One test example, read by the head of the last layer that adds most. Each line is one answer that the model has to "
        "give; the colour of a token is the share of the head’s output that its value makes. Blue adds, orange takes away. A "
        "value holds a token and, through the convolution, the three before it. On a page of its own, for every token, layer "
        "and head: hypermlp explore --task selective-copying."
    )
    for task in dict.fromkeys(record["task"] for record in shown):
        figures = [figure(record["mixer"], record["reading"]) for record in shown if record["task"] == task]
        html += f'<h4>{escape(TITLES[task])}</h4><div class="charts wide">{"".join(figures)}</div>'
    return html


def figure(mixer: str, found: dict[str, Any]) -> str:
    tokens: list[str] = found["tokens"]
    right = sum(given == wanted for given, wanted in zip(found["given"], found["right"], strict=True))
    title = f"{mixer}, layer {found['layer']}, head {found['head']}: {right} of {len(found['right'])} answers are right"
    width, height = LEFT + CELL * len(tokens) + 4, TOP + ROW * len(found["answers"]) + 4
    heads = "".join(
        f'<text x="{LEFT + CELL * (i + 0.5):.1f}" y="{TOP - 6}" text-anchor="middle">{escape(short(token))}</text>'
        for i, token in enumerate(tokens)
    )
    lines = "".join(line(found, i) for i in range(len(found["answers"])))
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">{heads}{lines}</svg></figure>'
    )


def short(token: str) -> str:
    return token if len(token) <= 2 else "▸"


def line(found: dict[str, Any], i: int) -> str:
    """An answer: what was given, right or wrong, and the tokens by their shares; the answer's own place has a frame."""
    y, shares = TOP + ROW * i, found["shares"][i]
    given, wanted = found["given"][i], found["right"][i]
    words = f"{given} ✓" if given == wanted else f"{given} ✗ ({wanted})"
    largest = max(max(map(abs, shares)), 1e-9)
    cells = [f'<text x="{LEFT - 8}" y="{y + 12}" text-anchor="end">{escape(words)}</text>']
    for c, share in enumerate(shares):
        if abs(share) >= 0.005 * largest:
            kind = "up" if share > 0 else "down"
            cells.append(
                f'<rect x="{LEFT + CELL * c}" y="{y}" width="{CELL}" height="{ROW - 2}" '
                f'style="fill:rgb(var(--{kind}))" fill-opacity="{abs(share) / largest:.3f}"><title>'
                f"{escape(found['tokens'][c])}: {share:.1%}</title></rect>"
            )
    own = LEFT + CELL * found["answers"][i]
    cells.append(f'<path class="grid" style="fill:none" d="M{own} {y}h{CELL}v{ROW - 2}h-{CELL}z"/>')
    return "".join(cells)
