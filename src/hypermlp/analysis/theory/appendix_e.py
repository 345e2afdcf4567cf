"""Appendix E: the dictionary and the measures, slot by slot."""

from __future__ import annotations

import torch
from torch import Tensor

from hypermlp.analysis.theory.appendix_d import B_X, B_x, psi, psi_bound, total_variation
from hypermlp.analysis.theory.registry import Case, excess, relative, statement
from hypermlp.analysis.theory.setting import atoms, heads, read


@statement(
    "E.1",
    "Proposition",
    "The output is a readout of the pool",
    says="At every query and context the output is 1/ρ(h) times the sum of the dictionary elements Ψ(x; (u, v)) over the pool.",
    assumes="the activation is ReLU of a positively rescaled h.",
    control="softmax weights over the same scores",
)
def pool_readout(case: Case) -> float:
    layer, x, X = case.layer(), case.normal(6), case.normal(case.integer(2, 12), 6)
    pools = heads(layer, x, X)
    expected = torch.stack([psi(head, atoms(head)).sum(0) / head.rho for head in pools]).sum(0)
    found = read(layer, x[None], X)[0]
    if case.broken:
        found = torch.stack([head.alpha.softmax(0) @ head.beta for head in pools]).sum(0)
    return relative(found, expected)


def inside(points: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return ((points >= low) & (points <= high)).all(1)


@statement(
    "E.2",
    "Lemma",
    "The pool is the image of the slots",
    says="The pool's mass of any set A is the number of slots j whose atom Γ(j) lies in A, multiplicities included.",
    assumes="the slots carry the counting measure.",
    control="every place counted once, as a set: the repeated tokens are lost",
)
def pushforward(case: Case) -> float:
    layer = case.layer(use_op1=False, use_op2=False)
    few = case.normal(3, 6)
    X = few[torch.arange(9) % 3]  # every token three times; without mixing their atoms coincide
    points = atoms(heads(layer, X[0], X)[0])
    places, count = torch.unique(points, dim=0, return_counts=True)
    mass = torch.ones_like(count) if case.broken else count  # the measure: places and their masses
    wrong = 0.0
    for token in few:
        low, high = token.repeat(2) - case.uniform(12), token.repeat(2) + case.uniform(12)
        wrong += float((inside(places, low, high) * mass).sum() != inside(points, low, high).sum())
    return wrong


@statement(
    "E.6",
    "Lemma",
    "Gating is a contraction, by partitions",
    says="Over any partition of the atoms Σ|(gμ)(A_i)| ≤ ‖μ‖_TV for every signed μ and |g| ≤ 1.",
    assumes="|g| ≤ 1.",
    control="a gate with values between 1.5 and 3, on the finest partition",
)
def partition_sums(case: Case) -> float:
    layer, X = case.layer(), case.normal(12, 6)
    points = atoms(heads(layer, X[0], X)[0])
    mu = case.normal(12)
    g = case.uniform(12, low=1.5, high=3) if case.broken else case.uniform(12, low=-1, high=1)
    worst = 0.0
    for parts in (2, 4, 12):
        block = torch.arange(12) % parts
        sums = torch.zeros(parts, dtype=torch.float64).index_add(0, block, g * mu)
        worst = max(worst, excess(sums.abs().sum(), total_variation(points, mu)))
    return worst


@statement(
    "E.7",
    "Remark",
    "Total variation counts slots",
    says="The pool's total variation is t and the activated measure's is the number of slots with positive score, "
    "multiplicities included.",
    assumes="every slot has mass +1.",
    control="masses of random sign on repeated tokens, which cancel",
)
def counts_slots(case: Case) -> float:
    layer = case.layer(use_op1=False, use_op2=False)
    X = case.normal(4, 6)[torch.arange(12) % 4]
    x = case.normal(6)
    head = heads(layer, x, X)[0]
    mass = torch.tensor([1.0, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1] if case.broken else [1.0] * 12, dtype=torch.float64)
    pool = total_variation(atoms(head), mass)
    active = total_variation(atoms(head), mass * head.activated)
    return abs(pool - 12) + abs(active - float(head.activated.sum()))


@statement(
    "E.8",
    "Proposition",
    "A bound on the output by the size of the pool",
    says="‖ρ(h) o‖ ≤ ‖Ψ‖ times the number of active slots ≤ ‖Ψ‖ t, where ‖Ψ‖ is the supremum over queries and atoms.",
    assumes="query and context inside the bounds that define the supremum.",
    control="a query and a context a million times outside them",
)
def a_priori(case: Case) -> float:
    layer, t = case.layer(n_head=1), case.integer(4, 12)
    far = 1e6 if case.broken else 1.0
    x, X = case.normal(6), case.normal(t, 6)
    x, X = far * B_x * x / x.norm(), far * B_X * X / X.norm()
    head = heads(layer, x, X)[0]
    if not head.activated.any():
        x = -x
        head = heads(layer, x, X)[0]
    found = (read(layer, x[None], X)[0] * head.rho).norm()
    bound = psi_bound(layer)
    return max(excess(found, bound * head.activated.sum()), excess(found, bound * t))
