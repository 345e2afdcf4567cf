"""Seeded faults in copies of the Triton kernels: executing the compiled code shows every one of them.

Triton's interpreter, which runs the Python of a kernel, does not see those with `interpreted` False.
"""

from __future__ import annotations

from concurrent.futures.process import BrokenProcessPool

import pytest

from compiled import in_child, in_interpreting_child
from executed import Case
from mutations import Fault, outcome

ONE = {"B": 1, "H": 1}
SMALL = Case(T=100, L=100, options=ONE)
WINDOW = Case(T=70, L=20, options=ONE)
STEP = Case(1, S=90, L=90, options={"op1": False, **ONE})
RING = Case(1, S=90, L=90, spans=((0, 0, 1, 40, 130),), options={"op1": False, **ONE})
WIDE = Case(T=20, L=20, widths=(16, 140, 5), options=ONE)
ODD = Case(T=40, L=40, spans=((0, 0, 3, 0, 3), (0, 3, 40, 3, 40)), options=ONE)
CUT = Case(T=70, L=70, cut=True, options=ONE)

FAULTS = {
    "none": Fault("", "", "", SMALL, False),
    "an alias that the loop does not carry": Fault(
        "backward.py",
        "    d1, d2 = tl.zeros([M, N], DT), tl.zeros([M, N], DT)\n",
        "    d1 = tl.zeros([M, N], DT)\n    d2 = d1\n",
        SMALL, False,
    ),
    "a buffer overwritten while other warps read it": Fault(
        "decode.py", "        squares += hg * hg\n", "        squares += hg * hg\n        tl.store(own + e, a, mask=ok)\n",
        STEP, False,
    ),
    "a barrier left out": Fault("backward_h", "", "", SMALL, False),
    "a scratch promised to be aligned": Fault("blocks.py", "MARGIN = 256", "MARGIN = 259", SMALL, False),
    "slots before the sequence": Fault("forward.py", "    ok = (c >= 0) & (c < S)\n", "    ok = c < S\n", SMALL, None),
    "two programs write the same columns": Fault(
        "products.py", "chunk_head(first, count, H), tl.program_id(2) * W1", "chunk_head(first, count, H), 0 * W1", WIDE, True
    ),
    "a lag too many": Fault("skew.py", "+ j) < N\n", "+ j) <= N\n", SMALL, True),
    "parameters one tile off": Fault(
        "forward.py", "    p = L - (Q - n + LATE) * N + tl", "    p = L - (Q - n) * N + tl", SMALL, True
    ),
    "strides swapped": Fault("products.py", "b * y_b + c0.to(tl.int64) * y_t", "b * y_t + c0.to(tl.int64) * y_b", ODD, True),
    "a ring that is cut a slot too late": Fault("decode.py", "where(c < S, c", "where(c <= S, c", RING, None),
    "a ring that goes on a slot too far": Fault("decode.py", "c, c - S)", "c, c - S + 1)", RING, True),
    "the window's end": Fault("products.py", "(lag >= 0) & (lag < L)", "(lag >= 0) & (lag <= L)", WINDOW, True),
    "a split that repeats its neighbour's tiles": Fault(
        "forward.py", "(n + 0 * p >= begin + LATE)", "(n + 0 * p >= begin)", CUT, True
    ),
    "halves of a word mixed": Fault("skew.py", ".to(tl.int32) & 0xFFFF", ".to(tl.int32)", SMALL, True),
    "gradients where the gate is shut": Fault("backward.py", "where(hg > 0, da", "where(hg > -1, da", SMALL, True),
}  # fmt: skip
SEEDED = [name for name in FAULTS if name != "none"]


def test_without_a_fault_nothing_shows() -> None:
    assert in_child(outcome, FAULTS["none"]) == "nothing"


@pytest.mark.parametrize("name", SEEDED)
def test_execution_shows(name: str) -> None:
    assert in_child(outcome, FAULTS[name]) != "nothing"


@pytest.mark.parametrize("name", ["none", *(n for n in SEEDED if FAULTS[n].line and FAULTS[n].interpreted is not None)])
def test_what_the_interpreter_shows(name: str) -> None:
    try:
        found = in_interpreting_child(outcome, FAULTS[name])
    except BrokenProcessPool:
        found = "crash"
    assert (found != "nothing") == FAULTS[name].interpreted, found


def test_enough_faults_are_seen_by_execution_alone() -> None:
    assert len(SEEDED) >= 10
    assert sum(FAULTS[name].interpreted is False for name in SEEDED) >= 4
