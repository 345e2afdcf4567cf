"""`hypermlp bench latency`: every token of long streams timed alone, and what lies in the tail.

Streams are past their window before the clock runs, so every token does the same work, as in a service that never ends. The
streams of one setting take turns of some tokens, so that what else a machine does meets all of them; the first tokens of a turn
find caches that others have used, and are not counted.

Letters: B batch, C width, H heads, K width of a head.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp.bench.record import ResultsFile
from hypermlp.bench.timing import threads as thread_count
from hypermlp.checks import at_least_one, choose_from
from hypermlp.errors import RunError
from hypermlp.mixers import HyperGLU, build_mixer
from hypermlp.mixers.int8 import quantize
from hypermlp.models.lm import LanguageModel, ModelConfig

WEIGHTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "float32": lambda module: module,
    "bfloat16": lambda module: module.to(torch.bfloat16),
    "int8": lambda module: quantize(module.to(torch.bfloat16)),  # linear weights; the rest is bfloat16
}
DEADLINES = (1, 5, 10, 20)  # ms
TURNS, COLD = 20, 4  # turns that each stream takes, and tokens at the beginning of one that do not count
STEP = 1.02  # from one border of the distribution to the next
PIECES = 400  # of the trace
BASELINE = "softmax 12 heads"
MODEL = "language model"
MODEL_SHAPE: dict[str, Any] = {"vocabulary": 257, "width": 128, "depth": 4, "length": 256}  # 1.1 M parameters


class RingAttention(nn.Module):
    """Softmax attention over the last `window` tokens, in a ring: the rival of constant cost.

    It has no rotary embedding, so the order of slots does not matter.
    """

    def __init__(self, width: int, n_head: int, window: int) -> None:
        super().__init__()
        self.width, self.heads, self.window = width, n_head, window
        self.qkv, self.o = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def begin(self, x: Tensor) -> Tensor:
        """The output of the last of the first tokens x (B T C), which the ring then holds."""
        q, k, v = self._heads(x)
        slots = x.new_zeros(2, x.shape[0], self.heads, self.window, k.shape[3])
        self.slots, self.seen = slots, x.shape[1]
        place = torch.arange(x.shape[1])[-self.window :] % self.window
        slots[0][:, :, place], slots[1][:, :, place] = k[:, :, -self.window :], v[:, :, -self.window :]
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(o[:, :, -1:].transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # 3 B H T K
        return q, k, v

    def forward(self, x: Tensor) -> Tensor:
        """y (B 1 C) of one token for each row."""
        q, k, v = self._heads(x)
        keys, values = self.slots
        place, held = self.seen % self.window, min(self.seen + 1, self.window)
        keys[:, :, place], values[:, :, place] = k[:, :, 0], v[:, :, 0]
        self.seen += 1
        return self.o(F.scaled_dot_product_attention(q, keys[:, :, :held], values[:, :, :held]).transpose(1, 2).flatten(2))


class TimedStream(NamedTuple):
    """What decodes one token after the other."""

    first: float  # seconds from the prompt to the output of its last token
    step: Callable[[], object]
    parameters: int
    bytes: int  # of parameters, and of what it remembers of all rows


def layer_stream(build: Callable[[], nn.Module], length: int, batch: int, weights: str) -> TimedStream:
    """A layer of width C that has read `length` tokens in every row."""
    torch.manual_seed(0)
    mixer = WEIGHTS[weights](build().eval())
    own: Any = mixer
    x = torch.randn(1, length, own.width).to(torch.float32 if weights == "float32" else torch.bfloat16)
    token = x[:, -1:].expand(batch, -1, -1).contiguous()
    begin = time.perf_counter()
    if isinstance(mixer, RingAttention):
        mixer.begin(x)
        first = time.perf_counter() - begin
        mixer.slots = mixer.slots.repeat_interleave(batch, dim=1)
        return TimedStream(first, lambda: mixer(token), count(mixer), size(mixer) + size_of(mixer.slots))
    cache = own.new_cache(1, max_len=length)
    own(x, cache=cache)
    first = time.perf_counter() - begin
    cache = cache.select([0] * batch)
    return TimedStream(first, lambda: own(token, cache=cache), count(mixer), size(mixer) + cache.nbytes)


def model_stream(length: int, batch: int, weights: str, *, by_modules: bool) -> TimedStream:
    """A small language model; its window is full."""
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(**{**MODEL_SHAPE, "length": length})).eval()
    WEIGHTS[weights](model)
    if by_modules:
        model.norm.register_forward_hook(lambda *_: None)  # so every module is called
    tokens = torch.randint(model.config.vocabulary, (1, length))
    cache = model.new_cache(1, max_len=length)
    begin = time.perf_counter()
    model(tokens, cache=cache)
    first = time.perf_counter() - begin
    cache = cache.select([0] * batch)
    token = tokens[:, -1:].expand(batch, -1).contiguous()
    if model.explain(token, cache).startswith("model") == by_modules:
        raise RunError(f"the model does not take the way that is to be timed: {model.explain(token, cache)}")
    return TimedStream(first, lambda: model(token, cache=cache), count(model), size(model) + cache.nbytes)


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def size_of(t: Tensor) -> int:
    return t.numel() * t.element_size()


def size(module: nn.Module) -> int:
    return sum(map(size_of, module.parameters()))


Make = Callable[[int, int, int, str], TimedStream]  # width, length, batch, weights
CONTESTANTS: dict[str, Make] = {
    "hyperglu": lambda C, t, B, weights: layer_stream(lambda: HyperGLU(n_embd=C, n_head=2, block_size=t), t, B, weights),
    BASELINE: lambda C, t, B, weights: layer_stream(lambda: RingAttention(C, 12, t), t, B, weights),
    "mamba": lambda C, t, B, weights: layer_stream(lambda: build_mixer("mamba", C, t), t, B, weights),
    "gated_deltanet": lambda C, t, B, weights: layer_stream(lambda: build_mixer("gated_deltanet", C, t), t, B, weights),
}
MODELS: dict[str, Make] = {
    MODEL: lambda C, t, B, weights: model_stream(t, B, weights, by_modules=False),
    f"{MODEL}, by modules": lambda C, t, B, weights: model_stream(t, B, weights, by_modules=True),
}


def run(
    path: Path,
    *,
    context: Sequence[int] = (256, 1024, 4096, 16384),
    batch: Sequence[int] = (1, 8),
    weights: Sequence[str] = tuple(WEIGHTS),
    only: Sequence[str] = (),
    model: bool = False,
    cold: bool = False,
    width: int = 768,
    steps: int = 20000,
    threads: int = 2,
    tell: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """Rows of the file at `path`, which grows with every setting and is resumed by the same call.

    model: the small language model, in one call and by its modules, instead of layers. cold: turns of one token.
    """
    contestants = MODELS if model else CONTESTANTS
    for name in only:
        choose_from("only", name, tuple(contestants))
    for kind in weights:
        choose_from("weights", kind, tuple(WEIGHTS))
    at_least_one("steps", steps)
    if not model and width % 12:
        raise ValueError(f"width ({width}) must be divisible by the 12 heads of softmax attention; try {width - width % 12}")
    settings = {"width": width, "steps": steps, "threads": threads, "model": model, "cold": cold, "only": sorted(only)}
    results = ResultsFile(path, "latency", settings)
    chosen = [name for name in contestants if not only or name in only]
    done = {(row["context"], row["batch"], row["weights"]) for row in results.rows}
    with torch.inference_mode(), thread_count(threads):
        for length in context:
            for rows in batch:
                made: list[tuple[str, str, TimedStream]] = []
                for kind in [k for k in weights if (length, rows, k) not in done]:
                    tell(f"context {length}, batch {rows}, {kind}: prompt")
                    made += [(name, kind, contestants[name](width, length, rows, kind)) for name in chosen]
                if not made:
                    continue
                streams, turn = [stream for _, _, stream in made], 1 if cold else -(-steps // TURNS)
                seconds = in_turns(streams, steps, turn, f"context {length}, batch {rows}", tell)
                same = {"context": length, "batch": rows, "session": results.session}
                results.extend(
                    {**same, "contestant": name, "weights": kind, **summary(stream, times)}
                    for (name, kind, stream), times in zip(made, seconds, strict=True)
                )
    return results.rows


def in_turns(
    streams: Sequence[TimedStream], steps: int, turn: int, what: str, tell: Callable[[str], None]
) -> list[list[float]]:
    """Seconds of each of `steps` tokens of every stream, in turns of `turn` tokens."""
    times: list[list[float]] = [[] for _ in streams]
    clock, often = time.perf_counter, -(-steps // TURNS)
    while len(times[0]) < steps:
        if len(times[0]) % often < turn:
            tell(f"{what}: {len(times[0]):,} of {steps:,} tokens of {len(streams)} streams")
        for stream, own in zip(streams, times, strict=True):
            step = stream.step
            for _ in range(COLD if turn > 1 else 0):
                step()
            for _ in range(min(turn, steps - len(own))):
                begin = clock()
                step()
                own.append(clock() - begin)
    return times


def summary(stream: TimedStream, seconds: Sequence[float]) -> dict[str, Any]:
    """Percentiles, deadlines, distribution and trace, in milliseconds."""
    ms = [1e3 * s for s in seconds]
    ordered = sorted(ms)

    def percentile(share: float) -> float:
        return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]

    borders: dict[int, int] = {}
    for value in ms:
        place = math.floor(math.log(value) / math.log(STEP))
        borders[place] = borders.get(place, 0) + 1
    piece = -(-len(ms) // PIECES)
    pieces = [ms[i : i + piece] for i in range(0, len(ms), piece)]
    return {
        "first_ms": 1e3 * stream.first,
        "parameters": stream.parameters,
        "bytes": stream.bytes,
        "p50": percentile(0.5),
        "p99": percentile(0.99),
        "p99.9": percentile(0.999),
        "worst": ordered[-1],
        "met": {str(limit): sum(value <= limit for value in ms) / len(ms) for limit in DEADLINES},
        "distribution": [[STEP**place, number] for place, number in sorted(borders.items())],
        "trace": [[statistics.median(values), max(values)] for values in pieces],
        "piece": piece,
    }
