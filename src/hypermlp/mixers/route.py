"""Which way a call takes through a HyperGLU layer: asked once per call, answered with a reason.

    whole     the layer is one call of compiled code, and one node of autograd
    step      one token of each row joins a cache, in one call of compiled code (mixers/decode.py)
    fused     projections and readout are a node of autograd each, around the operator
    modules   every module is called, one after the other: what a compiler, a hook, an adapter or autocast must see

Every faster way computes what `modules` computes, or is not taken. Below them all, `impl` names what computes the operator.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from hypermlp.cache import Cache
from hypermlp.mixers import decode
from hypermlp.mixers.modules import find_hooked
from hypermlp.ops import dispatch, native
from hypermlp.ops.observer import Observer, observer_of

if TYPE_CHECKING:
    from hypermlp.mixers.base import Tokens
    from hypermlp.mixers.hyper import HyperGLU

logger = logging.getLogger("hypermlp.route")


class Route(NamedTuple):
    """A way through the layer, the operator's implementation, and why not a faster one."""

    kind: Literal["whole", "step", "fused", "modules"]
    impl: str
    why: str

    def __str__(self) -> str:
        return f"{self.kind} ({self.impl}): {self.why}"


def choose_route(layer: HyperGLU, tokens: Tokens, cache: Cache | None, impl: str | None) -> Route:
    """The fastest way that provably computes what calling every module computes."""
    impl = dispatch.resolve(impl or layer.config.impl_default, tokens.x, layer.spec.aligner)
    why = observed(layer, tokens.x, impl)
    if why is None and steps(layer, tokens, cache, impl):
        route = Route("step", impl, "one token for each row of a cache")
    else:
        why = why or altered(layer)
        route = Route("modules", impl, why) if why else fastest(layer, tokens, cache, impl)
    if not torch.compiler.is_compiling():
        logger.debug("%s", route)
    return route


def observed(layer: HyperGLU, x: Tensor, impl: str) -> str | None:
    """Why every module must be called, for what surrounds this call; None if nothing."""
    if impl == "dense":
        return "the dense implementation is the reference"
    if observer_of(x) is Observer.TRACER:
        return "a compiler, a dispatch mode, a transform or a tensor subclass sees every operation"
    if torch.is_autocast_enabled(x.device.type):
        return "autocast chooses the types"
    if layer.config.dropout and layer.training:
        return "dropout"
    if any(name in layer.__dict__ or getattr(type(layer), name) is not flow for name, flow in flow_of_the_paper().items()):
        return "the layer has a project or a read_out of its own"
    return None


def altered(layer: HyperGLU) -> str | None:
    """Why every module must be called, for what the layer is; None if compiled code may read the parameters instead."""
    hooked = find_hooked(layer)
    return decode.own_option(layer) or (None if hooked is None else f"{hooked} {decode.HOOKED}")


def steps(layer: HyperGLU, tokens: Tokens, cache: Cache | None, impl: str) -> bool:
    """Whether these are single tokens that join a cache in one call."""
    x = tokens.x
    if cache is None or impl != "native" or x.shape[1] != 1 or not x.shape[0] or tokens.order is not None:
        return False
    return x.is_cpu and not x.is_neg() and decode.takes(cache) and decode.prepared(layer).why is None


@functools.cache
def flow_of_the_paper() -> dict[str, Callable[..., Any]]:
    """What a subclass may replace, and `modules` calls."""
    from hypermlp.mixers.hyper import HyperGLU

    return {"project": HyperGLU.project, "read_out": HyperGLU.read_out}


def fastest(layer: HyperGLU, tokens: Tokens, cache: Cache | None, impl: str) -> Route:
    """The way of a layer whose modules need not be called."""
    x, p = tokens.x, layer.tensors()
    batched = tokens.order is None and not tokens.packed
    compiled = impl == "native" and batched and native.is_addressable(x) and native.is_addressable(*p, contiguous=True)
    per_head = all(op is None or op.A.shape[0] == op.heads for op in (layer.op1, layer.op2))
    if any(part is None for part in (layer.op1, layer.op2, layer.gate_qk, layer.gate_vo)):
        return Route("modules", impl, "the layer lacks a mixing or a gate")
    if cache is None and compiled and per_head and native.fits(x, p) and x.shape[0] * x.shape[1] <= native.MOST_TOKENS:
        return Route("whole", impl, f"plain sequences of up to {native.MOST_TOKENS} tokens at a small width")
    return Route("fused", impl, "the usual layer, and nobody watches its modules")
