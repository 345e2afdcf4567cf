"""Appendix H: prompts, registers, linear attention and the geometry of gating, read off the real layer."""

from __future__ import annotations

import torch
from torch import Tensor

from hypermlp.mixers.hyper import HyperGLU
from hypermlp.theory.appendix_c import extended_pair
from hypermlp.theory.appendix_c_geometry import (
    GRID,
    arrangement_gap,
    bends,
    crossing_times,
    scores_to_normals,
    set_routing,
    tangent_error,
)
from hypermlp.theory.geometry import partition, random_plane
from hypermlp.theory.registry import Instance, printed, relative, statement
from hypermlp.theory.setting import (
    Head,
    activations,
    heads,
    hidden,
    measured_atoms,
    measured_mixing,
    own_context,
    read,
)


def no_mixing(case: Instance, **changes: object) -> HyperGLU:
    """A layer with R1 = R2 = I; broken: with mixing."""
    return case.layer(use_op1=case.broken, use_op2=case.broken, **changes)


def raw(head: Head) -> Tensor:
    """ρ(h) o of one head: what the atoms give before they are normalised."""
    return head.alpha.relu() @ head.beta


def same_multiset(found: Tensor, expected: Tensor) -> float:
    """Distance between two collections of atoms, whatever their order."""
    found, expected = (m[torch.argsort(m[:, 0])] for m in (found, expected))
    return relative(found, expected)


def added_atoms(layer: HyperGLU, X: Tensor, more: Tensor) -> float:
    """Appending rows `more` to X adds exactly their atoms, and changes the output by a rescaling and by what they give."""
    long = torch.cat([X, more])
    worst, change = 0.0, torch.zeros(X.shape[1], dtype=X.dtype)
    new = heads(layer, X[0], torch.cat([X[:1], more]))  # for the atoms of `more` alone, without mixing
    for g, (a, b, own) in enumerate(zip(heads(layer, X[0], long), heads(layer, X[0], X), new, strict=True)):
        expected = torch.cat([measured_atoms(layer, X[0], X, g), more.repeat(1, 2)])
        worst = max(worst, same_multiset(measured_atoms(layer, X[0], long, g), expected))
        gained = own.alpha[1:].relu() @ own.beta[1:]
        change = change + (1 / a.rho - 1 / b.rho) * raw(b) + gained / a.rho
    return worst + relative(own_context(layer, long) - own_context(layer, X), change)


@statement(
    "H.1",
    "Proposition",
    "A longer prompt adds atoms",
    says="Without mixing, putting a document before the prompt adds one atom per row of it; the output changes by the "
    "rescaling 1/ρ_A − 1/ρ_B of what was there and by what the new active atoms give.",
    assumes="R1 = R2 = I.",
    control="sequence mixing",
)
def prompt(case: Instance) -> float:
    layer = no_mixing(case)
    return added_atoms(layer, case.normal(case.integer(2, 6), 6), case.normal(case.integer(1, 6), 6))


@printed(
    "H.1",
    "The printed prompts are D₂‖D₁ and D₁ in lag order. As two inputs of an autoregressive layer they have different "
    "newest rows, hence different queries, and the decomposition for one x is not the difference of their outputs. The "
    "sentence above puts D₂ among the older tokens.",
)
def newest_document(case: Instance) -> float:
    layer = case.layer(use_op1=False, use_op2=False)
    D1, D2 = case.normal(5, 6), case.normal(4, 6)
    # The decomposition for the query of D1, against the layer's own outputs for the two prompts as printed.
    change = torch.zeros(6, dtype=torch.float64)
    for a, b in zip(heads(layer, D1[0], torch.cat([D2, D1])), heads(layer, D1[0], D1), strict=True):
        change = change + raw(a) / a.rho - raw(b) / b.rho
    return relative(own_context(layer, torch.cat([D2, D1])) - own_context(layer, D1), change)


@statement(
    "H.2",
    "Remark",
    "What is truncated has no influence at all",
    says="In an extended layer the derivative of the output by every token beyond lag t is exactly 0, by the newer ones not.",
    assumes="the extension of Lemma C.6.",
    control="further lags that keep their shortcut",
)
def no_influence(case: Instance) -> float:
    _, long, t, T = extended_pair(case, keep_diagonal=case.broken)
    X = case.normal(T, 6).requires_grad_()
    (slope,) = torch.autograd.grad(own_context(long, X) @ case.normal(6), X)
    sizes = slope.norm(dim=1)
    return float(sizes[t:].max() / sizes.max()) + float((sizes[:t] == 0).sum())


@statement(
    "H.3",
    "Proposition",
    "Slots are mixtures of the whole context",
    says="u_i = Σ_j R1_ji X_j and v_i = Σ_j R2_ji X_j, and with low-rank factors every slot takes from every token.",
    assumes="A Diag(s) Bᵀ has no zero entry.",
    control="A = 0: a diagonal R ties each slot to one token",
)
def context_wide(case: Instance) -> float:
    t = case.integer(2, 9)
    layer, X, x = case.layer(), case.normal(t, 6), case.normal(6)
    if case.broken:
        assert layer.op1 is not None
        layer.op1.A.zero_()
    worst = 0.0
    for g, head in enumerate(heads(layer, x, X)):
        sums = torch.stack([sum((head.R1[j, i] * X[j] for j in range(t)), torch.zeros(6)) for i in range(t)])
        worst = max(worst, relative(hidden(layer, x[None], X)[0, g], sums @ (x @ head.L1)))
    # What a change of token j does to score i of the real operator: L1 applied to R1_ji.
    moved = hidden(layer, x.expand(t, -1), X + torch.eye(t, dtype=torch.float64)[:, :, None] * x)
    reach = (moved - hidden(layer, x[None], X))[:, 0].abs()  # token, slot
    return worst + float((reach < 1e-12 * reach.max()).sum())


@statement(
    "H.4",
    "Corollary",
    "More context never takes away",
    says="Every layer for t tokens has an extension to T tokens with the same outputs on every row of every sequence.",
    assumes="the extension of Lemma C.6.",
    control="further lags that keep their shortcut",
)
def monotone(case: Instance) -> float:
    short, long, _, T = extended_pair(case, keep_diagonal=case.broken)
    tokens = case.normal(1, T + 3, 6)  # both slide: the short layer over t tokens, the long one over T
    return relative(long(tokens, impl="chunked"), short(tokens, impl="chunked"))


@statement(
    "H.5",
    "Proposition",
    "Registers are atoms that are always there",
    says="k register rows appended to the context add exactly the atoms (R_i, R_i) to the pool of every row, whatever "
    "the tokens.",
    assumes="R1 = R2 = I, and t + k ≤ block_size: a layer that slides drops its registers.",
    control="sequence mixing",
)
def registers(case: Instance) -> float:
    layer, k = no_mixing(case, block_size=16), case.integer(1, 4)
    learned = case.normal(k, 6)  # in front of the sequence, hence the oldest rows
    tokens = case.normal(case.integer(3, 8), 6)
    return max(added_atoms(layer, tokens[: t + 1].flip(0), learned.flip(0)) for t in range(len(tokens)))


@statement(
    "H.6",
    "Remark",
    "Registers widen the span of the slots",
    says="With mixing the operator scores every slot as a mixture of tokens and registers, and in general position t tokens "
    "and k registers span t + k dimensions of slots, against t without the registers.",
    assumes="the registers are not combinations of the tokens; t + k ≤ d.",
    control="registers that are sums of tokens",
)
def wider_span(case: Instance) -> float:
    t, k = case.integer(2, 3), case.integer(1, 3)
    layer, X = case.layer(block_size=8), case.normal(t, 6)
    extra = case.normal(k, t) @ X if case.broken else case.normal(k, 6)

    def span(context: Tensor) -> int:
        """The dimension of all slots over many queries."""
        found = torch.cat([measured_mixing(layer, 1, x, len(context)).T @ context for x in case.normal(6, 6)])
        return int(torch.linalg.matrix_rank(found, rtol=1e-9))

    both, x = torch.cat([X, extra]), case.normal(1, 6)
    mixtures = relative(hidden(layer, x, both)[0], torch.stack([head.alpha for head in heads(layer, x[0], both)]))
    return mixtures + float(abs(span(X) - t) + abs(span(both) - (t + k)))


@statement(
    "H.7",
    "Proposition",
    "Static mixing mixes the normals",
    says="b_j = Σ_i R1_ij b⁰_i, and every boundary found on the real operator lies in the hyperplane x·b_j = 0.",
    assumes="L1 and R1 constant, the query outside X.",
    control="controls that see the query",
    tolerance=1e-8,
    instances=5,
)
def mixed_normals(case: Instance) -> float:
    layer, X, t = case.layer(n_head=1, op1_rank=4), case.normal(4, 6), 4
    R = case.normal(t, t)
    set_routing(layer, R)
    B = heads(layer, X[0], X)[0].L1 @ X.T @ R
    if case.broken:
        assert layer.op1 is not None
        layer.op1.control.weight.copy_(case.normal(*layer.op1.control.weight.shape))
    plane = random_plane(6, case.generator)
    found = partition(lambda places: hidden(layer, plane.points(places), X)[:, 0], steps=GRID)
    places = [plane.points(found.boundary(j)) for j in range(t)]
    off = [float((at @ B[:, j]).abs().max()) for j, at in enumerate(places) if len(at)]
    return max(off, default=0.0)


@printed(
    "H.7",
    "“Any off-diagonal mixing … changing the hyperplane arrangement”: false for a swap of two slots, as in C.12.",
)
def swap_again(case: Instance) -> float:
    layer, X = case.layer(n_head=1, op1_rank=2), case.normal(3, 6)
    set_routing(layer, torch.eye(3, dtype=torch.float64)[[0, 2, 1]])
    base = heads(layer, X[0], X)[0].L1 @ X.T
    return float(arrangement_gap(scores_to_normals(layer, X), base) < 1e-6)


@statement(
    "H.8",
    "Proposition",
    "Dynamic mixing bends the boundaries",
    says="For generic parameters the boundaries of a dynamic head are smooth surfaces that are not planes: at every "
    "crossing the gradient is not zero and its direction is the surface's normal.",
    assumes="L1 and R1 are differentiable, generic parameters.",
    control="D = 0, no activation and a control that repeats a score: h = (x·b)², whose gradient vanishes on its boundary",
    tolerance=1e-3,
    instances=4,
)
def warped(case: Instance) -> float:
    layer, X = (degenerate(case) if case.broken else case.layer(n_head=1)), case.normal(4, 6)
    begin, end = case.normal(6, scale=2), case.normal(6, scale=2)

    def field(x: Tensor) -> Tensor:
        return torch.stack([heads(layer, q, X)[0].alpha for q in x])

    def signed(x: Tensor) -> Tensor:
        """Crosses zero where a score is zero, also where the score itself only touches it."""
        return (x @ repeat_score(layer, X))[:, None] if case.broken else hidden(layer, x, X)[:, 0]

    if case.broken:
        b = repeat_score(layer, X)
        end = begin - 2 * (begin @ b) / b.square().sum() * b  # mirrored, hence on the other side
    times = crossing_times(signed, begin, end)
    plane = random_plane(6, case.generator)
    straight = max(bends(lambda places: hidden(layer, plane.points(places), X)[:, 0], 4)) < 1e-6
    flat = off = 0.0
    for s in times.tolist():
        x = (begin + s * (end - begin)).requires_grad_()
        h = field(x[None])[0]
        slot = int(h.abs().argmin())
        (slope,) = torch.autograd.grad(h[slot], x)
        off = max(off, float(h[slot].detach().abs()))
        flat += float(slope.norm() < 1e-9)
    return float(straight and not case.broken) + flat + off + (0.0 if case.broken else tangent_error(field, begin, end, times))


def degenerate(case: Instance) -> HyperGLU:
    """R1 = a Bᵀ (x·w) alone, without activations: with w = b every score is a multiple of (x·b)²."""
    off = {"op1_shortcut": False, "op1_use_diag": False, "use_qk_gate": False, "gate_act": "none", "op1_rank": 1}
    layer = case.layer(n_head=1, block_size=4, **off)
    assert layer.op1 is not None
    layer.op1.control.bias.zero_()
    return layer


def repeat_score(layer: HyperGLU, X: Tensor) -> Tensor:
    """b with z A = x·b, made the control's weight too."""
    op = layer.op1
    assert op is not None
    b = layer.q.weight.T @ layer.k.weight @ X.T @ op.A[0].flip(0)[: len(X), 0]
    op.control.weight.copy_(b[None])
    return b


@printed(
    "H.8",
    "From C¹ maps it concludes “so o(·; X) is smooth on that component”; o is then C¹ and no more. With the control s "
    "= u|u| it has a jump in its second derivative inside a cell. C.13 states it correctly.",
)
def only_once_differentiable(case: Instance) -> float:
    X = case.normal(2, 6)
    w, b = case.normal(6), case.normal(6)

    def h(x: Tensor) -> Tensor:
        u = x @ w
        return x @ X[0] + u * u.abs() * (x @ X[1]) + 10

    x = b - (b @ w) / w.square().sum() * w  # u = 0 here, and h > 0 around
    step = 1e-4 * w / w.norm()
    left = (h(x) - 2 * h(x - step) + h(x - 2 * step)) / 1e-8
    right = (h(x + 2 * step) - 2 * h(x + step) + h(x)) / 1e-8
    return float((right - left).abs() / (w.square().sum() * (x @ X[1]).abs()))


@statement(
    "H.9",
    "Remark",
    "Mixing bends the boundaries through few dimensions",
    says="With the scores z fixed, whatever the controls are, the operator's h moves within the r_s columns of B alone.",
    assumes="only the controls depend on x; D, A and B do not.",
    control="a diagonal that changes too",
)
def few_dimensions(case: Instance) -> float:
    layer, x, X = case.layer(n_head=1, op1_rank=3), case.normal(1, 6), case.normal(9, 6)
    op = layer.op1
    assert op is not None
    assert op.diag is not None
    found = []
    for _ in range(8):  # the same query and keys, other controls
        op.control.bias.copy_(case.normal(3, scale=3))
        if case.broken:
            op.diag.copy_(case.normal(*op.diag.shape))
        found.append(hidden(layer, x, X)[0, 0])
    moves = torch.stack(found[1:]) - found[0]
    values = torch.linalg.svdvals(moves)
    basis = torch.linalg.qr(op.B[0].flip(0)[:9]).Q
    outside = moves - moves @ basis @ basis.T
    return float(values[3] / values[0]) + float(outside.norm() / moves.norm())


def ungated(layer: HyperGLU, x: Tensor, X: Tensor) -> Tensor:
    """The real layer with L2Norm alone for its activation: h/ρ = ReLU(h)/ρ − ReLU(−h)/ρ, two passes with opposite queries."""
    up = read(layer, x, X)
    down = read(turned(layer), x, X)
    turned(layer)
    return up - down


@statement(
    "H.10",
    "Proposition",
    "Without ReLU the whole pool is read",
    says="With L2Norm alone the output is 1/ρ(h) Σ α(x; u)β(x; v) over all slots with signed weights.",
    assumes="no gate: σ = L2Norm.",
    control="ReLU in place",
)
def full_pool(case: Instance) -> float:
    layer, x, X = case.layer(), case.normal(6, 6), case.normal(case.integer(4, 12), 6)
    found = read(layer, x, X) if case.broken else ungated(layer, x, X)
    expected = [torch.stack([h.alpha @ h.beta / h.rho for h in heads(layer, q, X)]).sum(0) for q in x]
    return relative(found, torch.stack(expected))


@statement(
    "H.11",
    "Remark",
    "Without ReLU there is one active set, and still no linear map",
    says="With L2Norm alone the operator gives every slot a weight at every query that was drawn, one active set where ReLU "
    "has many, although the map is not linear.",
    assumes="no gate: σ = L2Norm.",
    control="ReLU in place: many active sets",
    trivial="that scores are not zero; what is tested is that no slot is lost on the way to the readout, and the second half.",
    instances=5,
)
def one_set(case: Instance) -> float:
    layer, X = case.layer(), case.normal(case.integer(3, 8), 6)
    x = case.normal(300, 6)
    gated, reverse = activations(layer, x, X), activations(turned(layer), x, X)
    weights = gated if case.broken else gated - reverse
    sets = len(torch.unique(weights[:, 0] != 0, dim=0))
    many = len(torch.unique(gated[:, 0] != 0, dim=0))
    turned(layer)
    line = ungated(layer, torch.stack([x[0], 2 * x[0]]), X)
    return float(sets - 1) + float(many < 2) + float(relative(line[1], 2 * line[0]) < 1e-3)


def turned(layer: HyperGLU) -> HyperGLU:
    """The layer with its queries reversed, in place."""
    layer.q.weight.neg_()
    return layer
