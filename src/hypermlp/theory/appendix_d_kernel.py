"""Appendix D, second half: the tangent kernel, and activated sets that a margin keeps (D.8 to D.11)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hypermlp.mixers.hyper import HyperGLU
from hypermlp.theory.registry import DEFINITION, Instance, listed, relative, statement
from hypermlp.theory.setting import activations, hidden, read

listed(
    "D.8",
    "Definition",
    "The neural tangent kernel",
    says="Θ(z, z′) = J(z) J(z′)ᵀ, with J the derivative of the output by all parameters. D.9 and D.10 compute it.",
    unchecked=DEFINITION,
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
    blind="it is the chain rule, true of every differentiable model.",
)
def tangent_kernel(case: Instance) -> float:
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
    blind="true of every model that is linear in what is trained.",
)
def lazy_regime(case: Instance) -> float:
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


def first_flip(case: Instance, layer: HyperGLU, parameters: Sequence[Tensor]) -> tuple[float, float]:
    """The margin of a random input, and how far scores have moved when the activated set first changes.

    The parameters, of which scores are linear, move so that the score nearest to zero moves alone: the worst there is.
    """
    X, x = case.normal(case.integer(2, 4), 6), case.normal(1, 6)
    for p in parameters:
        p.requires_grad_()
    scores = hidden(layer, x, X)[0, 0]
    J = torch.stack([flat_gradient(score, parameters) for score in scores])  # t parameters
    for p in parameters:
        p.requires_grad_(False)
    before, nearest = scores.detach(), int(scores.detach().abs().argmin())
    wanted = torch.zeros_like(before)
    wanted[nearest] = -before[nearest]
    direction = torch.linalg.pinv(J) @ wanted

    def after(reach: float) -> tuple[bool, float]:
        """Whether the operator selects other slots, and the largest change of a score."""
        move(parameters, direction, reach)
        found, weights = hidden(layer, x, X)[0, 0], activations(layer, x, X)[0, 0]
        move(parameters, direction, -reach)
        return bool(((weights > 0) != (before > 0)).any()), float((found - before).abs().max())

    low, high = 0.0, 1.0
    while not after(high)[0] and high < 1e6:
        high *= 2
    for _ in range(45):
        middle = (low + high) / 2
        low, high = (low, middle) if after(middle)[0] else (middle, high)
    return float(before.abs().min()), after(high)[1]


@statement(
    "D.11",
    "Lemma",
    "A margin keeps the activated set",
    says="If every |h_j| ≥ δ, the operator's activated set stays the same until W_q, moved in the worst direction, has changed "
    "a score by δ.",
    assumes="‖h(θ) − h(θ₀)‖_∞ < δ.",
    control="a δ that is half as large again as the margin",
    trivial="that a number moved by less than its size keeps its sign; what is tested is that the operator's selection "
    "follows these signs, and that δ cannot be made larger.",
    instances=5,
)
def margin(case: Instance) -> float:
    layer = case.layer(n_head=1)
    delta, moved = first_flip(case, layer, [layer.q.weight])
    return case.bound((1.5 if case.broken else 1.0) * delta, moved)
