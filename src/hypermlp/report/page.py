"""One HTML page from a folder of results: complete in itself, readable without a network, scripts or a wide screen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from hypermlp.mixers.labels import MEANING, NO_LAG
from hypermlp.report import task_page
from hypermlp.report.accounts import budgets, failures, origins, run_times
from hypermlp.report.claims import (
    CONTRADICTED,
    INCONCLUSIVE,
    LEVEL,
    NOT_BEHIND,
    SUPPORTED,
    UNFINISHED,
    Evidence,
    judge_claims,
    noise_rule,
)
from hypermlp.report.curves import difficulty, learning_curves
from hypermlp.report.document import document
from hypermlp.report.estimates import ENOUGH, NONE, interval, signed
from hypermlp.report.folders import read_studies
from hypermlp.report.kernels import lag_kernels
from hypermlp.report.markup import cell, duration, facts, name_cell, paragraph, plural, prose, spread, table, verdict, words
from hypermlp.report.predictions import REASONS, prediction_rule, predictions
from hypermlp.report.readings import what_answers_read
from hypermlp.report.registered import protocol_section
from hypermlp.report.search import search_section
from hypermlp.report.study import AVERAGE, CEILING, FLOOR, LOSS, Study
from hypermlp.report.table1 import TITLES, Cell, columns, grid, legend, task_title

STRONG = {LOSS: 0.2}  # the difference of gains with the strongest colour; 20 for accuracies


@dataclass(frozen=True)
class Section:
    """A part of the page; `html` is trusted, so whoever writes it escapes its text."""

    title: str
    html: str


def write_report(folder: Path, out: Path | None = None, sections: Sequence[Section] = ()) -> Path:
    """Write the page of all runs in `folder` and below; returns its path (None: report.html in the folder)."""
    text = build_page(read_studies(folder), sections)
    out = out or folder / "report.html"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    return out


def build_page(studies: Sequence[Study], sections: Sequence[Section] = ()) -> str:
    """`sections` first, then all studies, one below the other."""
    parts = [(section.title, section.html) for section in sections]
    if picture := task_page.memory(studies):
        parts.append(("Recall against memory", picture))
    for i, study in enumerate(studies, 1):
        links, html = [], []
        for j, section in enumerate(study_sections(study), 1):
            links.append(f'<a href="#s{i}-{j}">{escape(section.title)}</a>')
            html.append(f'<h3 id="s{i}-{j}">{escape(section.title)}</h3>{section.html}')
        parts.append((heading(study), f"{links_of(links)}{''.join(html)}"))
    lead = "HyperMLP, HyperGLU and their rivals, measured; the numbers of the paper (Lu and Yang, 2026) beside them."
    return document("hypermlp: results", lead, parts)


def links_of(links: Iterable[str]) -> str:
    return f"<nav>{''.join(links)}</nav>"


def heading(study: Study) -> str:
    parts = []
    if "tasks" in study.plans:
        parts.append(", ".join(map(task_title, study.tasks)))
    if "mad" in study.plans:
        parts.append(f"MAD, {study.plans['mad']['protocol']} protocol")
    if "language" in study.plans:
        parts.append("language modelling")
    text = " and ".join(parts)
    return f"{text[0].upper()}{text[1:]}" + ("" if study.folders == (".",) else f" ({', '.join(study.folders)})")


def study_sections(study: Study) -> list[Section]:
    if "tasks" in study.plans:
        return task_sections(study)
    kernels, readings = lag_kernels(study), what_answers_read(study)
    protocol, search = protocol_section(study), search_section(study)
    return [
        Section("Summary", summary(study)),
        *([Section("Protocol", protocol)] if protocol else []),
        Section("Table 1", table1(study)),
        Section("Learning curves", learning_curves(study)),
        *([Section("What an answer reads", readings)] if readings else []),
        *([Section("Learned lag kernels", kernels)] if kernels else []),
        Section("Accuracy against difficulty", difficulty(study)),
        Section("Claims", claim_cards(study)),
        Section("Predictions", prediction_table(study)),
        *([Section("Search", search)] if search else []),
        Section("Parameter budgets", budgets(study)),
        Section("Run times", run_times(study)),
        Section("Failures", failures(study)),
        Section("Provenance", origins(study)),
    ]


# ---- summary ----


def task_sections(study: Study) -> list[Section]:
    """Of a study on one task that is none of MAD's."""
    found = {
        "Summary": task_page.summary(study),
        "Scores": task_page.scores(study),
        "Slices": task_page.slices(study),
        "Beyond the training length": task_page.beyond(study),
        "Learning curves": learning_curves(study),
        "Learning rates": search_section(study),
        "Parameter budgets": budgets(study),
        "Run times": run_times(study),
        "Failures": failures(study),
        "Provenance": origins(study),
    }
    return [Section(title, html) for title, html in found.items() if html]


def summary(study: Study) -> str:
    failed = sum(record["error"] is not None for record in study.records)
    seconds = [record["seconds"] for record in study.records if record.get("seconds") is not None]
    run = {
        "runs": f"{len(study.records):,}" + (f", of which {failed} failed" if failed else ""),
        "mixers": f"{len(study.mixers)}: {', '.join(study.mixers)}",
    }
    if study.mad:
        settings = sum(len(study.settings(task)) for task in study.tasks)
        run["MAD"] = f"{plural(len(study.tasks), 'task')}, {plural(settings, 'setting')}, {study.mad[0]['protocol']} protocol"
    run["seeds"] = f"{len(study.seeds)}: {', '.join(map(str, study.seeds))}"
    for kind, plan in study.plans.items():
        if shown := scale(plan):
            run[f"scale, {'MAD' if kind == 'mad' else kind}"] = shown
    run["training time"] = duration(sum(seconds)) + " over all runs, without evaluations"
    return paragraph(outcome(study), "lead") + judged(study) + facts(run)


def judged(study: Study) -> str:
    """The claims that this run has the labels for, each with its verdict."""
    items = "".join(
        f'<li class="{found.verdict.replace(" ", "-")}">{verdict(found.verdict, found.words)} {prose(found.claim.title)}'
        f"<small>{prose(found.numbers)}</small></li>"
        for found in judge_claims(study)
        if found.judged
    )
    return f'<ul class="claims">{items}</ul>' if items else ""


def scale(plan: dict[str, Any]) -> str:
    """The plan's plain numbers."""
    hidden = ("study", "kind", "models", "own", "protocol", "changes", "search")
    return ", ".join(f"{name} {plan_text(value)}" for name, value in plan.items() if name not in hidden and value is not None)


def plan_text(value: Any) -> str:
    if isinstance(value, dict):
        return spread([v for v in value.values() if isinstance(v, (int, float))], lambda v: f"{v:g}")
    return " / ".join(map(str, value)) if isinstance(value, list) else str(value)


def outcome(study: Study) -> str:
    """The main result in a few sentences."""
    sentences = []
    for measure in [measure for measure in (AVERAGE, LOSS) if measure in study.measures]:
        sentences += ranking(study, measure)
    if not sentences:
        sentences.append("No run has a score of every task yet.")
    claims, predicted = ([item.verdict for item in items] for items in (judge_claims(study), predictions(study)))
    whose = "claims of the paper" if study.protocol is None else "registered claims"
    sentences.append(f"Of {len(claims)} {whose}, {tally(claims)}.")
    if predicted:
        sentences.append(f"Of {plural(len(predicted), 'prediction')} of the paper's Table 4, {tally(predicted)}.")
    cells = [cell for row in grid(study) for cell in row.cells if cell.column.key in study.tasks]
    levels = [abs(c.measured.mean - c.paper) for c in cells if c.measured is not None and c.paper is not None]
    if levels and not caveat(study):
        sentences.append(f"Accuracies differ from the paper's by {fmean(levels):.1f} points on average.")
    return " ".join(sentences)


def ranking(study: Study, measure: str) -> list[str]:
    """The three best."""
    digits, sign = (3, -1) if measure == LOSS else (1, 1)
    scores = {name: score for name in study.mixers if not name.endswith("!") and (score := study.score(name, measure))}
    if not scores:
        return []
    best = sorted(scores, key=lambda name: -sign * scores[name].mean)[:3]
    average = f"Best at {task_title(study.tasks[0]).lower()}" if len(study.tasks) == 1 else "Best MAD average"
    what = "Lowest loss" if measure == LOSS else average
    listed = ", ".join(f"{name} ({interval(scores[name], digits)})" for name in best)
    return [f"{what} within the budget: {listed}."]


def tally(verdicts: Sequence[str]) -> str:
    order = (SUPPORTED, CONTRADICTED, LEVEL, NOT_BEHIND, CEILING, FLOOR, INCONCLUSIVE, UNFINISHED)
    return ", ".join(f"{verdicts.count(status)} {status}" for status in order if status in verdicts)


# ---- the grid ----


def table1(study: Study) -> str:
    rows = []
    for row in grid(study):
        size = cell(row.parameters_text, row.parameters, small=row.outside)
        rows.append([name_cell(row.mixer), *map(grid_cell, row.cells), size])
    heads = ["mixer", *(column.title for column in columns(study)), "parameters"]
    rival = study.reference
    colours = (
        f"The colour compares gains over {escape(rival)} (“gain”, the paper’s in parentheses): "
        '<span class="key up">more</span> or <span class="key down">less</span> than in the paper. '
        if rival
        else ""
    )
    key = (
        '<p class="note">Below each number: the range of its seeds where there are two or three, and the paper’s number. '
        f"{colours}“–”: not run, not finished, never reached, or not in the paper. "
        f"{escape(legend(study))} {escape(caveat(study))}</p>"
    )
    return table(heads, rows, sorts=True) + key + grammar(study)


def grammar(study: Study) -> str:
    """The letters of the labels that were run."""
    labels = [name for name in study.mixers if name[:1] in "SRG" and not name[1:2].isalpha()]
    letters = {letter for label in labels for letter in label}
    if not labels:
        return ""
    meaning = {letter: text for letter, text in MEANING.items() if letter in letters - {"-"}}
    if any(set(label) & set("12") and "o" not in label for label in labels):
        meaning["no o"] = NO_LAG
    about = "A label is base-features-rank-mixing: G-cg-q-12o has base G, features c and g, rank q, mixing 12 in layout o."
    return f'<details class="legend" open><summary>What the labels mean</summary>{paragraph(about)}{facts(meaning)}</details>'


def caveat(study: Study) -> str:
    """Whether levels may be compared with the paper's at all."""
    plan = study.plans.get("mad")
    published = {"protocol": "faithful", "width": 128, "epochs": 200, "examples": None, "changes": {}}
    if plan is None or all(plan.get(name, value) == value for name, value in published.items()):
        return ""
    return (
        "The benchmark as published has width 128, 200 epochs and an accuracy of its own (the faithful protocol). These runs "
        "are not of that kind, so compare orders and gains with the paper rather than levels."
    )


def grid_cell(shown: Cell) -> str:
    digits, style = shown.column.digits, ""
    small = [shown.finished, shown.range_text, "" if shown.paper is None else f"paper {shown.paper_text}"]
    if (shift := shown.shift) is not None and shown.gain is not None and shown.paper_gain is not None:
        strength = min(1.0, abs(shift) / STRONG.get(str(shown.column.key), 20))
        small.append(f"gain {signed(shown.gain, digits)} ({signed(shown.paper_gain, digits)})")
        if float(f"{shift:.{digits}f}"):
            style = f' class="{"up" if shift > 0 else "down"}" style="--d:{strength:.2f}"'
    value = None if shown.measured is None else shown.measured.mean
    return cell(shown.mean_text, value, small="\n".join(small), style=style)


# ---- verdicts ----


def claim_cards(study: Study) -> str:
    about = (
        "Gains are means over the seeds that both labels have, paired by seed; with two or three seeds their range is shown, "
        f"from {ENOUGH} on the 95 % interval. A claim is supported if at least one of its comparisons is, and none is "
        f"contradicted. {noise_rule(study.terms)}"
    )
    html = paragraph(about, "note")
    for i, item in enumerate(judge_claims(study), 1):
        claim, kind = item.claim, item.verdict.replace(" ", "-")
        deciding, others = ([e for e in item.evidence if bool(e.status) is wanted] for wanted in (True, False))
        html += (
            f'<div class="finding {kind}"><h4>{i}. {escape(claim.title)}: {verdict(item.verdict, item.words)}</h4>'
            f"{paragraph(claim.text)}"
            f"{paragraph(f'Rule: {claim.rule}.', 'note')}"
            f"{evidence_table(study, deciding) if deciding else ''}"
        )
        if others:
            html += f"<details><summary>numbers that are not judged</summary>{evidence_table(study, others)}</details>"
        html += "</div>"
    return html


def evidence_table(study: Study, evidence: Sequence[Evidence]) -> str:
    heads = ("comparison", "status", "gain", "paper’s gain", "means", "seeds")
    return table(heads, [evidence_row(study, item) for item in evidence])


def evidence_row(study: Study, item: Evidence) -> list[str]:
    digits = item.digits
    means = [study.score(name, item.measure) for name in (item.better, item.worse)]
    shown = " / ".join(NONE if score is None else f"{score.mean:.{digits}f}" for score in means)
    measure = f"{TITLES[item.measure]} saved" if item.measure == LOSS else TITLES[item.measure]
    return [
        f'<th scope="row">{escape(f"{item.better} − {item.worse}")}<small>{escape(measure)}</small></th>',
        f"<td>{verdict(item.status, item.words) if item.status else 'not judged'}{remark(item)}</td>",
        cell(item.gain_text),
        cell(NONE if item.paper is None else signed(item.paper, digits)),
        cell(shown),
        cell(str(item.gain.seeds if item.gain else 0)),
    ]


def remark(item: Evidence) -> str:
    """A gain that is there and does not matter is marked."""
    return f"<small>{item.note}</small>" if item.note and item.status == INCONCLUSIVE else ""


def prediction_table(study: Study) -> str:
    rows = []
    for item in predictions(study):
        found = item.evidence
        rows.append(
            [
                f'<th scope="row">{escape(TITLES[item.task])}</th>',
                f"<td>{verdict(item.verdict, found.words)}{remark(found)}</td>",
                cell(found.gain_text, small=found.note),
                cell(NONE if found.paper is None else signed(found.paper, 1)),
                cell(str(found.gain.seeds if found.gain else 0)),
                cell(item.expected),
                words(REASONS[item.task]),
            ]
        )
    heads = ("task", "verdict", "gain", "paper", "seeds", "expected", "reason")
    intro = "The paper’s Table 4 says what sequence mixing should gain on each task, at equal parameters."
    return (
        paragraph(intro)
        + table(heads, rows, left=("reason",))
        + paragraph(f"{prediction_rule(study.terms)} {noise_rule(study.terms)}", "note")
    )
