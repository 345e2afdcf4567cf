"""The demo on the terminal and on a page: the live table, which claims the run supports, and the learned lag kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console

from hypermlp import ops
from hypermlp.experiments import demo, mad, paper
from hypermlp.experiments.mad import Plan
from hypermlp.experiments.runs import Record, read_lines
from hypermlp.report.charts import Axis, Chart, Line, numeric_axis
from hypermlp.report.findings import CONFIRMED, POINTS, REFUTED, UNKNOWN, WIDE
from hypermlp.report.mad import accuracies, watch
from hypermlp.report.markup import paragraph
from hypermlp.report.page import Section, write_report
from hypermlp.report.study import Estimate, Study, read_studies
from hypermlp.report.table1 import TITLES


def show(
    console: Console, out: Path, plan: Plan, *, seeds: int = 1, workers: int | None = None, retry_failed: bool = False
) -> list[Record]:
    """Run the demo in `out`, or what is missing of it; then say what it supports, and leave report.html."""
    ops.announce(ops.choose())  # compiles, where that is still to be done, before the workers all want it
    before = {record["key"] for record in read_lines(out / "runs.jsonl")[0]}
    study = partial(
        mad.study,
        out,
        demo.MIXERS,
        demo.TASKS,
        plan,
        seeds=seeds,
        work=demo.train,
        workers=workers,
        retry_failed=retry_failed,
    )
    settings = {setting.key: task for task in demo.TASKS for setting in plan.settings_of(task)}
    records = watch(console, out, study, lambda found: accuracies(found, demo.MIXERS, settings, plan.protocol))
    if {record["key"] for record in records} <= before:
        console.print(f"All runs were finished before and are in {out}; with another --out they are trained anew.")
    (found,) = read_studies(out)
    findings = [judge(found, claim) for claim in CLAIMS]
    for finding in findings:
        console.print(finding.sentence, highlight=False, markup=False, soft_wrap=True)
    sections = [Section("What this run supports", support(findings, found)), Section("Learned lag kernels", kernels(records))]
    console.print(f"Report: {write_report(out, sections=sections)}", soft_wrap=True)
    return records


# ---- what the run supports ----


@dataclass(frozen=True)
class Claim:
    """One model is better than another by more than `least` points, on the tasks where it is so in the paper."""

    text: str
    better: str
    worse: str
    least: float

    def tasks(self) -> list[str]:
        return [task for task in demo.TASKS if self.paper_gain(task) > self.least]

    def paper_gain(self, task: str) -> float:
        return paper.TABLE1[self.better].accuracy[task] - paper.TABLE1[self.worse].accuracy[task]


CLAIMS = (
    Claim("mixing along the sequence gains, at equal parameters", "R-cg-q-12o", "R-cg-q", POINTS),
    Claim("HyperGLU is ahead of softmax attention with rotary embedding and convolutions", "G-cg-q-12o", "S-pc", POINTS),
    Claim("mixing fails without the lag layout", "R-12o!", "R-12!", WIDE * POINTS),
)


@dataclass(frozen=True)
class Finding:
    claim: Claim
    gains: dict[str, float | None]  # task → points; None: a run is missing, or has no score

    @property
    def status(self) -> str:
        if None in self.gains.values():
            return UNKNOWN
        return CONFIRMED if all(gain is not None and gain > self.claim.least for gain in self.gains.values()) else REFUTED

    @property
    def sentence(self) -> str:
        words = {CONFIRMED: "This run supports", REFUTED: "This run does not support", UNKNOWN: "Runs are missing to judge"}
        numbers = ", ".join(
            f"{'no score' if gain is None else f'{gain:+.1f} points'} on {TITLES[task].lower()} "
            f"(paper {self.claim.paper_gain(task):+.1f})"
            for task, gain in self.gains.items()
        )
        return f"{words[self.status]} that {self.claim.text}: {self.claim.better} against {self.claim.worse}, {numbers}."


def judge(study: Study, claim: Claim) -> Finding:
    gains = {task: study.gain(claim.better, claim.worse, task) for task in claim.tasks()}
    return Finding(claim, {task: None if gain is None else gain.mean for task, gain in gains.items()})


def support(findings: Iterable[Finding], study: Study) -> str:
    cards = [
        f'<div class="finding {finding.status.replace(" ", "-")}">{paragraph(finding.sentence)}</div>' for finding in findings
    ]
    seeds = len(study.seeds)
    chance = "One seed says nothing about chance: see --seeds." if seeds == 1 else f"Gains are means over {seeds} seeds."
    rule = (
        f"A claim is supported if the gain is above {POINTS:g} points ({WIDE * POINTS:g} for a failure) on every task of this "
        f"run on which the paper’s own gain is. The models and the tasks are much smaller than the paper’s. {chance}"
    )
    return "".join(cards) + paragraph(rule, "note")


# ---- what the mixing has learned ----


def kernels(records: Iterable[Record]) -> str:
    """D by lag and the strongest head's mixing from lag to lag, for the first seed of every task."""
    about = (
        f"What {demo.SHOWN} (HyperGLU) has learned: R = D + A Diag(s) Bᵀ works on the scores of a token’s past, which are "
        "sorted by lag (0 is the token itself). R1 mixes them before the activation, R2 behind it. D is 1 for every lag before "
        "training; of A Diag(s) Bᵀ, which is near 0 then, the head is drawn where it has become largest, with s averaged over "
        "the test set."
    )
    shown = [record for record in records if record.get("lag_kernels") and record["seed"] == 0]
    if not shown:
        return paragraph(f"No run of {demo.SHOWN} has finished.")
    html = paragraph(about)
    for record in shown:
        figures = [*map(mixing_map, record["lag_kernels"]), *map(diagonal_chart, record["lag_kernels"])]
        html += f'<h3>{escape(TITLES[record["task"]])}</h3><div class="charts">{"".join(figures)}</div>'
    key = (
        "Blue: a score at one lag adds to another; orange: it takes away. The colours of a map go up to its own largest entry."
    )
    return html + paragraph(key, "note")


def place(kernel: dict[str, Any]) -> str:
    return f"Layer {kernel['layer']}, {kernel['operator']}"


def diagonal_chart(kernel: dict[str, Any]) -> str:
    rows: list[list[float]] = kernel["diagonal"]
    lines = [
        Line(f"head {i + 1}", [(float(lag), Estimate(value, None, 1)) for lag, value in enumerate(row)], i)
        for i, row in enumerate(rows)
    ]
    values = [value for row in rows for value in row]
    x, y = numeric_axis("lag", 0, len(rows[0]) - 1), numeric_axis("D", min(values), max(values))
    return Chart(f"{place(kernel)}: D", lines, x, y).html()


LEVELS = 8  # shades of a map's colour
SIDE, MARGIN = 200, 38  # of the map, and beside it


def mixing_map(kernel: dict[str, Any]) -> str:
    """A heat map as SVG; the cells of a shade are one path."""
    values: Sequence[Sequence[float]] = kernel["mixing"]
    L = len(values)
    largest = max((abs(value) for row in values for value in row), default=0.0)
    shades: dict[int, list[str]] = {}
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            if level := round(LEVELS * value / (largest or 1)):
                shades.setdefault(level, []).append(f"M{x} {y}h1v1h-1z")
    paths = "".join(
        f'<path style="fill:rgb(var(--{"up" if level > 0 else "down"}))" fill-opacity="{abs(level) / LEVELS:.3f}" '
        f'd="{"".join(cells)}"/>'
        for level, cells in sorted(shades.items())
    )
    title = f"{place(kernel)}, head {kernel['head']}: mixing, up to {largest:.2g}"
    width, height = SIDE + 2 * MARGIN + 124, SIDE + MARGIN + 8  # as wide as a chart
    left = (width - SIDE) / 2
    frame = f'<path class="grid" style="fill:none" d="M{left} 4h{SIDE}v{SIDE}h-{SIDE}z"/>'
    axis = numeric_axis("", 0, L - 1)
    turned = f'transform="rotate(-90 {left - 28} {SIDE / 2})" text-anchor="middle"'
    texts = (
        f'<text x="{left + SIDE / 2}" y="{height - 4}" text-anchor="middle">to lag</text>'
        f'<text x="{left - 28}" y="{SIDE / 2}" {turned}>from lag</text>{ticks(axis, left, L)}'
    )
    cells = f'<svg x="{left}" y="4" width="{SIDE}" height="{SIDE}" viewBox="0 0 {L} {L}">{paths}</svg>'
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">{cells}{frame}{texts}</svg></figure>'
    )


def ticks(axis: Axis, left: float, cells: int) -> str:
    parts = []
    for value, text in axis.ticks:
        at = SIDE * (value + 0.5) / cells
        parts.append(f'<text x="{left + at:.1f}" y="{SIDE + 18}" text-anchor="middle">{text}</text>')
        parts.append(f'<text x="{left - 5}" y="{at + 7.5:.1f}" text-anchor="end">{text}</text>')
    return "".join(parts)
