"""Appendix C, second half: how static and dynamic mixing divide the space of queries (C.10 to C.16)."""

from __future__ import annotations

import torch
from torch import Tensor

from hypermlp.mixers.hyper import HyperGLU
from hypermlp.theory.geometry import Field, find_roots, partition, random_plane, straightness
from hypermlp.theory.registry import Instance, printed, relative, statement
from hypermlp.theory.setting import activations, heads, hidden, make_static, measured_mixing, mixing_matrix, read

GRID = 16  # cells along a side: enough to find boundaries, each of which is then exact


def normals(layer: HyperGLU, X: Tensor) -> Tensor:
    """Columns b of B(X) = L1 Xᵀ R1 (d t) for the first head of a static layer."""
    head = heads(layer, torch.zeros(X.shape[1], dtype=X.dtype), X)[0]
    return head.L1 @ X.T @ head.R1


def direction_gap(found: Tensor, expected: Tensor) -> float:
    """Largest sine between corresponding columns: 0 where they span the same line."""
    a, b = (m / m.norm(dim=0).clamp(min=1e-300) for m in (found, expected))
    return float((1 - (a * b).sum(0).square()).clamp(min=0).sqrt().max())


def plane_field(layer: HyperGLU, case: Instance, X: Tensor) -> tuple[Field, Field]:
    """Scores of the first head over a random plane, by the real operator; and the points of the plane."""
    plane = random_plane(X.shape[1], case.generator)
    return (lambda places: hidden(layer, plane.points(places), X)[:, 0]), plane.points


def bends(field: Field, slots: int) -> list[float]:
    found = partition(field, steps=GRID)
    return [straightness(found.boundary(i)) for i in range(slots)]


@statement(
    "C.10",
    "Theorem",
    "Static mixing: a polyhedral partition",
    says="For a context X that does not contain the query, and unnormalised ReLU, the boundaries are the hyperplanes "
    "x·b_j = 0 with b_j the columns of L1XᵀR1, and on each cell the output is linear, o = x A_s.",
    assumes="L and R do not depend on x.",
    control="controls that see x",
    tolerance=1e-8,
    instances=6,
)
def polyhedral(case: Instance) -> float:
    layer, X = case.layer(n_head=1, gate_act="none"), case.normal(case.integer(2, 6), 6)
    if not case.broken:
        make_static(layer)
    head = heads(layer, X[0], X)[0]
    B = head.L1 @ X.T @ head.R1
    x = case.normal(5, 6)
    mask = torch.diag_embed((x @ B > 0).double())
    linear = torch.einsum("nd,dt,nts,se->ne", x, B, mask, head.beta)
    field, _ = plane_field(layer, case, X)
    return relative(read(layer, x, X, norm="none"), linear) + max(bends(field, len(X)))


@printed(
    "C.10",
    "In an autoregressive head the query is a row of its own context (footnote 5: vary “only the most recent row”). "
    "Then slot 1 scores x L1 xᵀ, and with mixing every slot has such a term: the boundaries are quadrics, not "
    "hyperplanes, although L and R are constant. The sentence above therefore keeps the query out of X. This also "
    "touches 2.2, C.12, H.7, I.1 and I.2.",
)
def own_token(case: Instance) -> float:
    layer = make_static(case.layer(n_head=1, gate_act="none"))
    old = case.normal(4, 6)
    plane = random_plane(6, case.generator)

    def field(places: Tensor) -> Tensor:
        x = plane.points(places)
        return hidden(layer, x, torch.cat([x[:, None], old.expand(len(x), -1, -1)], dim=1))[:, 0]

    return max(bends(field, 5))


@printed(
    "C.10",
    "The head of (36) has σ = ReLU ∘ L2Norm, and with it the output is not piecewise linear; the proof replaces σ by "
    "ReLU. Remark C.11 says so.",
)
def normalised_is_not_linear(case: Instance) -> float:
    layer, X = make_static(case.layer(n_head=1)), case.normal(4, 6)
    x = case.normal(8, 6)
    return relative(read(layer, 2 * x, X), 2 * read(layer, x, X))


@statement(
    "C.11",
    "Remark",
    "L2 normalisation keeps the cells and loses linearity",
    says="With normalisation the boundaries stay where they are, the output is x A_s/ρ on each cell, and it is not "
    "linear there.",
    assumes="static L and R, query outside X; ρ is not constant.",
    control="no normalisation: ρ = 1",
    tolerance=1e-8,
    instances=6,
)
def normalised_cells(case: Instance) -> float:
    layer, X, x = make_static(case.layer(n_head=1)), case.normal(case.integer(2, 8), 6), case.normal(6, 6)
    norm = "none" if case.broken else "l2"
    head = heads(layer, X[0], X)[0]
    h = x @ normals(layer, X)
    rho = (h.square().sum(1, keepdim=True) + layer.config.norm_eps).sqrt()
    expected = torch.relu(h) @ head.beta
    found = read(layer, x, X, norm=norm)
    far = relative(found, expected if case.broken else expected / rho)
    bent = relative(read(layer, 2 * x, X, norm=norm), 2 * found)  # same cell, twice the point
    return far + float(bent < 1e-3)


def set_routing(layer: HyperGLU, R: Tensor) -> None:
    """Give a one-head layer the static operator R1 = D + A Bᵀ (t t) by its own parameters; the rank must suffice."""
    op, t = layer.op1, len(R)
    assert op is not None
    assert op.diag is not None
    low = R - torch.diag(torch.diag(R))
    U, S, Vh = torch.linalg.svd(low)
    rank = op.A.shape[-1]
    make_static(layer)
    with torch.no_grad():
        op.A.zero_()
        op.B.zero_()
        op.diag.zero_()
        op.control.bias.zero_()  # a sigmoid of 0 is one half
        op.diag[0, -t:] = (torch.diag(R) - 1).flip(0)
        op.A[0, -t:, : min(rank, t)] = (2 * U[:, :rank] * S[:rank]).flip(0)
        op.B[0, -t:, : min(rank, t)] = Vh[:rank].T.flip(0)


@statement(
    "C.12",
    "Corollary",
    "A diagonal R1 keeps the hyperplanes, a dense one mixes their normals",
    says="A diagonal R1 without zeros leaves every hyperplane; in general b_j = Σ_i R_ij b⁰_i, and for almost every R1 "
    "with entries off the diagonal the set of hyperplanes changes.",
    assumes="static L and R; no zero on the diagonal; R1 in general position.",
    control="a zero on the diagonal: that slot has no hyperplane any more",
    tolerance=1e-7,
)
def diagonal_or_dense(case: Instance) -> float:
    t = case.integer(2, 5)
    layer, X = case.layer(n_head=1, op1_rank=6), case.normal(t, 6)
    diagonal = case.uniform(t, low=0.5, high=2)
    if case.broken:
        diagonal[case.integer(0, t - 1)] = 0
    set_routing(layer, torch.diag(diagonal))
    base = heads(layer, X[0], X)[0].L1 @ X.T
    kept = direction_gap(scores_to_normals(layer, X), base)
    R = case.normal(t, t)
    set_routing(layer, R)
    mixed = scores_to_normals(layer, X)
    return kept + relative(mixed, base @ R) + float(arrangement_gap(mixed, base) < 1e-3)


def scores_to_normals(layer: HyperGLU, X: Tensor) -> Tensor:
    """B(X) (d t) of a static layer, read off the real operator: its scores at the unit vectors."""
    return hidden(layer, torch.eye(X.shape[1], dtype=X.dtype), X)[:, 0]


def arrangement_gap(found: Tensor, base: Tensor) -> float:
    """How far the hyperplane that fits worst is from all of the base's: 0 where the sets are equal."""
    a, b = (m / m.norm(dim=0) for m in (found, base))
    return float((1 - (a.T @ b).square().max(1).values.clamp(max=1)).sqrt().max())


@printed(
    "C.12",
    "“Any off-diagonal mixing … changing the hyperplane arrangement” is false: R1 = I − (e₁ − e₂)(e₁ − e₂)ᵀ, which "
    "rank one reaches, swaps two slots, is off-diagonal and leaves the set of hyperplanes as it was. H.7 says the same.",
)
def swap(case: Instance) -> float:
    layer, X = case.layer(n_head=1, op1_rank=2), case.normal(4, 6)
    R = torch.eye(4, dtype=torch.float64)[[1, 0, 2, 3]]
    set_routing(layer, R)
    base = heads(layer, X[0], X)[0].L1 @ X.T
    mixed = scores_to_normals(layer, X)
    assert relative(mixed, base @ R) < 1e-9
    return float(arrangement_gap(mixed, base) < 1e-6)  # the printed claim wants a change


def crossing_times(field: Field, begin: Tensor, end: Tensor, steps: int = 400) -> Tensor:
    """Places in (0, 1) along a segment where any score crosses zero, sorted."""
    at = torch.linspace(0, 1, steps + 1, dtype=torch.float64)
    line = begin + at[:, None] * (end - begin)
    h = field(line)
    where = ((h[1:] > 0) != (h[:-1] > 0)).nonzero()
    found = find_roots(field, line[where[:, 0]], line[where[:, 0] + 1], where[:, 1])
    return ((found - begin) @ (end - begin) / (end - begin).square().sum()).sort().values


@statement(
    "C.13",
    "Theorem",
    "Dynamic mixing: the pullback of the orthants",
    says="Between crossings of a score with zero the activated set does not change and the output is smooth; at a "
    "crossing with a nonzero gradient the boundary is a smooth surface with that normal.",
    assumes="h is continuous in x (for the second part differentiable).",
    control="controls that jump, s = 1{x·w > c}, and with them a score from one sign to the other",
    tolerance=1e-3,
    instances=6,
    blind="a wrong operator that is continuous has cells of its own; C.14 says what the scores are.",
)
def pullback(case: Instance) -> float:
    layer, X = case.layer(n_head=1), case.normal(4, 6)
    begin, end = case.normal(6, scale=2), case.normal(6, scale=2)

    def field(x: Tensor) -> Tensor:
        return hidden(layer, x, X)[:, 0]

    while case.broken and not leaps(layer, field, begin, end):
        begin, end = case.normal(6, scale=2), case.normal(6, scale=2)
        case.randomise(layer, 1.0)
    times = crossing_times(field, begin, end)
    change = kink = 0.0
    for low, high in zip([0.0, *times.tolist()], [*times.tolist(), 1.0], strict=True):
        inside = low + (high - low) * torch.linspace(0.02, 0.98, 25, dtype=torch.float64)
        h = field(begin + inside[:, None] * (end - begin))
        change = max(change, float(((h[1:] > 0) != (h[:-1] > 0)).sum()))
        middle, step = begin + (low + high) / 2 * (end - begin), 1e-6 * (end - begin)
        if high - low > 1e-3:
            out = read(layer, torch.stack([middle - step, middle, middle + step]), X)
            kink = max(kink, float((out[0] + out[2] - 2 * out[1]).norm()) / 1e-6)
    smooth = 0.0 if case.broken else tangent_error(hidden_autograd(layer, X), begin, end, times)
    return change + kink + largest_leap(field, begin, end, times) + smooth


def largest_leap(field: Field, begin: Tensor, end: Tensor, times: Tensor) -> float:
    """The largest size of a score beside a place where its sign changes: a continuous score is zero there."""
    before, after = (field(begin + (times[:, None] + step) * (end - begin)) for step in (-1e-8, 1e-8))
    flips = (before > 0) != (after > 0)
    return float(torch.where(flips, torch.maximum(before.abs(), after.abs()), 0).max()) if len(times) else 0.0


def leaps(layer: HyperGLU, field: Field, begin: Tensor, end: Tensor) -> bool:
    """Make the layer's controls steps at the middle of a segment; whether a score leaps over zero there, and far."""
    assert layer.op1 is not None
    steep = 1e12 * (end - begin)
    layer.op1.control.weight.copy_(steep.expand_as(layer.op1.control.weight))
    layer.op1.control.bias.copy_((-steep @ (begin + end) / 2).expand_as(layer.op1.control.bias))
    before, after = field(torch.stack([begin + at * (end - begin) for at in (0.4999, 0.5001)]))
    return bool((((before > 0) != (after > 0)) & (torch.minimum(before.abs(), after.abs()) > 0.05)).any())


@printed(
    "C.13",
    "That o is C^k on every component needs a ρ that is C^k, which Assumption B.1 does not ask for: with ρ = 1 + "
    "max|h| the output has kinks inside a cell, where two scores are equally large. The layer's own ρ is smooth.",
)
def rough_normalisation(case: Instance) -> float:
    layer, X = case.layer(n_head=1), case.normal(2, 6)

    def scores(x: Tensor) -> Tensor:
        return hidden(layer, x, X)[:, 0]

    def tie(x: Tensor) -> Tensor:
        return scores(x)[:, :1].square() - scores(x)[:, 1:].square()

    while True:
        begin, end = case.normal(6, scale=2), case.normal(6, scale=2)
        step = 1e-6 * (end - begin)
        for s in crossing_times(tie, begin, end, steps=50).tolist():
            x = begin + s * (end - begin)
            if (scores(x[None]) > 0).any():  # a tie of which the output sees something
                h = scores(torch.stack([x - step, x, x + step]))
                weights = torch.relu(h) / (1 + h.abs().max(1, keepdim=True).values)
                return float((weights[0] + weights[2] - 2 * weights[1]).abs().max()) / 1e-6


def hidden_autograd(layer: HyperGLU, X: Tensor) -> Field:
    """Scores of the first head by the paper's equations, differentiable in x (n d)."""
    return lambda x: torch.stack([heads(layer, q, X)[0].alpha for q in x])


def tangent_error(field: Field, begin: Tensor, end: Tensor, times: Tensor) -> float:
    """At the first crossing: a small step δ along the tangent plane changes the score by O(δ²) only."""
    if not len(times):
        return 0.0
    x = (begin + times[0] * (end - begin)).requires_grad_()
    h = field(x[None])[0]
    slot = int(h.abs().argmin())
    (slope,) = torch.autograd.grad(h[slot], x)
    along = end - begin + 0.37 * begin.flip(0)
    along = along - (along @ slope) / slope.square().sum() * slope
    step = 1e-5 * along / along.norm()
    return float((field((x.detach() + step)[None])[0, slot] - h[slot].detach()).abs()) / 1e-5


@statement(
    "C.14",
    "Proposition",
    "What bends the boundaries",
    says="dh = dx L1 Xᵀ R1 + x dL1 Xᵀ R1 + x L1 Xᵀ dR1: a fixed-weight part, and one part each from gates and from "
    "mixing that see the token.",
    assumes="L1 and R1 are differentiable, X is fixed.",
    control="the last part left out, as if R1 were constant",
    tolerance=1e-8,
)
def deformation(case: Instance) -> float:
    layer, X = case.layer(n_head=1), case.normal(case.integer(2, 8), 6)
    x, dx = case.normal(6), case.normal(6)
    K = layer.q.out_features

    def L1(x: Tensor) -> Tensor:
        assert layer.gate_qk is not None
        m = torch.sigmoid(x @ layer.gate_qk.weight.T + layer.gate_qk.bias)
        return layer.q.weight[:K].T @ torch.diag(m) @ layer.k.weight[:K]

    def R1(x: Tensor) -> Tensor:
        return mixing_matrix(layer, layer.op1, x, 0, len(X))

    (L, dL), (R, dR) = (torch.autograd.functional.jvp(f, x, dx) for f in (L1, R1))
    parts = dx @ L @ X.T @ R + x @ dL @ X.T @ R + (0.0 if case.broken else 1.0) * (x @ L @ X.T @ dR)
    step = 1e-6
    up, down = hidden(layer, torch.stack([x + step * dx, x - step * dx]), X)[:, 0]
    return relative(parts, (up - down) / (2 * step))  # the difference quotient of the real operator


@statement(
    "C.15",
    "Remark",
    "The bending has low rank",
    says="R1(x) − R1(x′), read off the operator, has rank at most r_s for tokens near and far.",
    assumes="only the controls S depend on x.",
    control="a diagonal D that depends on x too",
)
def low_rank_change(case: Instance) -> float:
    layer, x, dx = case.layer(block_size=10, op1_rank=3), case.normal(6), case.normal(6)

    def R(x: Tensor) -> Tensor:
        found = measured_mixing(layer, 1, x, 10)
        return found + torch.diag(torch.sin(x.sum() * torch.arange(1, 11))) if case.broken else found

    values = [torch.linalg.svdvals(R(x) - R(x + step * dx)) for step in (1.0, 1e-3)]
    formula = mixing_matrix(layer, layer.op1, x, 0, 10)
    return max(float(v[3] / v[0]) for v in values) + relative(R(x), formula if not case.broken else R(x))


@printed(
    "C.15",
    "“Without introducing arbitrary high-curvature boundaries” does not follow from the low rank: in example 1, with "
    "r_s = 1, the boundary x₂ = −φ(c x₁)x₁ has curvature (c/2)/(5/4)^{3/2} at the origin, as large as c. A bound on "
    "W_S is needed. H.9 repeats it.",
)
def curvature(case: Instance) -> float:
    c = float(case.uniform(1, low=1e3, high=1e4))
    at = torch.tensor([-1e-6, 0.0, 1e-6], dtype=torch.float64)
    down, middle, up = (-torch.sigmoid(c * at) * at).tolist()
    second, first = (up + down - 2 * middle) / 1e-12, (up - down) / 2e-6
    return float(abs(second) / (1 + first**2) ** 1.5 > 100)  # the printed claim wants a bound


@statement(
    "C.16",
    "Remark",
    "L2 normalisation leaves the partition",
    says="The activated set at every point of a plane is the same with and without normalisation.",
    assumes="ρ is one positive number per row.",
    control="the median subtracted as well",
    instances=6,
)
def same_partition(case: Instance) -> float:
    layer, X = case.layer(attn_norm="l2"), case.normal(case.integer(3, 9), 6)
    x = random_plane(6, case.generator).points(case.uniform(400, 2, low=-2, high=2))
    h = hidden(layer, x, X)
    rho = (h.square().sum(-1, keepdim=True) + 1e-12).sqrt()
    weights = torch.relu((h - h.median(-1, keepdim=True).values) / rho) if case.broken else activations(layer, x, X)
    return float(((weights > 0) != (h > 0)).sum())
