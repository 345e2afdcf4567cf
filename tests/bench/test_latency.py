"""What the latency benchmark compares computes what it says, and its numbers are those of the times."""

from __future__ import annotations

import pytest
import torch

from helpers import assert_same
from hypermlp.bench.latency import COLD, RingAttention, TimedStream, in_turns, summary
from hypermlp.mixers import SoftmaxAttention


@torch.no_grad()
def test_the_ring_is_softmax_attention_over_its_window() -> None:
    ring, plain, x = RingAttention(24, 3, 5), SoftmaxAttention(24, 3, use_rope=False), torch.randn(2, 17, 24)
    for part, weight in zip((plain.q, plain.k, plain.v), ring.qkv.weight.chunk(3), strict=True):
        part.weight.copy_(weight)
    plain.o.weight.copy_(ring.o.weight)
    found = [ring.begin(x[:, :3]), *(ring(x[:, t : t + 1]) for t in range(3, 17))]
    expected = [plain(x[:, max(0, t - 4) : t + 1])[:, -1:] for t in range(2, 17)]
    assert_same(torch.cat(found, 1), torch.cat(expected, 1), 1e-5)


def test_percentiles_deadlines_and_trace() -> None:
    seconds = [1e-3 * n for n in range(1, 1001)]
    found = summary(TimedStream(0.5, lambda: None, 3, 4), seconds)
    assert (found["p50"], found["p99"], found["p99.9"], found["worst"]) == pytest.approx((500, 990, 999, 1000))
    assert found["met"] == {"1": 0.001, "5": 0.005, "10": 0.01, "20": 0.02}
    assert sum(number for _, number in found["distribution"]) == 1000
    assert found["trace"][0] == pytest.approx([2, 3])
    assert found["first_ms"] == 500


@pytest.mark.parametrize("turn", [1, 5])
def test_every_stream_takes_every_step(turn: int) -> None:
    taken: list[int] = []
    streams = [TimedStream(0, lambda n=n: taken.append(n), 0, 0) for n in range(2)]
    times = in_turns(streams, 33, turn, "", lambda text: None)
    assert [len(own) for own in times] == [33, 33]
    if turn == 1:  # nothing is left of the caches that a stream has filled
        assert taken == [0, 1] * 33
    else:  # the first tokens of a turn do not count
        assert taken[: 2 * (COLD + 5)] == [0] * (COLD + 5) + [1] * (COLD + 5)
