"""`hypermlp gpu check`, `bench` and `tune`: what only a machine with a GPU can tell.

Parity with the reference first (`parity.py`): values and all gradients; nothing is timed where one is wrong. Times are medians
of CUDA events after warming up, the mixers in turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp.bench import model, parity
from hypermlp.bench.cases import BASELINE, Case, build, reason_to_leave_out
from hypermlp.bench.layer import Shape
from hypermlp.config import HyperGLUConfig
from hypermlp.errors import RunError
from hypermlp.mixers.hyper import HyperGLU
from hypermlp.mixers.softmax import SoftmaxAttention
from hypermlp.models.lm import published_inner

SHAPES = ((8, 1024, 768), (1, 4096, 768), (1, 16384, 768))
MODEL = model.language(Shape(8, 1024, 768), depth=12, vocabulary=50304)  # GPT-2 small, as in the paper's efficiency table
DECODE = ((1, 4096), (8, 4096), (1, 32768))
CANDIDATES = {
    "forward_u": [(64, 32), (64, 64), (32, 32)],
    "forward_y": [(64, 32), (64, 64), (32, 32)],
    "forward_w": [(64, 32), (32, 32)],
    "backward": [(64, 32), (32, 32)],
}
BACKWARD_ROWS = ("backward_dw", "backward_h", "backward_dz")  # share rows and columns
BACKWARD_PRODUCTS = ("backward_parameters", "backward_q", "backward_k", "backward_v")  # share rows


def need_gpu(what: str) -> None:
    if not torch.cuda.is_available():
        raise RunError(
            f"{what} needs an NVIDIA GPU that torch can see (torch.cuda.is_available() is False here); "
            "without one, `hypermlp bench kernels` compiles the kernels and predicts their cost"
        )


def milliseconds(task: Callable[[], object], rounds: int) -> list[float]:
    times = []
    for number in range(-3, rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        task()
        end.record()
        torch.cuda.synchronize()
        if number >= 0:
            times.append(begin.elapsed_time(end))
    return times


def layers(rounds: int, against: str | None, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """Forward and training step of whole layers in bfloat16, and their peak memory."""
    rows = []
    for batch, time, width in SHAPES:
        for name in (
            "hyperglu triton",
            "hyperglu chunked",
            BASELINE,
            "softmax sdpa 12 heads",
            *(["authors"] if against else []),
        ):
            case = Case(name=name.replace("triton", "chunked"), batch=batch, time=time, width=width, against=against)
            if reason_to_leave_out(case) is not None:
                continue
            tell(f"layer: {name}, batch {batch}, {time} tokens")
            built = build(case)
            layer = built.layer.cuda().to(torch.bfloat16)
            call = partial(layer, impl=name.split()[1]) if name.startswith("hyperglu") else built.call
            x = torch.randn(batch, time, width, device="cuda", dtype=torch.bfloat16)
            rows.append({"part": "layer", "contestant": name, "shape": [batch, time, width], **timed(layer, call, x, rounds)})
    return rows


def timed(layer: torch.nn.Module, call: Callable[[Tensor], Tensor], x: Tensor, rounds: int) -> dict[str, float]:
    """Milliseconds and bytes at the peak of a forward and of a training step."""

    def forward() -> None:
        with torch.no_grad():
            call(x)

    def step() -> None:
        layer.zero_grad(set_to_none=True)
        call(x).sum().backward()

    found = {}
    for phase, task in (("forward", forward), ("training", step)):
        found[f"{phase}_ms"] = statistics.median(milliseconds(task, rounds))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        task()
        torch.cuda.synchronize()
        found[f"{phase}_extra_bytes"] = torch.cuda.max_memory_allocated() - before
    return found


def models(kind: model.ModelKind, rounds: int, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """The same of whole language models at equal width, next-token loss included."""
    rows = []
    for name in (kind.mixer, kind.baseline):
        tell(f"model: {name}, {kind.depth} layers, {kind.shape}")
        net, loss, tokens = language_model(kind, name, "cuda")
        row = {"part": "model", "contestant": name, "shape": list(kind.shape), "depth": kind.depth}
        rows.append({**row, "parameters": sum(p.numel() for p in net.parameters()), **timed(net, loss, tokens, rounds)})
    return rows


def language_model(kind: model.ModelKind, name: str, device: str) -> tuple[nn.Module, Callable[[Tensor], Tensor], Tensor]:
    """A model in bfloat16, its loss as a function of a batch of tokens, and a batch."""
    torch.manual_seed(0)
    net = kind.build(name, None, published_inner(kind.shape.width)).to(device, torch.bfloat16)
    tokens = torch.randint(kind.vocabulary, (kind.shape.batch, kind.shape.time + 1), device=device)

    def loss(tokens: Tensor) -> Tensor:
        return F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())

    return net, loss, tokens


def decoding(rounds: int, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """Milliseconds per token against a cache of some length."""
    rows = []
    for batch, context in DECODE:
        makers: dict[str, Callable[[int], Any]] = {
            "hyperglu triton": lambda length: HyperGLU(HyperGLUConfig(n_embd=768, n_head=2, block_size=length)),
            "softmax sdpa 12 heads": lambda length: SoftmaxAttention(768, 12, use_rope=False),
        }
        for name, make in makers.items():
            tell(f"decode: {name}, batch {batch}, context {context}")
            layer = make(context).cuda().to(torch.bfloat16)
            cache = layer.new_cache(batch, max_len=context, device="cuda", dtype=torch.bfloat16)
            layer(torch.randn(batch, context - rounds - 8, 768, device="cuda", dtype=torch.bfloat16), cache=cache)
            token = torch.randn(batch, 1, 768, device="cuda", dtype=torch.bfloat16)

            def step(layer: Any = layer, cache: Any = cache, token: Tensor = token) -> None:
                layer(token, cache=cache)

            rows.append(
                {
                    "part": "decode", "contestant": name, "batch": batch, "context": context,
                    "ms_per_token": statistics.median(milliseconds(step, rounds)), "cache_bytes": cache.nbytes,
                }
            )  # fmt: skip
    return rows


def run(
    *,
    rounds: int = 20,
    against: str | None = None,
    tell: Callable[[str], None] = lambda text: None,
    done: Callable[[dict[str, Any]], None] = lambda row: None,
) -> list[dict[str, Any]]:
    """Parity, layers, models, decoding; one row per comparison."""
    need_gpu("bench gpu")
    rows: list[dict[str, Any]] = []
    parts: tuple[Callable[[], Iterable[dict[str, Any]]], ...] = (
        lambda: parity.run("triton", "cuda", tell=tell),
        lambda: layers(rounds, against, tell),
        lambda: models(MODEL, rounds, tell),
        lambda: decoding(rounds, tell),
    )
    for part in parts:
        for row in part():
            rows.append(row)
            done(row)
    return rows


# Tuning


def measure_tiles(overrides: Mapping[str, Sequence[int]], phase: str, rounds: int = 10) -> float | None:
    """Milliseconds of the operator with some tiles replaced, at batch 8 and 1024 tokens; None where they do not compile."""
    from hypermlp.ops.triton import launch, tiles

    def replaced(kernel: str, arch: int, dtype: str) -> Any:
        return tiles.Tile._make((*overrides[kernel], kernel)) if kernel in overrides else tiles.tile(kernel, arch, dtype)

    torch.manual_seed(0)
    layer = HyperGLU(HyperGLUConfig(n_embd=768, n_head=2, block_size=1024)).cuda().to(torch.bfloat16)
    x = torch.randn(8, 1024, 768, device="cuda", dtype=torch.bfloat16)
    try:
        with patch.object(launch, "tile", replaced):
            return timed(layer, partial(layer, impl="triton"), x, rounds)[f"{phase}_ms"]
    except Exception as error:  # triton raises types of its own: out of shared memory, out of registers
        if "out of resource" in str(error).lower() or "OutOfResources" in type(error).__name__:
            return None
        raise


def tune(
    measure: Callable[[Mapping[str, Sequence[int]], str], float | None] = measure_tiles,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, list[int]]:
    """The fastest tile of each kernel, one group of kernels after another, by trying all candidates."""
    best: dict[str, list[int]] = {}
    for group, sizes in CANDIDATES.items():
        phase = "training" if group == "backward" else "forward"
        times: dict[tuple[int, ...], float] = {}
        for M, N in sizes:
            for warps in {M // 16, M // 8}:
                for stages in (1, 2, 3):
                    taken = measure(overrides_of(group, M, N, warps, stages), phase)
                    outcome = "too large" if taken is None else f"{taken:.3f} ms"
                    tell(f"{group} {M}×{N}, {warps} warps, {stages} stages: {outcome}")
                    if taken is not None:
                        times[M, N, warps, stages] = taken
        if not times:
            raise RunError(f"none of the tiles of {group} compiles on this GPU")
        best |= overrides_of(group, *min(times, key=lambda tile: times[tile]))
    return best


def overrides_of(group: str, M: int, N: int, warps: int, stages: int) -> dict[str, list[int]]:
    """The tiles that change together."""
    if group == "backward":
        rows = {name: [M, N, warps, stages] for name in BACKWARD_ROWS}
        return rows | {name: [M, 64, M // 16, stages] for name in BACKWARD_PRODUCTS}
    found = {group: [M, N, warps, stages]}
    return found | ({"forward_v": [M, 64, M // 16, stages]} if group == "forward_w" else {})
