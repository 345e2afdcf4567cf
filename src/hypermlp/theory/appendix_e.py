"""Appendix E: the dictionary and the measures, slot by slot."""

from __future__ import annotations

import torch
from torch import Tensor

from hypermlp.mixers.hyper import HyperGLU
from hypermlp.theory.appendix_d import OUTSIDE, measured_gate, psi, total_variation, variation_norm
from hypermlp.theory.appendix_d_kernel import first_flip
from hypermlp.theory.registry import DEFINITION, RESTATED, Instance, listed, relative, statement
from hypermlp.theory.search import climb, on_sphere
from hypermlp.theory.setting import activations, atoms, heads, hidden, make_static, measured_atoms, read


@statement(
    "E.1",
    "Proposition",
    "The output is a readout of the pool",
    says="At every query and context the output is 1/ρ(h) times the sum of the dictionary elements Ψ(x; (u, v)) over the pool.",
    assumes="the activation is ReLU of a positively rescaled h.",
    control="softmax weights over the same scores",
)
def pool_readout(case: Instance) -> float:
    layer, x, X = case.layer(), case.normal(6), case.normal(case.integer(2, 12), 6)
    pools = heads(layer, x, X)
    expected = torch.stack([psi(head, atoms(head)).sum(0) / head.rho for head in pools]).sum(0)
    found = read(layer, x[None], X)[0]
    if case.broken:
        found = torch.stack([head.alpha.softmax(0) @ head.beta for head in pools]).sum(0)
    return relative(found, expected)


@statement(
    "E.2",
    "Lemma",
    "The pool is the image of the slots",
    says="The unnormalised readout is the integral of Ψ over the image of the slots: places (u, v), read off the operator, "
    "each with the number of its slots as its mass.",
    assumes="the slots carry the counting measure.",
    control="every place counted once, as a set: the repeated tokens are lost",
    trivial="the lemma itself, which spells out an image measure; what is tested is that the operator reads by its masses.",
)
def pushforward(case: Instance) -> float:
    worst = 0.0
    for mixing in (False, True):  # without mixing equal tokens share a place, with it each slot has its own
        layer = case.layer(n_head=1, use_op1=mixing, use_op2=mixing)
        X, x = case.normal(3, 6)[torch.arange(9) % 3], case.normal(6)
        if not bool((hidden(layer, x[None], X) > 0).any()):
            x = -x
        places, count = torch.unique(measured_atoms(layer, x, X), dim=0, return_counts=True)
        mass = torch.ones_like(count) if case.broken else count
        integral = mass.double() @ psi(heads(layer, x, X)[0], places)
        worst = max(worst, relative(read(layer, x[None], X, norm="none")[0], integral))
    return worst


listed(
    "E.3",
    "Definition",
    "The hard gate and the activated pool",
    says="g = 1{α > 0} and μ_act = g μ_pool. D.6 reads this g off the operator.",
    unchecked=DEFINITION,
)


@statement(
    "E.4",
    "Remark",
    "Selection prunes the pool",
    says="Tokens whose slots are not activated can be struck out of the context: the unnormalised readout stays the same.",
    assumes="R1 = R2 = I; what is struck out is not activated.",
    control="an activated token struck out",
    trivial="that the three supports are nested: each is selected from the one before.",
)
def pruning(case: Instance) -> float:
    layer, x, X = case.layer(n_head=1, use_op1=False, use_op2=False), case.normal(6), case.normal(10, 6)
    active = heads(layer, x, X)[0].activated
    if not 0 < int(active.sum()) < 10:
        X = torch.cat([X[:5], -X[:5]])  # opposite tokens: one of each pair is active
        active = heads(layer, x, X)[0].activated
    kept = active.clone()
    if case.broken:
        kept[active.nonzero()[0]] = False
        kept[(~active).nonzero()[0]] = True
    return relative(read(layer, x[None], X[kept], norm="none"), read(layer, x[None], X, norm="none"))


listed(
    "E.5",
    "Remark",
    "Finitely many atoms in a step, infinitely many over all contexts",
    says="The first half is C.8, the second C.9; both are checked there.",
    unchecked=RESTATED,
)


@statement(
    "E.6",
    "Lemma",
    "Gating is a contraction, by partitions",
    says="Over any partition of the pool's atoms Σ|(gμ)(A_i)| ≤ ‖μ‖_TV for every signed μ, with the operator's own g.",
    assumes="|g| ≤ 1.",
    control="a gate with values between 1.5 and 3, on the finest partition",
    trivial="that |g| ≤ 1 contracts, as in D.6.",
)
def partition_sums(case: Instance) -> float:
    layer, X = case.layer(), case.normal(12, 6)
    points = measured_atoms(layer, X[0], X)
    mu = case.normal(12)
    g = case.uniform(12, low=1.5, high=3) if case.broken else measured_gate(layer, X[0], X)
    mu = torch.where(g.abs() < 0.5, 0.01 * mu, mu)  # most of the mass where the gate is open: the worst there is
    worst = 0.0
    for parts in (2, 4, 12):
        block = torch.arange(12) % parts
        sums = torch.zeros(parts, dtype=torch.float64).index_add(0, block, g * mu)
        worst = max(worst, case.bound(sums.abs().sum(), total_variation(points, mu)))
    return worst


@statement(
    "E.7",
    "Remark",
    "Total variation counts slots",
    says="The total variation of the activated measure, on atoms read off the operator, is the number of slots to which the "
    "operator gives a weight, and a token that comes three times counts three times.",
    assumes="every slot has mass +1.",
    control="masses of random sign on repeated tokens, which cancel",
    trivial="that t masses of +1 add up to t.",
)
def counts_slots(case: Instance) -> float:
    layer = case.layer(use_op1=False, use_op2=False)
    X, x = case.normal(4, 6)[torch.arange(12) % 4], case.normal(6)
    points, weights = measured_atoms(layer, x, X), activations(layer, x[None], X)[0, 0]
    signs = torch.tensor([1.0, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1] if case.broken else [1.0] * 12, dtype=torch.float64)
    once = heads(layer, x, X[:4])[0].activated  # each token alone
    pool, active = total_variation(points, signs), total_variation(points, signs * (weights > 0))
    return abs(pool - 12) + abs(active - 3 * float(once.sum()))


@statement(
    "E.8",
    "Proposition",
    "A bound on the output by the size of the pool",
    says="‖ρ(h) o‖ ≤ sup‖Ψ‖ times the number of active slots ≤ sup‖Ψ‖ t, for contexts climbed to; t equal tokens in the "
    "direction that L1 and L2 stretch most reach the bound.",
    assumes="all atoms of the pool lie in the set over which the supremum is taken.",
    control="tokens a tenth outside that set",
    tolerance=1e-8,
    instances=5,
)
def a_priori(case: Instance) -> float:
    t, far = case.integer(2, 6), OUTSIDE if case.broken else 1.0
    layer = make_static(case.layer(n_head=1, use_op1=False, use_op2=False))
    x, X = case.normal(6), case.normal(t, 6)
    x = 2 * x / x.norm()
    largest = stretch(layer) * 2.0  # over ‖x‖ ≤ 2 and atoms of norm 1

    def size(context: Tensor) -> Tensor:
        return read(layer, x[None], context, impl="dense", norm="none").norm()

    if not float(size(X)):
        X = -X  # all slots closed: nothing to climb on
    X = climb(size, X, lambda c: on_sphere(c, 1.0))
    active = float((hidden(layer, x[None], X) > 0).sum())
    error = case.bound(size(X), largest * active) if active else 0.0
    error = max(error, case.bound(size(X), largest * t))
    align(layer)
    reach = read(layer, x[None], (far * x / 2).expand(t, -1), norm="none").norm()
    error = max(error, case.bound(reach, 2.0 * stretch(layer) * t))
    return error + (0.0 if case.broken else abs(float(reach) / (2.0 * stretch(layer) * t) - 1))


def stretch(layer: HyperGLU) -> float:
    """‖L1‖‖L2‖ of a static one-head layer: sup ‖Ψ‖ over unit queries and atoms, which may be different vectors."""
    head = heads(layer, torch.zeros(6, dtype=torch.float64), torch.eye(6, dtype=torch.float64))[0]
    return float(torch.linalg.matrix_norm(head.L1, 2) * torch.linalg.matrix_norm(head.L2, 2))


def align(layer: HyperGLU) -> None:
    """Weights of which L1 and L2 are multiples of the identity: every direction is stretched most."""
    for gate in (layer.gate_qk, layer.gate_vo):
        assert gate is not None
        gate.bias.zero_()
    for linear in (layer.q, layer.k, layer.v, layer.o):
        linear.weight.copy_(torch.eye(*linear.weight.shape))


@statement(
    "E.9",
    "Remark",
    "With static mixing the size of the pool bounds the variation norm",
    says="With R1 and R2 constant one measure, the pool of X, gives the unnormalised readout at all queries, so its variation "
    "norm is at most t.",
    assumes="R1 and R2 do not depend on x; gates may.",
    control="controls that see the query: no measure on that pool gives the readout",
    tolerance=1e-7,
    instances=4,
)
def static_pool(case: Instance) -> float:
    t, n = 4, 6
    layer = case.layer(n_head=1)
    if not case.broken:
        for op in (layer.op1, layer.op2):
            assert op is not None
            op.control.weight.zero_()
    X, queries = case.normal(t, 6), case.normal(n, 6)
    pool = measured_atoms(layer, queries[0], X)
    spare = case.normal(2, 12)  # atoms outside the pool may represent it more cheaply
    table = torch.cat([psi(heads(layer, x, X)[0], torch.cat([pool, spare])).T for x in queries])  # n·d t+2
    f = read(layer, queries, X, norm="none").flatten()
    size = variation_norm(table, f)
    nearest = torch.linalg.lstsq(table, f[:, None], driver="gelsd").solution[:, 0]  # also where an atom is never active
    gap = float((table @ nearest - f).norm() / f.norm())
    return gap + (case.bound(size, t) if size < float("inf") else 0.0)


@statement(
    "E.10",
    "Remark",
    "A margin keeps the activated pool while the mixing learns",
    says="D.11 for A and D of R1: the operator selects the same atoms until a score has moved by the margin δ, and in the "
    "worst direction no longer.",
    assumes="‖h(θ) − h(θ₀)‖_∞ < δ.",
    control="a δ that is half as large again as the margin",
    trivial="as in D.11.",
    instances=4,
)
def stable_pool(case: Instance) -> float:
    layer = case.layer(n_head=1, op1_rank=4)
    op = layer.op1
    assert op is not None
    assert op.diag is not None
    delta, moved = first_flip(case, layer, [op.A, op.diag])
    return case.bound((1.5 if case.broken else 1.0) * delta, moved)
