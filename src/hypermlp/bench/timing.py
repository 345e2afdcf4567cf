"""Timing on noisy machines: mixers take turns, and ratios are taken within a round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch


class Ratio(NamedTuple):
    """Median over rounds of one mixer's time by another's, with the quartiles."""

    median: float
    low: float
    high: float


def take_turns(
    tasks: dict[str, Callable[[], object]],
    rounds: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds of each task in each round, after one round to warm up. Odd rounds run backwards, so that drift cancels."""
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    for number in range(-1, rounds):
        for name in list(tasks) if number % 2 else list(tasks)[::-1]:
            begin = clock()
            tasks[name]()
            if number >= 0:
                seconds[name].append(clock() - begin)
            tick()
    return seconds


def ratio(times: list[float], base: list[float]) -> Ratio:
    per_round = sorted(a / b for a, b in zip(times, base, strict=True))
    if len(per_round) == 1:
        return Ratio(per_round[0], per_round[0], per_round[0])
    low, median, high = statistics.quantiles(per_round, n=4, method="inclusive")
    return Ratio(median, low, high)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def matmul_peak(size: int = 1536, rounds: int = 5, dtype: torch.dtype = torch.float32) -> float:
    """Multiply-adds per second, times two, of torch's own matrix product on this machine, at its best."""
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    seconds = take_turns({"matmul": lambda: a @ b}, rounds)["matmul"]
    return 2 * size**3 / min(seconds)


def median(values: list[float]) -> float:
    return statistics.median(values)
