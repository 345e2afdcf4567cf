"""Spans that go around the end of their slots: every implementation reads a ring as if its slots lay in time order."""

from __future__ import annotations

import pytest
import torch

from helpers import TOLERANCE, Problem, assert_same, each_fast_impl, each_impl, make_problem, precision, randn, run_problem

# rows, slots of the ring, lags: single rows, few rows, strips, and slots beyond a packed tile (96) and a decoding block (512)
SIZES = [(1, 1, 1), (1, 2, 1), (1, 7, 5), (3, 9, 9), (5, 12, 7), (4, 131, 110), (60, 230, 150), (1, 1100, 1050)]


def ring_of(plain: Problem, begin: int) -> Problem:
    """The same slots, the first at place `begin` and the last of them before it."""
    B, T, S = *plain.q.shape[:2], plain.k.shape[1]
    spans = torch.tensor([[b, 0, T, begin, begin + S] for b in range(B)])
    return plain.replace(k=plain.k.roll(begin, 1), v=plain.v.roll(begin, 1), spans=spans)


def places(S: int) -> list[int]:
    return sorted({0, 1 % S, 5 % S, S // 2, S - S // 4, S - 1})


@each_impl
@pytest.mark.parametrize("T, S, L", SIZES)
def test_a_ring_is_read_in_time_order(T: int, S: int, L: int, impl: str, chunk: int | None) -> None:
    dtype = precision(impl)
    plain = make_problem(T, S, L).to(dtype)
    expected = plain.mix(impl, chunk)
    for begin in places(S):
        assert_same(ring_of(plain, begin).mix(impl, chunk), expected, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("T, S, L", SIZES)
@pytest.mark.parametrize("threads", [1, 2])
def test_bits_do_not_depend_on_the_place(T: int, S: int, L: int, threads: int, dtype: torch.dtype) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        plain = make_problem(T, S, L).to(dtype)
        expected = plain.mix("native")
        for begin in places(S):
            assert torch.equal(ring_of(plain, begin).mix("native"), expected), begin
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("K, V, R", [(16, 16, 16), (33, 37, 1), (48, 100, 17), (70, 433, 32)])
def test_every_width_is_read_whole_and_in_order(K: int, V: int, R: int, dtype: torch.dtype, limit: float) -> None:
    """Vectors of all numbers, and what is left behind the last."""
    narrow = make_problem(1, 603, 590, ranks=(R, R))
    q, k, v = (randn(*t.shape[:3], n, seed=n) for t, n in ((narrow.q, K), (narrow.k, K), (narrow.v, V)))
    plain = narrow.replace(q=q, k=k, v=v).to(dtype)
    found = plain.mix("native")
    assert_same(found, plain.to(torch.float64).mix("dense"), limit)
    for begin in (1, 302, 600):
        assert torch.equal(ring_of(plain, begin).mix("native"), found), begin


@each_impl
def test_rows_of_a_batch_lie_at_places_of_their_own(impl: str, chunk: int | None) -> None:
    dtype, spans = precision(impl), [[0, 0, 5, 17, 30], [1, 0, 2, 3, 9], [2, 1, 5, 19, 39]]
    ring = make_problem(5, 20, 11, B=3, spans=torch.tensor(spans)).to(dtype)
    found = ring.mix(impl, chunk)
    for b, r0, r1, c0, c1 in spans:
        slots = torch.arange(c0, c1) % 20
        routing, reading = (m._replace(control=m.control[b : b + 1, r0:r1]) for m in (ring.routing, ring.reading))
        alone = Problem(ring.q[[b], r0:r1], ring.k[[b]][:, slots], ring.v[[b]][:, slots], routing, reading, ring.spec)
        assert_same(found[b : b + 1, r0:r1], alone.mix("dense"), TOLERANCE[dtype])
    assert (found[1, 2:] == 0).all()
    assert (found[2, :1] == 0).all()


def test_the_reference_differentiates_a_ring() -> None:
    plain = make_problem(5, 12, 7)
    expected, found = run_problem(plain), run_problem(ring_of(plain, 8))
    unrolled = {name: g.roll(-8, 1) if name in ("d k", "d v") else g for name, g in found.items()}
    assert_same(unrolled, expected, TOLERANCE[torch.float64])


@each_fast_impl
def test_hand_written_gradients_refuse_a_ring(impl: str, chunk: int | None) -> None:
    with pytest.raises(ValueError, match=r'spans go around 12 slots.*impl="dense"'):
        run_problem(ring_of(make_problem(5, 12, 7).to(precision(impl)), 8), impl, chunk)


@pytest.mark.parametrize("begin, end", [(13, 20), (3, 16), (-1, 4), (12, 25)])
def test_the_kernel_refuses_what_is_no_ring(begin: int, end: int) -> None:
    problem = make_problem(1, 12, 7, B=1, spans=torch.tensor([[0, 0, 1, begin, end]])).to(torch.float32)
    with pytest.raises(RuntimeError, match="the arguments do not agree"):
        problem.mix("native")
