"""The paper's head, written densely from the parameters of a real layer, and the real operator beside it.

Letters: d width, t slots, n queries, G routing heads, H heads. Contexts are in lag order, newest row first, as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp import ops
from hypermlp.mixers.hyper import HyperGLU, SequenceMixing


@dataclass(frozen=True)
class Head:
    """One head at one query: equations (22), (23), (27) and, with a scale branch, (60)."""

    x: Tensor  # d
    X: Tensor  # t d
    L1: Tensor  # d d
    L2: Tensor  # d d, transposed as in β = v L2ᵀ
    R1: Tensor  # t t
    R2: Tensor  # t t
    eps: float
    scale: Head | None = None  # of HyperGLU: its h is h_scale

    @property
    def U(self) -> Tensor:
        return self.R1.T @ self.X

    @property
    def V(self) -> Tensor:
        return self.R2.T @ self.X

    @property
    def alpha(self) -> Tensor:
        """Addresses of all slots (t); they are the hidden pre-activation h."""
        return self.U @ (self.x @ self.L1)

    @property
    def beta(self) -> Tensor:
        """Readouts of all slots (t d)."""
        return self.V @ self.L2.T

    @property
    def rho(self) -> Tensor:
        return (self.alpha.square().sum() + self.eps).sqrt()

    @property
    def activated(self) -> Tensor:
        return self.alpha > 0

    @property
    def strength(self) -> Tensor:
        """What multiplies α₊: 1, or HyperGLU's softplus(h_scale)."""
        return torch.ones_like(self.alpha) if self.scale is None else F.softplus(self.scale.alpha)

    def readout(self) -> Tensor:
        """o: the sum over the pool, equation (17) or (61)."""
        return (self.strength * self.alpha.relu()) @ self.beta / self.rho


def heads(layer: HyperGLU, x: Tensor, X: Tensor) -> list[Head]:
    """All heads of a layer without convolutions, for query x (d) and context X (t d)."""
    c = layer.config
    H, t = c.n_head, len(X)

    def routing(g: int) -> Head:
        K = layer.q.out_features // c.routing_heads
        V = layer.v.out_features // H
        rows, h = slice(g * K, (g + 1) * K), g % H
        values = slice(h * V, (h + 1) * V)
        L1 = (
            layer.q.weight[rows].T @ torch.diag(gate(layer, layer.gate_qk, x, K * c.routing_heads)[rows]) @ layer.k.weight[rows]
        )
        L2T = layer.v.weight[values].T @ torch.diag(gate(layer, layer.gate_vo, x, V * H)[values]) @ layer.o.weight[:, values].T
        return Head(
            x, X, L1, L2T.T, mixing_matrix(layer, layer.op1, x, g, t), mixing_matrix(layer, layer.op2, x, h, t), c.norm_eps
        )

    found = [routing(g) for g in range(c.routing_heads)]
    if c.attn_kind == "relu":
        return found
    return [replace(found[h], scale=found[h + H]) for h in range(H)]


def gate(layer: HyperGLU, module: nn.Linear | None, x: Tensor, size: int) -> Tensor:
    """The diagonal of M(x)."""
    if module is None:
        return x.new_ones(size)
    value = x @ module.weight.T + module.bias
    return torch.sigmoid(value) if layer.config.gate_act == "sigmoid" else value


def mixing_matrix(layer: HyperGLU, op: SequenceMixing | None, x: Tensor, head: int, t: int) -> Tensor:
    """R(x) = D + A Diag(s) Bᵀ over the t newest lags, newest first."""
    if op is None:
        return torch.eye(t, dtype=x.dtype)
    rank = op.A.shape[-1]
    control = gate(layer, op.control, x, 0)[head * rank : (head + 1) * rank]
    own = head if op.A.shape[0] > 1 else 0
    A, B = op.A[own].flip(0)[:t], op.B[own].flip(0)[:t]
    D = torch.full((t,), float(op.shortcut), dtype=x.dtype)
    if op.diag is not None:
        D = D + op.diag[own].flip(0)[:t]
    return torch.diag(D) + A @ torch.diag(control) @ B.T


def formula(layer: HyperGLU, x: Tensor, X: Tensor) -> Tensor:
    """The layer's output at query x by the paper's equations."""
    return torch.stack([head.readout() for head in heads(layer, x, X)]).sum(0)


def own_context(layer: HyperGLU, X: Tensor) -> Tensor:
    """The real layer's output for its newest token (d): X in lag order, the query is its first row. Also for many X (n t d)."""
    return layer(X.flip(-2).reshape(-1, *X.shape[-2:]), impl="chunked")[:, -1].reshape(*X.shape[:-2], -1)


class Query:
    """What a layer makes of queries x (n d) alone: q, controls, readout gate."""

    def __init__(self, layer: HyperGLU, x: Tensor) -> None:
        G = layer.config.routing_heads
        rows = x[:, None]  # n 1 d
        q = layer.q(rows)
        self.q = (q if layer.gate_qk is None else q * act(layer, layer.gate_qk(rows))).unflatten(-1, (G, -1))
        self.routing = None if layer.op1 is None else layer.op1(act(layer, layer.op1.control(rows)))
        self.reading = None if layer.op2 is None else layer.op2(act(layer, layer.op2.control(rows)))
        self.gate = None if layer.gate_vo is None else act(layer, layer.gate_vo(rows))


def act(layer: HyperGLU, value: Tensor) -> Tensor:
    return torch.sigmoid(value) if layer.config.gate_act == "sigmoid" else value


def in_time_order(x: Tensor, X: Tensor) -> Tensor:
    return X.flip(-2).expand(len(x), *X.shape[-2:])


def read(layer: HyperGLU, x: Tensor, X: Tensor, impl: str = "chunked", **changes: object) -> Tensor:
    """The real operator for queries x (n d) over a context X (t d), or one each (n t d); `changes` are fields of ops.Spec."""
    query, context = Query(layer, x), in_time_order(x, X)
    k = layer.k(context).unflatten(-1, (layer.config.routing_heads, -1))
    v = layer.v(context).unflatten(-1, (layer.config.n_head, -1))
    spec = replace(layer.spec, **changes)  # type: ignore[arg-type]
    o = ops.mix(ops.MixCall(query.q, k, v, query.routing, query.reading, spec), impl=impl).flatten(2)
    return layer.o(o if query.gate is None else o * query.gate)[:, 0]


def hidden(layer: HyperGLU, x: Tensor, X: Tensor) -> Tensor:
    """h (n G t, newest slot first) of the real operator, seen from outside.

    Values that are unit vectors read out the activations, and relu(h) − relu(−h) = h.
    """
    query, context = Query(layer, x), in_time_order(x, X)
    G, t = layer.config.routing_heads, X.shape[-2]
    k = layer.k(context).unflatten(-1, (G, -1))
    unit = torch.eye(t, dtype=X.dtype)[None, :, None].expand(len(x), t, G, t)
    spec = replace(layer.spec, kind="relu", norm="none")
    up, down = (ops.mix(ops.MixCall(q, k, unit, query.routing, None, spec), impl="chunked") for q in (query.q, -query.q))
    return (up - down)[:, 0].flip(-1)


def activations(layer: HyperGLU, x: Tensor, X: Tensor, **changes: object) -> Tensor:
    """a (n H t, newest slot first) of the real operator: what it reads from values that are unit vectors, without R2."""
    query, context = Query(layer, x), in_time_order(x, X)
    G, H, t = layer.config.routing_heads, layer.config.n_head, X.shape[-2]
    k = layer.k(context).unflatten(-1, (G, -1))
    unit = torch.eye(t, dtype=X.dtype)[None, :, None].expand(len(x), t, H, t)
    spec = replace(layer.spec, **changes)  # type: ignore[arg-type]
    return ops.mix(ops.MixCall(query.q, k, unit, query.routing, None, spec), impl="chunked")[:, 0].flip(-1)


def measured_mixing(layer: HyperGLU, which: int, x: Tensor, t: int, head: int = 0) -> Tensor:
    """R1(x) or R2(x) (t t, newest lag first) of the real operator, seen from outside.

    Scores that are the unit vector e_j, and values that are unit vectors, read out row j of R1 or column j of R2.
    """
    op = layer.op1 if which == 1 else layer.op2
    heads = layer.config.routing_heads if which == 1 else layer.config.n_head
    unit = torch.eye(t, dtype=x.dtype)
    if op is None:
        return unit
    control = act(layer, op.control(x.expand(t, 1, -1)))
    q = x.new_ones(t, 1, heads, 1)
    k = unit[:, :, None, None].expand(t, t, heads, 1)  # one score per entry of the batch
    v = unit[None, :, None].expand(t, t, heads, t)
    spec = replace(layer.spec, kind="relu", norm="none")
    if which == 2:
        return ops.mix(ops.MixCall(q, k, v, None, op(control), spec), impl="chunked")[:, 0, head].flip(0, 1).T
    up, down = (ops.mix(ops.MixCall(s * q, k, v, op(control), None, spec), impl="chunked") for s in (1, -1))
    return (up - down)[:, 0, head].flip(0, 1)


def measured_atoms(layer: HyperGLU, x: Tensor, X: Tensor, head: int = 0) -> Tensor:
    """The pool's atoms (u, v) (t 2d), mixed as the real operator mixes."""
    return torch.cat([measured_mixing(layer, which, x, len(X), head).T @ X for which in (1, 2)], dim=1)


def element(layer: HyperGLU, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """Ψ(x; (u, v)) (n d) of the real operator, for rows (n d): one slot, whose key is made of u and whose value of v."""
    query = Query(layer, x)
    k = layer.k(u)[:, None].unflatten(-1, (layer.config.routing_heads, -1))
    values = layer.v(v)[:, None].unflatten(-1, (layer.config.n_head, -1))
    spec = replace(layer.spec, norm="none")
    o = ops.mix(ops.MixCall(query.q, k, values, None, None, spec), impl="chunked").flatten(2)
    return layer.o(o if query.gate is None else o * query.gate)[:, 0]


def make_static(layer: HyperGLU) -> HyperGLU:
    """Gates and controls that do not see the token: only their biases remain."""
    modules = (layer.gate_qk, layer.gate_vo, *(None if op is None else op.control for op in (layer.op1, layer.op2)))
    with torch.no_grad():
        for module in modules:
            if module is not None:
                module.weight.zero_()
    return layer


def atoms(head: Head) -> Tensor:
    """The pool's atoms (u, v), one per slot (t 2d)."""
    return torch.cat([head.U, head.V], dim=1)
