"""What a study's runs cost and where they come from: parameters, times, failures, provenance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from statistics import fmean

import torch

from hypermlp.files import Record
from hypermlp.mixers import build_mixer
from hypermlp.models.lm import count_parameters
from hypermlp.report.estimates import NONE
from hypermlp.report.markup import cell, duration, facts, name_cell, paragraph, plural, spread, table, words
from hypermlp.report.study import REFERENCES, Study, final_loss, read_setting
from hypermlp.report.table1 import count_text, task_title


def halves(study: Study) -> list[tuple[str, list[Record]]]:
    title = "MAD" if "tasks" not in study.plans else ", ".join(map(task_title, study.tasks))
    return [(title, study.mad), ("Language modelling", study.language)]


def budgets(study: Study) -> str:
    html = ""
    for title, records in halves(study):
        if found := [record for record in records if record.get("parameters") is not None]:
            html += f"<h4>{title}</h4>" + budget_table(study, found)
    return html or paragraph("No record says how many parameters its model has.")


def budget_table(study: Study, records: Sequence[Record]) -> str:
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
        if mixer.endswith("!"):
            notes.append("full ranks, so outside the budget: neither widened nor matched")
        else:
            notes += dict.fromkeys(record["budget"] for record in own.values() if record.get("budget"))
        whole = [record["parameters"] for record in own.values()]
        parts = [count for record in own.values() if (count := mixer_parameters(study, record)) is not None]
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


def mixer_parameters(study: Study, record: Record) -> int | None:
    """Of one layer; None where the record does not say enough, or the mixer is not known here."""
    plan = study.plans.get(record.get("kind", "mad"), {})
    length = read_setting(record["setting"]).get("seq_len") if record.get("setting") else plan.get("length")
    if plan.get("width") is None or length is None:
        return None
    try:
        with torch.device("meta"):
            return count_parameters(
                build_mixer(str(record.get("variant", record["mixer"])), plan["width"], length, record.get("size"))
            )
    except ValueError:
        return None


def balance(records: Sequence[Record]) -> str:
    """How equal the models that should be equal are."""
    worst = 0.0
    for place in {record.get("setting") for record in records}:
        counts = [r["parameters"] for r in records if r.get("setting") == place and not r["mixer"].endswith("!")]
        if counts:
            worst = max(worst, 1 - min(counts) / max(counts))
    return f"Ranges are over settings. Within a setting, models without ! differ by {worst:.1%} of their parameters at most" + (
        "." if worst <= 0.02 else ", so they are not of one budget."
    )


def run_times(study: Study) -> str:
    html = "".join(f"<h4>{title}</h4>{shown}" for title, records in halves(study) if (shown := time_table(study, records)))
    note = (
        "Training only, one thread per run, with other runs beside it. The ratio of two mixers’ times per step is the "
        "geometric mean over the settings that both have."
    )
    return html + paragraph(note, "note") if html else paragraph("No finished run says how long it took.")


def time_table(study: Study, records: Sequence[Record]) -> str:
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
        bar = "" if ratio is None else f'<span class="bar" style="--w:{ratio / largest:.3f}"></span>'
        rows.append(
            [
                name_cell(mixer),
                cell(str(len(whole[mixer])), len(whole[mixer])),
                cell(duration(fmean(whole[mixer])), fmean(whole[mixer])),
                cell(f"{ms:.1f}", ms),
                cell(NONE if ratio is None else f"{ratio:.2f}", ratio),
                f'<td class="words">{bar}</td>',
            ]
        )
    heads = ("mixer", "runs", "time per run", "ms per step", f"time per step ÷ that of {reference or 'softmax'}", "")
    return table(heads, rows, sorts=True) if rows else ""


def relative(own: dict[str, list[float]], reference: dict[str, list[float]]) -> float | None:
    both = own.keys() & reference.keys()
    return math.exp(fmean(math.log(fmean(own[place]) / fmean(reference[place])) for place in both)) if both else None


def failures(study: Study) -> str:
    rows, traces = [], ""
    for record in study.records:
        reason = record["error"]
        score = final_loss(record) if record.get("kind") == "language" else record["metrics"]
        if reason is None and score is None:
            reason = record.get("stopped") or "it has no score"
        if reason is not None:
            place = record.get("setting") or "language"
            rows.append([name_cell(record["mixer"]), words(place), cell(str(record["seed"])), words(str(reason))])
            if record.get("traceback"):
                name = escape(str(record.get("key")))
                traces += f"<details><summary>{name}</summary><pre>{escape(str(record['traceback']))}</pre></details>"
    damaged = (
        paragraph(f"Left out: {plural(study.damaged, 'line')}, damaged or of a kind that is not known here.")
        if study.damaged
        else ""
    )
    if not rows:
        return paragraph("Every run has a score.") + damaged
    return table(("mixer", "setting", "seed", "why"), rows, left=("setting", "why")) + traces + damaged


def origins(study: Study) -> str:
    rows = []
    for start in study.starts:
        values = {name: "none" if value is None else str(value) for name, value in start.items()}
        versions = ", ".join(f"{name} {values[name]}" for name in ("hypermlp", "python", "torch") if name in values)
        machine = ", ".join(values[name] for name in ("system", "cpu", "gpu") if values.get(name, "none") != "none")
        command = f'<td class="words"><code>{escape(values.get("command", NONE))}</code></td>'
        when = f'<th scope="row">{escape(values.get("date", NONE))}</th>'
        rows.append([when, command, cell(values.get("commit", NONE)), words(versions), words(machine)])
    heads = ("start", "command", "commit", "versions", "machine")
    known = table(heads, rows, left=heads[1:]) if rows else paragraph("No plan.json says where the runs come from.")
    for kind, plan in study.plans.items():
        values = {name: str(value) for name, value in plan.items() if value is not None}
        known += f"<details><summary>plan, {escape(kind)}</summary>{facts(values)}</details>"
    return known
