"""An epoch shows every token once; a step's batch depends on the step alone, however many processes share it."""

import hashlib
import os
import subprocess
import sys
import time
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hypermlp.batch import Batch
from hypermlp.config import IGNORED
from hypermlp.data.corpus import Corpus, TokenStream, read_corpus
from hypermlp.data.packing import Batches, best_fit, shuffled
from hypermlp.data.tokenizers import ByteTokenizer

END = ByteTokenizer.end


def corpus_of(lengths: list[int]) -> Corpus:
    """Documents of so many tokens, all different, in two pieces; filling can be told from them."""
    ends = np.cumsum(lengths)
    stream = np.arange(1000, 1000 + ends[-1])
    cut = len(stream) // 3
    tokens = TokenStream([stream[:cut], stream[cut:]], [ends[ends <= cut], ends[ends > cut] - cut])
    return Corpus("test", ByteTokenizer(), {"train": tokens, "validation": tokens})


LENGTHS = st.lists(st.integers(1, 30), min_size=3, max_size=40).filter(lambda lengths: sum(lengths) > 8)


def epoch(batches: Batches) -> Batch:
    found = [one for step in range(len(batches)) for one in batches.passes(step)]
    return Batch(torch.cat([b.inputs.view(-1) for b in found]), torch.cat([b.targets.view(-1) for b in found]))


@given(lengths=LENGTHS, batch=st.integers(1, 5), context=st.integers(1, 8))
def test_concatenated_every_token_is_input_and_target_once(lengths: list[int], batch: int, context: int) -> None:
    corpus = corpus_of(lengths)
    stream = corpus.split("train").read(0, sum(lengths)).tolist()
    batches = Batches(corpus, "train", context=context, batch=batch, seed=None)
    inputs, targets, _ = epoch(batches)
    assert inputs.tolist() == stream + [END] * (len(batches) * batch * context - len(stream))
    assert targets.tolist() == stream[1:] + [IGNORED] * (len(inputs) - len(stream) + 1)


@given(lengths=LENGTHS, batch=st.integers(1, 5), context=st.integers(2, 8))
def test_by_documents_every_token_comes_once_and_nothing_crosses(lengths: list[int], batch: int, context: int) -> None:
    corpus = corpus_of(lengths)
    stream = corpus.split("train").read(0, sum(lengths)).tolist()
    last = {stream[end - 1] for end in np.cumsum(lengths)}
    seen = []
    batches = Batches(corpus, "train", context=context, batch=batch, seed=None, documents=True)
    for inputs, targets, bounds in (one for step in range(len(batches)) for one in batches.passes(step)):
        assert inputs.shape == targets.shape == (1, batch * context)
        assert bounds is not None
        assert bounds.dtype == torch.int32
        assert (bounds[0], bounds[-1]) == (0, batch * context)
        assert set(range(0, batch * context, context)) <= set(bounds.tolist()), "a row begins a document"
        for a, b in pairwise(bounds.tolist()):
            piece, aims = inputs[0, a:b].tolist(), targets[0, a:b].tolist()
            if piece[0] == END:
                assert (piece, aims) == ([END] * (b - a), [IGNORED] * (b - a))
            else:
                assert piece == list(range(piece[0], piece[0] + b - a)), "of one document, without a gap"
                assert not last & set(piece[:-1])
                assert aims == [IGNORED if token in last else token + 1 for token in piece]
                seen += piece
    assert sorted(seen) == stream


@given(lengths=LENGTHS, context=st.integers(2, 8))
def test_whole_documents_stay_whole(lengths: list[int], context: int) -> None:
    corpus = corpus_of(lengths)
    batches = Batches(corpus, "train", context=context, batch=1, seed=None, documents=True)
    pieces = [piece for row in range(batches.rows) for piece in batches.pieces(row)]
    ends = np.cumsum(lengths).tolist()
    expected = []
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        expected += [(a, min(context, end - a), a + context >= end) for a in range(start, end, context)]
    assert sorted(pieces) == expected
    assert all(sum(length for _, length, _ in batches.pieces(row)) <= context for row in range(batches.rows))


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=200))
def test_placing_equals_at_once_is_best_fit_longest_first(lengths: list[int]) -> None:
    rows = best_fit(np.array(lengths), 50)
    used = np.bincount(rows, weights=lengths)
    assert sorted(50 - used) == sorted(greedy(lengths, 50))


def greedy(lengths: list[int], context: int) -> list[int]:
    """The room left in each row by best fit, longest first, one piece after another."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fits = [room for room in rooms if room >= length]
        if fits:
            rooms[rooms.index(min(fits))] -= length
        else:
            rooms.append(context - length)
    return rooms


@given(count=st.integers(1, 300), seed=st.integers(0, 2**40), turn=st.integers(0, 100))
def test_a_shuffle_is_a_permutation(count: int, seed: int, turn: int) -> None:
    assert sorted(shuffled(i, count, seed, turn) for i in range(count)) == list(range(count))


def test_a_shuffle_mixes() -> None:
    count = 1000
    orders = np.array([[shuffled(i, count, seed, turn) for i in range(count)] for seed, turn in [(0, 0), (0, 1), (1, 0)]])
    for order in orders:
        assert abs(np.corrcoef(order, np.arange(count))[0, 1]) < 0.1
        assert np.mean(np.diff(order) == 1) < 0.01
    assert all(np.mean(a == b) < 0.01 for a, b in pairwise([*orders, orders[0]]))


@pytest.mark.parametrize("documents", [False, True])
class TestSeeded:
    corpus = corpus_of([5, 9, 30, 2, 17, 8, 8, 1, 12, 40, 3])

    def batches(self, documents: bool, **options: Any) -> Batches:
        return Batches(self.corpus, "train", **{"context": 8, "batch": 4, "seed": 3, "documents": documents, **options})

    def test_each_epoch_has_every_row_once(self, documents: bool) -> None:
        batches = self.batches(documents, batch=1)
        ordered = [row.tolist() for row in epoch(self.batches(documents, batch=1, seed=None)).inputs.view(-1, 8)]
        rows = [one.inputs[0].tolist() for step in range(3 * batches.rows) for one in batches.passes(step)]
        epochs = [rows[batches.rows * turn :][: batches.rows] for turn in range(3)]
        assert all(sorted(rows) == sorted(ordered) for rows in epochs)
        assert epochs[0] != epochs[1] != epochs[2]
        assert ordered not in epochs

    def test_a_batch_depends_on_the_step_alone(self, documents: bool) -> None:
        batches = self.batches(documents)
        iterated = [batches.passes(step) for step in range(20)]
        fresh = self.batches(documents)
        for step in (19, 0, 7):
            for one, two in zip(fresh.passes(step), iterated[step], strict=True):
                same(one, two)

    def test_the_seed_decides(self, documents: bool) -> None:
        assert not torch.equal(self.batches(documents, seed=4).passes(0)[0].inputs, self.batches(documents).passes(0)[0].inputs)

    @pytest.mark.parametrize("world, micro", [(1, 1), (1, 3), (2, None), (2, 1), (4, None), (4, 1)])
    @pytest.mark.parametrize("seed", [3, None])
    def test_passes_and_processes_share_the_rows_of_one_batch(
        self, documents: bool, world: int, micro: int | None, seed: int | None
    ) -> None:
        whole = self.batches(documents, seed=seed)
        shares = [self.batches(documents, seed=seed, rank=rank, world=world, micro=micro) for rank in range(world)]
        for step in range(len(whole)):
            (expected,) = whole.passes(step)
            parts = [one for together in zip(*(share.passes(step) for share in shares), strict=True) for one in together]
            given = sum(part.inputs.numel() for part in parts)
            assert given == 32 or (seed is None and step == len(whole) - 1), "passes that would be empty are left out"
            assert (expected.targets.view(-1)[given:] == IGNORED).all()
            expected = Batch(*(part.view(-1)[:given] for part in expected[:2]), expected.cu_seqlens)
            assert torch.equal(torch.cat([p.inputs.view(-1) for p in parts]), expected.inputs.view(-1))
            assert torch.equal(torch.cat([p.targets.view(-1) for p in parts]), expected.targets.view(-1))
            if documents:
                assert expected.cu_seqlens is not None
                before = accumulate([p.inputs.numel() for p in parts], initial=0)
                bounds = [p.cu_seqlens[:-1] + n for n, p in zip(before, parts, strict=False) if p.cu_seqlens is not None]
                assert torch.equal(torch.cat(bounds), expected.cu_seqlens[expected.cu_seqlens < given])


def same(one: Batch, two: Batch) -> None:
    for a, b in zip(one, two, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def test_the_docstring_s_example() -> None:
    stream = np.array([1, 2, 3, END, 4, 5, 6, 7, END])
    tokens = TokenStream([stream], [np.array([4, 9])])
    corpus = Corpus("example", ByteTokenizer(), {"train": tokens, "validation": tokens})
    options: dict[str, Any] = {"context": 4, "batch": 3, "seed": None}
    ((inputs, targets, _),) = Batches(corpus, "train", **options).passes(0)
    assert inputs.tolist() == [[1, 2, 3, END], [4, 5, 6, 7], [END] * 4]
    assert targets.tolist() == [[2, 3, END, 4], [5, 6, 7, END], [IGNORED] * 4]
    ((inputs, targets, bounds),) = Batches(corpus, "train", **options, documents=True).passes(0)
    assert inputs.view(3, 4).tolist() == [[1, 2, 3, END], [4, 5, 6, 7], [END] * 4]
    assert targets.view(3, 4).tolist() == [[2, 3, END, IGNORED], [5, 6, 7, END], [IGNORED] * 4]
    assert bounds is not None
    assert bounds.tolist() == [0, 4, 8, 9, 12]


FINGERPRINT = """
import hashlib
from hypermlp.data.corpus import read_corpus
from hypermlp.data.packing import Batches
batches = Batches(read_corpus(), "train", context=64, batch=8, seed=1, documents=True)
print(hashlib.sha256(b"".join(t.numpy().tobytes() for step in (0, 999) for t in batches.passes(step)[0][:2])).hexdigest())
"""


def test_the_default_corpus_gives_the_same_batches_in_another_process() -> None:
    start = time.process_time()
    corpus = read_corpus()
    assert time.process_time() - start < 2
    batches = Batches(corpus, "train", context=64, batch=8, seed=1, documents=True)
    mine = hashlib.sha256(b"".join(t.numpy().tobytes() for step in (0, 999) for t in batches.passes(step)[0][:2])).hexdigest()
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    done = subprocess.run([sys.executable, "-c", FINGERPRINT], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == mine, done.stderr


def test_impossible_requests_are_refused_with_a_remedy() -> None:
    corpus = corpus_of([5, 5])

    def fails(message: str, **options: Any) -> None:
        with pytest.raises(ValueError, match=message):
            Batches(corpus, **{"split": "train", "context": 4, "batch": 2, "seed": 0, **options})

    fails(r"train split of test has 10 tokens, too few for a context of 10 .* shorter context, more text", context=10)
    fails(r"batch \(3\) must be divisible by world \(2\), the number of processes; try 2 or 4", batch=3, world=2)
    fails(r"rank \(2\) must be at least 0 and below world \(2\)", rank=2, world=2)
    fails(r"context \(0\) must be at least 1", context=0)
    fails(r"micro \(0\) must be at least 1", micro=0)
    fails(r"split \('test'\) must be one of 'train', 'validation'", split="test")
    with pytest.raises(ValueError, match=r"step \(-1\) must be at least 0"):
        Batches(corpus, "train", context=4, batch=2, seed=0).passes(-1)
