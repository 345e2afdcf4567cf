"""Appendix C, first half: sub-networks, the dynamic two-layer form, three stages of memory, extension (C.1 to C.9)."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from hypermlp import ops
from hypermlp.mixers.hyper import HyperGLU
from hypermlp.theory.registry import ASSUMPTION, Instance, listed, relative, statement
from hypermlp.theory.setting import (
    Query,
    activations,
    heads,
    hidden,
    make_static,
    measured_atoms,
    measured_mixing,
    own_context,
    read,
)


@statement(
    "C.1",
    "Lemma",
    "ReLU is a diagonal gate",
    says="The activation of the operator without normalisation is z D(z), where D(z) is the diagonal matrix of 1{z > 0}.",
    assumes="the activation is ReLU.",
    control="a leaky ReLU",
    trivial="it is how ReLU is defined; what is tested is that the operator's activation is one.",
)
def diagonal_gate(case: Instance) -> float:
    layer, x, X = case.layer(n_head=1), case.normal(4, 6), case.normal(case.integer(4, 12), 6)
    z = torch.stack([heads(layer, q, X)[0].alpha for q in x])
    found = F.leaky_relu(z, 0.1) if case.broken else activations(layer, x, X, norm="none")[:, 0]
    return relative(found, torch.einsum("nt,nts->ns", z, torch.diag_embed((z > 0).double())))


@statement(
    "C.2",
    "Theorem",
    "A ReLU MLP selects a linear sub-network",
    says="f(x) = x W₁D_xW₂ + b₁D_xW₂ + b₂ for every x, so f is affine wherever the mask D_x is constant.",
    assumes="for the second part: the points compared have one mask.",
    control="points on both sides of a boundary",
    blind="it speaks of an MLP with fixed weights and biases, not of the layer; C.3 and C.10 are the layer's form.",
)
def selects_subnetwork(case: Instance) -> float:
    d, width = case.integer(2, 6), case.integer(2, 12)
    W1, b1, W2, b2 = case.normal(d, width), case.normal(width), case.normal(width, d), case.normal(d)
    x, step = case.normal(d), case.normal(d)

    def f(x: Tensor) -> Tensor:
        return F.relu(x @ W1 + b1) @ W2 + b2

    z, dz = x @ W1 + b1, step @ W1
    reach = float((z / dz).abs().min())  # to the nearest boundary along the step
    step = step * (1.5 if case.broken else 0.9) * reach
    mask = torch.diag((z > 0).double())
    form = relative(x @ W1 @ mask @ W2 + b1 @ mask @ W2 + b2, f(x))
    return form + float((f(x + step) + f(x - step) - 2 * f(x)).norm() / f(x).norm())


def telling(case: Instance, layer: HyperGLU, t: int) -> Tensor:
    """A context (t d) of which the layer reads something: one without active slots would show no difference."""
    while True:
        X = case.normal(t, layer.width)
        if bool(own_context(layer, X).any()):
            return X


@statement(
    "C.3",
    "Proposition",
    "The layer is a two-layer MLP with weights made from the context",
    says="The layer's output is the sum over heads of σ(x W1) W2 with W1 = L1(x) Xᵀ R1(x) of size d × t and W2 = "
    "R2(x)ᵀ X L2(x)ᵀ of size t × d.",
    assumes="X is the prefix in lag order, newest first; q and k carry no rotation.",
    control="the prefix in time order",
)
def dynamic_form(case: Instance) -> float:
    layer = case.layer()
    X = telling(case, layer, case.integer(2, 12))
    out = torch.zeros(6, dtype=torch.float64)
    for head in heads(layer, X[0], X.flip(0) if case.broken else X):
        W1, W2 = head.L1 @ head.X.T @ head.R1, head.R2.T @ head.X @ head.L2.T
        h = head.x @ W1
        out = out + F.relu(h / (h.square().sum() + head.eps).sqrt()) @ W2
    return relative(own_context(layer, X), out)


@statement(
    "C.5",
    "Theorem",
    "Three stages: space, pool, activated set",
    says="The output is 1/ρ(h) times the sum of α(x; u)β(x; v) over the slots with α > 0 alone, and the operator gives a "
    "weight to exactly these.",
    assumes="σ = ReLU ∘ L2Norm.",
    control="a HyperGLU, whose activation has a second factor",
    trivial="that the activated slots are some of the pool's: they are selected from them.",
)
def three_stages(case: Instance) -> float:
    layer, X = case.layer(attn_kind="glu" if case.broken else "relu"), case.normal(case.integer(2, 12), 6)
    out, other = torch.zeros(6, dtype=torch.float64), 0.0
    for head, weights in zip(heads(layer, X[0], X), activations(layer, X[:1], X)[0], strict=True):
        other += float(((weights != 0) != head.activated).sum())
        out = out + head.alpha[head.activated] @ head.beta[head.activated] / head.rho
    return other + relative(own_context(layer, X), out)


listed(
    "C.4",
    "Assumption",
    "The normalisation divides each row by one positive number",
    says="Assumption B.1 once more, word for word.",
    unchecked=ASSUMPTION,
)


def extend(short: HyperGLU, long: HyperGLU, *, keep_diagonal: bool = False, newest_last: bool = True) -> None:
    """Lemma C.6: give `long` the parameters of `short`, with p = −1 and A = B = 0 at the further lags.

    Lags are stored newest last, so the further ones come first; in forward order they come last.
    """
    with torch.no_grad():
        for name, theirs in short.state_dict().items():
            ours = long.state_dict()[name]
            if ours.shape == theirs.shape:
                ours.copy_(theirs)
                continue
            more, t = ours.shape[1] - theirs.shape[1], theirs.shape[1]
            rest, kept = (slice(0, more), slice(more, None)) if newest_last else (slice(t, None), slice(0, t))
            ours[:, kept] = theirs
            if name.endswith("diag"):
                ours[:, rest] = 0.0 if keep_diagonal else -1.0
            else:
                ours[:, rest] = 0.0


def extended_pair(case: Instance, *, keep_diagonal: bool = False, **changes: object) -> tuple[HyperGLU, HyperGLU, int, int]:
    """A layer for t tokens, its extension to T tokens, t and T."""
    t = case.integer(3, 7)
    T = t + case.integer(1, 6)
    short, long = (case.layer(block_size=n, **changes) for n in (t, T))
    extend(short, long, keep_diagonal=keep_diagonal)
    return short, long, t, T


@statement(
    "C.6",
    "Lemma",
    "Lag parameters have an extension",
    says="With p = −1 and A = B = 0 at the lags beyond t, R of length T, read off the operator, is the one of length t in "
    "its top-left corner, R_T(x) = P R_t(x) Pᵀ, for every x.",
    assumes="the diagonal beyond t is 1 + p = 0.",
    control="p = 0 beyond t: the shortcut stays",
)
def extension(case: Instance) -> float:
    short, long, t, T = extended_pair(case, keep_diagonal=case.broken)
    x, P = case.normal(6), torch.eye(T, t, dtype=torch.float64)
    return max(
        relative(measured_mixing(long, which, x, T, head), P @ measured_mixing(short, which, x, t, head) @ P.T)
        for which in (1, 2)
        for head in (0, 1)
    )


@statement(
    "C.7",
    "Corollary",
    "An extended layer ignores the older tokens",
    says="The extended layer gives the output of the short one; its first t slots are the short one's, all others are "
    "(0, 0) and never activated.",
    assumes="R_T = P R_t Pᵀ, and ρ([h, 0]) = ρ(h).",
    control="a root mean square in place of ρ, which zeros dilute",
)
def extended_pool(case: Instance) -> float:
    short, long, t, T = extended_pair(case)
    X = case.normal(T, 6)
    worst = float((hidden(long, X[:1], X)[..., t:] > 0).sum())
    for head in (0, 1):
        padded = F.pad(measured_atoms(short, X[0], X[:t], head), (0, 0, 0, T - t))
        worst = max(worst, relative(measured_atoms(long, X[0], X, head), padded))
    out, expected = own_context(long, X), own_context(short, X[:t])
    if case.broken:
        out, expected = out * T**0.5, expected * t**0.5
    return worst + relative(out, expected)


@statement(
    "C.8",
    "Proposition",
    "The hidden layer grows with the context",
    says="At a row with t tokens the hidden layer has t units, all of them in use, and none for the tokens to come.",
    assumes="causal rows, t ≤ block_size.",
    control="the bidirectional layer, whose every row sees all tokens",
    trivial="that t units make at most t atoms: there is one per unit.",
)
def growing_width(case: Instance) -> float:
    T = case.integer(3, 10)
    options: dict[str, object] = {"aligner_kind": "identity", "do_masking": False} if case.broken else {}
    layer, tokens = case.layer(block_size=T, **options), case.normal(T, 6)
    units = (all_rows(layer, tokens) != 0).sum(-1)[0]  # of the first head, per row
    return float((units != torch.arange(1, T + 1)).sum())


def all_rows(layer: HyperGLU, tokens: Tensor) -> Tensor:
    """h (G T T, slots in time order) of a whole sequence, by the real operator; zero where a row has no slot."""
    query, G, T = Query(layer, tokens), layer.config.routing_heads, len(tokens)
    assert query.routing is not None
    routing = query.routing._replace(control=query.routing.control.transpose(0, 1))
    q, k = query.q.transpose(0, 1), layer.k(tokens)[None].unflatten(-1, (G, -1))
    unit = torch.eye(T, dtype=tokens.dtype)[None, :, None].expand(1, T, G, T)
    spec = replace(layer.spec, kind="relu", norm="none")
    up, down = (ops.mix(ops.MixCall(sign * q, k, unit, routing, None, spec), impl="chunked") for sign in (1, -1))
    return (up - down)[0].transpose(0, 1)


@statement(
    "C.9",
    "Proposition",
    "Across contexts the atoms are without number",
    says="With R = I every token x can become the atom (x, x): from scores and outputs of n one-token contexts the n atoms "
    "are recovered, all different.",
    assumes="the token space is infinite; R1 = R2 = I is among the parameters (A = 0, p = 0).",
    control="a vocabulary of 20 vectors",
    instances=3,
    trivial="that infinitely many tokens make infinitely many atoms (x, x); what is tested is that a layer tells them apart.",
)
def infinite_atoms(case: Instance) -> float:
    layer = make_static(case.layer(n_head=1))
    for op in (layer.op1, layer.op2):
        assert op is not None
        assert op.diag is not None
        op.A.zero_()
        op.diag.zero_()
    n, vocabulary = 30, case.normal(20, 6)
    tokens = vocabulary[torch.arange(n) % 20] if case.broken else case.normal(n, 6)
    found = torch.stack([recovered(layer, token) for token in tokens])
    different = len(torch.unique((found * 1e6).round(), dim=0))
    return 1 - different / n + relative(found, tokens.repeat(1, 2))


def recovered(layer: HyperGLU, token: Tensor) -> Tensor:
    """The atom (u, v) of a one-token context, from what a static one-head layer gives at queries; L1 and L2 are invertible."""
    head, unit = heads(layer, token, token[None])[0], torch.eye(len(token), dtype=token.dtype)
    scores = hidden(layer, unit, token[None])[:, 0, 0]  # L1 uᵀ
    x = torch.linalg.solve(head.L1.T, token)  # scores |token|² > 0
    out = read(layer, x[None], token[None], norm="none")[0] / (x @ scores)  # v L2ᵀ
    return torch.cat([torch.linalg.solve(head.L1, scores), torch.linalg.solve(head.L2, out)])


listed(
    "C.9 (ii)",
    "Proposition",
    "The reachable atoms are uncountable",
    says="Over a continuum of tokens the set of reachable atoms is uncountable, since it contains every (x, x).",
)
