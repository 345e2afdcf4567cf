"""A study in documents: all verdicts; where HyperGLU stands, as a table and as a picture of every gain behind it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from hypermlp.report.claims import (
    CONTRADICTED,
    HYPERGLU,
    HYPERMLP,
    INCONCLUSIVE,
    LEVEL,
    SUPPORTED,
    Evidence,
    beside,
    judge_claims,
    margin,
    weigh,
)
from hypermlp.report.estimates import NONE
from hypermlp.report.markdown import markdown_table
from hypermlp.report.predictions import predictions
from hypermlp.report.study import AVERAGE, CEILING, FLOOR, LOSS, Study, title_of
from hypermlp.report.style import new_figure
from hypermlp.report.table1 import task_title

SHOWN = ("S-pc", "gated_deltanet")  # rivals of the table
RIVALS = (*SHOWN, "deltanet", "mamba", "gla", HYPERMLP)
STANDS = {
    SUPPORTED: "ahead",
    CONTRADICTED: "behind",
    LEVEL: "level",
    INCONCLUSIVE: "undecided",
    CEILING: "both solve it",
    FLOOR: "both guess",
}
COLOURS = {SUPPORTED: "tab:green", CONTRADICTED: "tab:red"}  # grey: neither


def measures(studies: Sequence[Study]) -> list[tuple[Study, str, str]]:
    """Study, measure, and what that is called; a measure that a later study has too stands behind the first, with its steps."""
    found: dict[str, list[tuple[Study, str, str]]] = {}
    for study in studies:
        for measure in [*([LOSS] if study.language else []), *study.tasks]:
            name = "Language" if measure == LOSS else task_title(measure)
            again = f", {study.plans['mad']['steps'][measure]:,} steps" if measure in found else ""
            found.setdefault(measure, []).append((study, measure, name + again))
    return [item for items in found.values() for item in items]


def standing(study: Study, rival: str, measure: str) -> Evidence:
    """HyperGLU beside a rival, by the terms of the protocol."""
    return weigh(study, HYPERGLU, rival, measure, "more")


def evidence_markdown(*studies: Study) -> str:
    """Measures × rivals: means over seeds, gains with their intervals, and what they say."""
    rows = []
    for study, measure, name in measures(studies):
        found = [standing(study, rival, measure) for rival in SHOWN]
        row = [f"{name}, {'loss in nats' if measure == LOSS else '%'}", mean_text(study, HYPERGLU, found[0])]
        for rival, item in zip(SHOWN, found, strict=True):
            row += [mean_text(study, rival, item), NONE if item.gain is None else f"{STANDS[item.status]}, {item.gain_text}"]
        rows.append(row)
    heads = ["", title_of(HYPERGLU), *(head for rival in SHOWN for head in (title_of(rival) or rival, "HyperGLU is"))]
    return markdown_table(heads, rows)


def mean_text(study: Study, mixer: str, item: Evidence) -> str:
    score = study.score(mixer, item.measure)
    return NONE if score is None else f"{score.mean:.{item.digits}f}"


def picture(*studies: Study) -> Figure:
    """A panel per measure, a line per rival: HyperGLU's gain with its interval; grey: too small to matter."""
    shown = measures(studies)
    columns = min(len(shown), 4)
    rows = math.ceil(len(shown) / columns)
    figure, axes = new_figure(columns, rows, width=1.6 + 1.9 * columns, height=2.5 * rows)
    for ax in axes[len(shown) :]:
        ax.remove()
    for place, (ax, (study, measure, name)) in enumerate(zip(axes, shown, strict=False)):
        small = margin(measure, study.terms)
        ax.axvspan(-small, small, color="0.9", zorder=0)
        ax.axvline(0, color="0.5", linewidth=1, zorder=1)
        for line, rival in enumerate(RIVALS):
            item = standing(study, rival, measure)
            if item.gain is not None:
                colour = COLOURS.get(item.status, "0.35")
                if item.gain.seeds > 1:
                    ax.plot(item.gain.ends(study.terms.interval), (line, line), color=colour, linewidth=2)
                ax.plot(item.gain.mean, line, "o", color=colour, markersize=5)
        ax.set_yticks(range(len(RIVALS)), [] if place % columns else [title_of(rival) or rival for rival in RIVALS])
        ax.set_ylim(len(RIVALS) - 0.5, -0.5)
        ax.set_title(name, fontsize=10)
        ax.set_xlabel("nats saved" if measure == LOSS else "points gained", fontsize=9)
    return figure


def verdicts_markdown(study: Study) -> str:
    """Claims and predictions with their verdicts, for a document."""
    lines = ["| claim | verdict here | gains (loss: saved) |", "| --- | --- | --- |"]
    for i, outcome in enumerate(judge_claims(study), 1):
        lines.append(f"| {i}. {outcome.claim.title} | {outcome.words} | {outcome.numbers or NONE} |")
    for found in predictions(study):
        item = found.evidence
        shown = f"with mixing − without: {item.gain_text}{beside(item)}"
        lines.append(f"| Table 4: {found.expected} gain on {task_title(found.task).lower()} | {item.words} | {shown} |")
    return "\n".join(lines)


def longer_markdown(study: Study, longer: Study) -> str:
    """What a later study with longer runs says on each claim, and what becomes of the claim with those runs in their place."""
    both = replace(study, mad=[*(record for record in study.mad if record["task"] not in longer.tasks), *longer.mad])
    before, after = ({outcome.claim.title: outcome for outcome in judge_claims(one)} for one in (study, both))
    lines = [
        "| claim | longer runs alone | as registered | with longer runs | gain of the MAD average with them |",
        "|" + " --- |" * 5,
    ]
    for outcome in judge_claims(longer):
        title, own = outcome.claim.title, [f"{i.better} − {i.worse} {i.gain_text}{beside(i)}" for i in outcome.judged]
        averages = [item.gain_text for item in after[title].evidence if item.measure == AVERAGE]
        cells = [title, f"{outcome.words}: {', '.join(own) or NONE}", before[title].words, after[title].words]
        lines.append("| " + " | ".join([*cells, ", ".join(averages) or NONE]) + " |")
    return "\n".join(lines)
