"""Appendix D, first half: bounded readouts over measures (D.1 to D.7)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, product

import torch
from torch import Tensor

from hypermlp.mixers.hyper import HyperGLU, SequenceMixing
from hypermlp.theory.registry import ASSUMPTION, Instance, listed, relative, statement
from hypermlp.theory.search import climb, on_sphere
from hypermlp.theory.setting import (
    Head,
    activations,
    atoms,
    element,
    heads,
    hidden,
    make_static,
    measured_atoms,
    measured_mixing,
    mixing_matrix,
    own_context,
    read,
)

B_X, B_x = 3.0, 30.0  # bounds of ‖X‖ and ‖x‖
OUTSIDE = 1.1  # how far a control leaves them
T = 6  # tokens of a context

listed(
    "D.1",
    "Assumption",
    "Bounded queries, contexts and mixings",
    says="‖x‖ ≤ B_x, ‖X‖ ≤ B_X, ‖R(x)‖ ≤ C_R and ‖L(x)‖ ≤ C_L for all x. Sigmoid gates give the last two: the controls of "
    "D.2 and D.3 take them away.",
    unchecked=ASSUMPTION,
)


def largest_norm(left: Tensor, right: Tensor, plus: Tensor | None = None) -> float:
    """max ‖plus + left Diag(s) right‖ over all s between 0 and 1: a convex function of s is largest at a corner."""
    corners = torch.tensor(list(product((0.0, 1.0), repeat=left.shape[1])), dtype=left.dtype)  # 2^r r
    made = torch.einsum("ar,nr,rb->nab", left, corners, right)
    return float(torch.linalg.matrix_norm(made if plus is None else made + plus, 2).max())


def operator_bound(layer: HyperGLU, which: int, t: int = T) -> float:
    """C_R: the least bound of ‖R(x)‖ over all controls between 0 and 1, from the parameters of a one-head layer."""
    op = layer.op1 if which == 1 else layer.op2
    assert op is not None
    assert op.diag is not None
    return largest_norm(op.A[0, -t:], op.B[0, -t:].T, torch.diag(1 + op.diag[0, -t:]))


def feature_bounds(layer: HyperGLU) -> tuple[float, float]:
    """C_L1 and C_L2: the least bounds over all gates between 0 and 1, for a one-head layer."""
    return largest_norm(layer.q.weight.T, layer.k.weight), largest_norm(layer.v.weight.T, layer.o.weight.T)


def radii(layer: HyperGLU) -> tuple[float, float]:
    """How far the atoms u and v of the compact set Ω_t may lie from the origin."""
    return operator_bound(layer, 1) * B_X, operator_bound(layer, 2) * B_X


def psi(head: Head, atom: Tensor) -> Tensor:
    """Ψ(x; (u, v)) = α(x; u)₊ β(x; v) for atoms (n 2d), by the paper's equations."""
    u, v = atom.chunk(2, dim=1)
    return torch.relu(u @ (head.x @ head.L1))[:, None] * (v @ head.L2.T)


def psi_bound(layer: HyperGLU) -> float:
    """Lemma D.3's bound of ‖Ψ‖ on 𝒳 × Ω_t."""
    (C1, C2), (u, v) = feature_bounds(layer), radii(layer)
    return B_x * C1 * C2 * u * v


@dataclass(frozen=True)
class Attained:
    """Where a static layer's ‖Ψ‖ is largest, which is known exactly: singular vectors of L1 and L2."""

    x: Tensor  # d
    u: Tensor
    v: Tensor
    size: float  # sup ‖Ψ‖


def attained(layer: HyperGLU) -> Attained:
    """For a static one-head layer; ‖xL1‖‖u‖‖vL2ᵀ‖ is largest where all three point along singular vectors."""
    head = heads(layer, torch.zeros(layer.width, dtype=torch.float64), torch.eye(layer.width, dtype=torch.float64))[0]
    U1, S1, V1 = torch.linalg.svd(head.L1)
    U2, S2, _ = torch.linalg.svd(head.L2.T)
    ru, rv = radii(layer)
    return Attained(B_x * U1[:, 0], ru * V1[0], rv * U2[:, 0], float(B_x * S1[0] * ru * S2[0] * rv))


def draw_atoms(case: Instance, layer: HyperGLU, n: int) -> tuple[Tensor, Tensor]:
    """u and v (n d) at the edge of Ω_t."""
    ru, rv = radii(layer)
    return on_sphere(case.normal(n, 6), ru), on_sphere(case.normal(n, 6), rv)


@statement(
    "D.2",
    "Lemma",
    "Atoms stay in a compact set",
    says="‖u‖ ≤ C_R1 B_X and ‖v‖ ≤ C_R2 B_X for every slot, with C_R the largest ‖D + A Diag(s) Bᵀ‖ over all s between 0 and "
    "1; the query and the context are climbed to.",
    assumes="‖X‖ ≤ B_X, and ‖R(x)‖ ≤ C_R for all x, which sigmoid controls give.",
    control="controls without an activation (gate_act=“none”), unbounded in x",
    instances=5,
)
def compact_atoms(case: Instance) -> float:
    layer = case.layer(n_head=1, gate_act="none" if case.broken else "sigmoid")
    worst = 0.0
    for which, op in ((1, layer.op1), (2, layer.op2)):

        def farthest(x: Tensor, op: SequenceMixing | None = op) -> Tensor:
            """The largest column of R(x): the whole context in the one row that this column takes."""
            return mixing_matrix(layer, op, x, 0, T).norm(dim=0).max()

        x = climb(farthest, case.normal(6), lambda y: on_sphere(y, B_x))
        R = measured_mixing(layer, which, x, T)
        column = R[:, int(R.norm(dim=0).argmax())]
        X = B_X * column[:, None] / column.norm() * on_sphere(case.normal(6), 1.0)  # of rank one, aligned with the column
        both = measured_atoms(layer, x, X).split(6, dim=1)
        worst = max(worst, case.bound(both[which - 1].norm(dim=1).max(), operator_bound(layer, which) * B_X))
    return worst


@statement(
    "D.3",
    "Lemma",
    "The dictionary is bounded",
    says="‖Ψ(x; (u, v))‖ ≤ B_x C_L1 C_L2 (C_R1 B_X)(C_R2 B_X) for all queries and all atoms of the compact set, climbed to; "
    "with gates that do not see the query the bound is reached.",
    assumes="bounded x, L and atoms.",
    control="gates without an activation (gate_act=“none”), unbounded in x",
    tolerance=1e-8,
    instances=5,
)
def bounded_dictionary(case: Instance) -> float:
    layer = case.layer(n_head=1, gate_act="none" if case.broken else "sigmoid")
    ru, rv = radii(layer)

    def best_atom(x: Tensor) -> tuple[Tensor, Tensor]:
        head = heads(layer, x, torch.eye(6, dtype=torch.float64))[0]
        return on_sphere(x @ head.L1, ru), rv * torch.linalg.svd(head.L2.T).U[:, 0]

    def size(x: Tensor) -> Tensor:
        head = heads(layer, x, torch.eye(6, dtype=torch.float64))[0]
        return (x @ head.L1).norm() * torch.linalg.matrix_norm(head.L2, 2) * ru * rv

    x = max((climb(size, case.normal(6), lambda y: on_sphere(y, B_x)) for _ in range(3)), key=lambda y: float(size(y)))
    u, v = best_atom(x)
    error = case.bound(element(layer, x[None], u[None], v[None]).norm(), psi_bound(layer))
    still = make_static(case.layer(n_head=1))
    at = attained(still)
    reached = element(still, at.x[None], at.u[None], at.v[None]).norm()
    return error + abs(float(reached) / at.size - 1)


listed(
    "D.3 (ii)",
    "Lemma",
    "The dictionary is Borel measurable",
    says="Ψ is a measurable function of x and the atom, since L is and products are continuous.",
)


@statement(
    "D.4",
    "Theorem",
    "A bounded linear readout of the pool",
    says="‖∫Ψ dμ‖ ≤ sup‖Ψ‖ ‖μ‖_TV for signed measures on the compact set, with equality for a point mass where ‖Ψ‖ is "
    "largest, and the layer's output is the readout of its pool over ρ(h).",
    assumes="the atoms of μ lie in the compact set of Lemma D.2.",
    control="the point mass a tenth outside that set",
    trivial="that the readout is linear in μ: it is a sum.",
)
def bounded_readout(case: Instance) -> float:
    layer = make_static(case.layer(n_head=1))
    X = on_sphere(case.normal(T, 6).flatten(), B_X).view(T, 6)
    head = heads(layer, X[0], X)[0]
    out = relative(own_context(layer, X), psi(head, atoms(head)).sum(0) / head.rho)
    at = attained(layer)
    u, v = draw_atoms(case, layer, 30)
    u, v = (torch.cat([a, far * b[None]]) for a, b, far in ((u, at.u, OUTSIDE if case.broken else 1.0), (v, at.v, 1.0)))
    table = element(layer, at.x.expand(31, -1), u, v)
    mass = torch.eye(31, dtype=torch.float64)[-1]
    worst = max(case.bound((w @ table).norm(), at.size * w.abs().sum()) for w in (case.normal(31), case.normal(31), mass))
    return out + worst


@statement(
    "D.5",
    "Remark",
    "Bounds carry over to the normalised output",
    says="‖o‖ ≤ ‖ρ(h) o‖/√ε ≤ sup‖Ψ‖ t/√ε on the real layer; the first is reached as the query becomes small.",
    assumes="ρ(z) = √(‖z‖² + ε) ≥ √ε.",
    control="the normalisation without its ε",
)
def normalised_bound(case: Instance) -> float:
    eps, layer = 0.01, make_static(case.layer(n_head=1, norm_eps=0.01))
    X = on_sphere(case.normal(T, 6).flatten(), B_X).view(T, 6)
    x = on_sphere(case.normal(6), 1.0)
    if not bool((hidden(layer, x[None], X) > 0).any()):
        x = -x
    worst = 0.0
    for size in (B_x, 1.0, 1e-4):
        query = (size * x)[None]
        head = heads(layer, query[0], X)[0]
        o, raw = read(layer, query, X, eps=1e-30 if case.broken else eps), psi(head, atoms(head)).sum(0)
        worst = max(
            worst, case.bound(o.norm(), raw.norm() / eps**0.5), case.bound(o.norm(), attained(layer).size * T / eps**0.5)
        )
    return worst


def total_variation(points: Tensor, weights: Tensor) -> float:
    """Of a signed atomic measure; weights of one place add up before their sizes do."""
    _, place = torch.unique(points, dim=0, return_inverse=True)
    return float(torch.zeros(len(points), dtype=weights.dtype).index_add(0, place, weights).abs().sum())


def measured_gate(layer: HyperGLU, x: Tensor, X: Tensor) -> Tensor:
    """g (t) of the first head: by which factor the operator, unnormalised, lets each score through."""
    h = torch.stack([head.alpha for head in heads(layer, x, X)])[0]
    return activations(layer, x[None], X, norm="none")[0, 0] / h


@statement(
    "D.6",
    "Theorem",
    "Gating never increases the total variation",
    says="‖gμ‖_TV ≤ ‖μ‖_TV for signed μ on the pool's atoms, with g the factor by which the operator lets scores through.",
    assumes="|g| ≤ 1: the operator's factors are 0 and 1.",
    control="a gate with values between 1.5 and 3",
    trivial="that |g| ≤ 1 contracts; what is tested is that the operator's own g, score by score, is such a factor.",
)
def contraction(case: Instance) -> float:
    layer, X = case.layer(), case.normal(case.integer(3, 12), 6)
    points = measured_atoms(layer, X[0], X).repeat(2, 1)  # every place twice, so that weights can cancel
    g = case.uniform(len(X), low=1.5, high=3) if case.broken else measured_gate(layer, X[0], X)
    worst = 0.0 if case.broken else float((g * (1 - g)).abs().max())  # 0 or 1
    ones, random = torch.ones(len(points), dtype=torch.float64), case.normal(len(points))
    for weights in (ones, random, random * (0.01 + g.abs().repeat(2))):  # the last has most of its mass where the gate is open
        worst = max(worst, case.bound(total_variation(points, g.repeat(2) * weights), total_variation(points, weights)))
    return worst


def variation_norm(table: Tensor, f: Tensor) -> float:
    """min ‖w‖₁ subject to table·w = f, exactly: an optimum exists on linearly independent columns, so all of them are tried."""
    rank = int(torch.linalg.matrix_rank(table))
    best = float("inf")
    for chosen in combinations(range(table.shape[1]), rank):
        part = table[:, chosen]
        if int(torch.linalg.matrix_rank(part)) < rank:
            continue
        w = torch.linalg.lstsq(part, f[:, None]).solution[:, 0]
        if float((part @ w - f).norm()) < 1e-9 * float(f.norm()):
            best = min(best, float(w.abs().sum()))
    return best


@statement(
    "D.7",
    "Theorem",
    "The variation norm is a norm that bounds the function",
    says="The least total variation that represents f is homogeneous, obeys the triangle inequality, and ‖f‖_∞ ≤ sup‖Ψ‖ "
    "times it, with equality for the atom at which ‖Ψ‖ is largest.",
    assumes="the atoms lie in the compact set of Lemma D.2.",
    control="an atom a tenth outside that set",
    tolerance=1e-7,
    instances=4,
)
def variation(case: Instance) -> float:
    layer = make_static(case.layer(n_head=1, vo_rank=2))
    at = attained(layer)
    u, v = draw_atoms(case, layer, 5)
    u, v = torch.cat([u, (OUTSIDE if case.broken else 1.0) * at.u[None]]), torch.cat([v, at.v[None]])
    queries = torch.stack([at.x, on_sphere(case.normal(6), B_x)])
    values = [element(layer, x.expand(6, -1), u, v) for x in queries]  # per query: atoms d
    table = torch.cat([part.T for part in values]) / at.size  # 2d 6
    f, g, alone = table @ case.normal(6), table @ case.normal(6), table[:, 5]
    nf, ng = variation_norm(table, f), variation_norm(table, g)
    triangle = case.bound(variation_norm(table, f + g), nf + ng)
    homogeneous = abs(variation_norm(table, -2.5 * f) / (2.5 * nf) - 1)
    sizes = [h.unflatten(0, (2, 6)).norm(dim=1).max() for h in (f, g, alone)]
    bounds = [case.bound(a, variation_norm(table, h)) for a, h in zip(sizes, (f, g, alone), strict=True)]
    reached = 0.0 if case.broken else abs(float(sizes[2]) - 1)  # sup ‖Ψ‖ is the unit of the table
    return triangle + homogeneous + max(bounds) + reached


listed(
    "D.7 (ii)",
    "Theorem",
    "The reachable functions are a Banach space",
    says="The space is complete, being the quotient of the Banach space of measures by the kernel of the readout.",
)
