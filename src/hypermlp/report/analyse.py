"""`hypermlp explore --over`: statistics of a model's memory over a text, as tables and with pictures on a page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from markupsafe import Markup
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from hypermlp.analysis.statistics import HeadStatistics, OperatorStatistics, Statistics, analyse, random_noise
from hypermlp.data.corpus import TokenStream
from hypermlp.files import refuse_foreign, write_json, write_own
from hypermlp.models.bundled import short_name
from hypermlp.provenance import provenance
from hypermlp.report.charts import Axis, Chart, Line, numeric_axis
from hypermlp.report.markup import cell, document, paragraph, spread, table
from hypermlp.report.markup import charts as side_by_side
from hypermlp.report.terminal import Column, say, show_table
from hypermlp.runs.generate import corpus_for, open_model
from hypermlp.verdicts.estimates import Estimate

HEADS = ("layer", "head", "active", "without mixing", "switched on", "switched off", "mean |w|", "mean lag read")
OPERATORS = ("layer", "head", "operator", "‖ASBᵀ‖/‖D‖", "effective rank", "of", "‖D−1‖/‖1‖", "mean s", "s moves")
NOISE = ("layer", "head", "noise active", "noise without mixing", "other active", "other without mixing", "|w| on noise")
ABOUT = {
    "heads": "Shares of the slots that rows see. Without mixing: as it would be with R1 = R2 = I on the same inputs. "
    "Mean lag read: lags weighted by |w|, the size of the readout weights.",
    "operators": "R = D + A Diag(s) Bᵀ over the lags that the text meets: how strong the low-rank part is beside the diagonal "
    "(Frobenius norms), how many directions it really uses (e to the entropy of the squared singular values), how far D has "
    "come from its start at 1, and the controls s: their mean, and their standard deviation from token to token.",
    "noise": "Proposition I.3: in attention without mixing, noise whose addresses are symmetric about 0 activates half of its "
    "slots, so that spurious memories grow with the context. Here half of the tokens are replaced by random ones; in the rows "
    "of the others, this share of the noise’s slots is active, and this share of |w| falls on them.",
}


def show_analyse(
    console: Console,
    folder: Path,
    corpus: str,
    *,
    out: Path,
    windows: int,
    context: int | None = None,
    seed: int = 0,
    force: bool = False,
) -> Statistics:
    """Read `windows` windows of a held-out text with the model; leaves analysis.html and analysis.json in `out`."""
    refuse_foreign(out / "analysis.html", force=force)
    model, tokenizer = open_model(folder)
    text = corpus_for(corpus, tokenizer)
    context = model.config.length if context is None else context
    found = take_windows(text.split("validation"), windows, context, tokenizer.end)
    noise = random_noise(tokenizer.vocabulary, torch.Generator().manual_seed(seed))
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("windows", total=len(found))
        statistics = analyse(model, found, noise, lambda done: progress.update(task, completed=done))
    show_tables(console, statistics)
    out.mkdir(parents=True, exist_ok=True)
    about = {"provenance": provenance(), "model": model.config.to_dict(), "corpus": text.name, "context": context, "seed": seed}
    write_json(out / "analysis.json", {**about, **statistics.to_dict()})
    page = build_page(statistics, short_name(folder), text.name)
    write_own(out / "analysis.html", page, force=force)
    say(console, f"Page: {out / 'analysis.html'}   Numbers: {out / 'analysis.json'}")
    return statistics


def take_windows(text: TokenStream, count: int, context: int, end: int) -> list[Tensor]:
    """Windows of `context` tokens at equal distances, each behind the end of a document; fewer where the text is short."""
    if context < 2:
        raise ValueError(f"context ({context}) must be at least 2")
    length = context - 1
    count = min(count, len(text) // length)
    if count < 1:
        raise ValueError(f"the text has {len(text)} tokens, fewer than one window of {length}; give more text or less context")
    starts = np.linspace(0, len(text) - length, count).astype(int)
    return [torch.from_numpy(np.append([end], text.read(int(start), int(start) + length))) for start in starts]


# ---- tables ----


def show_tables(console: Console, found: Statistics) -> None:
    heads = [head_row(head) for head in found.heads]
    show_table(console, f"Heads over {found.tokens:,} tokens", columns(HEADS), heads, keys=2)
    if found.operators:
        rows = [operator_row(op) for op in found.operators]
        show_table(console, "Mixing along the sequence", columns(OPERATORS), rows, keys=3)
    if noisy := [noise_row(head) for head in found.heads if counts_noise(head)]:
        show_table(console, f"Noise: {found.noise_share:.0%} of the tokens are random", columns(NOISE), noisy, keys=2)


def columns(names: Sequence[str]) -> list[Column]:
    return [Column(name) for name in names]


def head_row(own: HeadStatistics) -> list[str]:
    shares = [f"{own.overall(name):.1%}" for name in ("active", "active_plain", "on", "off")]
    return [str(own.layer + 1), str(own.head + 1), *shares, f"{own.overall('weight'):.3g}", f"{own.reach:.1f}"]


def operator_row(op: OperatorStatistics) -> list[str]:
    measured = (f"{op.strength:.3f}", f"{op.rank:.1f}", str(op.full_rank), f"{op.departure:.3f}")
    return [str(op.layer + 1), str(op.head + 1), op.name, *measured, f"{op.control:.3f}", f"{op.moves:.3f}"]


def noise_row(own: HeadStatistics) -> list[str]:
    names = ("noise_active", "noise_plain", "real_active", "real_plain", "weight")
    return [str(own.layer + 1), str(own.head + 1), *(f"{own.spurious(name):.1%}" for name in names)]


def counts_noise(own: HeadStatistics) -> bool:
    """Whether there is something to select: softmax attention has every slot active, whatever it holds."""
    return own.noise.get("noise_slots", 0) > 0 and own.overall("active") < 1


# ---- the page ----


def build_page(found: Statistics, name: str, corpus: str) -> str:
    active, plain = (
        spread([head.overall(what) for head in found.heads], "{:.0%}".format) for what in ("active", "active_plain")
    )
    lead = (
        f"Over {found.tokens:,} tokens of {corpus}, {active} of the slots of a head of {name} are active; without mixing it "
        f"would be {plain}."
    )
    layers = sorted({head.layer for head in found.heads})
    sections = [("Heads", paragraph(ABOUT["heads"]) + html_table(HEADS, map(head_row, found.heads)))]
    charts = {
        "Active slots by lag": lambda own: own.share("active"),
        "Readout weight by lag": lambda own: own.share("weight"),
        "Switched on minus switched off, by lag": lambda own: own.share("on") - own.share("off"),
    }
    for title, get in charts.items():
        shown = [lag_chart(f"Layer {layer + 1}", [h for h in found.heads if h.layer == layer], get) for layer in layers]
        sections.append((title, side_by_side(shown)))
    if found.operators:
        rows = html_table(OPERATORS, map(operator_row, found.operators))
        sections.append(("Mixing along the sequence", paragraph(ABOUT["operators"]) + rows))
    if noisy := [head for head in found.heads if counts_noise(head)]:
        sections.append(("Noise", paragraph(ABOUT["noise"]) + html_table(NOISE, map(noise_row, noisy))))
    return document("What the heads of a model do", lead, sections)


def html_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Markup:
    return table(heads, [[cell(text) for text in row] for row in rows])


def lag_chart(title: str, heads: Sequence[HeadStatistics], get: Callable[[HeadStatistics], Tensor]) -> Markup:
    """A line per head over lags, whose axis is logarithmic: lag ℓ stands at log₂(1 + ℓ)."""
    lines = []
    for own in heads:
        points = [(float(np.log2(1 + lag)), Estimate((value,))) for lag, value in thinned(get(own))]
        lines.append(Line(f"head {own.head + 1}", points, own.head % 8))
    values = [mean.mean for line in lines for _, mean in line.points]
    longest = max(line.points[-1][0] for line in lines)
    y = numeric_axis("", min(0.0, *values), max(values) or 1.0)
    marks = [2**power - 1 for power in range(1 + int(longest))]
    x = Axis("lag", 0, longest, [(float(power), str(lag)) for power, lag in enumerate(marks)])
    return Chart(title, lines, x, y).html()


def thinned(values: Tensor) -> list[tuple[float, float]]:
    """Lags and values; far lags as means of steps that grow, so that a line has few points."""
    found, first = [], 0
    while first < len(values):
        step = max(1, first // 16)
        part = values[first : first + step]
        found.append((first + (len(part) - 1) / 2, float(part.mean())))
        first += step
    return found
