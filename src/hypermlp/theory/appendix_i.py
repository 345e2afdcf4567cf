"""Appendix I: what mixing adds to the function class, and the three examples of curved routing."""

from __future__ import annotations

import torch
from torch import Tensor

from hypermlp.mixers.hyper import HyperGLU
from hypermlp.theory.appendix_c_geometry import GRID, bends
from hypermlp.theory.appendix_f import update_space, updates
from hypermlp.theory.geometry import Field, Plane, partition, random_plane, straightness
from hypermlp.theory.registry import Instance, excess, printed, relative, statement
from hypermlp.theory.setting import activations, heads, hidden, make_static, read

CURVED = 1e-3  # a boundary this far from every straight line is curved


@statement(
    "I.1",
    "Proposition",
    "HyperMLP contains token-wise attention and more",
    says="With A = 0, p = 0 and gate weights 0 a HyperMLP computes a token-wise ReLU attention exactly, and with free "
    "controls it has boundaries that no finite union of hyperplanes contains.",
    assumes="the query is not a row of X; for the second part controls that see it.",
    control="controls that do not see the query",
    instances=5,
)
def strict_gap(case: Instance) -> float:
    plain = case.layer(n_head=1, use_op1=False, use_op2=False, use_qk_gate=False, use_vo_gate=False)
    full, X, x = case.layer(n_head=1), case.normal(4, 6), case.normal(5, 6)
    embed(plain, full)
    contained = relative(read(full, x, X), read(plain, x, X))
    rich = case.layer(n_head=1, use_qk_gate=False)
    assert rich.op1 is not None
    rich.op1.control.weight.copy_(3 * rich.op1.control.weight)
    if case.broken:
        make_static(rich)
    plane = random_plane(6, case.generator)
    bent = max(bends(lambda places: hidden(rich, plane.points(places), X)[:, 0], 4))
    return contained + float(bent < CURVED)


def embed(plain: HyperGLU, full: HyperGLU) -> None:
    """Token-wise attention as a HyperMLP: gates are sigmoid(0) = 1/2, made up for by twice the weight."""
    make_static(full)
    for name in ("q", "k", "v", "o"):
        getattr(full, name).weight.copy_(getattr(plain, name).weight)
    for gate, weight in ((full.gate_qk, full.q.weight), (full.gate_vo, full.v.weight)):
        assert gate is not None
        gate.bias.zero_()
        weight.mul_(2)
    for op in (full.op1, full.op2):
        assert op is not None
        assert op.diag is not None
        op.A.zero_()
        op.diag.zero_()


def example_layer(a: Tensor, b: Tensor, W: Tensor) -> tuple[HyperGLU, Tensor]:
    """A real layer whose slot 2 scores x·b + Σ_k φ(x·w_k) x·a_k, and its context, for rows a (r d), b (d) and W (r d).

    The context holds b and the a's; A and B carry the score of each a to the slot of b.
    """
    from hypermlp.config import HyperGLUConfig

    r, d = a.shape
    t = r + 1
    config = HyperGLUConfig(
        n_embd=d,
        n_head=1,
        block_size=t,
        qk_rank=d,
        attn_kind="relu",
        use_kv_conv=False,
        use_qk_gate=False,
        use_vo_gate=False,
        op1_rank=r,
        use_op2=False,
    )
    layer = HyperGLU(config).double().requires_grad_(False)
    assert layer.op1 is not None
    for weight in (layer.q.weight, layer.k.weight, layer.v.weight, layer.o.weight):
        weight.copy_(torch.eye(d))
    X = torch.cat([a, b[None]])  # lag order: the a's are slots 1 … r, b is the oldest
    layer.op1.A.zero_()
    layer.op1.B.zero_()
    layer.op1.control.weight.copy_(W)
    for k in range(r):
        layer.op1.A[0, t - 1 - k, k] = 1  # lag k at index L − 1 − k
        layer.op1.B[0, 0, k] = 1  # the oldest slot
    return layer, X


def example_field(layer: HyperGLU, X: Tensor, plane: Plane | None = None) -> Field:
    """Scores of its slots over a plane of queries (None: the plane itself, d = 2), by the real operator."""
    return lambda places: hidden(layer, places if plane is None else plane.points(places), X)[:, 0]


def warped_halfspace(c: float) -> tuple[HyperGLU, Tensor]:
    """Example 1 and the proof of I.2: h = (x₁, x₂ + φ(c x₁)x₁)."""
    e1, e2 = torch.eye(2, dtype=torch.float64)
    return example_layer(e1[None], e2, c * e1[None])


@statement(
    "I.2",
    "Proposition",
    "Shrinking QK pays for curved routing",
    says="A head with smaller d_qk and mixing of 4tr_s + 2t + 2dr_s parameters fits the budget if 2d(d_qk − d̃_qk) is "
    "at least that; already t = 2, d̃_qk = 2, r_s = 1 give a head whose output has kinks along the curve x₂ = −φ(c "
    "x₁)x₁, which no token-wise head with fixed projections has; and its outputs stay in Col(W_o).",
    assumes="controls without bias, query outside X, c ≠ 0.",
    control="c = 0: the kinks lie on a line",
    tolerance=1e-6,
    instances=4,
)
def paid_by_routing(case: Instance) -> float:
    c = 0.0 if case.broken else float(case.uniform(1, low=1, high=4))
    layer, X = warped_halfspace(c)
    found = partition(example_field(layer, X), steps=GRID)
    line = found.boundary(1)
    place = float((line[:, 1] + torch.sigmoid(c * line[:, 0]) * line[:, 0]).abs().max())
    kinks = min(kink(layer, X, point) for point in line[(line.norm(dim=1) > 0.3)][::5])
    narrow = case.layer(vo_rank=2)
    found_updates, basis = updates(case, narrow), update_space(narrow)
    outside = relative(found_updates @ basis @ basis.T, found_updates)
    return place + float(straightness(line) < CURVED) + float(kinks < 0.1) + budget_gap(case) + outside


def kink(layer: HyperGLU, X: Tensor, point: Tensor) -> float:
    """The jump of the output's derivative across the boundary, upwards."""
    step = torch.tensor([0.0, 1e-6], dtype=torch.float64)
    below, at, above = read(layer, torch.stack([point - step, point, point + step]), X)[:, 1]
    return float((above + below - 2 * at).abs()) / 1e-6


def mixing_parameters(layer: HyperGLU, *, bias: bool) -> int:
    ops = (layer.op1, layer.op2)
    return sum(p.numel() for op in ops if op for name, p in op.named_parameters() if bias or name != "control.bias")


def budget_gap(case: Instance) -> float:
    """Parameters counted in real layers: mixing is 4tr + 2t + 2dr, and the smaller d_qk pays for it."""
    d, t, r, small = 64, case.integer(8, 24), 2, 16
    layer = case.layer(n_embd=d, n_head=1, qk_rank=small, vo_rank=d, block_size=t, op1_rank=r, op2_rank=r)
    temporal = 4 * t * r + 2 * t + 2 * d * r
    saved = 2 * d * (d - small)
    assert saved >= temporal
    plain = 2 * d * small + 2 * d * d + mixing_parameters(layer, bias=False)
    return abs(mixing_parameters(layer, bias=False) - temporal) + excess(plain, 4 * d * d)


@printed(
    "I.2",
    "(95) is called an upper bound of the temporal parameters. The released layer also has a bias per control, 2 r_s "
    "more per head, and HyperGLU has two routing heads per head: 6tr_s + 3t + 3dr_s + 3r_s.",
)
def biases(case: Instance) -> float:
    d, t, r = 16, 12, 2
    layer = case.layer(n_embd=d, n_head=1, attn_kind="glu", block_size=t, op1_rank=r, op2_rank=r)
    return excess(mixing_parameters(layer, bias=True), 4 * t * r + 2 * t + 2 * d * r)


@statement(
    "I.3",
    "Proposition",
    "Half of the noise is active, and mixing lowers that number",
    says="Without mixing, noise tokens whose scores have a continuous symmetric distribution activate |N|/2 slots in "
    "expectation: a context and its mirror image together activate |N| exactly. With p = −1 and B zero outside two slots the "
    "same noise is averaged into two slots and activates one in expectation, at 1/m of a token's variance for m tokens each.",
    assumes="scores symmetric about 0, and 0 itself has probability zero; X is random, x is fixed.",
    control="noise with a mean",
)
def spurious(case: Instance) -> float:
    n, x = 12, case.normal(1, 6)
    noise = case.normal(n, 6)
    plain, mixed = case.layer(n_head=1, use_op1=False, use_op2=False), case.layer(n_head=1, use_op2=False)
    aggregate(mixed, plain)
    shift = 5 * heads_direction(plain, x) if case.broken else torch.zeros(6, dtype=torch.float64)

    def active(layer: HyperGLU) -> float:
        """Noise slots that the operator activates, on average over a context and its mirror image, both equally likely."""
        pair = [int((activations(layer, x, sign * noise + shift)[0, 0] > 0).sum()) for sign in (1, -1)]
        return sum(pair) / 2

    scores = torch.stack([head.alpha for head in heads(plain, x[0], noise)])[0]  # of the tokens, one by one
    means = scores.view(2, n // 2).mean(1)  # of independent tokens: 1/m of the variance
    averaged = relative(hidden(mixed, x, noise)[0, 0], torch.cat([means, torch.zeros(n - 2, dtype=torch.float64)]))
    return abs(active(plain) - n / 2) + abs(active(mixed) - 1) + averaged


def aggregate(layer: HyperGLU, like: HyperGLU) -> None:
    """Give `layer` the weights of `like`, and an R1 that averages lags 0 to 5 into slot 1 and lags 6 to 11 into slot 2."""
    layer.load_state_dict(like.state_dict(), strict=False)
    op = layer.op1
    assert op is not None
    assert op.diag is not None
    op.diag.fill_(-1)  # p = −1: no slot keeps its own token
    op.control.weight.zero_()
    op.control.bias.fill_(1e3)  # s = 1
    op.A.zero_()
    op.B.zero_()
    op.A[0, 6:, 0] = op.A[0, :6, 1] = 1 / 6
    op.B[0, -1, 0] = op.B[0, -2, 1] = 1


def heads_direction(layer: HyperGLU, x: Tensor) -> Tensor:
    """A unit vector that the first head scores highly."""
    K = layer.q.out_features // layer.config.routing_heads
    assert layer.gate_qk is not None
    q = (layer.q(x) * torch.sigmoid(layer.gate_qk(x)))[0, :K]
    found = q @ layer.k.weight[:K]
    return found / found.norm() * 20


@printed(
    "I.3",
    "Symmetry does not exclude 0: tokens that are zero with probability p score 0, which is symmetric and never "
    "active; the expectation is (1 − p)|N|/2. And with both x and X fixed, as printed, nothing is random.",
)
def zeros(case: Instance) -> float:
    layer, x, n = case.layer(use_op1=False, use_op2=False), case.normal(1, 6), 12
    noise = case.normal(n, 6)
    noise[::3] = 0
    pair = [int((hidden(layer, x, sign * noise)[0, 0] > 0).sum()) for sign in (1, -1)]
    return abs(sum(pair) / 2 - n / 2)


@statement(
    "example 1",
    "Example",
    "A sigmoid-warped half-plane",
    says="With d = t = 2, X = I and R1 = I + e₁φ(c x₁)e₂ᵀ the boundary of slot 2 is the curve x₂ = −φ(c x₁)x₁.",
    assumes="c ≠ 0.",
    control="c = 0, a straight line",
    instances=5,
)
def example_1(case: Instance) -> float:
    c = 0.0 if case.broken else float(case.uniform(1, low=1, high=4))
    layer, X = warped_halfspace(c)
    points = partition(example_field(layer, X), steps=GRID).boundary(1)
    off = float((points[:, 1] + torch.sigmoid(c * points[:, 0]) * points[:, 0]).abs().max())
    return off + float(straightness(points) < CURVED)


@statement(
    "example 2",
    "Example",
    "A normal that moves with the query",
    says="With rows a, b and R1 = I + e₁φ(x·w)e₂ᵀ slot 2 scores x·b + φ(x·w) x·a, and the normal of its boundary turns "
    "along it.",
    assumes="a and b independent; w not orthogonal to the boundary.",
    control="w = 0",
    instances=5,
)
def example_2(case: Instance) -> float:
    a, b = case.normal(2), case.normal(2)
    normal = b + a / 2  # of the boundary at the origin; a w along it would leave the control constant there
    along = torch.stack([-normal[1], normal[0]]) / normal.norm()
    w = (0.0 if case.broken else 2.0) * (along + 0.3 * case.normal(2))
    layer, X = example_layer(a[None], b, w[None])
    points = partition(example_field(layer, X), steps=GRID).boundary(1)
    score = points @ b + torch.sigmoid(points @ w) * (points @ a)
    return float(score.abs().max()) + float(normal_turn(points, a, b, w) < CURVED)


def normal_turn(points: Tensor, a: Tensor, b: Tensor, w: Tensor) -> float:
    """The largest angle between the gradients of x·b + φ(x·w) x·a at points of its boundary."""
    s = torch.sigmoid(points @ w)
    slope = b + s[:, None] * a + (s * (1 - s) * (points @ a))[:, None] * w
    unit = slope / slope.norm(dim=1, keepdim=True)
    cross = unit[:, :1] * unit[:, 1:].T - unit[:, 1:] * unit[:, :1].T
    return float(cross.abs().max())


@statement(
    "example 3",
    "Example",
    "More bends with more rank",
    says="The slot that scores x·b + Σ_k φ(x·w_k) x·a_k has a boundary with 2, 4, 6, … inflections for r_s = 1, 2, 3, ….",
    assumes="controls of different steepness and alternating sign, w_k ≠ 0.",
    control="all w_k equal: the terms add up to one",
    instances=3,
)
def example_3(case: Instance) -> float:
    steep = float(case.uniform(1, low=0.8, high=1.2))
    missing, off = 0.0, 0.0
    for r in (1, 2, 3):
        layer, X, scale = bent_layer(r, steep, equal=case.broken)
        at = 0.01 * torch.sinh(torch.linspace(-7.5, 7.5, 1501, dtype=torch.float64))  # dense where the steep controls bend
        curve = boundary_height(layer, X, at)
        sums = [a * torch.sigmoid(w * at) * at for w, a in scale]
        off = max(off, float((curve + torch.stack(sums).sum(0)).abs().max()))
        slope = curve.diff() / at.diff()
        bend = slope.diff()
        seen = bend[bend.abs() > 1e-9]
        inflections = int(((seen[1:] > 0) != (seen[:-1] > 0)).sum())
        missing += float(max(0, 2 * r - inflections))
    return off + missing


def bent_layer(r: int, steep: float, *, equal: bool = False) -> tuple[HyperGLU, Tensor, list[tuple[float, float]]]:
    """Example 3 with a_k = ± e₁ of growing size and w_k = c_k e₁; also the pairs (c_k, a_k)."""
    e1, e2 = torch.eye(2, dtype=torch.float64)
    scale = [(steep * (1.0 if equal else 8.0**k), (-1.0) ** k) for k in range(r)]
    layer, X = example_layer(torch.stack([a * e1 for _, a in scale]), e2, torch.stack([w * e1 for w, _ in scale]))
    return layer, X, scale


def boundary_height(layer: HyperGLU, X: Tensor, at: Tensor) -> Tensor:
    """x₂ on the boundary of the last slot above each x₁; its score is x₂ plus a function of x₁."""
    return -hidden(layer, torch.stack([at, torch.zeros_like(at)], dim=1), X)[:, 0, -1]
