"""Small experiments that the paper argues for, in docs/reproduction.md: a section for every protocol with runs in results/.

A protocol without runs stands in the table of those that are prepared, so the document is right whichever have been run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from hypermlp.report.evidence import verdicts_markdown
from hypermlp.report.markdown import markdown_table
from hypermlp.report.ranks import row_order
from hypermlp.report.table1 import columns, new_row, rows_markdown, task_title
from hypermlp.report.words import measure_words, tally
from hypermlp.verdicts.claims import judge_claims
from hypermlp.verdicts.estimates import NONE, interval
from hypermlp.verdicts.folders import read_studies
from hypermlp.verdicts.results import LOSSES, Results, full_name


class Experiment(NamedTuple):
    """What a protocol compares, and where the paper says why."""

    compares: str
    reason: str


EXPERIMENTS = {
    "labels": Experiment(
        "the 21 labels of Table 1 that the first study left out, with those that claims 3, 4 and 5 need: copying, "
        "fuzzy recall, language, rank 16",
        "Table 1",
    ),
    "rank16": Experiment("HyperGLU and HyperMLP at rank 16, on the tasks where the search preferred rank 8", "section 2.6"),
    "noise": Experiment("noisy recall among three fifths of noise, where the first study has four fifths", "Table 1"),
    "registers": Experiment("0, 4 and 16 registers, in HyperGLU and in the same layer without mixing", "appendix H.3"),
    "gates": Experiment("the gate on v and o alone, on q and k alone, both, none", "appendix H.7"),
    "ranks": Experiment(
        "mixing of rank 4, 16, 32 × one, two, four heads × q and k of width 16 or 32 (r4 h2 qk16: rank 4, two heads, width 16)",
        "section 2.6, F.2",
    ),
    "lora": Experiment(
        "LoRA on v and o against q and k, on a model that was trained on one setting and adapts to a harder one", "appendix H.6"
    ),
}
GRID = re.compile(r"G-cg-q-12o\+op1_rank=(\d+)\+op2_rank=\1\+n_head=(\d+)\+qk_rank=(\d+)")


def read_experiments(results: Path) -> dict[str, Results]:
    """The protocols whose runs are there."""
    found = {}
    for name in EXPERIMENTS:
        if (results / name).is_dir():
            (found[name],) = read_studies(results / name)
    return found


def prepared_markdown(done: Mapping[str, Results]) -> str:
    """The protocols that have not been run, or that they all have been."""
    rows = [[f"`{name}`", *one] for name, one in EXPERIMENTS.items() if name not in done]
    if not rows:
        return "None: all have been run."
    return markdown_table(["protocol", "what it compares", "the paper's reason"], rows).replace("| ---: ", "| --- ")


def experiments_markdown(done: Mapping[str, Results]) -> str:
    """A section for each that has been run: what it compares, two sentences, its table and its verdicts."""
    return "\n\n".join(section(name, study) for name, study in done.items()) or "None has been run."


def section(name: str, study: Results) -> str:
    """Of one experiment."""
    shown = [column for column in columns(study) if isinstance(column.key, str)]
    rows = [new_row(study, mixer, shown) for mixer in sorted(study.mixers, key=row_order)]
    title = name if study.protocol is None else study.protocol.title
    parts = [f"### {title}", f"Protocol `{name}` compares {EXPERIMENTS[name].compares}.", two_sentences(study)]
    parts.append(rows_markdown(rows, shown))
    if judge_claims(study):
        parts.append(verdicts_markdown(study))
    return GRID.sub(r"r\1 h\2 qk\3", "\n\n".join(parts))


def two_sentences(study: Results) -> str:
    """The verdicts, and who has the best means."""
    verdicts = tally([claim.verdict for claim in judge_claims(study)])
    best = []
    for measure in [*study.tasks, *study.losses[:1]]:
        sign = -1 if measure in LOSSES else 1
        scores = {m: sign * score.mean for m in study.mixers if (score := study.score(m, measure)) is not None}
        if scores:
            what = measure_words(measure).removesuffix(" saved")
            best.append(f"`{max(scores, key=lambda mixer: scores[mixer])}` ({what})")
    leaders = f"The best means, by chance or not, are those of {', '.join(best)}." if best else ""
    return " ".join(filter(None, [f"Of its claims: {verdicts}." if verdicts else "", leaders]))


def noise_markdown(harder: Results, easier: Results | None) -> str:
    """Noisy recall at both shares of noise; only what was run."""
    task = "noisy-recall"
    studies = [study for study in (easier, harder) if study is not None]
    settings = [study.settings(task)[0] for study in studies]
    heads = [f"{task_title(task)}, {re.findall(r'frac_noise=([0-9.]+)', key)[0]} of noise" for key in settings]
    rows = [
        [full_name(mixer), *(interval(study.score(mixer, task), 1) if mixer in study.mixers else NONE for study in studies)]
        for mixer in (harder.mixers if easier is None else easier.mixers)
    ]
    return markdown_table(["mixer", *heads], rows)
