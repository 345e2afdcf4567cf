"""A cache for compiled decoding: its bookkeeping is tensors, and nothing but their values ever changes.

So torch.compile makes one graph for all tokens (fullgraph=True, dynamic=False), and a CUDA graph may replay it. Slots lie in
the order of time from the first place on. How many have room is fixed from the start; a window saves none.

Letters: B batch, T new tokens, S slots of room.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from hypermlp.cache import Cache, CacheSpec


class FixedCache(Cache):
    """A cache of `max_len` tokens for each of `batch` rows; made by new_cache(…, fixed=True).

    It can be filled, and its rows reordered. What is written beyond its room is an error, in compiled code too.
    """

    seen: Tensor  # type: ignore[assignment]  # B: tokens of each row

    def __init__(self, spec: CacheSpec, batch: int, *, max_len: int | None, dtype: torch.dtype, device: torch.device) -> None:
        if max_len is None or max_len < 1:
            raise ValueError(f"max_len ({max_len}) of a fixed cache must be how many tokens it has room for")
        if spec.rewritten:
            raise ValueError(
                "these slots change with every token, which needs a cache that grows: leave fixed unset "
                "(cache_implementation in transformers)"
            )

        def zeros(shape: tuple[int, ...], precision: torch.dtype = dtype) -> Tensor:
            return torch.zeros(batch, *shape, dtype=precision, device=device)

        exact = torch.promote_types(dtype, torch.float32)
        slots = {name: zeros((max_len + 1, *shape)) for name, shape in spec.slots.items()}  # the last is for padding
        states = {name: zeros(shape, exact) for name, shape in spec.states.items()}
        super().__init__(spec, 0, slots, states, zeros((spec.taps - 1, spec.width)))
        self.max_len = max_len
        self.seen = zeros((), torch.int64)
        self.columns = zeros((max_len + 1 if slots else 0,), torch.int64)  # of the caller's tokens, for each slot
        self.columns_seen = torch.zeros((), dtype=torch.int64, device=device)

    def _leave_inference_mode(self) -> None:
        if not self.seen.is_inference() or torch.is_inference_mode_enabled():
            return
        super()._leave_inference_mode()
        self.seen, self.columns, self.columns_seen = self.seen.clone(), self.columns.clone(), self.columns_seen.clone()

    @property
    def lengths(self) -> Tensor:
        """Tokens that each row has seen (B), where the cache is."""
        return self.seen.clone()

    @property
    def room(self) -> int:
        return self.max_len

    def history(self) -> Tensor:
        return self.inputs

    def note(self, order: Tensor | None, T: int) -> None:
        """T tokens come, whose places among the caller's are `order` (B T); None: as they are."""
        if not self.slots:
            return
        place = torch.arange(T, device=self.seen.device)
        row = torch.arange(self.batch_size, device=place.device)[:, None]
        column = self.columns_seen + (place if order is None else order).expand(self.batch_size, T)
        self.columns.index_put_((row, (self.seen[:, None] + place).clamp(max=self.max_len)), column)
        self.columns_seen.add_(T)

    def append(
        self, new: dict[str, Tensor], inputs: Tensor, counts: list[int], *, ring: bool = False
    ) -> tuple[dict[str, Tensor], Tensor]:
        n = self._reserved(counts)
        row, place = torch.arange(len(counts), device=n.device), torch.arange(inputs.shape[1], device=n.device)
        index = torch.where(place < n[:, None], self.seen[:, None] + place, self.max_len)
        for name, values in new.items():
            self.slots[name].index_put_((row[:, None], index), values.to(self.slots[name].dtype))
        zero = torch.zeros_like(row)
        spans = torch.stack([row, zero, n, zero, self.seen + n], dim=1)
        self.advance({}, inputs, counts)
        return self.slots, spans

    def _reserved(self, counts: list[int]) -> Tensor:
        """counts as a tensor (B), for which there is room."""
        n = self.seen.new_tensor(counts)
        fits, said = (self.seen + n <= self.max_len).all(), f"a fixed cache of {self.max_len} tokens is full: make a larger one"
        if torch.compiler.is_compiling():
            torch._assert_async(fits, said)
        elif not bool(fits):
            raise ValueError(said)
        return n

    def advance(self, states: dict[str, Tensor], inputs: Tensor, counts: list[int]) -> None:
        n = self.seen.new_tensor(counts)
        for name, state in states.items():
            self.states[name].copy_(state)
        if self.taps > 1:
            joined = torch.cat([self.inputs, inputs.to(self.inputs.dtype)], dim=1)
            last = n[:, None] + torch.arange(self.taps - 1, device=n.device)
            self.inputs.copy_(joined.gather(1, last[..., None].expand(-1, -1, joined.shape[2])))
        self.seen.add_(n)

    def reorder(self, index: Any) -> None:
        rows = torch.as_tensor(index, device=self.seen.device)
        if rows.shape != self.seen.shape:
            raise ValueError(f"a fixed cache keeps its {self.batch_size} rows: give as many places, not {tuple(rows.shape)}")
        for t in (self.seen, self.columns, self.inputs, *self.slots.values(), *self.states.values()):
            t.copy_(t.index_select(0, rows))

    def clear(self) -> None:
        """Begin again."""
        for t in (self.seen, self.columns_seen, self.inputs, *self.states.values()):
            t.zero_()

    def _refuse(self, *arguments: Any) -> NoReturn:
        raise ValueError("a fixed cache can be filled and reordered alone: make it without fixed to crop, copy or store it")

    reserve = check_crop = _state = _refuse  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"FixedCache(lengths={self.seen.tolist()}, max_len={self.max_len}, nbytes={self.nbytes:,})"
