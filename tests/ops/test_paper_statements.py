"""The paper's statements about the operator, each checked on random instances from outside, through ops.mix alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers import (
    TOLERANCE,
    Problem,
    assert_same,
    each_impl,
    error,
    make_problem,
    precision,
    readout_weights,
    run_problem,
)
from hypermlp import ops

seeds = st.integers(0, 10**6)
kinds = st.sampled_from(["glu", "relu"])


def hidden(problem: Problem, impl: str, chunk: int | None) -> Tensor:
    """h (B H T S) of a HyperMLP in time order, seen from outside: relu(h) − relu(−h) = h."""
    bare = problem.replace(reading=None).with_spec(kind="relu", norm="none")
    return readout_weights(bare, impl, chunk) - readout_weights(bare.replace(q=-bare.q), impl, chunk)


def matrix(mixing: ops.Mixing, b: int, t: int, h: int, n: int) -> Tensor:
    """R(x_t) (n n) of one head over the n newest lags, formed explicitly."""
    A, B = mixing.A[h, -n:], mixing.B[h, -n:]
    D = torch.full((n,), float(mixing.shortcut), dtype=A.dtype)
    if mixing.diag is not None:
        D = D + mixing.diag[h, -n:]
    return torch.diag(D) + A @ torch.diag(mixing.control[b, t, h]) @ B.T


@each_impl
@given(seed=seeds, kind=kinds, T=st.integers(2, 12), L=st.integers(1, 14), cut=st.integers(1, 11))
def test_future_never_changes_the_past(impl: str, chunk: int | None, seed: int, kind: str, T: int, L: int, cut: int) -> None:
    cut = min(cut, T - 1)
    problem = make_problem(T, L=L, kind=kind, seed=seed).to(precision(impl))
    leaves = {n: t.clone() for n, t in problem.leaves().items()}
    for name in ("q", "k", "v", "R1.control", "R2.control"):
        leaves[name][:, cut:] = 7
    changed = problem.with_leaves(leaves).mix(impl, chunk)
    assert_same(changed[:, :cut], problem.mix(impl, chunk)[:, :cut], TOLERANCE[precision(impl)])


@each_impl
@given(seed=seeds, kind=kinds, T=st.integers(5, 12), L=st.integers(3, 14), cut=st.integers(4, 11))
def test_past_outputs_have_no_gradient_in_the_future(
    impl: str, chunk: int | None, seed: int, kind: str, T: int, L: int, cut: int
) -> None:
    cut = min(cut, T - 1)
    problem = make_problem(T, L=L, kind=kind, seed=seed).to(precision(impl))
    k, v = problem.k.requires_grad_(), problem.v.requires_grad_()
    problem.mix(impl, chunk)[:, :cut].sum().backward()
    assert k.grad is not None
    assert v.grad is not None
    for grad in (k.grad, v.grad):
        assert (grad[:, cut:] == 0).all()
    assert (v.grad[:, :cut] != 0).any()


@each_impl
@given(seed=seeds, T=st.integers(1, 12), L=st.integers(1, 14))
def test_gate_invariance(impl: str, chunk: int | None, seed: int, T: int, L: int) -> None:
    """Lemma B.2: L2Norm(z) > 0 where z > 0, and ReLU(L2Norm(z)) = ReLU(z) / ρ(z)."""
    problem = make_problem(T, L=L, kind="relu", op2=False, seed=seed).to(precision(impl))
    h = hidden(problem, impl, chunk)
    rho = (h.square().sum(-1, keepdim=True) + problem.spec.eps).sqrt()
    for norm in ("out_scale", "l2"):
        weights = readout_weights(problem.with_spec(norm=norm), impl, chunk)
        assert torch.equal(weights > 0, h > 0)
        assert_same(weights, F.relu(h) / rho, TOLERANCE[precision(impl)])


@each_impl
@given(seed=seeds, kind=kinds, t=st.integers(1, 8), older=st.integers(1, 8))
def test_lag_layout_is_invariant_to_truncation(impl: str, chunk: int | None, seed: int, kind: str, t: int, older: int) -> None:
    """Theorem 2.3, Lemma C.6 and Theorem F.1 (i): with p = −1, A = B = 0 at the older lags, older slots have no effect."""
    T = t + older
    short = make_problem(1, t, L=t, kind=kind, seed=seed).to(precision(impl))
    long = make_problem(1, T, L=T, kind=kind, seed=seed + 1).to(precision(impl))
    k, v = torch.cat([long.k[:, :older], short.k], 1), torch.cat([long.v[:, :older], short.v], 1)
    extended = short.replace(k=k, v=v, routing=extend(short.routing, older), reading=extend(short.reading, older))
    extended = extended.with_spec(block_size=T)
    assert_same(extended.mix(impl, chunk), short.mix(impl, chunk), TOLERANCE[precision(impl)])


@each_impl
@given(seed=seeds, kind=kinds, t=st.integers(4, 8), newer=st.integers(1, 8))
def test_forward_layout_has_the_wrong_invariance(
    impl: str, chunk: int | None, seed: int, kind: str, t: int, newer: int
) -> None:
    """Theorem F.1 (ii): the top-left extension in forward order keeps the oldest tokens, not the most recent ones."""
    T, tolerance = t + newer, TOLERANCE[precision(impl)]
    long = make_problem(1, T, L=T, kind=kind, aligner="identity", seed=seed).to(precision(impl))
    short = make_problem(1, t, L=t, kind=kind, aligner="identity", seed=seed + 1).to(precision(impl))
    routing, reading = (extend(m, newer, at_end=True) for m in (short.routing, short.reading))
    extended = long.replace(q=short.q, routing=routing, reading=reading)
    oldest = short.replace(k=long.k[:, :t], v=long.v[:, :t])
    recent = short.replace(k=long.k[:, -t:], v=long.v[:, -t:])
    o = extended.mix(impl, chunk)
    assert_same(o, oldest.mix(impl, chunk), tolerance)
    assert error(o, recent.mix(impl, chunk)) > 1e3 * tolerance


def extend(mixing: ops.Mixing, more: int, at_end: bool = False) -> ops.Mixing:
    """Lemma C.6: the length-T parameters of P R_t Pᵀ."""

    def with_more(p: Tensor, value: float) -> Tensor:
        rest = p.new_full((p.shape[0], more, *p.shape[2:]), value)
        return torch.cat([p, rest] if at_end else [rest, p], dim=1)

    assert mixing.diag is not None
    return mixing._replace(A=with_more(mixing.A, 0), B=with_more(mixing.B, 0), diag=with_more(mixing.diag, -1))


@each_impl
@given(seed=seeds, kind=kinds, T=st.integers(5, 12), t=st.integers(4, 11))
def test_prefix_of_a_longer_input_is_the_shorter_input(
    impl: str, chunk: int | None, seed: int, kind: str, T: int, t: int
) -> None:
    """One set of lag parameters serves every length in the offset layout; in the forward layout appending moves all of them."""
    t = min(t, T - 1)
    for aligner in ("offset", "identity"):
        long = make_problem(T, L=12, kind=kind, aligner=aligner, seed=seed).to(precision(impl))
        parts = {name: x if name[-1] in "ABg" else x[:, :t] for name, x in long.leaves().items()}
        difference = error(long.with_leaves(parts).mix(impl, chunk), long.mix(impl, chunk)[:, :t])
        assert (difference <= TOLERANCE[precision(impl)]) == (aligner == "offset")


@each_impl
@given(seed=seeds, kind=kinds, S=st.integers(1, 12))
def test_layouts_agree_in_the_last_row(impl: str, chunk: int | None, seed: int, kind: str, S: int) -> None:
    lag = make_problem(S, L=12, kind=kind, seed=seed).to(precision(impl))
    forward = lag.with_spec(aligner="identity")
    assert_same(lag.mix(impl, chunk)[:, -1], forward.mix(impl, chunk)[:, -1], TOLERANCE[precision(impl)])


@each_impl
@given(seed=seeds, T=st.integers(1, 12))
def test_identity_mixing_is_normalised_relu_attention(impl: str, chunk: int | None, seed: int, T: int) -> None:
    """Theorem 2.1 (iii): R = I gives the token-wise basis, absent or spelled out as a shortcut without low rank."""
    absent = make_problem(T, L=12, kind="relu", op1=False, op2=False, seed=seed).to(precision(impl))
    spelled = make_problem(T, L=12, kind="relu", diag=False, seed=seed).to(precision(impl))
    spelled = spelled.replace(
        routing=spelled.routing._replace(A=0 * spelled.routing.A), reading=spelled.reading._replace(B=0 * spelled.reading.B)
    )
    scores = torch.einsum("bthk,bshk->bhts", absent.q, absent.k).tril()
    attention = scores.relu() / (scores.square().sum(-1, keepdim=True) + 1e-12).sqrt()
    expected = torch.einsum("bhts,bshv->bthv", attention, absent.v)
    for problem in (absent, spelled):
        assert_same(problem.mix(impl, chunk), expected, TOLERANCE[precision(impl)])


@each_impl
@given(seed=seeds, T=st.integers(2, 12), L=st.integers(2, 14))
def test_scale_scores_never_change_the_routing(impl: str, chunk: int | None, seed: int, T: int, L: int) -> None:
    """Proposition 2.4: the active slots of HyperGLU are those of its gate heads; the scale multiplies by a softplus."""
    glu = make_problem(T, L=L, op2=False, seed=seed).to(precision(impl))
    H = glu.v.shape[2]
    halves = {}
    for name, part in (("gate", slice(0, H)), ("scale", slice(H, None))):
        m = glu.routing
        routing = m._replace(A=m.A[part], B=m.B[part], control=m.control[:, :, part], diag=m.diag[part])
        halves[name] = glu.replace(q=glu.q[:, :, part], k=glu.k[:, :, part], routing=routing).with_spec(kind="relu")
    gate = readout_weights(halves["gate"], impl, chunk)  # of the HyperMLP that has the gate heads alone
    weights = readout_weights(glu, impl, chunk)
    assert torch.equal(weights > 0, gate > 0)
    assert_same(weights, gate * F.softplus(hidden(halves["scale"], impl, chunk)), TOLERANCE[precision(impl)])

    louder = glu.replace(k=torch.cat([glu.k[:, :, :H], 3 * glu.k[:, :, H:]], 2))
    assert torch.equal(readout_weights(louder, impl, chunk) > 0, gate > 0)
    opposite = glu.replace(k=torch.cat([-glu.k[:, :, :H], glu.k[:, :, H:]], 2))
    assert not torch.equal(readout_weights(opposite, impl, chunk) > 0, gate > 0)


@each_impl
@given(seed=seeds, T=st.integers(1, 12), L=st.integers(1, 14), diag=st.booleans(), shortcut=st.booleans())
def test_low_rank_product_equals_the_matrix(
    impl: str, chunk: int | None, seed: int, T: int, L: int, diag: bool, shortcut: bool
) -> None:
    """Lemma G.1: y R and y Rᵀ against the matrix D + A Diag(s) Bᵀ over the slots of each row."""
    problem = make_problem(T, L=L, kind="relu", norm="none", diag=diag, shortcut=shortcut, seed=seed)
    problem = problem.to(precision(impl))
    z = torch.einsum("bthk,bshk->bhts", problem.q, problem.k)
    h, w = torch.zeros_like(z), torch.zeros_like(z)
    for b, head, t in torch.cartesian_prod(*(torch.arange(n) for n in z.shape[:3])).tolist():
        n = min(t + 1, L)
        row = z[b, head, t, t + 1 - n : t + 1]
        h[b, head, t, t + 1 - n : t + 1] = row @ matrix(problem.routing, b, t, head, n)
        w[b, head, t, t + 1 - n : t + 1] = row.relu() @ matrix(problem.reading, b, t, head, n).T
    tolerance = TOLERANCE[precision(impl)]
    assert_same(hidden(problem, impl, chunk), h, tolerance)
    assert_same(readout_weights(problem.replace(routing=None), impl, chunk), w, tolerance)


@each_impl
@given(seed=seeds, kind=kinds, T=st.integers(1, 12), L=st.integers(1, 14))
def test_normalising_first_or_last_is_the_same(impl: str, chunk: int | None, seed: int, kind: str, T: int, L: int) -> None:
    last = make_problem(T, L=L, kind=kind, seed=seed).to(precision(impl))
    found, expected = run_problem(last.with_spec(norm="l2"), impl, chunk), run_problem(last, impl, chunk)
    assert_same(found, expected, 10 * TOLERANCE[precision(impl)])
