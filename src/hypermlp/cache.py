"""What one layer remembers between steps, per row of the batch: a window of slots, recurrent states, the most recent inputs.

Letters: B batch, S slots of room, T new tokens, W taps of a convolution, C width.

Rows are independent: each has its own length, so ragged batches, left padding and continuous batching need nothing special.
Slots are a ring: token t of a row lies at place t mod S. A cache without a window grows before it would go around. A windowed
one grows to window + rewind slots; from then on each token takes the place of the oldest, and nothing else moves. So a stream
runs forever in constant memory, and every token costs the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Shapes = Mapping[str, tuple[int, ...]]
SMALLEST_ROOM = 16  # slots that a growing cache begins with
COUNTERS = ("oldest", "seen", "known")  # bookkeeping, one whole number per row


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """What a mixer remembers between steps, per row of a batch."""

    slots: Shapes = field(default_factory=dict)  # name → shape for one token
    states: Shapes = field(default_factory=dict)  # name → shape of what a recurrence knows of its past
    window: int | None = None  # most slots that a token sees; None: all
    taps: int = 1  # taps of its convolutions, the current token included
    width: int = 0  # channels of what the convolutions take
    rewritten: bool = False  # the slots change with every token; kept in float32 at least, so that rounding does not accumulate
    rewind: int = field(default=0, compare=False)  # tokens that crop can always undo, unless new_cache says otherwise

    @property
    def one_way(self) -> bool:
        """Whether crop cannot undo tokens."""
        return self.rewritten or bool(self.states)

    def size(self, tokens: int) -> int:
        """Numbers that it holds per row after so many tokens, without spare room."""
        kept = tokens if self.window is None else min(tokens, self.window)
        slots, states = (sum(math.prod(shape) for shape in shapes.values()) for shapes in (self.slots, self.states))
        return kept * slots + states + (self.taps - 1) * self.width


class Cache:
    """Slots, states and recent inputs of one layer; made by the layer's new_cache.

    Args:
        spec: what the mixer remembers.
        rewind: tokens that crop can always undo.
        slots: name → (B, room, …), where token t of a row lies at place t mod room.
        states: name → (B, …).
        inputs: the last `keep` inputs of each row (B, keep, C), what convolutions need and what crop restores; a ring too, with
            one place for all rows.
    """

    def __init__(
        self, spec: CacheSpec, rewind: int, slots: dict[str, Tensor], states: dict[str, Tensor], inputs: Tensor
    ) -> None:
        batch = inputs.shape[0]
        self.spec, self.rewind = spec, rewind
        self.slots, self.states, self.inputs = slots, states, inputs
        self.window, self.taps, self.one_way = spec.window, spec.taps, spec.one_way
        self.keep = 0 if self.taps <= 1 else rewind + self.taps - 1
        self.tail = 0  # place of the oldest of the recent inputs, where the next one comes
        # The first token of a row whose slot is held, how many tokens it has seen, and how many of its recent inputs are valid:
        # at first all, since a sequence is preceded by zeros.
        self.oldest, self.seen, self.known = [0] * batch, [0] * batch, [self.keep] * batch

    @classmethod
    def new(
        cls,
        spec: CacheSpec,
        batch: int,
        *,
        rewind: int | None = None,
        max_len: int | None = None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Cache:
        """An empty cache.

        Args:
            spec: what the mixer remembers.
            batch: rows, a sequence in each.
            rewind: tokens that crop can always undo; None: as the spec says.
            max_len: tokens that it has room for from the start, at most what a window ever needs; None: it grows.
            dtype, device: of what it holds.
        """
        rewind = spec.rewind if rewind is None else rewind
        for name, value, least in (
            ("batch_size", batch, 0),
            ("max_len", 1 if max_len is None else max_len, 1),
            ("rewind", rewind, 0),
        ):
            if value < least:
                raise ValueError(f"{name} ({value}) must be at least {least}")
        room = SMALLEST_ROOM if max_len is None else max_len
        room = room if spec.window is None else min(room, spec.window + rewind)
        kept = 0 if spec.taps <= 1 else rewind + spec.taps - 1

        def zeros(shape: tuple[int, ...], exact: bool = False) -> Tensor:
            precision = torch.promote_types(dtype, torch.float32) if exact else dtype
            return torch.zeros(batch, *shape, dtype=precision, device=device)

        slots = {name: zeros((room, *shape), spec.rewritten) for name, shape in spec.slots.items()}
        states = {name: zeros(shape, exact=True) for name, shape in spec.states.items()}
        return cls(spec, rewind, slots, states, zeros((kept, spec.width)))

    # Used by layers

    def check(self, x: Tensor, spec: CacheSpec) -> None:
        """Refuse a cache that was not made for this layer, batch and device.

        Args:
            x: the next input (B T C).
            spec: what the layer remembers.
        """
        self._leave_inference_mode()
        if self.spec != spec:
            raise ValueError(
                f"the cache is one of {self.spec}, and this layer needs {spec}; make it with this layer's new_cache"
            )
        if self.batch_size != x.shape[0]:
            raise ValueError(f"the cache has {self.batch_size} rows and x {x.shape[0]}; see cache.select and Cache.stack")
        if self.inputs.device != x.device:
            raise ValueError(f"the cache is on {self.inputs.device} and x on {x.device}; make it with device={str(x.device)!r}")

    def _leave_inference_mode(self) -> None:
        """Tensors that were made in torch.inference_mode cannot be changed outside it; copies can."""
        if not self.inputs.is_inference() or torch.is_inference_mode_enabled():
            return
        self.inputs = self.inputs.clone()
        self.slots = {name: t.clone() for name, t in self.slots.items()}
        self.states = {name: t.clone() for name, t in self.states.items()}

    @property
    def recent(self) -> Tensor:
        """The last inputs of each row (B keep C), newest last, zeros before the sequence."""
        return self._last_inputs(self.keep)

    def history(self) -> Tensor:
        """The inputs that precede the next token in a convolution (B, W−1, C)."""
        return self._last_inputs(self.taps - 1)

    def _last_inputs(self, n: int) -> Tensor:
        """The last n of the recent inputs; a view where they lie in one piece."""
        end = self.tail or self.keep
        if n <= end:
            return self.inputs[:, end - n : end]
        return torch.cat([self.inputs[:, end - n :], self.inputs[:, :end]], dim=1)

    def append(
        self, new: dict[str, Tensor], inputs: Tensor, counts: list[int], *, ring: bool = False
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Add the first counts[b] tokens of each row of `new` (name → B T …); `inputs` (B T C) are what they were made from.

        Returns the slots to read (name → B S …) and their spans (None where every row is read whole and alike). ring: the
        caller reads spans that go around the end of the slots (ops.types.dense_spans); else they are copied into time order.
        """
        spans, room = self.reserve(counts), self.room
        longest, furthest = max((end - begin for *_, begin, end in spans), default=0), max((s[4] for s in spans), default=0)
        if longest > room or (furthest > room and not ring):
            slots, spans = self._in_time_order(new, counts, spans)
            self._write(new, counts)
        else:
            self._write(new, counts)
            slots = self.slots
        self.commit(inputs, counts)
        return readable(slots, spans, inputs.shape[1])

    def reserve(self, counts: list[int]) -> list[list[int]]:
        """Where the next counts[b] tokens of each row will lie, and what they see: spans (see ops.types.dense_spans) as lists.

        Nothing counts as held before `commit`. A span longer than the room has no place beside what its first token sees; of a
        single token this is never so.
        """
        self._grow(max((seen - first + n for seen, first, n in zip(self.seen, self.oldest, counts, strict=True)), default=0))
        room, window, spans = self.room, self.window, []
        # One place becomes free, since a step writes before it commits; no crop could need what was there.
        self.oldest = [max(held, seen + min(n, 1) - room) for held, seen, n in zip(self.oldest, self.seen, counts, strict=True)]
        for b, (held, seen, n) in enumerate(zip(self.oldest, self.seen, counts, strict=True)):
            first = held if window is None else max(held, seen - window + 1)
            begin = first % room
            spans.append([b, 0, n, begin, begin + seen - first + n])
        return spans

    def standing(self) -> tuple[Any, ...]:
        """What the next reservation depends on."""
        return self.room, self.window, self.rewind, self.seen, self.oldest

    def commit(self, inputs: Tensor | None, counts: list[int]) -> None:
        """Count the first counts[b] new tokens of each row as held, now that their slots are written.

        inputs: see append; None where they are written too, at `tail`, and counts are alike.
        """
        if inputs is None:
            self._remembered(counts)
        else:
            self.remember(inputs, counts)
        self.seen = [seen + n for seen, n in zip(self.seen, counts, strict=True)]
        room = self.room
        self.oldest = [max(oldest, seen - room) for oldest, seen in zip(self.oldest, self.seen, strict=True)]

    def advance(self, states: dict[str, Tensor], inputs: Tensor, counts: list[int]) -> None:
        """Replace the states by those after counts[b] more tokens of each row; `inputs` (B T …) are what convolutions take."""
        self.remember(inputs, counts)
        self.states = {name: states[name].to(old.dtype) for name, old in self.states.items()}
        self.seen = [seen + n for seen, n in zip(self.seen, counts, strict=True)]

    def remember(self, inputs: Tensor, counts: list[int]) -> None:
        """Take the first counts[b] of `inputs` (B T C) into the recent inputs."""
        keep = self.keep
        if keep == 0 or not counts:
            return
        if min(counts) == max(counts):
            copy(inputs, [0] * len(counts), self.inputs, [self.tail] * len(counts), counts)
            self._remembered(counts)
            return
        self._know(counts)
        joined = torch.cat([self.recent, inputs.to(self.inputs.dtype)], dim=1)
        place = torch.tensor(counts, device=joined.device)[:, None] + torch.arange(keep, device=joined.device)
        self._set_recent(joined.gather(1, place[..., None].expand(-1, -1, joined.shape[2])))

    def _remembered(self, counts: list[int]) -> None:
        """As many inputs of each row are written at `tail`."""
        if self.keep and counts:
            self._know(counts)
            self.tail = (self.tail + counts[0]) % self.keep

    def _know(self, counts: list[int]) -> None:
        self.known = [min(self.keep, known + n) for known, n in zip(self.known, counts, strict=True)]

    def _set_recent(self, values: Tensor) -> None:
        self.inputs.copy_(values)
        self.tail = 0

    def _write(self, new: dict[str, Tensor], counts: list[int]) -> None:
        for name, values in new.items():
            copy(values, [0] * len(counts), self.slots[name], self.seen, counts)

    def _in_time_order(
        self, new: dict[str, Tensor], counts: list[int], spans: list[list[int]]
    ) -> tuple[dict[str, Tensor], list[list[int]]]:
        """A copy of what the new tokens see, with them behind it, and its spans."""
        held = [end - begin - n for *_, n, begin, end in spans]
        spans = [[b, 0, n, 0, h + n] for b, (n, h) in enumerate(zip(counts, held, strict=True))]
        if not any(held):
            return {name: values.to(self.slots[name].dtype) for name, values in new.items()}, spans
        first, zero, joined = [seen - h for seen, h in zip(self.seen, held, strict=True)], [0] * len(counts), {}
        for name, slots in self.slots.items():
            joined[name] = slots.new_zeros(slots.shape[0], max(end for *_, end in spans), *slots.shape[2:])
            copy(slots, first, joined[name], zero, held)
            copy(new[name], zero, joined[name], held, counts)
        return joined, spans

    def _grow(self, need: int) -> None:
        """Room for `need` slots in each row, or for as many as a window ever needs."""
        room = self.room
        if need > room and (self.window is None or room < self.window + self.rewind):
            room = max(need, 2 * room)
            self._resize(room if self.window is None else min(room, self.window + self.rewind))

    def _with_room(self, room: int) -> Cache:
        if room == self.room:
            return self
        grown = self.clone()
        grown._resize(room)
        return grown

    def _resize(self, room: int) -> None:
        if room <= self.room:
            return
        held = [seen - oldest for seen, oldest in zip(self.seen, self.oldest, strict=True)]
        for name, slots in self.slots.items():
            self.slots[name] = slots.new_zeros(slots.shape[0], room, *slots.shape[2:])
            copy(slots, self.oldest, self.slots[name], self.oldest, held)

    # Used by callers

    @property
    def batch_size(self) -> int:
        return self.inputs.shape[0]

    @property
    def lengths(self) -> Tensor:
        """Tokens that each row has seen (B), in the CPU's memory."""
        return on_host(self.seen)

    @property
    def room(self) -> int:
        return max((t.shape[1] for t in self.slots.values()), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of all that it holds."""
        return sum(t.numel() * t.element_size() for t in (self.inputs, *self.slots.values(), *self.states.values()))

    def crop(self, length: int | Sequence[int]) -> None:
        """Forget all but the first `length` tokens of every row that has more, as if the others had not been seen.

        length: one for all rows, or one for each.
        """
        left, back = self.check_crop(length)
        self._leave_inference_mode()
        if self.keep and any(back):
            self._rewind_inputs(left, back)
        emptied = [row for row, (kept, n) in enumerate(zip(left, back, strict=True)) if n and not kept]
        for values in self.states.values():
            values[emptied] = 0
        for row, (kept, n) in enumerate(zip(left, back, strict=True)):
            known = max(self.known[row] - n, 0)
            self.known[row] = self.keep if kept <= known else known
            self.oldest[row] = self.oldest[row] if kept else 0
        self.seen = left

    def check_crop(self, length: int | Sequence[int]) -> tuple[list[int], list[int]]:
        """Tokens that `crop` would leave of each row and take back; raises a ValueError where it cannot.

        Args:
            length: how many tokens shall be left, of all rows or of each.
        """
        lengths = list(length) if isinstance(length, Sequence) else [int(length)] * self.batch_size
        if len(lengths) != self.batch_size or min(lengths, default=0) < 0:
            raise ValueError(f"length ({length}) must be at least 0, one for all {self.batch_size} rows or one for each")
        left = [min(seen, n) for seen, n in zip(self.seen, lengths, strict=True)]
        back = [seen - kept for seen, kept in zip(self.seen, left, strict=True)]
        for row in range(self.batch_size):
            if back[row] and left[row]:
                self._check_row(row, left[row], back[row])
        return left, back

    def _check_row(self, row: int, left: int, back: int) -> None:
        if self.one_way:
            raise ValueError(
                f"cannot crop to {left} tokens: what this layer keeps is rewritten with every token and cannot be undone; "
                "clone the cache first if you need to return to this point, or crop to 0"
            )
        if self.window is not None and self.oldest[row] > max(0, left - self.window + 1):
            raise ValueError(
                f"cannot crop to {left} tokens: slots that they see have rolled out of the window of {self.window}; "
                "clone the cache first if you need to return to this point"
            )
        if self.taps > 1 and self.known[row] - back < self.taps - 1:
            raise ValueError(
                f"cannot crop by {back} tokens: the convolutions' inputs are kept for {self.rewind}; "
                f"make the cache with new_cache(…, rewind={back})"
            )

    def _rewind_inputs(self, left: list[int], back: list[int]) -> None:
        if min(back) == max(back) and min(left) >= self.keep:
            self.tail = (self.tail - back[0]) % self.keep  # what takes the place of the oldest counts as unknown
            return
        newest_last = on_host(range(self.keep))
        place = newest_last - on_host(back)[:, None]  # B keep: where each recent input stood
        before = self.keep - 1 - newest_last >= on_host(left)[:, None]  # from before the sequence began
        index = place.clamp(min=0).to(self.inputs.device)[..., None].expand_as(self.inputs)
        self._set_recent(self.recent.gather(1, index).masked_fill(before[..., None].to(self.inputs.device), 0))

    def reorder(self, index: Tensor | Sequence[int]) -> None:
        """Row i becomes what row index[i] was (beam search); rows may repeat."""
        self.__dict__.update(self.select(index).__dict__)

    def select(self, rows: Tensor | Sequence[int]) -> Cache:
        """A new cache of these rows."""
        index = torch.as_tensor(rows, dtype=torch.int64, device="cpu")
        if index.dim() != 1 or (len(index) and not 0 <= int(index.min()) <= int(index.max()) < self.batch_size):
            raise ValueError(f"rows ({index.tolist()}) must be a list of places in the batch of {self.batch_size}")
        return self._with({name: t.index_select(0, index.to(t.device)) for name, t in self._state().items()})

    def clone(self) -> Cache:
        """A copy that shares no memory with this one."""
        return self._with(self.state_dict())

    @staticmethod
    def stack(caches: Sequence[Cache]) -> Cache:
        """One cache of all rows of `caches`, in order; they must come from the same layer."""
        if not caches:
            raise ValueError("stack needs at least one cache")
        kinds = [(c.spec, c.rewind, c.inputs.dtype) for c in caches]
        if any(kind != kinds[0] for kind in kinds):
            raise ValueError(f"caches of different layers cannot be stacked: {kinds}")
        room = max(c.room for c in caches)
        parts = [c._with_room(room)._state() for c in caches]
        return caches[0]._with({name: torch.cat([p[name] for p in parts]) for name in parts[0]})

    def state_dict(self) -> dict[str, Tensor]:
        """A copy of all tensors, one row of each per row of the batch, ready for safetensors or torch.save."""
        return {name: t.clone() for name, t in self._state().items()}

    def _state(self) -> dict[str, Tensor]:
        counters = {name: on_host(getattr(self, name)) for name in COUNTERS}
        slots = {f"slots.{name}": t for name, t in self.slots.items()}
        states = {f"states.{name}": t for name, t in self.states.items()}
        return {"recent": self.recent, **counters, **slots, **states}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load a saved state; raises, with nothing changed, if it is not of this kind of cache."""
        own = self._state()
        if set(state) != set(own):
            raise ValueError(f"the state has {sorted(state)}, this cache needs {sorted(own)}")
        batch = state["seen"].shape[0]
        room = next((tuple(state[f"slots.{name}"].shape[1:2]) for name in self.slots), ())
        for name, t in own.items():
            like = (batch, *room, *t.shape[2:]) if name.startswith("slots.") else (batch, *t.shape[1:])
            if tuple(state[name].shape) != like:
                raise ValueError(f"{name} has shape {tuple(state[name].shape)}; this cache needs {like}")
        copied = {name: state[name].to(t.device, t.dtype, copy=True) for name, t in own.items()}
        self.__dict__.update(self._with(copied).__dict__)

    def _with(self, state: dict[str, Tensor]) -> Cache:
        """The same kind of cache with other rows."""
        batch = state["seen"].shape[0]
        slots = {name: state[f"slots.{name}"] for name in self.slots}
        states = {name: state[f"states.{name}"] for name in self.states}
        inputs = self.inputs.new_zeros(batch, *self.inputs.shape[1:])
        other = type(self)(self.spec, self.rewind, slots, states, inputs)
        other.inputs.copy_(state["recent"])
        other.__dict__.update({name: state[name].tolist() for name in COUNTERS})
        return other

    def __repr__(self) -> str:
        return f"Cache(lengths={self.seen}, window={self.window}, room={self.room}, nbytes={self.nbytes:,})"


def reserve_all(caches: Sequence[Cache], counts: list[int]) -> list[list[list[int]]]:
    """`reserve` of every layer's cache; they mostly stand alike, and then one answer holds for all."""
    first = caches[0]
    before = first.standing()
    spans = first.reserve(counts)
    alike = first.room == before[0]
    found = [spans]
    for cache in caches[1:]:
        if alike and cache.standing() == before:
            cache.oldest = first.oldest.copy()
            found.append(spans)
        else:
            found.append(cache.reserve(counts))
    return found


def commit_all(caches: Sequence[Cache], counts: list[int]) -> None:
    """`commit` of what compiled code has written into every layer's cache."""
    first = caches[0]
    before, known = first.standing(), first.known
    first.commit(None, counts)
    for cache in caches[1:]:
        if cache.standing() == before and cache.known == known and cache.keep == first.keep:
            cache.seen, cache.oldest, cache.known = first.seen.copy(), first.oldest.copy(), first.known.copy()
            cache.tail = (cache.tail + counts[0]) % cache.keep if cache.keep else 0
        else:
            cache.commit(None, counts)


def on_host(numbers: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    """Whole numbers as a tensor in the CPU's memory, whatever torch's default device is."""
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def readable(slots: dict[str, Tensor], spans: list[list[int]], rows: int) -> tuple[dict[str, Tensor], Tensor | None]:
    """The slots as the operator takes them: cut to size where all rows are alike and lie in one piece, else with spans."""
    _, _, count, begin, end = spans[0] if spans else [0] * 5
    room = min((values.shape[1] for values in slots.values()), default=0)
    if spans and count == rows and end <= room and all(span[2:] == spans[0][2:] for span in spans):
        return {name: values[:, begin:end] for name, values in slots.items()}, None
    return slots, on_host(spans).reshape(-1, 5)


def copy(source: Tensor, start: list[int], into: Tensor, at: list[int], counts: list[int]) -> None:
    """into[b, at[b] + i] = source[b, start[b] + i] for i < counts[b].

    Both are rings: what goes beyond the last place goes on at the first. Of more than there is room for, the last stay.
    """
    if counts and all(min(numbers) == max(numbers) for numbers in (start, at, counts)):
        rows: list[tuple[int | slice, int, int, int]] = [(slice(None), start[0], at[0], counts[0])]
    else:
        rows = list(zip(range(len(counts)), start, at, counts, strict=True))
    for b, origin, target, count in rows:
        for i, j, n in stretches(origin, source.shape[1], target, into.shape[1], count):
            into[b, j : j + n] = source[b, i : i + n]


def stretches(start: int, size: int, at: int, room: int, count: int) -> Iterator[tuple[int, int, int]]:
    """Pieces of `count` places from `start` in a ring of `size` and `at` in one of `room` that go around in neither."""
    done = max(count - room, 0)
    while done < count:
        i, j = (start + done) % size, (at + done) % room
        n = min(count - done, size - i, room - j)
        yield i, j, n
        done += n
