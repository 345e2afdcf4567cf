"""Table 1: who takes part here (the paper's labels, and rivals that it compares with elsewhere), and its two studies.

`hypermlp table1` runs both into one folder, from which `hypermlp report` makes the table with the paper's values beside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hypermlp.checks import choose_from
from hypermlp.mixers import DISTINCT, VARIANTS
from hypermlp.mixers.labels import TABLE1
from hypermlp.studies.executors import find_device
from hypermlp.studies.language import language_study
from hypermlp.studies.mad import task_study
from hypermlp.studies.search import Search
from hypermlp.studies.study import Study

# Enough labels for every finding of the paper's "Result analysis", and four rivals.
CORE = (
    *("S", "S-p", "S-pc", "R-pc", "R-cg-q", "R-cg-q-12o", "G-cg-q", "G-cg-q-12o", "R-12!", "R-12o!"),
    *("G-cg-q-1o", "R-c-q", "R-c-v", "deltanet", "gated_deltanet", "gla", "mamba"),
)
GROUPS: dict[str, Sequence[str]] = {
    "core": CORE,
    "labels": TABLE1,
    "rivals": DISTINCT,
    "variants": VARIANTS,
    "all": (*TABLE1, *DISTINCT),
}


def contestants(text: str) -> list[str]:
    """Names, labels and groups with commas between them, each once: "core", "labels,mamba", "G-cg-q-12o,S-pc"."""
    found: dict[str, None] = {}
    for name in filter(None, (part.strip() for part in text.split(","))):
        found.update(dict.fromkeys(GROUPS.get(name, (name,))))
    return list(found)


def table1_studies(
    scale: str,
    half: str = "both",
    *,
    corpus: str | None = None,
    device: str = "auto",
    init: str | None = None,
    search: Search | None = None,
) -> dict[str, Study]:
    """Folder → study: the halves of Table 1 at a scale.

    The paper's scale is its protocol on GPUs, in bfloat16; a CPU must be asked for by name, and computes in float32.
    """
    choose_from("half", half, ("both", "mad", "language"))
    choose_from("scale", scale, ("paper", "laptop", "quick"))
    paper = scale == "paper"
    if paper and half != "mad" and corpus is None:
        raise ValueError(
            "the language half at the paper's scale needs --corpus: OpenWebText2, made ready with hypermlp data prepare; "
            "--half mad does without"
        )
    gpu = find_device(device) == "cuda"
    if paper and not gpu and device != "cpu":
        raise ValueError(
            "the paper's scale is for GPUs, and PyTorch finds none: 396 runs per mixer, or a language model of 124 million "
            "parameters, would take this CPU years; --scale laptop takes hours, --device cpu tries it all the same"
        )
    precision: Any = "bfloat16" if paper and gpu else "float32"
    protocol, mad_scale = ("faithful", "full") if paper else ("clean", scale)
    studies: dict[str, Study] = {}
    if half != "language":
        studies["mad"] = task_study(protocol, mad_scale, precision=precision, init=init, search=search)
    if half != "mad":
        language = language_study(scale, corpus=corpus, init=init)
        studies["language"] = dataclasses.replace(language, precision=precision, search=search)
    return studies
