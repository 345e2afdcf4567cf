"""The recurrence in chunks against one token after another and against public references; values, states and gradients."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from helpers import assert_same, randn, seeded
from hypermlp.ops.recurrence import CHUNK, FEW_TOKENS, Steps, chunked, isolate, recurrence, step_by_step

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it warns of the missing GPU
    from fla.ops.delta_rule.naive import delta_rule_recurrence
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
    from fla.ops.generalized_delta_rule.dplr.naive import dplr_recurrence
    from fla.ops.gla.naive import naive_recurrent_gla
    from fla.ops.linear_attn.naive import naive_recurrent_linear_attn
    from fla.ops.retention.naive import naive_retention
    from fla.ops.simple_gla.naive import naive_recurrent_simple_gla

B, H, K, V = 2, 2, 5, 3
STRENGTHS = torch.tensor([-1e4, -math.inf, 0, -1e-8, -0.5], dtype=torch.float64)
each_decay = pytest.mark.parametrize("decay", [None, "scalar", "channel"])
each_transition = pytest.mark.parametrize("transition", [None, "a", "ab"])
each_length = pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 130, 200])


def make_steps(T: int, decay: str | None = None, transition: str | None = None, *, extreme: bool = False) -> Steps:
    q, k, v = randn(B, T, H, K), 0.5 * randn(B, T, H, K, seed=1), randn(B, T, H, V, seed=2)
    g = a = b = None
    if decay is not None:
        shape = (B, T, H, K) if decay == "channel" else (B, T, H)
        g = -2 * torch.rand(shape, generator=seeded(3), dtype=torch.float64)
        if extreme:
            g = STRENGTHS[torch.randint(len(STRENGTHS), shape, generator=seeded(4))]
    if transition is not None:
        a = -0.3 * k + 0.05 * randn(B, T, H, K, seed=5)
    if transition == "ab":
        b = 0.3 * randn(B, T, H, K, seed=6)
    return Steps(q, k, v, g, a, b)


def run(
    function: Callable[..., tuple[Tensor, Tensor]], steps: Steps, state: Tensor | None, **more: Tensor
) -> dict[str, Tensor]:
    """Readouts, the last state and the gradients of all that goes in."""
    inputs = {**steps._asdict(), "state": state, **more}
    leaves = {name: t.detach().clone().requires_grad_() for name, t in inputs.items() if t is not None}
    o, last = function(
        Steps(*(leaves.get(name) for name in Steps._fields)), leaves.get("state"), **{name: leaves[name] for name in more}
    )
    d_o, d_last = randn(*o.shape, seed=7, dtype=o.dtype), randn(*last.shape, seed=8, dtype=last.dtype)
    found = torch.autograd.grad((o * d_o).sum() + (last * d_last).sum(), list(leaves.values()))
    results = {"o": o, "last": last, **{f"d {name}": d for name, d in zip(leaves, found, strict=True)}}
    assert all(t.isfinite().all() for t in results.values())
    return results


@each_length
@each_decay
@each_transition
@pytest.mark.parametrize("extreme", [False, True])
def test_chunks_equal_single_tokens(T: int, decay: str | None, transition: str | None, extreme: bool) -> None:
    steps, state = make_steps(T, decay, transition, extreme=extreme), randn(B, H, K, V, seed=9)
    for before in (state, None):
        assert_same(run(chunked, steps, before), run(step_by_step, steps, before))


@each_decay
@each_transition
@pytest.mark.parametrize("T", [3, 70, 130])
def test_borders_and_padding(T: int, decay: str | None, transition: str | None) -> None:
    steps, state = make_steps(T, decay, transition), randn(B, H, K, V, seed=9)
    begins = torch.rand(1, T, generator=seeded(10)) < 0.1
    padding = torch.arange(T) >= torch.tensor([[T - 2], [T]])

    def in_one_go(steps: Steps, state: Tensor | None) -> tuple[Tensor, Tensor]:
        return recurrence(steps, state, begins=begins, padding=padding)

    def token_by_token(steps: Steps, state: Tensor | None) -> tuple[Tensor, Tensor]:
        return step_by_step(isolate(steps, begins, padding), state)

    assert_same(run(in_one_go, steps, state), run(token_by_token, steps, state))


@each_decay
@each_transition
def test_documents_are_separate_and_padding_is_idle(decay: str | None, transition: str | None) -> None:
    T, cut, end = 150, 70, 140
    steps, state = make_steps(T, decay, transition), randn(B, H, K, V, seed=9)
    begins, padding = torch.arange(T)[None] == cut, (torch.arange(T) >= end).expand(B, T)
    o, last = recurrence(steps, state, begins=begins, padding=padding)
    parts = [Steps._make(None if t is None else t[:, span] for t in steps) for span in (slice(cut), slice(cut, end))]
    (first, _), (second, expected) = recurrence(parts[0], state), recurrence(parts[1])
    assert_same(o[:, :end], torch.cat([first, second], 1))
    assert_same(last, expected)


@each_decay
@each_transition
@pytest.mark.parametrize("cut", [1, FEW_TOKENS, 64, 99])
def test_the_state_goes_on(decay: str | None, transition: str | None, cut: int) -> None:
    steps = make_steps(150, decay, transition)
    o, last = recurrence(steps)
    parts = [Steps._make(None if t is None else t[:, span] for t in steps) for span in (slice(cut), slice(cut, None))]
    first, state = recurrence(parts[0])
    second, found = recurrence(parts[1], state)
    assert_same(torch.cat([first, second], 1), o)
    assert_same(found, last)


@each_decay
@each_transition
@pytest.mark.parametrize("extreme", [False, True])
def test_single_precision_is_close(decay: str | None, transition: str | None, extreme: bool) -> None:
    steps, state = make_steps(200, decay, transition, extreme=extreme), randn(B, H, K, V, seed=9)
    single = Steps._make(None if t is None else t.float() for t in steps)
    assert_same(run(recurrence, single, state.float()), run(step_by_step, steps, state), 1e-5)


def test_a_weak_decay_is_not_lost_beside_a_strong_one() -> None:
    """A difference of long sums would see −1e4 + 1e-3 − (−1e4), which is 1e-3 only roughly in float32."""
    g = torch.full((1, 64, 1, 1), -1e-3)
    g[:, 0] = -1e4
    one = torch.zeros(1, 64, 1, 1)
    one[:, 0] = 1
    for decay in (g, g[..., 0]):
        o, _ = recurrence(Steps(torch.ones_like(one), one, torch.ones_like(one), decay))
        assert_same(o[0, :, 0, 0], torch.exp(-1e-3 * torch.arange(64, dtype=torch.float64)), 1e-6)


@pytest.mark.usefixtures("poisoned")
@each_decay
@each_transition
def test_all_memory_is_written(decay: str | None, transition: str | None) -> None:
    steps = make_steps(70, decay, transition)
    assert_same(run(chunked, steps, None), run(step_by_step, steps, None))


@each_decay
@each_transition
@pytest.mark.parametrize("rows, T", [(0, 70), (2, 0), (0, 0), (0, 1)])
def test_empty_inputs(decay: str | None, transition: str | None, rows: int, T: int) -> None:
    steps = Steps._make(None if t is None else t[:rows, :T] for t in make_steps(70, decay, transition))
    o, last = recurrence(steps, randn(rows, H, K, V))
    assert o.shape == (rows, T, H, V)
    assert_same(last, randn(rows, H, K, V))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_single(dtype: torch.dtype) -> None:
    half = Steps._make(None if t is None else t.to(dtype) for t in make_steps(100, "channel", "ab"))
    o, last = recurrence(half)
    expected, state = step_by_step(Steps._make(None if t is None else t.double() for t in half), None)
    assert (o.dtype, last.dtype) == (dtype, torch.float32)
    assert_same(o, expected, 5e-3)
    assert_same(last, state, 1e-5)


@each_decay
@each_transition
def test_memory_grows_linearly(decay: str | None, transition: str | None) -> None:
    def saved(T: int) -> int:
        kept: dict[int, int] = {}

        def pack(t: Tensor) -> Tensor:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        steps = Steps._make(None if t is None else t.requires_grad_() for t in make_steps(T, decay, transition))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            _ = recurrence(steps)
            return sum(kept.values())

    assert saved(8 * CHUNK) <= 2.01 * saved(4 * CHUNK)


# Public references, which compute in float32. What they scale by 1/√K we leave to the caller.

SCALE = K**-0.5


def heads_first(*tensors: Tensor) -> list[Tensor]:
    return [t.transpose(1, 2) for t in tensors]


def reference_delta(s: Steps, state: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    o, last = delta_rule_recurrence(*heads_first(s.q, s.k, s.v, beta), initial_state=state)
    return o.transpose(1, 2), last


def reference_gated_delta(s: Steps, state: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    return naive_recurrent_gated_delta_rule(s.q, s.k, s.v, beta, s.g, initial_state=state, output_final_state=True)


def reference_dplr(s: Steps, state: Tensor) -> tuple[Tensor, Tensor]:
    o, last = dplr_recurrence(*heads_first(s.q, s.k, s.v, s.a, s.b, s.g), initial_state=state)
    return o.transpose(1, 2), last


def reference_gla(s: Steps, state: Tensor) -> tuple[Tensor, Tensor]:
    return naive_recurrent_gla(s.q, s.k, s.v, s.g, initial_state=state, output_final_state=True)


def reference_simple_gla(s: Steps, state: Tensor) -> tuple[Tensor, Tensor]:
    return naive_recurrent_simple_gla(s.q, s.k, s.v, s.g, initial_state=state)


def reference_linear(s: Steps, state: Tensor) -> tuple[Tensor, Tensor]:
    return naive_recurrent_linear_attn(s.q, s.k, s.v, initial_state=state, output_final_state=True)


def our_delta(s: Steps, state: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    decay = 1 if s.g is None else s.g.exp()[..., None]
    return recurrence(Steps(s.q * SCALE, beta[..., None] * s.k, s.v, s.g, -decay * s.k), state)


def our_recurrence(s: Steps, state: Tensor) -> tuple[Tensor, Tensor]:
    return recurrence(s._replace(q=s.q * SCALE), state)


# Theirs, ours, the kind of decay and of transition.
REFERENCES = {
    "delta": (reference_delta, our_delta, None, None),
    "gated delta": (reference_gated_delta, our_delta, "scalar", None),
    "dplr": (reference_dplr, our_recurrence, "channel", "ab"),
    "gla": (reference_gla, our_recurrence, "channel", None),
    "simple gla": (reference_simple_gla, our_recurrence, "scalar", None),
    "linear": (reference_linear, our_recurrence, None, None),
}


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("T", [1, 3, 37, 64, 101])
def test_public_references(name: str, T: int) -> None:
    theirs, ours, decay, transition = REFERENCES[name]
    steps = Steps._make(None if t is None else t.float() for t in make_steps(T, decay, transition))
    state = randn(B, H, K, V, seed=9, dtype=torch.float32)
    more = {"beta": torch.rand(B, T, H, generator=seeded(11))} if "delta" in name else {}
    assert_same(run(ours, steps, state, **more), run(theirs, steps, state, **more), 1e-5)


@pytest.mark.parametrize("T", [1, 37, 101])
def test_public_retention(T: int) -> None:
    steps = Steps(*(t.float() for t in make_steps(T)[:3]))
    gamma = 1 - 2.0 ** (-5 - torch.arange(H))

    def theirs(s: Steps, _: None) -> tuple[Tensor, Tensor]:
        o = naive_retention(*heads_first(s.q, s.k, s.v)).transpose(1, 2)
        return o, o.new_zeros(1)

    def ours(s: Steps, _: None) -> tuple[Tensor, Tensor]:
        o, _ = recurrence(Steps(s.q * SCALE, s.k, s.v, gamma.log().expand(B, T, H)))
        return o, o.new_zeros(1)

    assert_same(run(ours, steps, None), run(theirs, steps, None), 1e-5)
