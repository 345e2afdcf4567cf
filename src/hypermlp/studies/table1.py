"""Table 1's two studies, which `hypermlp study run table1` runs into one folder; the page has the paper's values beside."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hypermlp.checks import choose_from
from hypermlp.studies.executors import find_device
from hypermlp.studies.language import language_study
from hypermlp.studies.mad import task_study
from hypermlp.studies.search import Search
from hypermlp.studies.study import Study

PARTS = ("mad", "language")
SCALES = ("quick", "laptop", "paper")


def table1_studies(
    scale: str,
    parts: Sequence[str] = PARTS,
    *,
    corpus: str | None = None,
    device: str = "auto",
    init: str | None = None,
    search: Search | None = None,
) -> dict[str, Study]:
    """Folder → study: the halves of Table 1 at a scale.

    The paper's scale is its protocol on GPUs, in bfloat16; a CPU must be asked for by name, and computes in float32.
    """
    for part in parts:
        choose_from("half of Table 1 (--tasks)", part, PARTS)
    choose_from("scale", scale, SCALES)
    paper = scale == "paper"
    if paper and "language" in parts and corpus is None:
        raise ValueError(
            "the language half at the paper's scale needs corpus=FOLDER: OpenWebText2, prepared with hypermlp data prepare; "
            "--tasks mad needs none"
        )
    gpu = find_device(device) == "cuda"
    if paper and not gpu and device != "cpu":
        raise ValueError(
            "the paper's scale is for GPUs, and PyTorch finds none: 396 runs per mixer, or a language model of 124 million "
            "parameters, would take this CPU years; --scale laptop takes hours, --device cpu tries it anyway"
        )
    precision: Any = "bfloat16" if paper and gpu else "float32"
    protocol, mad_scale = ("faithful", "full") if paper else ("clean", scale)
    studies: dict[str, Study] = {}
    if "mad" in parts:
        studies["mad"] = task_study(protocol, mad_scale, precision=precision, init=init, search=search)
    if "language" in parts:
        language = language_study(scale, corpus=corpus, init=init)
        studies["language"] = dataclasses.replace(language, precision=precision, search=search)
    return studies
