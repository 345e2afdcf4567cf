"""`hypermlp bench model`: what every mixer costs, as whole models, as layers that grow, and at long contexts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hypermlp.bench import flops, memory, table5_mixers
from hypermlp.bench.cases import Case
from hypermlp.bench.record import RoundsFile, entry
from hypermlp.bench.table5_mixers import BASELINE, TABLE5_MIXERS
from hypermlp.bench.timing import matmul_peak
from hypermlp.errors import RunError
from hypermlp.models.lm import Block, LanguageModel, ModelConfig, count_parameters
from hypermlp.provenance import cpu_name

Tell = Callable[[str], None]
PARTS = ("model", "growth", "long")
LONG = ("hyperglu", BASELINE)  # who is measured at long contexts
WARM_UP = 64  # tokens, on a CPU
SHARE_OF_PEAK = 0.4  # of matrix products' speed, for the estimate
LOOSE = 0.03  # of a layer in bfloat16 on a GPU against itself in float32 on the CPU, norm-wise


@dataclass(frozen=True, kw_only=True)
class ModelScale:
    batch: int
    depth: int
    width: int
    vocabulary: int
    time: int
    rounds: int
    growth_width: int
    growth: tuple[int, ...]
    long: tuple[int, ...]


GROWTH, FAR, NEAR = (256, 1024, 4096, 16384), (16384, 32768, 65536), (64, 128, 256)
SCALES = {
    "paper": ModelScale(
        batch=8, depth=12, width=768, vocabulary=50304, time=1024, rounds=5, growth_width=768, growth=GROWTH, long=FAR
    ),
    "laptop": ModelScale(
        batch=1, depth=2, width=768, vocabulary=50304, time=1024, rounds=5, growth_width=256, growth=GROWTH, long=FAR
    ),
    "quick": ModelScale(
        batch=1, depth=2, width=128, vocabulary=512, time=128, rounds=2, growth_width=128, growth=NEAR, long=NEAR
    ),
}
LONG_WIDTH = 256


# ---- models ----


@dataclass(frozen=True, kw_only=True)
class ModelCase:
    """A mixer in a whole model."""

    name: str
    batch: int
    time: int
    width: int
    depth: int
    vocabulary: int
    device: str = "cpu"  # on CUDA in bfloat16, compiled

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    def network(self) -> LanguageModel:
        """GPT-2 of this size with the mixer in the place of attention; the head is the embedding."""
        net = LanguageModel(
            ModelConfig(
                vocabulary=self.vocabulary, width=self.width, depth=self.depth, length=self.time, mixer="softmax", style="gpt2"
            )
        )
        for block in net.blocks:
            assert isinstance(block, Block)
            block.mixer = TABLE5_MIXERS[self.name].build(self.width, self.time)
        return net


class Model:
    """A built case, with its forward and its training step; the loss is that of the next token."""

    def __init__(self, case: ModelCase) -> None:
        torch.manual_seed(0)
        self.case, self.net = case, case.network().to(case.device, case.dtype)
        self.call: Callable[[Tensor], Tensor] = torch.compile(self.net) if case.device == "cuda" else self.net

    def input(self, batch: int, time: int) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(self.case.vocabulary, (batch, time), generator=generator).to(self.case.device)

    def forward(self, tokens: Tensor) -> None:
        with torch.no_grad():
            self.call(tokens)

    def train_step(self, tokens: Tensor) -> None:
        """Forward, loss, backward; no update."""
        self.release()
        F.cross_entropy(self.call(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()

    def release(self) -> None:
        self.net.zero_grad(set_to_none=True)


def model_work(case: ModelCase) -> dict[str, int]:
    """Parameters and operations, counted without memory for them."""
    with torch.device("meta"):
        net = case.network()
    found = flops.model(net, case.batch, case.time)
    seen = flops.seen(net, case.batch, case.time, naive=case.name.startswith("naive"))
    return {
        "parameters": count_parameters(net),
        **found._asdict(),
        "forward": found.forward,
        "training": found.training,
        "seen": seen,
    }


# ---- layers ----


class Layer:
    """A mixer as one layer, on the CPU or in bfloat16 on a GPU."""

    def __init__(self, case: Case) -> None:
        self.built = table5_mixers.build_layer(case)
        if torch.cuda.is_available():
            self.built.layer.to("cuda", torch.bfloat16)
        self.forward, self.train_step = self.built.forward, self.built.train_step

    def input(self, batch: int, time: int) -> Tensor:
        x = self.built.input(batch, time)
        return x.to("cuda", torch.bfloat16) if torch.cuda.is_available() else x

    def release(self) -> None:
        self.built.layer.zero_grad(set_to_none=True)


def check(case: Case, device: str) -> None:
    """Wrong results are never timed: the layer against its reference, and on a GPU against itself on the CPU."""
    built = table5_mixers.build_layer(case)
    built.check()
    if device == "cuda":
        x = built.input(1, min(case.time, built.longest_check))
        with torch.no_grad():
            want = built.call(x)
            built.layer.to("cuda", torch.bfloat16)
            got = built.call(x.to("cuda", torch.bfloat16)).float().cpu()
        error = float((got - want).norm() / want.norm())
        if not error < LOOSE:
            raise RunError(f"{case.name} on the GPU differs from the CPU by {error:.1e}; it will not be timed")


# ---- rounds ----


class Field:
    """Contestants at one length, built when their turn comes and kept while there is memory for all of them."""

    def __init__(self, cases: dict[str, Any], build: Callable[[Any], Any], keep: bool) -> None:
        self.cases, self.build, self.keep = cases, build, keep
        self.built: dict[str, Any] = {}

    def turn(self, name: str) -> list[float]:
        """Seconds of a forward and of a training step."""
        case = self.cases[name]
        member = self.built.get(name)
        x = None
        if member is None:
            member = self.build(case)
            x = member.input(case.batch, case.time)
            short = x if x.is_cuda else member.input(1, min(case.time, WARM_UP))
            member.forward(x)  # memory is taken from the system once
            member.train_step(short)
            if self.keep:
                self.built[name] = member
        x = member.input(case.batch, case.time) if x is None else x
        seconds = [timed(partial(step, x)) for step in (member.forward, member.train_step)]
        member.release()
        return seconds


def timed(task: Callable[[], None]) -> float:
    synchronise()
    begin = time.perf_counter()
    task()
    synchronise()
    return time.perf_counter() - begin


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def take_rounds(record: RoundsFile, length: int, field: Field, rounds: int, tell: Tell) -> None:
    """Until everybody has as many rounds; the baseline takes part in each. Odd rounds run backwards."""
    while waiting := [n for n in field.cases if len(record.rounds(length, n)) < rounds]:
        done = min(len(record.rounds(length, n)) for n in waiting)
        order = list(dict.fromkeys([BASELINE, *waiting]))[:: -1 if done % 2 else 1]
        seconds = {}
        for name in order:
            tell(f"{length:,} tokens, round {done + 1} of {rounds}: {name}")
            seconds[name] = field.turn(name)
        record.add_round(length, {name: seconds[name] for name in sorted(seconds)})


def take_memory(record: RoundsFile, cases: dict[str, Any], build: Callable[[Any], Any], tell: Tell, repeats: int = 1) -> None:
    """In a fresh process each."""
    for name, case in cases.items():
        key = entry(name, case.time)
        if key not in record.data["memory"]:
            tell(f"{case.time:,} tokens: memory of {name}, in a process of its own")
            record.note("memory", {key: memory.extra(case, build, repeats)._asdict()})


# ---- parts ----


def settings(device: str, **own: Any) -> dict[str, Any]:
    machine = torch.cuda.get_device_name() if device == "cuda" else cpu_name()
    dtype = "bfloat16" if device == "cuda" else "float32"
    return {**own, "device": device, "dtype": dtype, "machine": machine, "threads": torch.get_num_threads()}


def run_model(out: Path, scale: str, names: Sequence[str], *, batch: int | None, rounds: int | None, tell: Tell) -> Path:
    """Whole models; returns the file."""
    s, device = SCALES[scale], find_device()
    sizes = {"batch": batch or s.batch, "time": s.time, "width": s.width, "depth": s.depth, "vocabulary": s.vocabulary}
    record = RoundsFile(out / f"model-{scale}.json", settings(device, scale=scale, **sizes))
    every = {name: ModelCase(name=name, device=device, **sizes) for name in TABLE5_MIXERS}
    cases = {name: every[name] for name in dict.fromkeys([BASELINE, *names])}
    work = {name: model_work(case) for name, case in every.items()}
    rounds = rounds or s.rounds
    left = left_over(record, cases, rounds)
    if not left:
        return record.path
    tell(f"{len(left)} mixers, {about(record, work, cases, rounds, device)}")
    for name in left:
        tell(f"checking {name} against its reference")
        check(Case(name=name, batch=1, time=s.time, width=s.width), device)
    known = record.data["work"]
    if new := {name: one for name, one in work.items() if known.get(name) != one}:
        record.note("work", new)
    bytes_of = {name: 4 * work[name]["parameters"] for name in cases}
    take_rounds(record, s.time, Field(cases, Model, sum(bytes_of.values()) < memory.available() / 2), rounds, tell)
    take_memory(record, cases, Model, tell)
    return record.path


def run_growth(out: Path, scale: str, names: Sequence[str], *, rounds: int | None, tell: Tell) -> Path:
    """Layers over lengths."""
    s, device = SCALES[scale], find_device()
    record = RoundsFile(out / f"growth-{scale}.json", settings(device, scale=scale, batch=1, width=s.growth_width))
    chosen = list(dict.fromkeys([BASELINE, *names]))
    for length in s.growth:
        cases = {}
        for name in chosen:
            if reason := table5_mixers.too_large(name, 1, length, s.growth_width):
                tell(f"{length:,} tokens: {name} left out, {reason}")
            else:
                cases[name] = Case(name=name, batch=1, time=length, width=s.growth_width)
        for name in left_over(record, cases, rounds or 2) if length == s.growth[0] else ():
            check(cases[name], device)
        take_rounds(record, length, Field(cases, Layer, True), rounds or 2, tell)
        take_memory(record, cases, Layer, tell)
    return record.path


def run_long(out: Path, scale: str, names: Sequence[str], *, tell: Tell) -> Path:
    """Time and memory at long contexts, both of the process that each has of its own."""
    s, device = SCALES[scale], find_device()
    width = min(LONG_WIDTH, s.growth_width)
    record = RoundsFile(out / f"long-{scale}.json", settings(device, scale=scale, batch=1, width=width))
    for length in s.long:
        work: dict[str, Any] = {}
        cases = {name: Case(name=name, batch=1, time=length, width=width) for name in LONG if name in {*names, BASELINE}}
        for name, case in cases.items():
            with torch.device("meta"):
                found = flops.work(TABLE5_MIXERS[name].build(width, length), length)
            assert found is not None
            if (key := entry(name, case.time)) not in record.data["work"]:
                work[key] = found._asdict()
        for name in left_over(record, cases, 0) if length == s.long[0] else ():
            check(cases[name], device)
        if work:
            record.note("work", work)
        take_memory(record, cases, Layer, tell, repeats=len(s.long) - s.long.index(length))  # short ones are soon done
    return record.path


def left_over(record: RoundsFile, cases: dict[str, Any], rounds: int) -> list[str]:
    """Who still has something to be measured."""
    return [
        name
        for name, case in cases.items()
        if len(record.rounds(case.time, name)) < rounds or entry(name, case.time) not in record.data["memory"]
    ]


def about(record: RoundsFile, work: dict[str, dict[str, int]], cases: dict[str, ModelCase], rounds: int, device: str) -> str:
    """How long it will take, from operations and the speed of matrix products here."""
    missing = {name: rounds - len(record.rounds(case.time, name)) for name, case in cases.items()}
    turns = {name: max(0, n) + (entry(name, cases[name].time) not in record.data["memory"]) for name, n in missing.items()}
    total = sum(turns[name] * (work[name]["forward"] + work[name]["training"]) for name in cases)
    if device == "cuda":
        return f"{total / 1e12:.0f} TFLOP to compute"
    peak = matmul_peak()
    minutes = total / (SHARE_OF_PEAK * peak) / 60
    return f"about {minutes:.0f} minutes ({total / 1e12:.0f} TFLOP, matrix products at {peak / 1e9:.0f} GFLOP/s here)"


def find_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
