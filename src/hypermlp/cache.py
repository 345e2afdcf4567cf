"""What one layer keeps between steps: a window of slots for each row of the batch, and its most recent inputs.

Letters: B batch, S slots of room, T new tokens, W taps of a convolution, C width.

Rows are independent: each has its own length, so ragged batches, left padding and continuous batching need nothing special.
Slots lie contiguous in time order. A windowed cache holds the last `window` of them; when its room is used up the window moves
to the front, once in window/8 steps, so a stream runs for ever in constant memory and constant time per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

SMALLEST_ROOM = 16  # slots that a growing cache begins with
HOST = ("begin", "end", "lengths", "known")  # its bookkeeping, one number a row, on the host


class Cache:
    """Slots and recent inputs of one layer; made by the layer's new_cache.

    slots: name → (B, room, …), the entries [begin, end) of each row are its slots in time order;
    recent: (B, rewind + W − 1, C), the row's last inputs, newest last: what convolutions look back on, and crop goes back to.
    """

    def __init__(
        self,
        slots: dict[str, Tensor],
        recent: Tensor,
        *,
        window: int | None,
        taps: int,
        rewind: int,
    ) -> None:
        batch = recent.shape[0]
        self.slots, self.recent = slots, recent
        self.window, self.taps, self.rewind = window, taps, rewind
        # On the host: where a row's slots lie, how many tokens it has seen in all, how many entries of `recent` are true.
        self.begin, self.end, self.lengths = (torch.zeros(batch, dtype=torch.int64) for _ in range(3))
        self.known = torch.full((batch,), recent.shape[1])  # at first all: there is nothing but zeros before a sequence

    @classmethod
    def new(
        cls,
        batch: int,
        shapes: dict[str, tuple[int, ...]],
        *,
        width: int,
        window: int | None,
        taps: int,
        rewind: int,
        max_len: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Cache:
        """Empty, with room for max_len tokens (it grows when there are more)."""
        for name, value, least in (("batch_size", batch, 0), ("max_len", max_len or 1, 1), ("rewind", rewind, 0)):
            if value < least:
                raise ValueError(f"{name} ({value}) must be at least {least}")
        room = SMALLEST_ROOM if max_len is None else max_len
        room = room if window is None else min(room, window)
        slots = {name: torch.zeros(batch, room, *shape, dtype=dtype, device=device) for name, shape in shapes.items()}
        keep = 0 if taps <= 1 else rewind + taps - 1
        return cls(slots, torch.zeros(batch, keep, width, dtype=dtype, device=device), window=window, taps=taps, rewind=rewind)

    # What a layer does with it

    def check(self, x: Tensor, shapes: dict[str, tuple[int, ...]]) -> None:
        """Refuse a cache that was not made for this layer, batch and device."""
        own = {name: tuple(t.shape[2:]) for name, t in self.slots.items()}
        if own != shapes:
            raise ValueError(f"the cache holds {own} and this layer needs {shapes}; make it with this layer's new_cache")
        if self.batch_size != x.shape[0]:
            raise ValueError(f"the cache has {self.batch_size} rows and x {x.shape[0]}; see cache.select and Cache.stack")
        if self.recent.device != x.device:
            raise ValueError(f"the cache is on {self.recent.device} and x on {x.device}; make it with device={str(x.device)!r}")

    def history(self) -> Tensor:
        """The last W − 1 inputs of each row (B, W−1, C), zeros before it began."""
        return self.recent[:, self.recent.shape[1] - (self.taps - 1) :]

    def append(self, new: dict[str, Tensor], inputs: Tensor, counts: Tensor) -> tuple[dict[str, Tensor], Tensor | None]:
        """Add the first counts[b] tokens of each row of `new` (name → B T …); `inputs` (B T C) are what they were made from.

        Returns the slots to read (name → B S …) and their spans (None where every row is read whole and alike).
        """
        self._remember(inputs, counts)
        if self._too_long(counts):
            return self._append_long(new, counts)
        self._make_room(counts)
        for name, values in new.items():
            write(self.slots[name], values, self.end, counts)
        self.end += counts
        self.lengths += counts
        return self._readable(self.slots, self.begin, self.end, counts, inputs.shape[1])

    def _append_long(self, new: dict[str, Tensor], counts: Tensor) -> tuple[dict[str, Tensor], Tensor | None]:
        """A chunk that does not fit beside the window: read it once from a joined copy, then keep the last window of it."""
        assert self.window is not None
        held = self.end - self.begin
        joined = {}
        for name, values in new.items():
            old = self.slots[name]
            joined[name] = old.new_zeros(old.shape[0], int((held + counts).max()), *old.shape[2:])
            for b, (begin, end) in enumerate(zip(self.begin.tolist(), self.end.tolist(), strict=True)):
                joined[name][b, : end - begin] = old[b, begin:end]
            write(joined[name], values, held, counts)
        total = held + counts
        kept = total.clamp(max=self._held())
        self._resize(int(kept.max()))
        for name, values in joined.items():
            for b, (stop, count) in enumerate(zip(total.tolist(), kept.tolist(), strict=True)):
                self.slots[name][b, :count] = values[b, stop - count : stop]
        self.begin, self.end, self.lengths = torch.zeros_like(kept), kept, self.lengths + counts
        rows = next(iter(new.values())).shape[1]
        return self._readable(joined, torch.zeros_like(total), total, counts, rows)

    @staticmethod
    def _readable(
        slots: dict[str, Tensor], begin: Tensor, end: Tensor, counts: Tensor, rows: int
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        alike = len(counts) > 0 and all(bool((x == x[0]).all()) for x in (begin, end, counts)) and int(counts[0]) == rows
        if alike:
            return {name: values[:, int(begin[0]) : int(end[0])] for name, values in slots.items()}, None
        entry, zero = torch.arange(len(counts)), torch.zeros_like(counts)
        return slots, torch.stack([entry, zero, counts, begin, end], dim=1)

    def _remember(self, inputs: Tensor, counts: Tensor) -> None:
        keep = self.recent.shape[1]
        if keep == 0:
            return
        joined = torch.cat([self.recent, inputs.to(self.recent.dtype)], dim=1)
        index = counts.to(joined.device)[:, None] + torch.arange(keep, device=joined.device)
        self.recent = joined.gather(1, index[..., None].expand(-1, -1, joined.shape[2]))
        self.known = (self.known + counts).clamp(max=keep)

    def _held(self) -> int:
        """Slots that a row keeps when its window moves: what the next token sees, and what crop may go back to."""
        assert self.window is not None
        return self.window - 1 + self.rewind

    def _full_room(self) -> int:
        """The most that a windowed cache ever has: room beside what it holds, so that the window moves once in a while."""
        assert self.window is not None
        return self._held() + max(1, self.window // 8)

    def _too_long(self, counts: Tensor) -> bool:
        """Whether a chunk does not fit into the fullest room, even beside a window that has just moved."""
        if self.window is None or len(counts) == 0:
            return False
        held = (self.end - self.begin).clamp(max=self._held())
        return int((held + counts).max()) > self._full_room()

    def _make_room(self, counts: Tensor) -> None:
        need = int((self.end + counts).max()) if len(counts) else 0
        room = self.room
        if need <= room:
            return
        if self.window is None:
            self._resize(max(need, 2 * room))
        elif need <= self.window:
            self._resize(min(self.window, max(need, 2 * room)))
        else:
            self._resize(self._full_room())
            self._move_to_front(counts)

    def _move_to_front(self, counts: Tensor) -> None:
        """Rows that would overflow their room keep their last slots and begin again at its front."""
        for b in range(len(counts)):
            begin, end = int(self.begin[b]), int(self.end[b])
            if end + int(counts[b]) <= self.room:
                continue
            first = max(begin, end - self._held())
            for values in self.slots.values():
                values[b, : end - first] = values[b, first:end].clone()
            self.begin[b], self.end[b] = 0, end - first

    def _resize(self, room: int) -> None:
        if room <= self.room:
            return
        for name, values in self.slots.items():
            grown = values.new_zeros(values.shape[0], room, *values.shape[2:])
            grown[:, : values.shape[1]] = values
            self.slots[name] = grown

    # What a user does with it

    @property
    def batch_size(self) -> int:
        return self.recent.shape[0]

    @property
    def room(self) -> int:
        return next(iter(self.slots.values())).shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(t.numel() * t.element_size() for t in self._tensors().values())

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens of every row that has more, as if the others had never come."""
        if length < 0:
            raise ValueError(f"length ({length}) must be at least 0")
        left = self.lengths.clamp(max=length)
        back = self.lengths - left
        oldest = self.lengths - (self.end - self.begin)  # the first token whose slot is still held
        needed = torch.zeros_like(left) if self.window is None else (left - self.window + 1).clamp(min=0)
        if bool(((back > 0) & (left > 0) & (oldest > needed)).any()):
            raise ValueError(
                f"cannot crop to {length} tokens: slots that they see have rolled out of the window of {self.window}; "
                "clone the cache before going on if you need to come back"
            )
        if self.taps > 1 and bool(((back > 0) & (left > 0) & (self.known - back < self.taps - 1)).any()):
            raise ValueError(
                f"cannot crop by {int(back.max())} tokens: the convolutions' inputs are kept for "
                f"{self.recent.shape[1] - self.taps + 1}; make the cache with new_cache(…, rewind={int(back.max())})"
            )
        keep = self.recent.shape[1]
        place = torch.arange(keep) - back[:, None]  # B keep: where each recent input stood
        moved = self.recent.gather(1, place.clamp(min=0).to(self.recent.device)[..., None].expand_as(self.recent))
        before = keep - 1 - torch.arange(keep) >= left[:, None]  # entries from before the sequence began
        self.recent = moved.masked_fill(before[..., None].to(moved.device), 0)
        self.known = torch.where(left <= self.known - back, keep, self.known - back).clamp(min=0)
        self.end = torch.where(left > 0, self.end - back, self.begin)
        self.lengths = left

    def reorder(self, index: Tensor | Sequence[int]) -> None:
        """Row i becomes what row index[i] was (beam search); rows may repeat."""
        chosen = self.select(index)
        self.__dict__.update(chosen.__dict__)

    def select(self, rows: Tensor | Sequence[int]) -> Cache:
        """A new cache of these rows."""
        rows = torch.as_tensor(rows, dtype=torch.int64, device="cpu")
        if rows.dim() != 1 or (len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < self.batch_size):
            raise ValueError(f"rows ({rows.tolist()}) must be a list of places in the batch of {self.batch_size}")
        return self._with({name: t.index_select(0, rows.to(t.device)) for name, t in self._tensors().items()})

    def clone(self) -> Cache:
        return self._with({name: t.clone() for name, t in self._tensors().items()})

    @staticmethod
    def stack(caches: Sequence[Cache]) -> Cache:
        """One cache of all rows of `caches`, in order; they must come from the same layer."""
        if not caches:
            raise ValueError("stack needs at least one cache")
        kinds = [c._kind() for c in caches]
        if any(kind != kinds[0] for kind in kinds):
            raise ValueError(f"caches of different layers cannot be stacked: {kinds}")
        caches = [c.clone() for c in caches]
        room = max(c.room for c in caches)
        for c in caches:
            c._resize(room)
        parts = [c._tensors() for c in caches]
        return caches[0]._with({name: torch.cat([p[name] for p in parts]) for name in parts[0]})

    def state_dict(self) -> dict[str, Tensor]:
        """Its tensors, ready for safetensors or torch.save."""
        return {name: t.clone() for name, t in self._tensors().items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over a saved state; refused, with nothing changed, if it is not of this kind of cache."""
        own = self._tensors()
        if set(state) != set(own):
            raise ValueError(f"the state has {sorted(state)}, this cache needs {sorted(own)}")
        batch = state["lengths"].shape[0]
        rooms = {tuple(state[f"slots.{name}"].shape[1:2]) for name in self.slots}
        for name, t in own.items():
            free = 2 if name.startswith("slots.") else 1  # batch and room may differ
            if state[name].shape[0] != batch or state[name].shape[free:] != t.shape[free:] or len(rooms) != 1:
                raise ValueError(
                    f"{name} has shape {tuple(state[name].shape)}; this cache needs (batch, …) like {tuple(t.shape)}"
                )
        copied = {name: state[name].to(t.device, t.dtype, copy=True) for name, t in own.items()}
        self.__dict__.update(self._with(copied).__dict__)

    def _tensors(self) -> dict[str, Tensor]:
        own = {name: getattr(self, name) for name in ("recent", *HOST)}
        return own | {f"slots.{name}": t for name, t in self.slots.items()}

    def _with(self, tensors: dict[str, Tensor]) -> Cache:
        slots = {name: tensors[f"slots.{name}"] for name in self.slots}
        other = type(self)(slots, tensors["recent"], window=self.window, taps=self.taps, rewind=self.rewind)
        other.__dict__.update({name: tensors[name] for name in HOST})
        return other

    def _kind(self) -> tuple[Any, ...]:
        shapes = tuple((name, t.shape[2:], t.dtype) for name, t in sorted(self.slots.items()))
        return self.window, self.taps, self.rewind, tuple(self.recent.shape[1:]), shapes

    def __repr__(self) -> str:
        return f"Cache(lengths={self.lengths.tolist()}, window={self.window}, room={self.room}, nbytes={self.nbytes:,})"


def write(into: Tensor, values: Tensor, at: Tensor, counts: Tensor) -> None:
    """into[b, at[b] : at[b] + counts[b]] = values[b, : counts[b]]."""
    if len(counts) == 0:
        return
    if bool((at == at[0]).all()) and bool((counts == counts[0]).all()):
        count = int(counts[0])
        into[:, int(at[0]) : int(at[0]) + count] = values[:, :count]
        return
    for b, (begin, count) in enumerate(zip(at.tolist(), counts.tolist(), strict=True)):
        into[b, begin : begin + count] = values[b, :count]
