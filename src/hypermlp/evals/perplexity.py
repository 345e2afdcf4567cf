"""How well a language model predicts a text: every token exactly once, each from the context it is given.

A text (the whole stream, or each document) begins after an end of document, and is read in windows of `context` tokens that
move by `stride`; a window counts the tokens that no window before it has counted:

    stream        a b c d e f |      `|` end of document, context = 4, stride = 2
    windows     | a b c              counts a b c d
                    b c d e          counts e f
                        d e f        counts |

So a token is predicted from at least context − stride + 1 tokens before it, unless its text has fewer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from hypermlp.config import IGNORED
from hypermlp.eval_mode import evaluating
from hypermlp.models.lm import LanguageModel


class Stream(Protocol):
    """Tokens of a text, as the split of a corpus has them."""

    @property
    def ends(self) -> NDArray[np.int64]:
        """The position after each document."""

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> NDArray[np.int64]: ...


class Decoder(Protocol):
    """What turned the text into tokens."""

    end: int  # the token after every document

    def decode(self, tokens: NDArray[Any]) -> str: ...


class Perplexity(NamedTuple):
    nats: float  # of the whole text
    tokens: int  # ends of documents included
    bytes: int  # of UTF-8; an end of document has none

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes


class Window(NamedTuple):
    start: int  # of its first target in the stream
    length: int
    counted: int  # how many of its last targets count
    first: bool  # of its text: its first input is the end of document before it


def measure(
    model: LanguageModel,
    text: Stream,
    tokenizer: Decoder,
    *,
    context: int | None = None,
    stride: int | None = None,
    documents: bool = False,
    batch: int = 8,
    progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """The perplexity of `text`, one stream or by documents, in batches of windows, on which it does not depend.

    context: by default the model's. stride: by default the context. progress gets the tokens done and their total.
    """
    context = model.config.length if context is None else context
    stride = context if stride is None else stride
    if batch < 1:
        raise ValueError(f"batch ({batch}) must be at least 1")
    if not 1 <= stride <= context:
        raise ValueError(f"stride ({stride}) must be at least 1 and at most the context ({context})")
    if not len(text):
        raise ValueError("there is no text to predict here; give more text, or another split")
    bounds = [0, *text.ends.tolist()] if documents else [0, len(text)]
    windows = [w for a, b in pairwise(bounds) for w in windows_of(a, b, context, stride)]
    windows.sort(key=lambda w: -w.length)  # largest memory first, little padding
    device = next(model.parameters()).device
    nats, done = 0.0, 0
    for some in batches(windows, batch):
        with evaluating(model):
            nats += sum_nats(model, *rows(text, some, tokenizer.end, device))
        done += sum(w.counted for w in some)
        if progress is not None:
            progress(done, len(text))
    return Perplexity(nats, len(text), count_bytes(text, tokenizer))


def windows_of(start: int, stop: int, context: int, stride: int) -> Iterator[Window]:
    """The windows of the text that lies from start to stop."""
    at, counted = start, start
    while counted < stop:
        end = min(at + context, stop)
        yield Window(at, end - at, end - counted, at == start)
        at, counted = at + stride, end


def batches(windows: Sequence[Window], size: int) -> Iterator[Sequence[Window]]:
    for at in range(0, len(windows), size):
        yield windows[at : at + size]


def rows(text: Stream, windows: Sequence[Window], end: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs and targets of windows; shorter ones are padded at the end, which causal models cannot see."""
    longest = max(w.length for w in windows)
    inputs = np.full((len(windows), longest), end, np.int64)
    targets = np.full_like(inputs, IGNORED)
    for row, w in enumerate(windows):
        found = text.read(w.start - (not w.first), w.start + w.length)
        before = np.append([end], found) if w.first else found
        inputs[row, : w.length] = before[:-1]
        targets[row, w.length - w.counted : w.length] = before[1 + w.length - w.counted :]
    return torch.from_numpy(inputs).to(device), torch.from_numpy(targets).to(device)


@torch.no_grad()
def sum_nats(model: LanguageModel, inputs: Tensor, targets: Tensor) -> float:
    logits = model(inputs)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(logits.mT, targets, ignore_index=IGNORED, reduction="none")
    return float(losses.double().sum())


def count_bytes(text: Stream, tokenizer: Decoder) -> int:
    bounds = [0, *text.ends.tolist()]
    return sum(len(tokenizer.decode(text.read(a, b)).encode()) for a, b in pairwise(bounds))
