"""A study in documents: all verdicts; where HyperGLU stands, as a table and as a picture of every gain behind it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from hypermlp.report.markdown import markdown_table
from hypermlp.report.ranks import at_own_rank, rank_of
from hypermlp.report.style import new_figure
from hypermlp.report.table1 import task_title
from hypermlp.report.words import beside, claim_words, corrected_words, digits, evidence_words, gain_words, numbers
from hypermlp.verdicts.claims import CONTRADICTED, LEVEL, SUPPORTED, Evidence, judge_claims, smallest, weigh
from hypermlp.verdicts.estimates import NONE
from hypermlp.verdicts.predictions import HYPERGLU, HYPERMLP, predictions
from hypermlp.verdicts.results import AVERAGE, CEILING, FLOOR, LOSS, LOSSES, VALIDATION, Results, plain_name, title_of

SHOWN = ("S-pc", "gated_deltanet")  # rivals of the table
RIVALS = (*SHOWN, "deltanet", "mamba", "gla", HYPERMLP)
STANDS = {SUPPORTED: "ahead", CONTRADICTED: "behind", LEVEL: "level", CEILING: "both solve it", FLOOR: "both guess"}
UNITS = {VALIDATION: "validation loss in nats", LOSS: "loss in nats"}
COLOURS = {SUPPORTED: "tab:green", CONTRADICTED: "tab:red"}  # grey: neither


def measures(studies: Sequence[Results], at_16: Results | None = None) -> list[tuple[Results, str, str]]:
    """Study, measure, and what that is called; a measure that a later study has too stands behind the first, with its steps.

    HyperGLU has the paper's rank. Where the search gave it another, the name says so; runs at the paper's (at_16) come first.
    """
    found: dict[str, list[tuple[Results, str, str]]] = {}
    for study in studies:
        for measure in [*study.losses[:1], *study.tasks]:
            name = "Language" if measure in LOSSES else task_title(measure)
            again = f", {study.plans['mad']['steps'][measure]:,} steps" if measure in found else ""
            own, rank = found.setdefault(measure, []), rank_of(study, HYPERGLU, measure)
            if rank and not again and at_16 is not None and measure in at_16.tasks:
                own.append((at_own_rank(study, at_16), measure, name))
            own.append((study, measure, name + again + (f", HyperGLU{rank}" if rank else "")))
    return [item for items in found.values() for item in items]


def standing(study: Results, rival: str, measure: str) -> Evidence:
    """HyperGLU beside a rival, by the terms of the protocol."""
    return weigh(study, HYPERGLU, rival, measure, "more")


def evidence_markdown(*studies: Results, at_16: Results | None = None) -> str:
    """Measures × rivals: means over seeds, gains with their intervals, and what they say."""
    rows = []
    for study, measure, name in measures(studies, at_16):
        found = [standing(study, rival, measure) for rival in SHOWN]
        row = [f"{name}, {UNITS.get(measure, '%')}", mean_text(study, HYPERGLU, found[0])]
        for rival, item in zip(SHOWN, found, strict=True):
            row += [mean_text(study, rival, item), NONE if item.gain is None else f"{stands(item)}, {gain_words(item)}"]
        rows.append(row)
    names = [title_of(rival) or f"{plain_name(rival)}, {rival}" for rival in SHOWN]
    heads = ["", title_of(HYPERGLU), *(head for name in names for head in (name, "HyperGLU is"))]
    return markdown_table(heads, rows)


def standing_markdown(*studies: Results, at_16: Results | None = None) -> str:
    """The same in short, for a first look: means, and where HyperGLU stands, with rivals by their plain names.

    How much each was searched stands below.
    """
    rows = []
    for study, measure, name in measures(studies, at_16):
        found = [standing(study, rival, measure) for rival in SHOWN]
        row = [f"{name}, {UNITS.get(measure, '%')}", mean_text(study, HYPERGLU, found[0])]
        for rival, item in zip(SHOWN, found, strict=True):
            row += [mean_text(study, rival, item), NONE if item.gain is None else stands(item)]
        rows.append(row)
    runs = {mixer: sum(study.search_runs.get(mixer, 0) for study in studies) for mixer in (HYPERGLU, *SHOWN)}
    if any(runs.values()):
        rows.append(["Runs of the search", str(runs[HYPERGLU]), *(cell for rival in SHOWN for cell in (str(runs[rival]), ""))])
    heads = ["", plain_name(HYPERGLU), *(head for rival in SHOWN for head in (plain_name(rival), "HyperGLU is"))]
    return markdown_table(heads, rows)


def stands(item: Evidence) -> str:
    """Where HyperGLU is."""
    assert item.verdict is not None
    return STANDS.get(item.verdict.word) or STANDS.get(item.verdict.limit) or item.verdict.word


def mean_text(study: Results, mixer: str, item: Evidence) -> str:
    score = study.score(mixer, item.measure)
    return NONE if score is None else f"{score.mean:.{digits(item)}f}"


def picture(*studies: Results) -> Figure:
    """A panel per measure, a line per rival: HyperGLU's gain with its interval; grey: too small to matter."""
    shown = measures(studies)
    columns = min(len(shown), 4)
    rows = math.ceil(len(shown) / columns)
    figure, axes = new_figure(columns, rows, width=1.6 + 1.9 * columns, height=2.5 * rows)
    for ax in axes[len(shown) :]:
        ax.remove()
    for place, (ax, (study, measure, name)) in enumerate(zip(axes, shown, strict=False)):
        small = smallest(measure, study.terms)
        ax.axvspan(-small, small, color="0.9", zorder=0)
        ax.axvline(0, color="0.5", linewidth=1, zorder=1)
        for line, rival in enumerate(RIVALS):
            item = standing(study, rival, measure)
            if item.gain is not None:
                colour = COLOURS.get(item.verdict.word if item.verdict else "", "0.35")
                if item.gain.seeds > 1:
                    ax.plot(item.gain.ends(study.terms.interval), (line, line), color=colour, linewidth=2)
                ax.plot(item.gain.mean, line, "o", color=colour, markersize=5)
        ax.set_yticks(range(len(RIVALS)), [] if place % columns else [title_of(rival) or rival for rival in RIVALS])
        ax.set_ylim(len(RIVALS) - 0.5, -0.5)
        ax.set_title(name.replace(", HyperGLU@", " @"), fontsize=10)
        ax.set_xlabel("nats saved" if measure in LOSSES else "points gained", fontsize=9)
    return figure


def verdicts_markdown(study: Results) -> str:
    """Claims and predictions with their verdicts, for a document; beside verdicts on other terms, those by t with Holm."""
    claims = judge_claims(study)
    head = [] if all(claim.is_corrected for claim in claims) else ["by Student’s t with Holm"]
    lines = [f"| {' | '.join(['claim', 'verdict here', *head, 'gains (loss: saved)'])} |", f"|{' --- |' * (3 + len(head))}"]
    for i, claim in enumerate(claims, 1):
        corrected = [corrected_words(claim).partition(": ")[2] or NONE] if head else []
        lines.append(f"| {' | '.join([f'{i}. {claim.title}', claim_words(claim), *corrected, numbers(claim) or NONE])} |")
    for found in predictions(study):
        item = found.evidence
        shown = f"with mixing − without: {gain_words(item)}{beside(item)}"
        title = f"Table 4: {found.expected} gain on {task_title(found.task).lower()}"
        lines.append(f"| {' | '.join([title, evidence_words(item), *([NONE] if head else []), shown])} |")
    return "\n".join(lines)


def longer_markdown(study: Results, longer: Results) -> str:
    """What a later study with longer runs says on each claim, and what becomes of the claim with those runs in their place."""
    both = replace(study, mad=[*(record for record in study.mad if record["task"] not in longer.tasks), *longer.mad])
    before, after = ({claim.title: claim for claim in judge_claims(one)} for one in (study, both))
    lines = [
        "| claim | longer runs alone | as registered | with longer runs | gain of the MAD average with them |",
        "|" + " --- |" * 5,
    ]
    for claim in judge_claims(longer):
        own = [f"{i.better} − {i.worse} {gain_words(i)}{beside(i)}" for i in claim.judged]
        averages = [gain_words(item) for item in after[claim.title].evidence if item.measure == AVERAGE]
        verdicts = [claim_words(one[claim.title]) for one in (before, after)]
        cells = [claim.title, f"{claim_words(claim)}: {', '.join(own) or NONE}", *verdicts, ", ".join(averages) or NONE]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
