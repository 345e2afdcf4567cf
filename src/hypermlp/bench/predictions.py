"""What the cost model (`roofline.py`) predicts for the sizes that matter, beside FlashAttention-2 and against targets.

What else a layer does (projections, convolutions, gates) is counted as matrix products at a share of the peak, and as bytes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from hypermlp.bench.kernels import WIDTH, in_own_process
from hypermlp.bench.roofline import DEVICES, MEMORY_SHARE, Gpu, flash_costs, operator_costs, seconds, summary

SHAPES = ((8, 1024), (1, 16384))  # batch and tokens; the first is Table 5's
PRODUCT_SHARE = 0.7
PAPER = {"forward_ms": 39.5, "training_ms": 119.0, "flash_forward_ms": 30.0, "flash_training_ms": 88.0}  # Table 5
TARGETS = {"forward_ms": 34.0, "training_ms": 102.0, "long_ratio": 1.5}


def products_seconds(device: Gpu, batch: int, time: int, depth: int, vocabulary: int, hyper: bool) -> float:
    """One forward of everything but the mixing in a GPT of this width: matrix products, and bytes of what is elementwise."""
    C, tokens = WIDTH, batch * time
    attention = (C // 4) * 3 * C + 3 * C * C + C * 6 * 16 if hyper else 4 * C * C  # q, k, gate; v, o, gate; controls
    products = 2 * tokens * (depth * (attention + 8 * C * C) + C * vocabulary)
    passes = (26 if hyper else 18) * 2 * C * tokens * depth + 6 * 2 * vocabulary * tokens
    return products / (PRODUCT_SHARE * device.tflops * 1e12) + passes / (MEMORY_SHARE * device.memory * 1e9)


def predict_device(device: Gpu) -> dict[str, Any]:
    """Predicted milliseconds: the operator of one layer, and GPT-2 small at batch 8 and 1024 tokens (Table 5)."""
    row: dict[str, Any] = {"device": device.name, "predicted": True}
    kernels: dict[str, Any] = {}
    at_table5: dict[str, dict[str, float]] = {}
    for batch, time in SHAPES:
        costs = operator_costs(device, batch, time)
        ours = {phase: seconds(found) for phase, found in costs.items()}
        flash = {phase: seconds(flash_costs(device, batch, time, phase)) for phase in ours}
        for found in (ours, flash):
            found["training"] = found["forward"] + found["backward"]
        for phase in ours:
            pair = {"hyperglu_ms": 1e3 * ours[phase], "flash_ms": 1e3 * flash[phase], "ratio": ours[phase] / flash[phase]}
            row[f"{phase} {batch}×{time}"] = pair
        kernels |= {f"{phase} {batch}×{time}": summary(found) for phase, found in costs.items()}
        if (batch, time) == SHAPES[0]:
            at_table5 = {"hyperglu": ours, "flash": flash}
    for name, found in at_table5.items():
        rest = products_seconds(device, *SHAPES[0], 12, 50257, name == "hyperglu")
        forward, training = 12 * found["forward"] + rest, 12 * found["training"] + 3 * rest
        row[f"{name} model"] = {"forward_ms": 1e3 * forward, "training_ms": 1e3 * training}
    return row | {"kernels": kernels}


def predict() -> list[dict[str, Any]]:
    """One row per device, each made in a process that Triton's interpreter does not touch."""
    with ThreadPoolExecutor(min(len(DEVICES), os.cpu_count() or 1)) as pool:
        return [row for rows in pool.map(lambda d: in_own_process(__name__, d.name), DEVICES) for row in rows]


class LimitCheck(NamedTuple):
    """A target beside what is predicted."""

    what: str
    predicted: float
    limit: float

    @property
    def met(self) -> bool:
        return self.predicted <= self.limit


def machine_factors(row: Mapping[str, Any]) -> dict[str, float]:
    """What the paper's FlashAttention row took by what the model predicts for it: overheads that the model does not know."""
    return {phase: PAPER[f"flash_{phase}"] / row["flash model"][phase] for phase in ("forward_ms", "training_ms")}


def verdicts(predicted: Sequence[Mapping[str, Any]]) -> list[LimitCheck]:
    """Table 5's row, scaled by the machine's factors, and long sequences by FlashAttention-2 on every device."""
    table5 = next(row for row in predicted if row["device"] == "L40S")
    found = [
        LimitCheck(f"Table 5, {phase.removesuffix('_ms')}, ms", table5["hyperglu model"][phase] * factor, TARGETS[phase])
        for phase, factor in machine_factors(table5).items()
    ]
    long = "training {}×{}".format(*SHAPES[1])
    return found + [
        LimitCheck(f"{long} by FlashAttention-2, {r['device']}", r[long]["ratio"], TARGETS["long_ratio"]) for r in predicted
    ]


def main() -> None:
    """The prediction for the device of this name, as JSON."""
    print(json.dumps(predict_device(next(d for d in DEVICES if d.name == sys.argv[1]))))


if __name__ == "__main__":
    main()
