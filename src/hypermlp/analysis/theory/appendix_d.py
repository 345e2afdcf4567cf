"""Appendix D: bounded readouts over measures, and the tangent kernel."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor

from hypermlp.analysis.theory.registry import Case, excess, proof_only, relative, statement
from hypermlp.analysis.theory.setting import Head, atoms, heads, hidden, own_context, read
from hypermlp.mixers.hyper import HyperGLU, SequenceMixing

B_X, B_x = 3.0, 1000.0  # bounds of ‖X‖ and ‖x‖


def operator_bound(op: SequenceMixing | None, head: int) -> float:
    """C_R: a bound of ‖R(x)‖ over all x, from parameters alone; controls lie between 0 and 1."""
    assert op is not None
    assert op.diag is not None
    A, B = (float(torch.linalg.matrix_norm(m[head], 2)) for m in (op.A, op.B))
    return float((1 + op.diag[head]).abs().max()) + A * B


def feature_bounds(layer: HyperGLU) -> tuple[float, float]:
    """C_L1 and C_L2 of a one-head layer: gates lie between 0 and 1."""
    q, k, v, o = (float(torch.linalg.matrix_norm(m.weight, 2)) for m in (layer.q, layer.k, layer.v, layer.o))
    return q * k, v * o


def bounded(case: Case, *, t: int = 6) -> tuple[HyperGLU, Tensor, Tensor]:
    """A one-head layer, a query and a context inside Assumption D.1; broken: controls and gates without bounds."""
    layer = case.layer(n_head=1, gate_act="none" if case.broken else "sigmoid")
    x, X = case.normal(6), case.normal(t, 6)
    return layer, B_x * x / x.norm(), B_X * X / X.norm()


def psi(head: Head, atom: Tensor) -> Tensor:
    """Ψ(x; (u, v)) = α(x; u)₊ β(x; v) for atoms (n 2d)."""
    u, v = atom.chunk(2, dim=1)
    return torch.relu(u @ (head.x @ head.L1))[:, None] * (v @ head.L2.T)


def psi_bound(layer: HyperGLU) -> float:
    """Lemma D.3's bound of ‖Ψ‖ on 𝒳 × Ω_t."""
    C1, C2 = feature_bounds(layer)
    return B_x * C1 * C2 * operator_bound(layer.op1, 0) * operator_bound(layer.op2, 0) * B_X**2


def draw_atoms(case: Case, layer: HyperGLU, n: int, *, outside: bool = False) -> Tensor:
    """Atoms of Ω_t, at its edge; `outside`: a thousand times too far out."""
    u, v = case.normal(n, 6), case.normal(n, 6)
    far = 1e3 if outside else 1.0
    u = far * operator_bound(layer.op1, 0) * B_X * u / u.norm(dim=1, keepdim=True)
    v = far * operator_bound(layer.op2, 0) * B_X * v / v.norm(dim=1, keepdim=True)
    return torch.cat([u, v], dim=1)


@statement(
    "D.2",
    "Lemma",
    "Atoms stay in a compact set",
    says="‖u‖ ≤ C_R1 B_X and ‖v‖ ≤ C_R2 B_X for every slot, with C_R = max|D| + ‖A‖‖B‖ from the layer's parameters.",
    assumes="‖X‖ ≤ B_X, and ‖R(x)‖ ≤ C_R for all x, which sigmoid controls give.",
    control="controls without an activation (gate_act=“none”), unbounded in x",
)
def compact_atoms(case: Case) -> float:
    layer, x, X = bounded(case)
    head = heads(layer, x, X)[0]
    u, v = head.U.norm(dim=1).max(), head.V.norm(dim=1).max()
    return max(excess(u, operator_bound(layer.op1, 0) * B_X), excess(v, operator_bound(layer.op2, 0) * B_X))


@statement(
    "D.3",
    "Lemma",
    "The dictionary is bounded",
    says="‖Ψ(x; (u, v))‖ ≤ B_x C_L1 C_L2 (C_R1 B_X)(C_R2 B_X) for all queries and all atoms of the compact set.",
    assumes="bounded x, L and atoms.",
    control="gates without an activation (gate_act=“none”), unbounded in x",
)
def bounded_dictionary(case: Case) -> float:
    layer, x, X = bounded(case)
    found = psi(heads(layer, x, X)[0], draw_atoms(case, layer, 200)).norm(dim=1).max()
    return excess(found, psi_bound(layer))


proof_only(
    "D.3 (ii)",
    "Lemma",
    "The dictionary is Borel measurable",
    says="Ψ is a measurable function of x and the atom, since L is and products are continuous.",
)


@statement(
    "D.4",
    "Theorem",
    "A bounded linear readout of the pool",
    says="μ ↦ ∫Ψ dμ is linear and bounded by sup‖Ψ‖ ‖μ‖_TV, and the layer's output is that readout of its pool over ρ(h).",
    assumes="the atoms of μ lie in the compact set of Lemma D.2.",
    control="atoms outside that set",
)
def bounded_readout(case: Case) -> float:
    layer = case.layer(n_head=1)
    X = B_X * (raw := case.normal(6, 6)) / raw.norm()
    head = heads(layer, X[0], X)[0]
    out = relative(own_context(layer, X), psi(head, atoms(head)).sum(0) / head.rho)
    x = case.normal(6)
    far = heads(layer, B_x * x / x.norm(), X)[0]
    points = draw_atoms(case, layer, 30, outside=case.broken)
    mu, nu = case.normal(30), case.normal(30)
    table = psi(far, points)
    linear = relative((2 * mu - 3 * nu) @ table, 2 * (mu @ table) - 3 * (nu @ table))
    one = torch.eye(30, dtype=torch.float64)  # single atoms reach the bound's scale
    worst = max(excess((w @ table).norm(), psi_bound(layer) * w.abs().sum()) for w in (mu, nu, *one))
    return out + linear + worst


def total_variation(points: Tensor, weights: Tensor) -> float:
    """Of a signed atomic measure; weights of one place add up before their sizes do."""
    _, place = torch.unique(points, dim=0, return_inverse=True)
    return float(torch.zeros(len(points), dtype=weights.dtype).index_add(0, place, weights).abs().sum())


@statement(
    "D.6",
    "Theorem",
    "Gating never increases the total variation",
    says="‖gμ‖_TV ≤ ‖μ‖_TV for any signed measure on the pool's atoms and any |g| ≤ 1; the activated measure is the "
    "case g = 1{α > 0}.",
    assumes="|g| ≤ 1.",
    control="a gate with values between 1.5 and 3",
)
def contraction(case: Case) -> float:
    layer, X = case.layer(), case.normal(case.integer(3, 12), 6)
    head = heads(layer, X[0], X)[0]
    points = atoms(head).repeat(2, 1)  # every place twice, so that weights can cancel
    weights = case.normal(len(points))
    t = len(X)
    g = case.uniform(t, low=1.5, high=3) if case.broken else case.uniform(t, low=-1, high=1)
    free = excess(total_variation(points, g.repeat(2) * weights), total_variation(points, weights))
    ones = torch.ones(t, dtype=torch.float64)
    gate = head.activated.double()
    return free + excess(total_variation(atoms(head), gate * ones), total_variation(atoms(head), ones))


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
    says="The least total variation that represents f is homogeneous, obeys the triangle inequality, and ‖f‖_∞ ≤ "
    "sup‖Ψ‖ times it.",
    assumes="the atoms lie in the compact set of Lemma D.2.",
    control="atoms outside that set",
    tolerance=1e-7,
    instances=4,
)
def variation(case: Case) -> float:
    layer, X = case.layer(n_head=1, vo_rank=2), case.normal(6, 6)
    points = draw_atoms(case, layer, 6, outside=case.broken)
    queries = case.normal(2, 6)
    queries = B_x * queries / queries.norm(dim=1, keepdim=True)
    values = [psi(heads(layer, x, X)[0], points) for x in queries]  # per query: atoms d
    table = torch.cat([v.T for v in values])  # 2d 6
    scale = table.abs().max()
    table = table / scale
    w1, w2 = case.normal(6), case.normal(6)
    f, g = table @ w1, table @ w2
    nf, ng = variation_norm(table, f), variation_norm(table, g)
    triangle = excess(variation_norm(table, f + g), nf + ng)
    homogeneous = abs(variation_norm(table, -2.5 * f) / (2.5 * nf) - 1)
    sizes = torch.stack([part.norm(dim=0) for part in table.split(6)])  # ‖Ψ‖ per query and atom
    alone = table[:, int(sizes.max(0).values.argmax())]  # the function of the strongest atom alone
    bound = max(
        excess(scale * h.unflatten(0, (2, 6)).norm(dim=1).max(), psi_bound(layer) * variation_norm(table, h))
        for h in (f, g, alone)
    )
    return triangle + homogeneous + bound


proof_only(
    "D.7 (ii)",
    "Theorem",
    "The reachable functions are a Banach space",
    says="The space is complete, being the quotient of the Banach space of measures by the kernel of the readout.",
)


def predictions(layer: HyperGLU, data: tuple[Tensor, Tensor]) -> Tensor:
    """All outputs for queries (n d) and their contexts (n t d), in one vector."""
    return read(layer, *data, impl="dense").flatten()


def flat_gradient(value: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    found = torch.autograd.grad(value, parameters, allow_unused=True, retain_graph=True)
    return torch.cat(
        [torch.zeros_like(p).flatten() if g is None else g.flatten() for g, p in zip(found, parameters, strict=True)]
    )


def move(parameters: Sequence[Tensor], change: Tensor, step: float) -> None:
    with torch.no_grad():
        for p, part in zip(parameters, change.split([p.numel() for p in parameters]), strict=True):
            p.add_(part.view_as(p), alpha=step)


@statement(
    "D.9",
    "Theorem",
    "Gradient flow moves predictions by the tangent kernel",
    says="Under gradient flow on the squared loss of a HyperGLU, d/dt f(z) = −Σ_i Θ(z, z_i)(f(z_i) − y_i), with Θ = J "
    "Jᵀ over all its parameters.",
    assumes="squared loss; no score is exactly zero.",
    control="a loss of fourth powers",
    tolerance=1e-6,
    instances=3,
)
def tangent_kernel(case: Case) -> float:
    layer = case.layer(attn_kind="glu", n_head=1, n_embd=4, qk_rank=4, vo_rank=4).requires_grad_()
    parameters = list(layer.parameters())
    data = (case.normal(3, 4), case.normal(3, 3, 4))
    f, y = predictions(layer, data), case.normal(12)
    J = torch.stack([flat_gradient(value, parameters) for value in f])
    loss = (f - y).pow(4).sum() / 4 if case.broken else (f - y).square().sum() / 2
    flow = -flat_gradient(loss, parameters)
    kernel = -(J @ J.T) @ (f - y).detach()
    step = 1e-6
    move(parameters, flow, step)
    up = predictions(layer, data).detach()
    move(parameters, flow, -2 * step)
    down = predictions(layer, data).detach()
    return relative((up - down) / (2 * step), kernel)


@statement(
    "D.10",
    "Corollary",
    "With a constant kernel training is linear",
    says="If only W_o is trained the kernel Θ does not move, and after time τ the predictions are y + e^{−Θτ}(f₀ − y).",
    assumes="the kernel is constant along training.",
    control="q, k and v trained as well",
    tolerance=1e-6,
    instances=2,
)
def lazy_regime(case: Case) -> float:
    layer = case.layer(n_head=1, n_embd=4, qk_rank=4, vo_rank=4, block_size=4)
    trained = [layer.o, layer.q, layer.k, layer.v] if case.broken else [layer.o]
    parameters: list[Tensor] = [m.weight.requires_grad_() for m in trained]
    data = (case.normal(2, 4), case.normal(2, 3, 4))
    y = case.normal(8)
    f = predictions(layer, data)
    J = torch.stack([flat_gradient(value, parameters) for value in f])
    values, vectors = torch.linalg.eigh((J @ J.T).detach())
    time, steps = float(1 / values[-1]), 16

    def slope() -> Tensor:
        return -flat_gradient((predictions(layer, data) - y).square().sum() / 2, parameters)

    for _ in range(steps):  # Runge and Kutta's fourth order
        k1 = slope()
        move(parameters, k1, time / steps / 2)
        k2 = slope()
        move(parameters, k2 - k1, time / steps / 2)
        k3 = slope()
        move(parameters, k3 - k2 / 2, time / steps)
        k4 = slope()
        move(parameters, (k1 + 2 * k2 - 4 * k3 + k4) / 6, time / steps)
    expected = y + vectors @ (torch.exp(-values * time) * (vectors.T @ (f.detach() - y)))
    return relative(predictions(layer, data), expected)


@statement(
    "D.11",
    "Lemma",
    "A margin keeps the activated set",
    says="If every |h_j| ≥ δ, then parameters that move no score by δ or more activate the same slots.",
    assumes="‖h(θ) − h(θ₀)‖_∞ < δ.",
    control="the same movement of parameters, carried on until a score has moved by more than δ and crossed zero",
    instances=5,
)
def margin(case: Case) -> float:
    layer, X = case.layer(n_head=1), case.normal(case.integer(2, 10), 6)
    x = case.normal(1, 6)
    before = hidden(layer, x, X)[0, 0]
    delta = float(before.abs().min())
    parameters: list[Tensor] = [*layer.q.parameters(), *layer.k.parameters()]
    direction = case.normal(sum(p.numel() for p in parameters))

    def scores(reach: float) -> Tensor:
        move(parameters, direction, reach)
        found = hidden(layer, x, X)[0, 0]
        move(parameters, direction, -reach)
        return found

    def beyond(reach: float) -> bool:
        after = scores(reach)
        return bool(((after > 0) != (before > 0)).any()) if case.broken else float((after - before).abs().max()) >= delta

    low, high = 0.0, 1e-3
    while not beyond(high):
        high *= 2
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (low, middle) if beyond(middle) else (middle, high)
    return float(((scores(high if case.broken else low) > 0) != (before > 0)).sum())
