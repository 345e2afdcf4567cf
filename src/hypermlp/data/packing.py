"""From a corpus to batches of fixed contexts, as a function of the step: a run that resumes at step 1000 needs no other state.

Concatenated, a row is a window of the stream, and windows do not overlap:

    stream     a b c | d e f g |     `|` end of document, context = 4
    rows       a b c |    d e f g    | . . .
    targets    b c | d    e f g |    - - - -       `-` does not count, `.` padding

By documents, a row holds whole documents (pieces of a context, where they are longer) that mixers keep apart by cu_seqlens:

    rows       a b c |    d e f g    | . . .
    targets    b c | -    e f g |    - - - -

An epoch has every row once, in an order that depends on the seed and the epoch; a batch may span the end of an epoch.
Without a seed there is one epoch, in order, for evaluation.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hypermlp.checks import divisible
from hypermlp.config import IGNORED
from hypermlp.data.corpus import Corpus, SplitName

Ints = NDArray[np.int64]


class Batch(NamedTuple):
    inputs: Tensor  # B T; by documents 1 B·T
    targets: Tensor  # the same shape
    cu_seqlens: Tensor | None = None  # by documents: where each one begins, and B·T


class Batches:
    """Batches of `batch` rows of `context` tokens; process `rank` of `world` gets its share of the same rows."""

    def __init__(
        self,
        corpus: Corpus,
        split: SplitName,
        *,
        context: int,
        batch: int,
        seed: int | None,
        documents: bool = False,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        for name, value in {"context": context, "batch": batch, "world": world}.items():
            if value < 1:
                raise ValueError(f"{name} ({value}) must be at least 1")
        divisible("batch", batch, world, f"world ({world}), the number of processes")
        if not 0 <= rank < world:
            raise ValueError(f"rank ({rank}) must be at least 0 and below world ({world})")
        self.tokens = corpus.split(split)
        if len(self.tokens) <= context:
            raise ValueError(
                f"the {split} split of {corpus.name} has {len(self.tokens)} tokens, too few for a context of {context} and the "
                "token after it; give a shorter context, more text, or hold out another share for validation"
            )
        self.end, self.context, self.batch, self.seed = corpus.tokenizer.end, context, batch, seed
        self.mine = range(rank * batch // world, (rank + 1) * batch // world)
        self.packed = pack(self.tokens.ends, context) if documents else None
        self.rows = len(self.packed.first) - 1 if self.packed else -(-len(self.tokens) // context)

    def __len__(self) -> int:
        """Steps of an epoch; with a seed, the last one may begin the next."""
        return -(-self.rows // self.batch)

    def steps(self, start: int = 0) -> Iterator[Batch]:
        """The batches from a step on: endless with a seed, otherwise to the end of the epoch."""
        step = start
        while self.seed is not None or step < len(self):
            yield self.at(step)
            step += 1

    def at(self, step: int) -> Batch:
        """The batch of a step; all cost the same."""
        if step < 0:
            raise ValueError(f"step ({step}) must be at least 0")
        inputs = np.full((len(self.mine), self.context), self.end, np.int64)
        targets = np.full_like(inputs, IGNORED)
        begins: list[int] = []
        for row, place in enumerate(self.mine):
            at = 0
            for start, length, last in self.pieces(step * self.batch + place):
                found = self.tokens.read(start, start + length + 1)
                following = found[1:length] if last else found[1:]
                inputs[row, at : at + length] = found[:length]
                targets[row, at : at + len(following)] = following
                begins.append(row * self.context + at)
                at += length
            if at < self.context:
                begins.append(row * self.context + at)  # padding is a document of its own
        if self.packed is None:
            return Batch(torch.from_numpy(inputs), torch.from_numpy(targets))
        bounds = torch.tensor([*begins, inputs.size], dtype=torch.int32)
        return Batch(torch.from_numpy(inputs).view(1, -1), torch.from_numpy(targets).view(1, -1), bounds)

    def pieces(self, number: int) -> list[tuple[int, int, bool]]:
        """The pieces in a row, counted over all epochs: start, length, and whether the token after it is out of reach."""
        epoch, place = divmod(number, self.rows)
        if self.seed is not None:
            place = shuffled(place, self.rows, self.seed, epoch)
        elif epoch:
            return []  # the last batch of the only epoch is padded
        if self.packed is None:
            start = place * self.context
            length = min(self.context, len(self.tokens) - start)
            return [(start, length, start + length == len(self.tokens))]
        row = slice(self.packed.first[place], self.packed.first[place + 1])
        columns = (self.packed.start, self.packed.length, self.packed.last)
        return list(zip(*(column[row].tolist() for column in columns), strict=True))


def shuffled(place: int, count: int, seed: int, epoch: int) -> int:
    """Where a permutation of range(count) sends `place`, without storing the permutation.

    A Feistel network permutes the numbers of an even number of bits; it is followed until it leads below count again.
    """
    half = ((count - 1).bit_length() + 1) // 2
    while True:
        left, right = place >> half, place & (1 << half) - 1
        for turn in range(6):
            left, right = right, left ^ scrambled(seed, epoch, turn, right) & (1 << half) - 1
        place = left << half | right
        if place < count:
            return place


@lru_cache(maxsize=2**14)  # of the 6 · 2^half that an epoch needs, most are needed again
def scrambled(seed: int, epoch: int, turn: int, number: int) -> int:
    digest = hashlib.blake2b(f"{seed} {epoch} {turn} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


class Packed(NamedTuple):
    """Which pieces of documents lie in which row; pieces are ordered by rows."""

    start: Ints  # in the stream
    length: Ints
    last: NDArray[np.bool_]  # whether the piece ends its document
    first: Ints  # rows + 1: each row's first piece


def pack(ends: Ints, context: int) -> Packed:
    """Cut documents into pieces of at most a context, and put these into rows."""
    begins = np.concatenate([[0], ends[:-1]])
    count = -(-(ends - begins) // context)
    document = np.repeat(np.arange(len(ends)), count)
    number = np.arange(len(document)) - np.repeat(np.cumsum(count) - count, count)  # of a piece in its document
    start = begins[document] + number * context
    length = np.minimum(context, ends[document] - start)
    row = best_fit(length, context)
    order = np.argsort(row, kind="stable")
    first = np.searchsorted(row[order], np.arange(row.max() + 2))
    return Packed(start[order], length[order], (start + length == ends[document])[order], first)


def best_fit(length: Ints, context: int) -> Ints:
    """The row of each piece: the longest first, each into the fullest row that has room. Equals are placed at once."""
    row = np.empty(len(length), np.int64)
    rows = 0
    open_rows: dict[int, Ints] = {}  # by the room they have left
    rooms: list[int] = []  # its keys, in order
    by_length = np.argsort(-length, kind="stable")
    sizes, begins = np.unique(-length[by_length], return_index=True)
    for size, left in zip((-sizes).tolist(), np.split(by_length, begins[1:]), strict=True):
        while len(left):
            at = bisect_left(rooms, size)
            if at == len(rooms):
                new = -(-len(left) // (context // size))
                open_rows[context] = np.arange(rows, rows + new)
                rooms.append(context)
                rows += new
            room = rooms.pop(at)
            found = open_rows.pop(room)
            each = min(room // size, len(left))
            count = min(len(found), len(left) // each)
            chosen, rest = found[:count], found[count:]
            row[left[: count * each]] = np.repeat(chosen, each)
            left = left[count * each :]
            for space, some in ((room, rest), (room - each * size, chosen)):
                if space and len(some):
                    if space not in open_rows:
                        insort(rooms, space)
                    open_rows[space] = np.concatenate([open_rows.get(space, some[:0]), some])
    return row
