"""What surrounds the operator in a layer, as two nodes of autograd that keep little: the projections and the gated readout.

The projections keep x and the joined product; the convolutions' outputs are computed again in backward. The readout keeps what
the operator keeps anyway and its gate. For eager calls: compilers and transforms see the steps (ops/pointwise.py) one by one.

Letters: B batch, T time, C width, W taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from hypermlp import ops
from hypermlp.ops import native, pointwise, reference
from hypermlp.ops.registered import Inputs, flatten_mixing, gradients_with_graph, observed, reference_mix
from hypermlp.ops.types import Mixing, Spec


class Projections(NamedTuple):
    """Weights (out C) and biases of the projections from x, from x's two convolutions (C W) for k and v."""

    q: Tensor
    gate_qk: Tensor
    s1: Tensor
    s2: Tensor
    k: Tensor
    v: Tensor
    gate_vo: Tensor | None
    q_bias: Tensor | None
    gate_qk_bias: Tensor | None
    s1_bias: Tensor | None
    s2_bias: Tensor | None
    k_bias: Tensor | None
    v_bias: Tensor | None
    gate_vo_bias: Tensor | None
    conv_k: Tensor | None
    conv_v: Tensor | None

    @property
    def weights(self) -> tuple[Tensor | None, ...]:
        return self[:7]

    @property
    def biases(self) -> tuple[Tensor | None, ...]:
        return self[7:14]

    @property
    def convs(self) -> tuple[Tensor | None, ...]:
        return self[14:]

    @property
    def sizes(self) -> list[int]:
        """Widths in the joined product."""
        return [w.shape[0] for w in self[:4]]

    def joined(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of q, its gate and both controls in one product."""
        weights, biases = self[:4], self[7:11]
        if all(b is None for b in biases):
            return torch.cat(weights), None
        return torch.cat(weights), torch.cat(
            [w.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)]
        )


class Projected(NamedTuple):
    """All (B T …): q gated, both controls activated, the readout's gate before its activation."""

    q: Tensor
    s1: Tensor
    s2: Tensor
    k: Tensor
    v: Tensor
    gate_vo: Tensor | None


def project(x: Tensor, weights: Projections, position: Tensor | None, history: Tensor | None, *, use: str) -> Projected:
    """The projections of x (B T C); position and history as in pointwise.convs, use from pointwise.kernels_for."""
    if observed(x, *weights) is None:
        return compute_projections(x, weights, position, history, use)[1]
    assert history is None, "for inference only"
    made = Project.apply(x, position, use, *weights)
    return Projected._make(made if weights.gate_vo is not None else (*made, None))


def compute_projections(
    x: Tensor, w: Projections, position: Tensor | None, history: Tensor | None, use: str
) -> tuple[Tensor, Projected]:
    """The joined product and what is made of it; in differentiable steps where use is ""."""
    if use == "native" and history is None and native.fits(x, w.weights):
        y, (q, _, s1, s2, k, v, gate_vo) = native.project_forward(x, position, w.weights, w.biases, w.convs)
        return y, Projected(*cast("Any", (q, s1, s2, k, v, gate_vo)))
    x_k, x_v = convolve(x, w, position, history, use)
    k, v = F.linear(x_k, w.k, w.k_bias), F.linear(x_v, w.v, w.v_bias)
    del x_k, x_v
    y = F.linear(x, *w.joined())
    gate_vo = None if w.gate_vo is None else F.linear(x, w.gate_vo, w.gate_vo_bias)
    return y, Projected(*pointwise.gates_forward(y, w.sizes, use), k, v, gate_vo)


def convolve(x: Tensor, w: Projections, position: Tensor | None, history: Tensor | None, use: str) -> tuple[Tensor, Tensor]:
    if w.conv_k is None or w.conv_v is None:
        return x, x
    return pointwise.convs_forward(x, w.conv_k, w.conv_v, position, history, use)


class Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, position: Tensor | None, use: str, *weights: Tensor | None) -> tuple[Tensor, ...]:
        y, made = compute_projections(x, Projections(*cast("Any", weights)), position, None, use)
        ctx.use = use
        ctx.save_for_backward(x, position, y, *weights)
        return tuple(t for t in made if t is not None)

    @staticmethod
    def backward(ctx: Any, *d: Tensor) -> tuple[Any, ...]:
        x, position, y, *weights = ctx.saved_tensors
        found: Sequence[Tensor | None]
        if torch.is_grad_enabled():

            def plain(x: Tensor, *weights: Tensor | None) -> tuple[Tensor, ...]:
                made = compute_projections(x, Projections(*cast("Any", weights)), position, None, "")[1]
                return tuple(t for t in made if t is not None)

            d_x, *plainly = gradients_with_graph(plain, (x, *weights), d)
            return (d_x, None, None, *plainly)
        wanted, w = Projections(*ctx.needs_input_grad[3:]), Projections(*weights)
        by_blocks = ctx.use == "native" and native.fits(x, w.weights)
        d_x, found = (blocks_backward if by_blocks else project_backward)(d, x, position, y, w, wanted, ctx.use)
        return (d_x, None, None, *found)


def project_backward(
    d: Sequence[Tensor], x: Tensor, position: Tensor | None, y: Tensor, w: Projections, wanted: Projections, use: str
) -> tuple[Tensor, Projections]:
    """Gradients of x and of the wanted weights. Large tensors are freed as soon as they have served."""
    d_q, d_s1, d_s2, d_k, d_v, *d_gate = d
    found: dict[str, Tensor | None] = dict.fromkeys(Projections._fields)

    def differentiate(name: str, d_y: Tensor, x: Tensor) -> None:
        if getattr(wanted, name):
            found[name] = flat(d_y).T @ flat(x)
        if getattr(wanted, f"{name}_bias"):
            found[f"{name}_bias"] = flat(d_y).sum(0)

    x_k, x_v = convolve(x, w, position, None, use)
    differentiate("k", d_k, x_k)
    differentiate("v", d_v, x_v)
    del x_k, x_v
    d_xk = d_k @ w.k
    if w.conv_k is None or w.conv_v is None:
        d_x = flat(d_xk).addmm_(flat(d_v), w.v)
    else:
        d_x, found["conv_k"], found["conv_v"] = pointwise.convs_backward(d_xk, d_v @ w.v, x, w.conv_k, w.conv_v, position, use)
        d_x = flat(d_x)
    del d_xk
    if w.gate_vo is not None:
        differentiate("gate_vo", d_gate[0], x)
        d_x.addmm_(flat(d_gate[0]), w.gate_vo)
    d_y = flat(pointwise.gates_backward(d_q, d_s1, d_s2, y, w.sizes, use))
    d_x.addmm_(d_y, w.joined()[0])
    if any(wanted[:4]):
        found |= zip(Projections._fields[:4], (d_y.T @ flat(x)).split(w.sizes), strict=True)
    if any(wanted[7:11]):
        found |= zip(Projections._fields[7:11], d_y.sum(0).split(w.sizes), strict=True)
    kept = (g if want else None for g, want in zip(found.values(), wanted, strict=True))
    return d_x.view(x.shape), Projections._make(kept)


def blocks_backward(
    d: Sequence[Tensor], x: Tensor, position: Tensor | None, y: Tensor, w: Projections, wanted: Projections, use: str
) -> tuple[Tensor, Projections]:
    """project_backward in one call."""
    d_q, d_s1, d_s2, d_k, d_v, *d_gate = d
    d_out = (d_q, None, d_s1, d_s2, d_k, d_v, d_gate[0] if d_gate else None)
    which = cast("Any", (wanted.weights, wanted.biases))
    d_x, *found = native.project_backward(d_out, y, x, position, w.weights, w.convs, *which)
    return d_x, Projections(*cast("Any", (g for group in found for g in group)))


def flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def read_out(o: Tensor, gate: Tensor, weight: Tensor, bias: Tensor | None, *, use: str) -> Tensor:
    """(o ⊙ σ(gate)) Wᵀ + b for o and gate (B T V)."""
    if observed(o, gate, weight, bias) is None:
        return compute_readout(o, gate, weight, bias, use)[1]
    return cast("Tensor", ReadOut.apply(o, gate, weight, bias, use))


def compute_readout(o: Tensor, gate: Tensor, weight: Tensor, bias: Tensor | None, use: str) -> tuple[Tensor, Tensor]:
    """The gated o, and y."""
    gated = pointwise.gate_forward(o, gate, use)
    return gated, F.linear(gated, weight, bias)


def plain_readout(o: Tensor, gate: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return compute_readout(o, gate, weight, bias, "")[1]


class ReadOut(torch.autograd.Function):
    """Keeps o, which the operator keeps as well, and computes the gated o again."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, gate: Tensor, weight: Tensor, bias: Tensor | None, use: str) -> Tensor:
        ctx.use = use
        ctx.save_for_backward(o, gate, weight, bias)
        return compute_readout(o, gate, weight, bias, use)[1]

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Any, ...]:
        o, gate, weight, bias = ctx.saved_tensors
        if torch.is_grad_enabled():
            return (*gradients_with_graph(plain_readout, (o, gate, weight, bias), (d_y,)), None)
        gated = pointwise.gate_forward(o, gate, ctx.use)
        d_gated, d_weight, d_bias = linear_backward(d_y, gated, weight, ctx.needs_input_grad[2:4])
        del gated
        return (*pointwise.gate_backward(d_gated, o, gate, ctx.use, overwrite=True), d_weight, d_bias, None)


def linear_backward(
    d_y: Tensor, x: Tensor, weight: Tensor, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    d = flat(d_y).contiguous()  # once for both products
    d_weight = d.T @ flat(x) if wanted[0] else None
    return (d @ weight).view(x.shape), d_weight, d.sum(0) if wanted[1] else None


def mix_and_read(
    impl: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    routing: Mixing | None,
    reading: Mixing | None,
    spec: Spec,
    spans: Tensor | None = None,
    chunk: int | None = None,
    *,
    gate: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """read_out of ops.compute. Where autograd observes compiled code, the gated o is kept and o is not."""
    inputs = Inputs(q, k, v, *flatten_mixing(routing, False), *flatten_mixing(reading, True), spans)
    readout = (gate, weight, bias)
    ours = impl == "native" and native.is_plain(*inputs.differentiable, *readout, half=True)
    if ours and observed(*inputs, *readout) == "autograd":
        o, rho = native.mix_linked(inputs, spec)
        return cast("Tensor", LinkedReadOut.apply(o, rho, *readout, spec, *inputs))
    o = ops.compute(impl, q, k, v, routing, reading, spec, spans, chunk).flatten(2)
    return read_out(o, *readout, use=pointwise.kernels_for(impl, o, gate))


class LinkedReadOut(torch.autograd.Function):
    """The readout of o (B T H V) from registered.linked: the gradient of ρ is d_o·o, which is d_y·y of the gated y.

    The operator's inputs are there for gradients of gradients alone; the operator keeps them too.
    """

    @staticmethod
    def forward(
        ctx: Any, o: Tensor, rho: Tensor, gate: Tensor, weight: Tensor, bias: Tensor | None, spec: Spec, *inputs: Tensor | None
    ) -> Tensor:
        gated, y = compute_readout(o.flatten(2), gate, weight, bias, "native")
        ctx.spec, ctx.shape = spec, o.shape
        ctx.save_for_backward(gated, gate, weight, bias, *inputs)
        return y

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Any, ...]:
        gated, gate, weight, bias, *tensors = ctx.saved_tensors
        if torch.is_grad_enabled():
            inputs = Inputs._make(tensors)

            def plain(gate: Tensor, weight: Tensor, bias: Tensor | None, *replaced: Tensor | None) -> Tensor:
                o = reference_mix(inputs.with_differentiable(replaced), ctx.spec)
                return plain_readout(o.flatten(2), gate, weight, bias)

            found = gradients_with_graph(plain, (gate, weight, bias, *inputs.differentiable), (d_y,))
            return (None, None, *found[:3], None, *found[3:], None)
        d_gated, d_weight, d_bias = linear_backward(d_y, gated, weight, ctx.needs_input_grad[3:5])
        d_o, d_gate, dots = native.ungate(d_gated, gated, gate, ctx.shape[2])
        return (d_o.view(ctx.shape), dots, d_gate, d_weight, d_bias, None, *(None for _ in tensors))


def run_whole(x: Tensor, parameters: Sequence[Tensor | None], form: native.Form) -> Tensor:
    """A layer on plain sequences x (B T C) in one call of compiled code, and one node of autograd where that records.

    See native.Form. The caller knows that no tracer observes, and that all parameters are plain and contiguous.
    """
    if torch.is_grad_enabled():
        return cast("Tensor", Whole.apply(x, form, *parameters))
    return native.layer_forward(x, parameters, form)[0]


class Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, form: native.Form, *parameters: Tensor | None) -> Tensor:
        y, kept = native.layer_forward(x, parameters, form)
        ctx.form = form
        ctx.save_for_backward(x, kept, *parameters)
        return y

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Any, ...]:
        x, kept, *parameters = ctx.saved_tensors
        if torch.is_grad_enabled():

            def plain(x: Tensor, *parameters: Tensor | None) -> Tensor:
                return plain_layer(x, parameters, ctx.form)

            d_x, *found = gradients_with_graph(plain, (x, *parameters), (d_y,))
        else:
            d_x, found = native.layer_backward(d_y, x, kept, parameters, ctx.form, ctx.needs_input_grad[2:])
        return (d_x, None, *found)


def plain_layer(x: Tensor, parameters: Sequence[Tensor | None], form: native.Form) -> Tensor:
    """The same in differentiable steps."""
    *weights, A1, B1, diag1, A2, B2, diag2, weight, bias = cast("list[Any]", parameters)
    p = compute_projections(x, Projections._make(weights), None, None, "")[1]
    assert p.gate_vo is not None
    q, s1, k = (t.unflatten(-1, (form.routing_heads, -1)) for t in (p.q, p.s1, p.k))
    s2, v = (t.unflatten(-1, (form.heads, -1)) for t in (p.s2, p.v))
    routing, reading = Mixing(A1, B1, s1, diag1, form.shortcut1), Mixing(A2, B2, s2, diag2, form.shortcut2)
    return plain_readout(reference.mix(q, k, v, routing, reading, form.spec).flatten(2), p.gate_vo, weight, bias)
