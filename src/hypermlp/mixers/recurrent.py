"""What the mixers with a recurrent state share: their way through padding, packing and the cache.

Letters: B batch, T time, C width, W taps, H heads, K and V widths of a head.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from hypermlp.cache import Cache, CacheSpec
from hypermlp.collectives import RowShare
from hypermlp.mixers.base import Mixer, Tokens
from hypermlp.ops.recurrence import Steps, recurrence
from hypermlp.ops.types import compute_dtype


class Past(NamedTuple):
    """What precedes these tokens; empty at the beginning of a sequence, and always in training."""

    states: dict[str, Tensor]  # name → B …
    history: Tensor | None  # B W−1 …: the last inputs of the convolutions

    def get(self, name: str) -> Tensor | None:
        return self.states.get(name)


class MixResult(NamedTuple):
    """What a recurrent mixer computes for some tokens."""

    y: Tensor  # B T C
    states: dict[str, Tensor]  # after the last token of each row
    conv_inputs: Tensor | None = None  # B T …: the inputs of its convolutions, if it has any


class RecurrentMixer(Mixer):
    """A mixer whose memory is a state of fixed size. Subclasses name the state's shape and take steps."""

    taps: int = 1  # taps of its convolutions (or token shifts), the current token included
    conv_width: int = 0  # over how many channels

    @abstractmethod
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """name → shape for one row of the batch."""

    @abstractmethod
    def step(self, tokens: Tokens, past: Past) -> MixResult:
        """Continue from `past`. tokens.begins and tokens.padding mark the first tokens of documents and padding."""

    def mix(self, tokens: Tokens, cache: Cache | None) -> Tensor:
        if cache is None:
            return self.step(tokens, Past({}, None)).y
        made = self.step(tokens, Past(cache.states, cache.history() if self.taps > 1 else None))
        cache.advance(made.states, tokens.x if made.conv_inputs is None else made.conv_inputs, tokens.counts())
        return made.y

    def mix_rows(self, x: Tensor, rows: RowShare) -> Tensor:
        names, exact = list(self.state_shapes()), compute_dtype(x.dtype)

        def compute(piece: int, part: Tensor, left: tuple[Tensor, ...] | None) -> tuple[Tensor, tuple[Tensor, ...]]:
            place = piece * part.shape[1] + torch.arange(part.shape[1], device=x.device)
            history = None if left is None or self.taps == 1 else left[-1]
            states = {} if left is None else dict(zip(names, left[: len(names)], strict=True))
            made = self.step(Tokens(part, place[None]), Past(states, history))
            ends = tuple(made.states[name].to(exact) for name in names)
            if self.taps == 1:
                return made.y, ends
            inputs = (part if made.conv_inputs is None else made.conv_inputs).to(exact)
            before = inputs.new_zeros(x.shape[0], self.taps - 1, self.conv_width) if history is None else history
            return made.y, (*ends, torch.cat([before, inputs], 1)[:, 1 - self.taps :])

        def empty() -> tuple[Tensor, ...]:
            shapes = [*self.state_shapes().values(), *([(self.taps - 1, self.conv_width)] if self.taps > 1 else [])]
            return tuple(x.new_empty(x.shape[0], *shape, dtype=exact) for shape in shapes)

        return rows.in_turn(x, compute, empty)

    def cache_spec(self) -> CacheSpec:
        return CacheSpec(states=self.state_shapes(), taps=self.taps, width=self.conv_width)


class MatrixMixer(RecurrentMixer):
    """A mixer whose state is a matrix S (K V) in each head, carried from token to token by ops.recurrence."""

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"S": (self.n_head, self.head_key_width, self.head_value_width)}

    def recur(self, steps: Steps, tokens: Tokens, past: Past) -> tuple[Tensor, dict[str, Tensor]]:
        """Readouts o (B T H V), and the state after the last token."""
        o, S = recurrence(steps, past.get("S"), begins=tokens.begins, padding=tokens.padding)
        return o, {"S": S}
