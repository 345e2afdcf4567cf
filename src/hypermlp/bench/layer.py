"""`hypermlp bench layer`: time, memory and operations of whole layers, forward and training step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple

from hypermlp.bench import memory
from hypermlp.bench.cases import BASELINE, BUILDERS, BuiltCase, Case, build, matched, reason_to_leave_out
from hypermlp.bench.timing import matmul_peak, ratio, take_turns, threads

AUTHORS_CHUNKS = (64, 128, 256, 512, 1024)


class Shape(NamedTuple):
    batch: int
    time: int
    width: int

    def __str__(self) -> str:
        return f"batch {self.batch}, {self.time} tokens, width {self.width}"

    @classmethod
    def parse(cls, text: str) -> Shape:
        try:
            shape = cls(*(int(part) for part in text.split("x")))
        except (TypeError, ValueError):
            raise ValueError(f"shape ({text}) must be three whole numbers BxTxd, such as 8x1024x768") from None
        if min(shape) < 1 or shape.width % 16:
            raise ValueError(f"shape ({text}) must be positive, with a width divisible by 16")
        return shape


DEFAULT_SHAPES = tuple(Shape(*s) for s in ((8, 1024, 768), (2, 2048, 768), (1, 4096, 768), (1, 8192, 768), (128, 128, 128)))
MIXER_SHAPES = tuple(Shape(*s) for s in ((4, 512, 256), (4, 1024, 256), (4, 2048, 256)))  # three, so that growth shows


def run(
    shapes: Sequence[Shape],
    names: Sequence[str] = tuple(BUILDERS),
    *,
    rounds: int = 5,
    thread_counts: Sequence[int] = (2, 1),
    match: bool = False,
    against: str | None = None,
    dtype: str = "float32",
    with_memory: bool = True,
    tell: Callable[[str], None] = lambda text: None,
    done: Callable[[dict[str, Any]], None] = lambda row: None,
) -> list[dict[str, Any]]:
    """One row for each mixer (an implementation, a registered name or a label) and shape.

    match: at equal parameters; a row says where that is not reached. dtype: of weights and inputs. `tell` hears what is going
    on, `done` each finished row.
    """
    rows = []
    for shape in shapes:
        cases = {}
        for name in names:
            case = Case(name=name, batch=shape.batch, time=shape.time, width=shape.width, against=against, dtype=dtype)
            reason = reason_to_leave_out(case)
            if reason is None:
                cases[name] = matched(case) if match else case
            elif name != "authors":
                tell(f"{shape}: {name} left out, {reason}")
        for row in run_shape(shape, cases, rounds, thread_counts, with_memory, tell) if cases else ():
            rows.append(row)
            done(row)
    if not rows:
        raise ValueError("no layer can run at these shapes; choose others")
    return rows


def run_shape(
    shape: Shape,
    cases: dict[str, Case],
    rounds: int,
    thread_counts: Sequence[int],
    with_memory: bool,
    tell: Callable[[str], None],
) -> list[dict[str, Any]]:
    tell(f"{shape}: checking {len(cases)} mixers against the reference")
    layers = {name: build(case) for name, case in cases.items()}
    for built in layers.values():
        built.check()
    if "authors" in layers:
        layers["authors"] = best_authors(layers["authors"], tell)
    rows = {
        name: {
            "contestant": name,
            "shape": list(shape),
            "parameters": c.parameters,
            "deviation": c.parameters / (4 * shape.width**2) - 1,  # from the baseline's
            "note": c.case.note,
            "flops_forward": c.flops,
            "size": c.case.size,
            "chunk": c.case.chunk,
            "dtype": c.case.dtype,
            "state_bytes": c.state_bytes,
        }
        for name, c in layers.items()
    }
    for count in thread_counts:
        with threads(count):
            time_phases(layers, rows, count, rounds, shape, tell)
    if with_memory:
        for name, built in layers.items():
            tell(f"{shape}: memory of {name}")
            extra = memory.extra(built.case)
            rows[name] |= {"forward_extra_bytes": extra.forward, "training_extra_bytes": extra.training}
    return list(rows.values())


def time_phases(
    layers: dict[str, BuiltCase],
    rows: dict[str, dict[str, Any]],
    count: int,
    rounds: int,
    shape: Shape,
    tell: Callable[[str], None],
) -> None:
    """Adds seconds, ratio to the baseline and share of peak under keys like `training_2t`; one thread is CPU time."""
    x = next(iter(layers.values())).input(shape.batch, shape.time)
    peak = matmul_peak(dtype=x.dtype)
    clock = time.process_time if count == 1 else time.perf_counter
    for phase, factor in (("forward", 1), ("training", 3)):
        tell(f"{shape}: {phase}, {count} thread{'s' * (count > 1)}, {rounds} rounds")
        tasks: dict[str, Callable[[], object]] = {
            name: partial(c.forward if phase == "forward" else c.train_step, x) for name, c in layers.items()
        }
        seconds = take_turns(tasks, rounds, clock=clock)
        for name, c in layers.items():
            median = sorted(seconds[name])[len(seconds[name]) // 2]
            rows[name][f"{phase}_{count}t"] = {
                "seconds": median,
                "ratio": ratio(seconds[name], seconds[BASELINE])._asdict() if BASELINE in seconds else None,
                "share_of_matmul_peak": None if c.flops is None else factor * c.flops / median / peak,
                "rounds": seconds[name],
            }
        for c in layers.values():
            c.layer.zero_grad(set_to_none=True)


def best_authors(built: BuiltCase, tell: Callable[[str], None]) -> BuiltCase:
    """The authors' layer at its best chunk size for a training step."""
    case = built.case
    trials = {chunk: build(replace(case, chunk=chunk)) for chunk in AUTHORS_CHUNKS if chunk <= max(case.time, 64)}
    x = built.input(case.batch, case.time)
    seconds = take_turns({str(chunk): partial(c.train_step, x) for chunk, c in trials.items()}, 1)
    best = min(trials, key=lambda chunk: min(seconds[str(chunk)]))
    tell(f"the authors' best chunk size at {asdict(case)['time']} tokens is {best}")
    return trials[best]
