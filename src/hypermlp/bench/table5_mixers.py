"""The mixers of the paper's Table 5, and others: what stands in the place of attention in a GPT-2 of any width.

Heads are 64 wide, as in GPT-2 (12 at width 768), except where a name says otherwise; HyperGLU and HyperMLP have two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hypermlp.bench.cases import BuiltCase, Case, NaiveSoftmax, built_case
from hypermlp.checks import choose_from
from hypermlp.mixers import Mixer, SoftmaxAttention, build_mixer
from hypermlp.mixers.deltanet import DeltaNet
from hypermlp.mixers.differential import DifferentialAttention
from hypermlp.mixers.gated_deltanet import GatedDeltaNet
from hypermlp.mixers.gla import GLA
from hypermlp.mixers.gsa import GSA
from hypermlp.mixers.hgrn2 import HGRN2
from hypermlp.mixers.linear import LinearAttention
from hypermlp.mixers.mamba import Mamba
from hypermlp.mixers.mamba2 import Mamba2
from hypermlp.mixers.path import PathAttention
from hypermlp.mixers.retnet import RetNet
from hypermlp.mixers.rwkv7 import RWKV7

HEAD_WIDTH = 64
MOST_BYTES = 2e9  # of T × T matrices, beyond which attention written out does not take part


@dataclass(frozen=True)
class Table5Mixer:
    title: str
    make: Callable[[int, int, int], Mixer]  # width, heads of 64, longest context
    paper: str = ""  # its name in Table 5

    def build(self, width: int, length: int) -> Mixer:
        if width % HEAD_WIDTH:
            raise ValueError(f"width ({width}) must be a multiple of {HEAD_WIDTH}, the width of a head")
        return self.make(width, width // HEAD_WIDTH, length)


BASELINE = "sdpa"
TABLE5_MIXERS = {
    "hyperglu": Table5Mixer("HyperGLU", lambda d, h, n: build_mixer("hyperglu", d, n), "HyperGLU"),
    "hypermlp": Table5Mixer("HyperMLP", lambda d, h, n: build_mixer("hypermlp", d, n)),
    "sdpa": Table5Mixer("softmax, SDPA", lambda d, h, n: SoftmaxAttention(d, h, use_rope=False), "SM(Flash)"),
    "sdpa-2": Table5Mixer("softmax, SDPA, 2 heads", lambda d, h, n: SoftmaxAttention(d, 2, use_rope=False)),
    "naive": Table5Mixer("softmax, written out", lambda d, h, n: NaiveSoftmax(d, h, use_rope=False), "SM(Naive)"),
    "naive-2": Table5Mixer("softmax, written out, 2 heads", lambda d, h, n: NaiveSoftmax(d, 2, use_rope=False)),
    "linear": Table5Mixer("linear attention", lambda d, h, n: LinearAttention(d, h), "LinAttn"),
    "hgrn2": Table5Mixer("HGRN2", lambda d, h, n: HGRN2(d, h), "HGRN2"),
    "gla": Table5Mixer("GLA", lambda d, h, n: GLA(d, h), "GLA"),
    "mamba": Table5Mixer("Mamba", lambda d, h, n: Mamba(d), "Mamba"),
    "gsa": Table5Mixer("GSA", lambda d, h, n: GSA(d, h), "GSA"),
    "path": Table5Mixer("PaTH", lambda d, h, n: PathAttention(d, h), "PaTH"),
    "rwkv7": Table5Mixer("RWKV-7", lambda d, h, n: RWKV7(d, h), "RWKV7"),
    "mamba2": Table5Mixer("Mamba-2", lambda d, h, n: Mamba2(d)),
    "deltanet": Table5Mixer("DeltaNet", lambda d, h, n: DeltaNet(d, h)),
    "gated_deltanet": Table5Mixer("Gated DeltaNet", lambda d, h, n: GatedDeltaNet(d, h)),
    "retnet": Table5Mixer("RetNet", lambda d, h, n: RetNet(d, h)),
    "differential": Table5Mixer("Differential", lambda d, h, n: DifferentialAttention(d, h)),
}


def choose_table5_mixers(text: str | None) -> list[str]:
    """Comma-separated names, in the order of the table; None: all of them."""
    names = list(TABLE5_MIXERS) if text is None else [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        choose_from("mixers", name, tuple(TABLE5_MIXERS))
    if not names:
        raise ValueError(f"mixers is empty; known are {', '.join(TABLE5_MIXERS)}")
    return [name for name in TABLE5_MIXERS if name in names]


def build_layer(case: Case) -> BuiltCase:
    """A mixer as one layer."""
    torch.manual_seed(0)
    return built_case(case, TABLE5_MIXERS[case.name].build(case.width, case.time))


def too_large(name: str, batch: int, time: int, width: int) -> str | None:
    """Why attention written out does not take part at a length; None if it does."""
    heads = {"naive": width // HEAD_WIDTH, "naive-2": 2}.get(name, 0)
    needed = 4 * 4.0 * batch * heads * time**2  # four matrices alive at once
    return f"its T × T matrices would need {needed / 1e9:.0f} GB" if needed > MOST_BYTES else None
