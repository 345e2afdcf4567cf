"""What a study's runs cost and where they come from: parameters, times, failures, provenance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from markupsafe import Markup

from hypermlp.files import Record
from hypermlp.mixers.hybrid import is_hybrid, outside_budget, pattern, sizes_of
from hypermlp.models.budget import count_mixer
from hypermlp.report.markup import (
    cell,
    details,
    duration,
    facts,
    heading,
    name_cell,
    paragraph,
    pieces,
    plural,
    spread,
    table,
    words,
)
from hypermlp.report.table1 import count_text, task_title
from hypermlp.verdicts.estimates import NONE
from hypermlp.verdicts.registration import deviations
from hypermlp.verdicts.results import REFERENCES, Results, final_loss, read_setting


def halves(study: Results) -> list[tuple[str, list[Record]]]:
    title = "MAD" if "tasks" not in study.plans else ", ".join(map(task_title, study.tasks))
    return [(title, study.mad), ("Language modelling", study.language)]


def budgets(study: Results) -> Markup:
    html = Markup()
    for title, records in halves(study):
        if found := [record for record in records if record.get("parameters") is not None]:
            html += heading(title) + budget_table(study, found)
    return html or paragraph("No record says how many parameters its model has.")


def budget_table(study: Results, records: Sequence[Record]) -> Markup:
    narrowest: dict[str | None, int] = {}
    for record in records:
        if record.get("inner") is not None:
            place = record.get("setting")
            narrowest[place] = min(narrowest.get(place, record["inner"]), record["inner"])
    rows = []
    for mixer in study.mixers:
        own = {record.get("setting"): record for record in records if record["mixer"] == mixer}
        if not own:
            continue
        inner = {place: record["inner"] for place, record in own.items() if record.get("inner") is not None}
        wider = [width - narrowest[place] for place, width in inner.items() if width > narrowest[place]]
        notes = [f"feed-forward widened in {len(wider)} of {len(inner)} settings, by up to {max(wider)}"] if wider else []
        if outside_budget(mixer):
            notes.append("full ranks, so outside the budget: neither widened nor matched")
        else:
            notes += dict.fromkeys(record["budget"] for record in own.values() if record.get("budget"))
        whole = [record["parameters"] for record in own.values()]
        parts = [count for record in own.values() for count in mixer_parameters(study, record)]
        rows.append(
            [
                name_cell(mixer),
                cell(spread(parts, count_text), max(parts, default=None)),
                cell(spread(list(inner.values()), lambda v: f"{v:g}"), max(inner.values(), default=None)),
                cell(spread(whole, count_text), max(whole)),
                words("; ".join(notes)),
            ]
        )
    heads = ("mixer", "one mixer", "feed-forward width", "whole model", "notes")
    return table(heads, rows, sorts=True, left=("notes",)) + paragraph(balance(records), "note")


def mixer_parameters(study: Results, record: Record) -> list[int]:
    """Of a layer, of a hybrid of each; none where the record does not say enough, or a mixer is not known here."""
    plan = study.plans.get(record.get("kind", "mad"), {})
    length = read_setting(record["setting"]).get("seq_len") if record.get("setting") else plan.get("length")
    if plan.get("width") is None or length is None:
        return []
    name = str(record.get("variant", record["mixer"]))
    mixers = pattern(name) if is_hybrid(name) else (name,)
    try:
        sizes = zip(mixers, sizes_of(mixers, record.get("size")), strict=True)
        return [count_mixer(mixer, plan["width"], length, size) for mixer, size in sizes]
    except ValueError:
        return []


def balance(records: Sequence[Record]) -> str:
    """How equal the models that should be equal are."""
    worst = 0.0
    for place in {record.get("setting") for record in records}:
        counts = [r["parameters"] for r in records if r.get("setting") == place and not outside_budget(r["mixer"])]
        if counts:
            worst = max(worst, 1 - min(counts) / max(counts))
    return f"Ranges are over settings. Within a setting, models without ! differ by {worst:.1%} of their parameters at most" + (
        "." if worst <= 0.02 else ", so they are not of one budget."
    )


def run_times(study: Results) -> Markup:
    shown = [(title, time_table(study, records)) for title, records in halves(study)]
    html = Markup().join(heading(title) + times for title, times in shown if times)
    note = (
        "Training only, one thread per run, with other runs beside it. The ratio of two mixers’ times per step is the "
        "geometric mean over the settings that both have."
    )
    return html + paragraph(note, "note") if html else paragraph("No finished run says how long it took.")


def time_table(study: Results, records: Sequence[Record]) -> Markup:
    """Also per step, since runs that solve their task end early."""
    steps: dict[str, dict[str, list[float]]] = {}
    whole: dict[str, list[float]] = {}
    for record in records:
        if record["error"] is None and record.get("seconds") and (points := record.get("curve")) and points[-1].get("step"):
            place = record.get("setting", "")
            steps.setdefault(record["mixer"], {}).setdefault(place, []).append(record["seconds"] / points[-1]["step"])
            whole.setdefault(record["mixer"], []).append(record["seconds"])
    reference = next((name for name in REFERENCES if name in steps), None)
    ratios = {mixer: relative(steps[mixer], steps[reference]) for mixer in steps} if reference else {}
    largest = max((ratio for ratio in ratios.values() if ratio is not None), default=1.0)
    rows = []
    for mixer in [mixer for mixer in study.mixers if mixer in steps]:
        ms = 1000 * fmean(fmean(values) for values in steps[mixer].values())
        ratio = ratios.get(mixer)
        rows.append(
            [
                name_cell(mixer),
                cell(str(len(whole[mixer])), len(whole[mixer])),
                cell(duration(fmean(whole[mixer])), fmean(whole[mixer])),
                cell(f"{ms:.1f}", ms),
                cell(NONE if ratio is None else f"{ratio:.2f}", ratio),
                cell("", kind="words", bar=None if ratio is None else ratio / largest),
            ]
        )
    heads = ("mixer", "runs", "time per run", "ms per step", f"time per step ÷ that of {reference or 'softmax'}", "")
    return table(heads, rows, sorts=True) if rows else Markup()


def relative(own: dict[str, list[float]], reference: dict[str, list[float]]) -> float | None:
    both = own.keys() & reference.keys()
    return math.exp(fmean(math.log(fmean(own[place]) / fmean(reference[place])) for place in both)) if both else None


def failures(study: Results) -> Markup:
    rows, traces = [], Markup()
    for record in study.records:
        reason = record["error"]
        score = final_loss(record) if record.get("kind") == "language" else record["metrics"]
        if reason is None and score is None:
            reason = record.get("stopped") or "it has no score"
        if reason is not None:
            place = record.get("setting") or "language"
            rows.append([name_cell(record["mixer"]), words(place), cell(str(record["seed"])), words(str(reason))])
            if record.get("traceback"):
                traces += details(str(record.get("key")), pieces.pre(record["traceback"]))
    damaged = (
        paragraph(f"Left out: {plural(study.damaged, 'line')}, damaged or of an unknown kind.") if study.damaged else Markup()
    )
    if not rows:
        return paragraph("Every run has a score.") + damaged
    return table(("mixer", "setting", "seed", "why"), rows, left=("setting", "why")) + traces + damaged


def origins(study: Results) -> Markup:
    """Commits, deviations, searches, and every start of the program."""
    commits = dict.fromkeys(str(start.get("commit") or "unknown") for start in study.starts)
    changed = deviations(study.versions)
    searched = [f"{mixer} {count}" for mixer, count in study.search_runs.items()]
    known = {
        "commits": ", ".join(commits) or "unknown",
        "deviations": f"{len(changed)}: see the protocol" if changed else "none" if study.versions else "not registered",
        "search runs": ", ".join(searched) or "none: no learning rate was searched",
    }
    html = facts(known)
    rows = []
    for start in study.starts:
        values = {name: "none" if value is None else str(value) for name, value in start.items()}
        versions = ", ".join(f"{name} {values[name]}" for name in ("hypermlp", "python", "torch") if name in values)
        machine = ", ".join(values[name] for name in ("system", "cpu", "gpu") if values.get(name, "none") != "none")
        when, command = cell(values.get("date", NONE), head=True), words(values.get("command", NONE))
        rows.append([when, command, cell(values.get("commit", NONE)), words(versions), words(machine)])
    heads = ("start", "command", "commit", "versions", "machine")
    html += table(heads, rows, left=heads[1:]) if rows else paragraph("No plan.json says where the runs come from.")
    for kind, plan in study.plans.items():
        html += details(f"plan, {kind}", facts({name: str(value) for name, value in plan.items() if value is not None}))
    return html
