"""Appendix F: the lag layout, and where a rank budget is felt."""

from __future__ import annotations

import torch
from torch import Tensor

from hypermlp.mixers.hyper import HyperGLU
from hypermlp.theory.appendix_c import extend
from hypermlp.theory.registry import Instance, relative, statement
from hypermlp.theory.setting import make_static, own_context, read

# Why statements about the rank of W_o notice no fault of the operator.
READOUT = "it holds whatever the operator gives: only W_o, behind it, decides the directions of an update."

# The same for statements about what an update can depend on.
DEPENDS = "it bounds what an update depends on and where it lies; a wrong operator between the same projections obeys it too."


def forward_pair(case: Instance, t: int, T: int) -> tuple[HyperGLU, HyperGLU]:
    """Layers in forward order (aligner_kind="identity"); the long one has the short one's operators in its top-left corner."""
    short, long = (case.layer(block_size=n, aligner_kind="identity") for n in (t, T))
    extend(short, long, newest_last=False)
    return short, long


@statement(
    "F.1",
    "Theorem",
    "Top-left extension keeps the newest tokens in lag order, the oldest in forward order",
    says="With R_T = P R_t Pᵀ the layer in lag order gives the output of its newest t tokens alone; in forward order "
    "the same extension gives the output of the oldest t tokens.",
    assumes="the invariance is read in the layer's own order.",
    control="forward order, asked to keep the newest tokens",
)
def layouts(case: Instance) -> float:
    t = case.integer(3, 7)
    T = t + case.integer(1, 6)
    X = case.normal(T, 6)
    lag_short, lag_long = (case.layer(block_size=n) for n in (t, T))
    extend(lag_short, lag_long)
    lag = relative(own_context(lag_long, X), own_context(lag_short, X[:t]))
    short, long = forward_pair(case, t, T)
    kept = X[:t] if case.broken else X[-t:]
    return lag + relative(read(long, X[:1], X), read(short, X[:1], kept))


@statement(
    "F.2",
    "Remark",
    "Forward order keeps the newest tokens with a suffix embedding",
    says="With R_T = Q R_t Qᵀ, which puts R_t in the bottom-right corner, the layer in forward order gives the output of its "
    "newest t tokens alone.",
    assumes="the suffix embedding is chosen, parameter by parameter.",
    control="the top-left embedding of F.1",
)
def suffix_embedding(case: Instance) -> float:
    t = case.integer(3, 7)
    T = t + case.integer(1, 6)
    X = case.normal(T, 6)
    short, long = (case.layer(block_size=n, aligner_kind="identity") for n in (t, T))
    extend(short, long, newest_last=not case.broken)
    return relative(read(long, X[:1], X), read(short, X[:1], X[:t]))


def update_space(layer: HyperGLU) -> Tensor:
    """An orthonormal basis of Row(W2) ⊆ Col(W_o) (d r)."""
    U, S, _ = torch.linalg.svd(layer.o.weight, full_matrices=False)
    return U[:, 1e-12 * S[0] < S]


def updates(case: Instance, layer: HyperGLU, count: int = 12) -> Tensor:
    """The layer's outputs (count d) for random contexts."""
    return own_context(layer, case.normal(count, case.integer(4, 12), layer.width))


@statement(
    "F.3",
    "Theorem",
    "A low-rank readout confines the update",
    says="With d_vo = r in total, x + layer(x) differs from x by a vector of one fixed subspace of dimension at most "
    "r, for every context; the other d − r directions pass unchanged.",
    assumes="rank W_o ≤ r, no bias.",
    control="a bias in W_o",
    blind=READOUT,
)
def confined(case: Instance) -> float:
    layer = case.layer(vo_rank=2, bias=case.broken)
    found = updates(case, layer)
    basis = update_space(layer)
    outside = found - found @ basis @ basis.T
    spectrum = torch.linalg.svdvals(found)
    return float(outside.norm() / found.norm()) + float(spectrum[2] / spectrum[0])


@statement(
    "F.4",
    "Corollary",
    "Functionals that the layer cannot change",
    says="⟨x + layer(x), v⟩ = ⟨x, v⟩ for every v orthogonal to the update space.",
    assumes="v ⊥ Row(W2).",
    control="a v that is not orthogonal",
    blind=READOUT,
)
def invariant_functionals(case: Instance) -> float:
    layer, X = case.layer(vo_rank=2), case.normal(case.integer(4, 12), 6)
    basis, v = update_space(layer), case.normal(6)
    if not case.broken:
        v = v - basis @ (basis.T @ v)
    v = v / v.norm()
    f = X[0] + own_context(layer, X)
    return float((f @ v - X[0] @ v).abs() / own_context(layer, X).norm())


def null_direction(case: Instance, *matrices: Tensor) -> Tensor:
    """A random unit vector δ with δ W = 0 for all the weights, which are stored transposed (out in)."""
    stacked = torch.cat(matrices)
    basis = torch.linalg.svd(stacked).Vh[int(torch.linalg.matrix_rank(stacked)) :]
    found = case.normal(len(basis)) @ basis
    return found / found.norm()


@statement(
    "F.5",
    "Theorem",
    "A low-rank first layer only forgets directions of the query",
    says="With rank W1 ≤ r the update is a function of x L for some d × r matrix L, and adding δ with δ W1 = 0 to the "
    "query adds δ to the result.",
    assumes="W1 and W2 do not depend on x: static gates and mixing, and a context that does not contain the query.",
    control="gates and controls that see the query, as in the published layer",
    blind=DEPENDS,
)
def quotient(case: Instance) -> float:
    layer, X = case.layer(n_head=1, qk_rank=2), case.normal(case.integer(4, 10), 6)
    if not case.broken:
        make_static(layer)
    x = case.normal(8, 6)
    delta = null_direction(case, layer.q.weight)
    before, after = read(layer, x, X), read(layer, x + 3 * delta, X)
    # ψ(p) is the update at any query with x L = p: here the shortest one.
    L = layer.q.weight.T
    shortest = x @ L @ torch.linalg.pinv(L)
    return relative(after, before) + relative(read(layer, shortest, X), before)
