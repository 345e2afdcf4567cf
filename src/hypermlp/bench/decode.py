"""`hypermlp bench decode`: milliseconds per token and bytes of cache, against softmax attention with a preallocated cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hypermlp.bench.timing import ratio, take_turns
from hypermlp.cache import Cache
from hypermlp.config import HyperGLUConfig
from hypermlp.errors import RunError
from hypermlp.mixers import HyperGLU, HyperMLP, SoftmaxAttention
from hypermlp.mixers.base import Mixer

STEPS = 8  # tokens decoded in one turn
LONGEST_PREFILL = 4096  # up to which the prefill is timed too
BASELINE = "softmax sdpa 2 heads"
CONTESTANTS: dict[str, Callable[[int, int], Mixer]] = {
    "hyperglu": lambda width, length: HyperGLU(HyperGLUConfig(n_embd=width, n_head=2, block_size=length)),
    "hypermlp": lambda width, length: HyperMLP(HyperGLUConfig(n_embd=width, n_head=2, block_size=length)),
    BASELINE: lambda width, length: SoftmaxAttention(width, 2, use_rope=False),
    "softmax sdpa 12 heads": lambda width, length: SoftmaxAttention(width, 12, use_rope=False),
}


def run(
    lengths: Sequence[int],
    batches: Sequence[int],
    *,
    width: int = 768,
    rounds: int = 15,
    tell: Callable[[str], None] = lambda text: None,
    done: Callable[[dict[str, Any]], None] = lambda row: None,
) -> list[dict[str, Any]]:
    """One row a contestant, length and batch: decoding the last tokens of a context of that length, and prefilling it."""
    rows = []
    for length in lengths:
        for batch in batches:
            tell(f"batch {batch}, context {length}")
            for row in run_one(length, batch, width, rounds):
                rows.append(row)
                done(row)
    return rows


def run_one(length: int, batch: int, width: int, rounds: int) -> list[dict[str, Any]]:
    if length <= STEPS:
        raise ValueError(f"a context ({length}) must be longer than the {STEPS} tokens of a turn")
    torch.manual_seed(0)
    names = [name for name in CONTESTANTS if not (name.endswith("12 heads") and width % 12)]
    mixers = {name: CONTESTANTS[name](width, length) for name in names}
    x = torch.randn(1, length, width)
    caches = {name: prefilled(name, mixer, x, batch) for name, mixer in mixers.items()}
    seconds = decode_in_turns(mixers, caches, x.expand(batch, -1, -1).contiguous(), rounds)
    prefill = prefill_in_turns(mixers, x, rounds=5) if batch == 1 and length <= LONGEST_PREFILL else None
    return [
        {
            "contestant": name,
            "batch": batch,
            "context": length,
            "width": width,
            "parameters": sum(p.numel() for p in mixer.parameters()),
            "ms_per_token": 1e3 * sorted(seconds[name])[rounds // 2] / STEPS,
            "ratio": ratio(seconds[name], seconds[BASELINE])._asdict(),
            "cache_bytes": caches[name].nbytes,
            "cache_ratio": caches[name].nbytes / caches[BASELINE].nbytes,
            "prefill_by_forward": ratio(prefill[name], prefill[f"{name} forward"])._asdict() if prefill else None,
        }
        for name, mixer in mixers.items()
    ]


def prefilled(name: str, mixer: Mixer, x: torch.Tensor, batch: int) -> Cache:
    """A cache that has seen all but the last tokens of x in every row; what it then decodes must be the full forward's."""
    one = mixer.new_cache(1, max_len=x.shape[1])
    mixer(x[:, :-STEPS], cache=one)
    cache = one.select([0] * batch)
    trial = cache.clone()
    tokens = x[:, -STEPS:].expand(batch, -1, -1).split(1, dim=1)
    steps = torch.cat([mixer(token, cache=trial) for token in tokens], dim=1)
    with torch.no_grad():
        error = float((steps - mixer(x)[:, -STEPS:]).norm() / steps.norm())
    if not error < 1e-4:
        raise RunError(f"{name} gives other outputs token by token than all at once, by {error:.1e}; it will not be timed")
    return cache


def decode_in_turns(mixers: dict[str, Mixer], caches: dict[str, Cache], x: torch.Tensor, rounds: int) -> dict[str, list[float]]:
    """Seconds for STEPS tokens in each round; the caches go back in between, off the clock."""
    tokens = x[:, -STEPS:].split(1, dim=1)
    seconds: dict[str, list[float]] = {name: [] for name in mixers}
    for number in range(-1, rounds):
        for name, mixer in mixers.items():
            begin = time.perf_counter()
            for token in tokens:
                mixer(token, cache=caches[name])
            if number >= 0:
                seconds[name].append(time.perf_counter() - begin)
            caches[name].crop(x.shape[1] - STEPS)
    return seconds


def prefill_in_turns(mixers: dict[str, Mixer], x: torch.Tensor, rounds: int) -> dict[str, list[float]]:
    tasks: dict[str, Callable[[], object]] = {}
    for name, mixer in mixers.items():

        def forward(mixer: Mixer = mixer) -> None:
            with torch.no_grad():
                mixer(x)

        def prefill(mixer: Mixer = mixer) -> None:
            mixer(x, cache=mixer.new_cache(x.shape[0], max_len=x.shape[1]))

        tasks[name], tasks[f"{name} forward"] = prefill, forward
    return take_turns(tasks, rounds)
