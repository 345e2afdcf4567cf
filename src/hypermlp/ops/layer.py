"""What surrounds the operator in a layer, as two nodes of autograd that keep little: the projections and the gated readout.

The projections keep x and the joined product; the convolutions' outputs are computed again in backward. The readout keeps what
the operator keeps anyway and its gate. `run_whole` is a whole layer in one node, for few tokens.

All of it is for the usual layer (both mixings, both gates, sigmoid gates, no rotation) in eager calls whose modules nobody
watches: mixers/route.py asks.

Letters: B batch, T time, C width, W taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from hypermlp.ops import dispatch, native, reference
from hypermlp.ops.native.layer import WholeCall
from hypermlp.ops.observer import needs_gradient
from hypermlp.ops.parameters import LayerParameters, LayerShape
from hypermlp.ops.pointwise import kernels, kernels_for
from hypermlp.ops.registered import Inputs, flatten, gradients_with_graph, reference_mix
from hypermlp.ops.types import MixCall, Mixing, Spec


class Projections(NamedTuple):
    """All (B T …): q gated, both controls activated, the readout's gate before its activation."""

    q: Tensor
    s1: Tensor
    s2: Tensor
    k: Tensor
    v: Tensor
    gate_vo: Tensor


def project(x: Tensor, p: LayerParameters, position: Tensor | None, history: Tensor | None, *, use: str) -> Projections:
    """The projections of x (B T C); position and history as in pointwise.convs, use from pointwise.kernels_for."""
    p = p.projections()
    if not needs_gradient(x, *p):
        return compute_projections(x, p, position, history, use)[1]
    assert history is None, "for inference only"
    return Projections._make(Project.apply(x, position, use, *p))


def compute_projections(
    x: Tensor, p: LayerParameters, position: Tensor | None, history: Tensor | None, use: str
) -> tuple[Tensor, Projections]:
    """The joined product and what is made of it; in differentiable steps where use is "plain"."""
    if use == "native" and history is None and native.fits(x, p):
        y, (q, _, s1, s2, k, v, gate_vo) = native.project.forward(x, position, p)
        return y, Projections(*cast("Any", (q, s1, s2, k, v, gate_vo)))
    x_k, x_v = convolve(x, p, position, history, use)
    k, v = F.linear(x_k, p.k, p.k_bias), F.linear(x_v, p.v, p.v_bias)
    del x_k, x_v
    y = F.linear(x, *p.joined())
    gate_vo = F.linear(x, p.gate_vo, p.gate_vo_bias)
    q, s1, s2 = kernels(use).gates_forward(y, p.sizes)
    return y, Projections(q, s1, s2, k, v, gate_vo)


def convolve(x: Tensor, p: LayerParameters, position: Tensor | None, history: Tensor | None, use: str) -> tuple[Tensor, Tensor]:
    if p.conv_k is None:
        return x, x
    return kernels(use).convs_forward(x, p.conv_k, p.conv_v, position, history)


class Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, position: Tensor | None, use: str, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        y, made = compute_projections(x, LayerParameters._make(parameters), position, None, use)
        ctx.use = use
        ctx.save_for_backward(x, position, y, *parameters)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *d: Tensor) -> tuple[Any, ...]:
        x, position, y, *parameters = ctx.saved_tensors
        if torch.is_grad_enabled():

            def plain(x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, ...]:
                return tuple(compute_projections(x, LayerParameters._make(parameters), position, None, "plain")[1])

            d_x, *plainly = gradients_with_graph(plain, (x, *parameters), d)
            return (d_x, None, None, *plainly)
        p, wanted = LayerParameters._make(parameters), LayerParameters._make(ctx.needs_input_grad[3:])
        if ctx.use == "native" and native.fits(x, p):
            d_q, d_s1, d_s2, *others = d
            d_x, found = native.project.backward((d_q, None, d_s1, d_s2, *others), y, x, position, p, wanted)
        else:
            d_x, found = project_backward(Projections._make(d), y, x, position, p, wanted, ctx.use)
        return (d_x, None, None, *found)


def project_backward(
    d: Projections, y: Tensor, x: Tensor, position: Tensor | None, p: LayerParameters, wanted: LayerParameters, use: str
) -> tuple[Tensor, LayerParameters]:
    """Gradients of x and of the wanted parameters. Large tensors are freed as soon as they have served."""
    found: dict[str, Tensor | None] = dict.fromkeys(LayerParameters._fields)

    def differentiate(name: str, d_y: Tensor, x: Tensor) -> None:
        if getattr(wanted, name):
            found[name] = flat(d_y).T @ flat(x)
        if getattr(wanted, f"{name}_bias"):
            found[f"{name}_bias"] = flat(d_y).sum(0)

    x_k, x_v = convolve(x, p, position, None, use)
    differentiate("k", d.k, x_k)
    differentiate("v", d.v, x_v)
    del x_k, x_v
    d_xk = d.k @ p.k
    if p.conv_k is None:
        d_x = flat(d_xk).addmm_(flat(d.v), p.v)
    else:
        d_x, found["conv_k"], found["conv_v"] = kernels(use).convs_backward(d_xk, d.v @ p.v, x, p.conv_k, p.conv_v, position)
        d_x = flat(d_x)
    del d_xk
    differentiate("gate_vo", d.gate_vo, x)
    d_x.addmm_(flat(d.gate_vo), p.gate_vo)
    d_y = flat(kernels(use).gates_backward(d.q, d.s1, d.s2, y, p.sizes))
    d_x.addmm_(d_y, p.joined()[0])
    if any(wanted[:4]):
        found |= zip(LayerParameters._fields[:4], (d_y.T @ flat(x)).split(p.sizes), strict=True)
    if any(wanted[7:11]):
        found |= zip(LayerParameters._fields[7:11], d_y.sum(0).split(p.sizes), strict=True)
    kept = (g if want else None for g, want in zip(found.values(), wanted, strict=True))
    return d_x.view(x.shape), LayerParameters._make(kept)


def flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def mix_and_read(impl: str, call: MixCall, gate: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(o ⊙ σ(gate)) Wᵀ + b for the operator's o (B T H V) and gate (B T H*V).

    Where autograd observes compiled code, the gated o is kept and o is not.
    """
    inputs, readout = flatten(call), (gate, weight, bias)
    compiled = impl == "native" and native.is_addressable(*inputs.differentiable, *readout, half=True)
    if compiled and needs_gradient(*inputs, *readout):
        return cast("Tensor", OwnedReadOut.apply(native.kernels.mix_owned(inputs, call.spec), *readout, call.spec, *inputs))
    o = dispatch.compute(impl, call).flatten(2)
    use = kernels_for(impl, o, gate)
    if needs_gradient(o, *readout):
        return cast("Tensor", ReadOut.apply(o, *readout, use))
    return compute_readout(o, *readout, use)[1]


def compute_readout(o: Tensor, gate: Tensor, weight: Tensor, bias: Tensor | None, use: str) -> tuple[Tensor, Tensor]:
    """The gated o, and y."""
    gated = kernels(use).gate_forward(o, gate)
    return gated, F.linear(gated, weight, bias)


def plain_readout(o: Tensor, gate: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return compute_readout(o, gate, weight, bias, "plain")[1]


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
        gated = kernels(ctx.use).gate_forward(o, gate)
        d_gated, d_weight, d_bias = linear_backward(d_y, gated, weight, ctx.needs_input_grad[2:4])
        del gated
        return (*kernels(ctx.use).gate_backward(d_gated, o, gate, overwrite=True), d_weight, d_bias, None)


def linear_backward(
    d_y: Tensor, x: Tensor, weight: Tensor, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    d = flat(d_y).contiguous()  # once for both products
    d_weight = d.T @ flat(x) if wanted[0] else None
    return (d @ weight).view(x.shape), d_weight, d.sum(0) if wanted[1] else None


class OwnedReadOut(torch.autograd.Function):
    """The readout of o (B T H V) from registered.owned: it keeps the gated o alone.

    The operator's inputs are there for gradients of gradients alone; the operator keeps them too.
    """

    @staticmethod
    def forward(
        ctx: Any, o: Tensor, gate: Tensor, weight: Tensor, bias: Tensor | None, spec: Spec, *inputs: Tensor | None
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
            return (None, *found[:3], None, *found[3:], None)
        d_gated, d_weight, d_bias = linear_backward(d_y, gated, weight, ctx.needs_input_grad[2:4])
        d_o, d_gate = native.kernels.ungate(d_gated, gated, gate)
        return (d_o.view(ctx.shape), d_gate, d_weight, d_bias, None, *(None for _ in tensors))


def run_whole(x: Tensor, call: WholeCall) -> Tensor:
    """A layer on plain sequences x (B T C) in one call of compiled code, and one node of autograd where that records."""
    if needs_gradient(x, *call.parameters):
        return cast("Tensor", FusedLayer.apply(x, call, *call.parameters))
    return call.forward(x)[0]


class FusedLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, call: WholeCall, *parameters: Tensor | None) -> Tensor:
        y, kept = call.forward(x)
        ctx.call = call
        ctx.save_for_backward(x, kept, *parameters)
        return y

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Any, ...]:
        x, kept, *parameters = ctx.saved_tensors
        p, call = LayerParameters._make(parameters), ctx.call
        if torch.is_grad_enabled():

            def plain(x: Tensor, *parameters: Tensor | None) -> Tensor:
                return plain_layer(x, LayerParameters._make(parameters), call.shape)

            d_x, *plainly = gradients_with_graph(plain, (x, *p), (d_y,))
            return (d_x, None, *plainly)
        if not call.reads(p):  # kept elsewhere until now, or replaced
            call = WholeCall(p, call.shape)
        d_x, found = call.backward(d_y, x, kept, LayerParameters._make(ctx.needs_input_grad[2:]))
        return (d_x, None, *found)


def plain_layer(x: Tensor, p: LayerParameters, shape: LayerShape) -> Tensor:
    """The same in differentiable steps."""
    made = compute_projections(x, p, None, None, "plain")[1]
    q, s1, k = (t.unflatten(-1, (shape.routing_heads, -1)) for t in (made.q, made.s1, made.k))
    s2, v = (t.unflatten(-1, (shape.heads, -1)) for t in (made.s2, made.v))
    routing, reading = Mixing(p.A1, p.B1, s1, p.diag1, shape.shortcut1), Mixing(p.A2, p.B2, s2, p.diag2, shape.shortcut2)
    return plain_readout(reference.mix(q, k, v, routing, reading, shape.spec).flatten(2), made.gate_vo, p.o, p.o_bias)
