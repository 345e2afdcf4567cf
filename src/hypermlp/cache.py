"""What one layer remembers between steps, per row of the batch: a window of slots, recurrent states, the most recent inputs.

Letters: B batch, S slots of room, T new tokens, W taps of a convolution, C width.

Rows are independent: each has its own length, so ragged batches, left padding and continuous batching need nothing special.
Slots lie contiguous in time order. A windowed cache holds the last `window` of them; when its room is used up the window moves
to the front, every window/8 steps, so a stream runs forever in constant memory and constant time per token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Shapes = Mapping[str, tuple[int, ...]]
SMALLEST_ROOM = 16  # slots that a growing cache begins with
SPARE_INPUTS = 4  # inputs that come in before the recent ones move to the front
COUNTERS = ("begin", "end", "seen", "known")  # bookkeeping, one whole number per row


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

    slots: name → (B, room, …); the entries [begin, end) of a row are its slots in time order. states: name → (B, …). The last
    `keep` inputs of each row are kept too, newest last: what convolutions need, and what crop restores.
    """

    def __init__(
        self, spec: CacheSpec, rewind: int, slots: dict[str, Tensor], states: dict[str, Tensor], inputs: Tensor
    ) -> None:
        batch = inputs.shape[0]
        self.spec, self.rewind = spec, rewind
        self.slots, self.states, self.inputs = slots, states, inputs  # inputs: B keep+spare C
        self.window, self.taps, self.one_way = spec.window, spec.taps, spec.one_way
        self.keep = 0 if self.taps <= 1 else rewind + self.taps - 1
        self.tail = self.keep  # end of the recent inputs in `inputs`, for all rows
        # Where a row's slots lie, how many tokens it has seen in all, and how many of its recent inputs are valid:
        # at first all, since a sequence is preceded by zeros.
        self.begin, self.end, self.seen, self.known = [0] * batch, [0] * batch, [0] * batch, [self.keep] * batch

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
        """Empty, with room for max_len tokens (it grows when there are more)."""
        rewind = spec.rewind if rewind is None else rewind
        for name, value, least in (
            ("batch_size", batch, 0),
            ("max_len", 1 if max_len is None else max_len, 1),
            ("rewind", rewind, 0),
        ):
            if value < least:
                raise ValueError(f"{name} ({value}) must be at least {least}")
        room = SMALLEST_ROOM if max_len is None else max_len
        room = room if spec.window is None else min(room, spec.window)
        kept = 0 if spec.taps <= 1 else rewind + spec.taps - 1 + SPARE_INPUTS

        def zeros(shape: tuple[int, ...], exact: bool = False) -> Tensor:
            precision = torch.promote_types(dtype, torch.float32) if exact else dtype
            return torch.zeros(batch, *shape, dtype=precision, device=device)

        slots = {name: zeros((room, *shape), spec.rewritten) for name, shape in spec.slots.items()}
        states = {name: zeros(shape, exact=True) for name, shape in spec.states.items()}
        return cls(spec, rewind, slots, states, zeros((kept, spec.width)))

    # Used by layers

    def check(self, x: Tensor, spec: CacheSpec) -> None:
        """Refuse a cache that was not made for this layer, batch and device."""
        if self.inputs.is_inference() and not torch.is_inference_mode_enabled():
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
        self.inputs = self.inputs.clone()
        self.slots = {name: t.clone() for name, t in self.slots.items()}
        self.states = {name: t.clone() for name, t in self.states.items()}

    @property
    def recent(self) -> Tensor:
        """The last inputs of each row (B keep C), newest last, zeros before the sequence."""
        return self.inputs[:, self.tail - self.keep : self.tail]

    def history(self) -> Tensor:
        """The inputs that precede the next token in a convolution (B, W−1, C)."""
        return self.recent[:, self.keep - (self.taps - 1) :]

    def append(self, new: dict[str, Tensor], inputs: Tensor, counts: list[int]) -> tuple[dict[str, Tensor], Tensor | None]:
        """Add the first counts[b] tokens of each row of `new` (name → B T …); `inputs` (B T C) are what they were made from.

        Returns the slots to read (name → B S …) and their spans (None where every row is read whole and alike).
        """
        room = self.reserve(counts)
        for name, values in new.items():
            write(room.slots[name], values, room.at, counts)
        room.keep(inputs)
        return readable(room, inputs.shape[1])

    def reserve(self, counts: list[int]) -> Room:
        """Room for counts[b] more slots in each row, beside those that they see; nothing counts as held before room.keep."""
        if self._too_long(counts):
            return self._join(counts)
        self._make_room(counts)
        return Room(self, self.slots, self.begin, self.end, counts)

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
        self.known = [min(keep, known + n) for known, n in zip(self.known, counts, strict=True)]
        n = counts[0]
        if min(counts) != max(counts):
            joined = torch.cat([self.recent, inputs.to(self.inputs.dtype)], dim=1)
            place = torch.tensor(counts, device=joined.device)[:, None] + torch.arange(keep, device=joined.device)
            self._set_recent(joined.gather(1, place[..., None].expand(-1, -1, joined.shape[2])))
        elif n >= keep:
            self._set_recent(inputs[:, n - keep : n])
        else:
            if self.tail + n > self.inputs.shape[1]:
                self._set_recent(self.recent[:, n:].clone(), at=n)
            self.inputs[:, self.tail : self.tail + n] = inputs[:, :n]
            self.tail += n

    def _set_recent(self, values: Tensor, at: int = 0) -> None:
        """The first recent inputs, at the front; a gap of `at` places is still to come behind them."""
        self.inputs[:, : values.shape[1]] = values
        self.tail = self.keep - at

    def _join(self, counts: list[int]) -> Room:
        """For a chunk that does not fit beside the window: a copy of what is held, with room behind it, to be read once."""
        held = [end - begin for begin, end in zip(self.begin, self.end, strict=True)]
        longest = max(h + n for h, n in zip(held, counts, strict=True))
        joined = {}
        for name, old in self.slots.items():
            joined[name] = old.new_zeros(old.shape[0], longest, *old.shape[2:])
            for b, (begin, end) in enumerate(zip(self.begin, self.end, strict=True)):
                joined[name][b, : end - begin] = old[b, begin:end]
        return Room(self, joined, [0] * len(held), held, counts)

    def _keep_last(self, room: Room) -> None:
        """Take the last slots of a joined copy."""
        kept = [min(end, self._held()) for end in room.end]
        self._resize(max(kept))
        for name, values in room.slots.items():
            for b, (stop, count) in enumerate(zip(room.end, kept, strict=True)):
                self.slots[name][b, :count] = values[b, stop - count : stop]
        self.begin, self.end = [0] * len(kept), kept

    def _held(self) -> int:
        """Slots that a row keeps when its window moves: what the next token sees, and what crop may go back to."""
        assert self.window is not None
        return self.window - 1 + self.rewind

    def _full_room(self) -> int:
        """The most that a windowed cache ever has: room beside what it holds, so that the window seldom moves."""
        assert self.window is not None
        return self._held() + max(1, self.window // 8)

    def _too_long(self, counts: list[int]) -> bool:
        """Whether a chunk does not fit into the fullest room, even beside a window that has just moved."""
        if self.window is None:
            return False
        most = self._held()
        needs = (min(e - b, most) + n for b, e, n in zip(self.begin, self.end, counts, strict=True))
        return max(needs, default=0) > self._full_room()

    def _make_room(self, counts: list[int]) -> None:
        need = max((end + n for end, n in zip(self.end, counts, strict=True)), default=0)
        if need <= self.room:
            return
        if self.window is None:
            self._resize(max(need, 2 * self.room))
        elif need <= self.window:
            self._resize(min(self.window, max(need, 2 * self.room)))
        else:
            self._resize(self._full_room())
            self._move_to_front(counts)

    def _move_to_front(self, counts: list[int]) -> None:
        """Rows that would overflow their room keep their last slots and begin again at its front."""
        begins, ends = list(self.begin), list(self.end)
        for b, (begin, end, n) in enumerate(zip(self.begin, self.end, counts, strict=True)):
            if end + n > self.room:
                first = max(begin, end - self._held())
                for values in self.slots.values():
                    values[b, : end - first] = values[b, first:end].clone()
                begins[b], ends[b] = 0, end - first
        self.begin, self.end = begins, ends

    def _resize(self, room: int) -> None:
        if room <= self.room:
            return
        for name, values in self.slots.items():
            grown = values.new_zeros(values.shape[0], room, *values.shape[2:])
            grown[:, : values.shape[1]] = values
            self.slots[name] = grown

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

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens of every row that has more, as if the others had not been seen."""
        if length < 0:
            raise ValueError(f"length ({length}) must be at least 0")
        left = [min(seen, length) for seen in self.seen]
        back = [seen - kept for seen, kept in zip(self.seen, left, strict=True)]
        for row in range(self.batch_size):
            self._check_crop(row, left[row], back[row])
        if self.keep and any(back):
            self._rewind_inputs(left, back)
        emptied = [row for row, (kept, n) in enumerate(zip(left, back, strict=True)) if n and not kept]
        for values in self.states.values():
            values[emptied] = 0
        for row, (kept, n) in enumerate(zip(left, back, strict=True)):
            known = self.known[row] - n
            self.known[row] = self.keep if kept <= known else max(known, 0)
            self.end[row] = self.end[row] - n if kept else self.begin[row]
        self.seen = left

    def _check_crop(self, row: int, left: int, back: int) -> None:
        if back == 0 or left == 0:
            return
        if self.one_way:
            raise ValueError(
                f"cannot crop to {left} tokens: what this layer keeps is rewritten with every token and cannot be undone; "
                "clone the cache first if you need to return to this point, or crop to 0"
            )
        oldest = self.seen[row] - (self.end[row] - self.begin[row])  # the first token whose slot is still held
        if self.window is not None and oldest > max(0, left - self.window + 1):
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
        if min(back) == max(back) and back[0] <= self.tail - self.keep and min(left) >= self.keep:
            self.tail -= back[0]  # the inputs before them have not moved yet
            return
        newest_last = on_host(range(self.keep))
        place = newest_last - on_host(back)[:, None]  # B keep: where each recent input stood
        before = self.keep - 1 - newest_last >= on_host(left)[:, None]  # from before the sequence began
        index = place.clamp(min=0).to(self.inputs.device)[..., None].expand_as(self.recent)
        self._set_recent(self.recent.gather(1, index).masked_fill(before[..., None].to(self.inputs.device), 0))

    def reorder(self, index: Tensor | Sequence[int]) -> None:
        """Row i becomes what row index[i] was (beam search); rows may repeat."""
        self.__dict__.update(self.select(index).__dict__)

    def select(self, rows: Tensor | Sequence[int]) -> Cache:
        """A new cache of these rows."""
        index = torch.as_tensor(rows, dtype=torch.int64, device="cpu")
        if index.dim() != 1 or (len(index) and not 0 <= int(index.min()) <= int(index.max()) < self.batch_size):
            raise ValueError(f"rows ({index.tolist()}) must be a list of places in the batch of {self.batch_size}")
        return self._with({name: t.index_select(0, index.to(t.device)) for name, t in self.state_dict().items()})

    def clone(self) -> Cache:
        return self._with(self.state_dict())

    @staticmethod
    def stack(caches: Sequence[Cache]) -> Cache:
        """One cache of all rows of `caches`, in order; they must come from the same layer."""
        if not caches:
            raise ValueError("stack needs at least one cache")
        kinds = [(c.spec, c.rewind, c.inputs.dtype) for c in caches]
        if any(kind != kinds[0] for kind in kinds):
            raise ValueError(f"caches of different layers cannot be stacked: {kinds}")
        caches = [c.clone() for c in caches]
        room = max(c.room for c in caches)
        for c in caches:
            c._resize(room)
        parts = [c.state_dict() for c in caches]
        return caches[0]._with({name: torch.cat([p[name] for p in parts]) for name in parts[0]})

    def state_dict(self) -> dict[str, Tensor]:
        """A copy of everything it holds, one row of each tensor per row of the batch, ready for safetensors or torch.save."""
        counters = {name: on_host(getattr(self, name)) for name in COUNTERS}
        slots = {f"slots.{name}": t.clone() for name, t in self.slots.items()}
        states = {f"states.{name}": t.clone() for name, t in self.states.items()}
        return {"recent": self.recent.clone(), **counters, **slots, **states}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load a saved state; raises, with nothing changed, if it is not of this kind of cache."""
        own = self.state_dict()
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
        other.inputs[:, : self.keep] = state["recent"]
        other.__dict__.update({name: state[name].tolist() for name in COUNTERS})
        return other

    def __repr__(self) -> str:
        return f"Cache(lengths={self.seen}, window={self.window}, room={self.room}, nbytes={self.nbytes:,})"


class Room:
    """Slots of a cache to write new tokens into and to read from: row b reads [begin[b], end[b]), new from at[b] on."""

    def __init__(self, cache: Cache, slots: dict[str, Tensor], begin: list[int], at: list[int], counts: list[int]) -> None:
        self.cache, self.slots, self.begin, self.at, self.counts = cache, slots, begin, at, counts
        self.end = [a + n for a, n in zip(at, counts, strict=True)]

    def spans(self) -> Tensor:
        """See ops.types.dense_spans."""
        rows = zip(self.counts, self.begin, self.end, strict=True)
        return on_host([[b, 0, n, first, last] for b, (n, first, last) in enumerate(rows)]).reshape(-1, 5)

    def keep(self, inputs: Tensor) -> None:
        """Count the new tokens as held, now that they are written; `inputs` (B T C) are what they were made from."""
        cache = self.cache
        cache.remember(inputs, self.counts)
        if self.slots is cache.slots:
            cache.end = self.end
        else:
            cache._keep_last(self)
        cache.seen = [seen + n for seen, n in zip(cache.seen, self.counts, strict=True)]


def on_host(numbers: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    """Whole numbers as a tensor in the CPU's memory, whatever torch's default device is."""
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def readable(room: Room, rows: int) -> tuple[dict[str, Tensor], Tensor | None]:
    """The slots as the operator takes them: cut to size where all rows are alike, else with spans."""
    begin, end, counts = room.begin, room.end, room.counts
    if counts and all(min(x) == max(x) for x in (begin, end, counts)) and counts[0] == rows:
        return {name: values[:, begin[0] : end[0]] for name, values in room.slots.items()}, None
    return room.slots, room.spans()


def write(into: Tensor, values: Tensor, at: list[int], counts: list[int]) -> None:
    """into[b, at[b] : at[b] + counts[b]] = values[b, : counts[b]]."""
    if counts and min(at) == max(at) and min(counts) == max(counts):
        into[:, at[0] : at[0] + counts[0]] = values[:, : counts[0]]
        return
    for b, (begin, count) in enumerate(zip(at, counts, strict=True)):
        into[b, begin : begin + count] = values[b, :count]
