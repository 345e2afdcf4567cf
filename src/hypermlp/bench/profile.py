"""`hypermlp bench profile`: where the time of a training step goes, operator by operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.profiler import ProfilerActivity, profile

from hypermlp.bench.cases import Case, build
from hypermlp.bench.layer import Shape

STEPS = 5
# What an operator's own time counts as; the first word found in its name decides.
GROUPS = {
    "hypermlp::hm_forward": "mixing",
    "hypermlp::hm_backward": "mixing",
    "scaled_dot_product": "mixing",
    "hypermlp::hm_project": "projections",
    "hypermlp": "convolutions and gates",
    "mm": "projections",
    "matmul": "projections",
}


def run(
    shapes: Sequence[Shape],
    names: Sequence[str],
    *,
    against: str | None = None,
    tell: Callable[[str], None] = lambda text: None,
    done: Callable[[dict[str, Any]], None] = lambda row: None,
) -> list[dict[str, Any]]:
    """One row a mixer and shape: milliseconds of a training step by group of operators."""
    rows = []
    for shape in shapes:
        for name in names:
            tell(f"{shape}: {name}")
            case = Case(name=name, batch=shape.batch, time=shape.time, width=shape.width, against=against)
            rows.append({"contestant": name, "shape": list(shape), "milliseconds": profile_step(case)})
            done(rows[-1])
    return rows


def profile_step(case: Case) -> dict[str, float]:
    built = build(case)
    built.check()
    x = built.input(case.batch, case.time)
    for _ in range(2):
        built.train_step(x)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for _ in range(STEPS):
            built.train_step(x)
    found = dict.fromkeys([*dict.fromkeys(GROUPS.values()), "the rest"], 0.0)
    for event in seen.key_averages():
        found[group_of(event.key)] += event.self_cpu_time_total / 1e3 / STEPS
    return found


def group_of(operator: str) -> str:
    name = operator.lower()
    return next((group for word, group in GROUPS.items() if word in name), "the rest")
