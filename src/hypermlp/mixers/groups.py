"""Groups of mixers: "core", "labels,mamba", "G-cg-q-12o,S-pc"."""

from __future__ import annotations

from collections.abc import Sequence

from hypermlp.mixers.labels import TABLE1
from hypermlp.mixers.registry import DISTINCT, VARIANTS

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


def choose_mixers(text: str) -> list[str]:
    """Comma-separated names, labels and groups, each once: "core", "labels,mamba", "G-cg-q-12o,S-pc"."""
    found: dict[str, None] = {}
    for name in filter(None, (part.strip() for part in text.split(","))):
        found.update(dict.fromkeys(GROUPS.get(name, (name,))))
    if not found:
        raise ValueError(f"mixers ({text!r}) names none; hypermlp mixers lists them")
    return list(found)
