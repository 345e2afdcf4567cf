"""Appendix B: the common setting."""

from __future__ import annotations

import torch

from hypermlp.theory.registry import ASSUMPTION, Instance, listed, relative, statement
from hypermlp.theory.setting import activations, hidden

listed(
    "B.1",
    "Assumption",
    "The normalisation divides each row by one positive number",
    says="L2Norm(z) = z/ρ(z) with ρ > 0. The layer's ρ(z) = √(‖z‖² + ε) is one; B.2 fails without it.",
    unchecked=ASSUMPTION,
)


@statement(
    "B.2",
    "Lemma",
    "Dividing by a positive number keeps the gate",
    says="ReLU(h/ρ) = ReLU(h)/ρ, and the slots that are positive after the normalisation are those that were positive "
    "before it.",
    assumes="L2Norm(h) = h/ρ(h) with one positive number ρ(h) per row.",
    control="a layer normalisation, which subtracts the mean as well",
)
def gate_invariance(case: Instance) -> float:
    layer, x, X = case.layer(attn_norm="l2"), case.normal(4, 6), case.normal(case.integer(2, 12), 6)
    h = hidden(layer, x, X)  # of the real operator, n H t
    rho = (h.square().sum(-1, keepdim=True) + layer.config.norm_eps).sqrt()
    weights = torch.relu((h - h.mean(-1, keepdim=True)) / rho) if case.broken else activations(layer, x, X)
    flips = float(((weights > 0) != (h > 0)).sum())
    return flips + relative(weights, torch.relu(h) / rho)
