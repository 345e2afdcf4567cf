"""One HTML page from a folder of results: complete in itself, readable without a network, scripts or a wide screen."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from hypermlp.files import write_own
from hypermlp.mixers.hybrid import is_hybrid, pattern
from hypermlp.mixers.labels import MEANING, NO_LAG
from hypermlp.report import task_page
from hypermlp.report.curves import difficulty, learning_curves
from hypermlp.report.kernels import lag_kernels
from hypermlp.report.markup import (
    TEMPLATES,
    TableCell,
    cell,
    details,
    document,
    duration,
    facts,
    name_cell,
    paragraph,
    pieces,
    plural,
    spread,
    table,
    verdict_cell,
    words,
)
from hypermlp.report.opening import Opening, opening, shown_claims, titles
from hypermlp.report.readings import what_answers_read
from hypermlp.report.registered import protocol_section
from hypermlp.report.search import search_section
from hypermlp.report.sources import budgets, failures, origins, run_times
from hypermlp.report.table1 import TITLES, Cell, columns, grid, legend
from hypermlp.report.words import (
    claim_rule,
    claim_words,
    corrected_words,
    digits,
    evidence_words,
    gain_words,
    noise_rule,
    power_words,
    tests_words,
    with_extent,
)
from hypermlp.verdicts.claims import Claim, Evidence
from hypermlp.verdicts.estimates import ENOUGH, NONE, signed
from hypermlp.verdicts.judged import Judged, judge_folder
from hypermlp.verdicts.predictions import REASONS, Prediction, prediction_rule
from hypermlp.verdicts.results import LOSSES, Results

STRONG = dict.fromkeys(LOSSES, 0.2)  # the difference of gains with the strongest colour; 20 for accuracies
draw: Any = TEMPLATES.get_template("studies.html").module


def write_report(
    folder: Path, out: Path | None = None, studies: Sequence[Judged] | None = None, *, force: bool = False
) -> Path:
    """Write the page of all runs in `folder` and below; returns its path (None: report.html in the folder).

    studies: what the folder holds, where it was read before.
    """
    text = build_page(judge_folder(folder) if studies is None else studies)
    out = out or folder / "report.html"
    write_own(out, text, force=force)
    return out


@dataclass(frozen=True)
class View:
    """A study on the page."""

    opening: Opening
    sections: list[tuple[str, Markup]]


def build_page(studies: Sequence[Judged]) -> str:
    """The page of one study; of several, what each of them says, and then one below the other."""
    named = zip(studies, titles(studies), strict=True)
    views = [View(dataclasses.replace(opening(study), title=title), study_sections(study)) for study, title in named]
    parts = [(view.opening.title, draw.body(view, number)) for number, view in enumerate(views, 1)]
    memory = [("Recall against memory", html)] if (html := task_page.memory([study.results for study in studies])) else []
    if len(views) == 1:
        (view,) = views
        if not view.opening.claims and not view.opening.problems:
            return document(view.opening.title, view.opening.lead, [*view.sections, *memory], view.opening.origin)
        found = [("What was found", draw.summary(view.opening, False)), *view.sections]
        return document(view.opening.title, view.opening.lead, [*found, *memory])
    across = [("All tasks side by side", html)] if (html := task_page.across([study.results for study in studies])) else []
    lead = task_page.widest([study.results for study in studies]) or f"{len(views)} studies, and what each of them found."
    contents = [("What was found", draw.contents(views, 1 + len(across) + len(memory)))]
    return document("Results of several studies", lead, [*contents, *across, *memory, *parts])


def study_sections(study: Judged) -> list[tuple[str, Markup]]:
    """Titles and content; what there is nothing to say about is left out."""
    results = study.results
    if "tasks" in results.plans:
        found = {
            "Summary": task_page.summary(results),
            "Scores": task_page.scores(results),
            "Slices": task_page.slices(results),
            "Beyond the training length": task_page.beyond(results),
            "Learning curves": learning_curves(results),
            "Learning rates": search_section(results),
        }
    else:
        found = {
            "Scores": table1(results),
            "Learning curves": learning_curves(results),
            "What an answer reads": what_answers_read(results),
            "Learned lag kernels": lag_kernels(results),
            "Accuracy against difficulty": difficulty(results),
            "Claims": claim_cards(study),
            "Predictions": prediction_table(study.predictions, results),
            "Protocol": protocol_section(results),
            "Search": search_section(results),
            "Runs": summary(results),
        }
    found |= {
        "Parameter budgets": budgets(results),
        "Run times": run_times(results),
        "Failures": failures(results),
        "Provenance": origins(results),
    }
    if not shown_claims(study):
        found = {title: html for title, html in found.items() if title not in ("Claims", "Predictions")}
    return [(title, html) for title, html in found.items() if html]


def summary(study: Results) -> Markup:
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
    return facts(run)


def scale(plan: dict[str, Any]) -> str:
    """The plan's plain numbers."""
    hidden = ("study", "kind", "models", "own", "protocol", "changes", "search")
    return ", ".join(f"{name} {plan_text(value)}" for name, value in plan.items() if name not in hidden and value is not None)


def plan_text(value: Any) -> str:
    if isinstance(value, dict):
        return spread([v for v in value.values() if isinstance(v, (int, float))], lambda v: f"{v:g}")
    return " / ".join(map(str, value)) if isinstance(value, list) else str(value)


# ---- the grid ----


def table1(study: Results) -> Markup:
    rows = []
    for row in grid(study):
        size = cell(row.parameters_text, row.parameters, small=row.outside)
        rows.append([name_cell(row.mixer), *map(grid_cell, row.cells), size])
    heads = ["mixer", *(column.title for column in columns(study)), "parameters"]
    key = pieces.grid_key(None if study.quick else study.reference, f"{legend(study)} {caveat(study)}")
    return table(heads, rows, sorts=True) + key + grammar(study)


def grammar(study: Results) -> Markup:
    """The letters of the labels that were run."""
    names = dict.fromkeys(one for name in study.mixers for one in (pattern(name) if is_hybrid(name) else (name,)))
    labels = [name for name in names if name[:1] in "SRG" and not name[1:2].isalpha()]
    letters = {letter for label in labels for letter in label}
    if not labels:
        return Markup()
    meaning = {letter: text for letter, text in MEANING.items() if letter in letters - {"-"}}
    if any(set(label) & set("12") and "o" not in label for label in labels):
        meaning["no o"] = NO_LAG
    about = "A label is base-features-rank-mixing: G-cg-q-12o has base G, features c and g, rank q, mixing 12 in layout o."
    return details("What the labels mean", paragraph(about) + facts(meaning), open=True, kind="legend")


def caveat(study: Results) -> str:
    """Whether levels may be compared with the paper's at all."""
    if study.quick:
        return "These runs are too short to compare with each other, or with the paper."
    plan = study.plans.get("mad")
    published = {"protocol": "faithful", "width": 128, "epochs": 200, "examples": None, "changes": {}}
    if plan is None or all(plan.get(name, value) == value for name, value in published.items()):
        return ""
    return (
        "The benchmark as published has width 128, 200 epochs and an accuracy of its own (the faithful protocol). These runs "
        "are not of that kind, so compare orders and gains with the paper rather than levels."
    )


def grid_cell(shown: Cell) -> TableCell:
    digits, looks = shown.column.digits, {}
    small = [shown.finished, shown.range_text, "" if shown.paper is None else f"paper {shown.paper_text}"]
    if (shift := shown.shift) is not None and shown.gain is not None and shown.paper_gain is not None:
        small.append(f"gain {signed(shown.gain, digits)} ({signed(shown.paper_gain, digits)})")
        if float(f"{shift:.{digits}f}"):
            strength = min(1.0, abs(shift) / STRONG.get(str(shown.column.key), 20))
            looks = {"kind": "up" if shift > 0 else "down", "strength": strength}
    value = None if shown.measured is None else shown.measured.mean
    return cell(shown.mean_text, value, small="\n".join(small), **looks)


# ---- verdicts ----


ONE = "A claim is supported if at least one of its comparisons is, and none is contradicted. "


def claim_cards(study: Judged) -> Markup:
    terms = study.results.terms
    about = (
        "Gains are means over the seeds that both mixers have, paired by seed; with two or three seeds their range is shown, "
        f"from {ENOUGH} on the 95 % interval. {'' if terms.interval == 'holm' else ONE}{noise_rule(terms)}"
    )
    if power := power_words(study.claims):
        about += f" {power}"
    cards = [claim_card(study.results, claim, number) for number, claim in enumerate(shown_claims(study), 1)]
    return paragraph(about, "note") + Markup().join(cards)


def claim_card(study: Results, claim: Claim, number: int) -> Markup:
    deciding, others = ([e for e in claim.evidence if (e.verdict is not None) is wanted] for wanted in (True, False))
    html = paragraph(claim.text) + paragraph(f"Rule: {claim_rule(claim, study.terms)}.", "note")
    if beside := corrected_words(claim):
        html += paragraph(f"{beside[0].upper()}{beside[1:]}.")
    html += evidence_table(study, deciding) if deciding else ""
    html += details("numbers that are not judged", evidence_table(study, others)) if others else ""
    word = claim.verdict.word
    said = with_extent(claim, claim.verdict, claim_words(claim)) if claim.is_corrected else claim_words(claim)
    title = Markup("{}. {}: {}").format(number, claim.title, pieces.verdict(word, said))
    return pieces.finding(word, title, html)


def evidence_table(study: Results, evidence: Sequence[Evidence]) -> Markup:
    heads = ("comparison", "verdict", "gain", "paper’s gain", "means", "seeds")
    return table(heads, [evidence_row(study, item) for item in evidence], left=("verdict",))


def evidence_row(study: Results, item: Evidence) -> list[TableCell]:
    means = [study.score(name, item.measure) for name in (item.better, item.worse)]
    shown = " / ".join(NONE if score is None else f"{score.mean:.{digits(item)}f}" for score in means)
    measure = f"{TITLES[item.measure]} saved" if item.measure in LOSSES else TITLES[item.measure]
    return [
        cell(f"{item.better} − {item.worse}", small=measure, head=True),
        verdict_cell(item.verdict, evidence_words(item)),
        cell(gain_words(item), small=tests_words(item)),
        cell(NONE if item.paper is None else signed(item.paper, digits(item))),
        cell(shown),
        cell(str(item.gain.seeds if item.gain else 0)),
    ]


def prediction_table(found: Sequence[Prediction], study: Results) -> Markup:
    rows = []
    for item in found:
        measured = item.evidence
        rows.append(
            [
                cell(TITLES[item.task], head=True),
                verdict_cell(item.verdict, evidence_words(measured)),
                cell(gain_words(measured)),
                cell(NONE if measured.paper is None else signed(measured.paper, 1)),
                cell(str(measured.gain.seeds if measured.gain else 0)),
                cell(item.expected),
                words(REASONS[item.task]),
            ]
        )
    heads = ("task", "verdict", "gain", "paper", "seeds", "expected", "reason")
    intro = "The paper’s Table 4 says what sequence mixing should gain on each task, at equal parameters."
    rules = paragraph(f"{prediction_rule(study.terms)} {noise_rule(study.terms)}", "note")
    return paragraph(intro) + table(heads, rows, left=("verdict", "reason")) + rules
