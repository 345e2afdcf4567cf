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
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hypermlp.batch import Batch
from hypermlp.checks import divisible
from hypermlp.config import IGNORED
from hypermlp.data.corpus import Corpus, SplitName

Ints = NDArray[np.int64]


class Batches:
    """Batches by step, a share of each for every process.

    Args:
        corpus: the text, and its tokenizer.
        split: which part of it.
        context: tokens of a row.
        batch: rows of a step, over all processes.
        micro: rows of a pass of one process; None: all of its share.
        seed: of the order of the rows; None: one epoch, in order.
        documents: keep documents apart.
        rank, world: which process of how many.
    """

    def __init__(
        self,
        corpus: Corpus,
        split: SplitName,
        *,
        context: int,
        batch: int,
        micro: int | None = None,
        seed: int | None,
        documents: bool = False,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        for name, value in {"context": context, "batch": batch, "micro": micro, "world": world}.items():
            if value is not None and value < 1:
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
        self.rank, self.world = rank, world
        self.together = batch if micro is None else micro * world  # rows of a pass, over all processes
        self.packed = pack(self.tokens.ends, context) if documents else None
        self.rows = len(self.packed.first) - 1 if self.packed else -(-len(self.tokens) // context)

    def __len__(self) -> int:
        """Steps of an epoch; with a seed, the last one may begin the next."""
        return -(-self.rows // self.batch)

    def passes(self, step: int) -> list[Batch]:
        """This process's share of the batch of a step; all steps cost the same.

        The processes share the rows of every pass, so that all have equally many; passes behind the only epoch are left out.
        """
        if step < 0:
            raise ValueError(f"step ({step}) must be at least 0")
        first, end = step * self.batch, (step + 1) * self.batch
        begins = range(first, end if self.seed is not None else min(end, self.rows), self.together)
        return [self.read(range(begin, min(begin + self.together, end))) for begin in begins]

    def read(self, shared: range) -> Batch:
        """This process's share of rows, which are counted over all epochs."""
        each = len(shared) // self.world
        rows = shared[self.rank * each : (self.rank + 1) * each]
        inputs = np.full((each, self.context), self.end, np.int64)
        targets = np.full_like(inputs, IGNORED)
        begins: list[int] = []
        for row, number in enumerate(rows):
            at = 0
            for start, length, last in self.pieces(number):
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
