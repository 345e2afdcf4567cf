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
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from hypermlp.cache import Cache
from hypermlp.mixers import decode
from hypermlp.mixers.modules import OfThread, Watch, find_hooked
from hypermlp.ops import dispatch, native
from hypermlp.ops.native.layer import WholeCall
from hypermlp.ops.observer import Observer, observer_of
from hypermlp.ops.parameters import LayerParameters

if TYPE_CHECKING:
    from hypermlp.mixers.base import Tokens
    from hypermlp.mixers.hyper import HyperGLU

logger = logging.getLogger("hypermlp.route")
FLOW: dict[str, Callable[..., Any]] = {}  # HyperGLU's methods as they were written; hyper.py fills it
BEFORE = ("forward", "prepare", "mix")  # what is called before a route is chosen
INSIDE = ("project", "arrange", "read_out", "_activated", "_gated")  # what `modules` calls, and other routes do not


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
        route = Route("modules", impl, why) if why else fastest(facts_of(layer), tokens, cache, impl)
    if not torch.compiler.is_compiling():
        logger.debug("%s", route)
    return route


def observed(layer: HyperGLU, x: Tensor, impl: str) -> str | None:
    """Why every module must be called, for what surrounds this call; None if nothing."""
    if impl == "dense":
        return "the dense implementation is the reference"
    if observer_of(x) is Observer.TRACER:
        return "a compiler, a mode, a transform or a tensor subclass sees every operation"
    if torch.is_autocast_enabled(x.device.type):
        return "autocast chooses the types"
    if layer.config.dropout and layer.training:
        return "dropout"
    own = replaced(layer, INSIDE)
    return None if own is None else f"the layer has a method {own} of its own"


def steps(layer: HyperGLU, tokens: Tokens, cache: Cache | None, impl: str) -> bool:
    """Whether these are single tokens that join a cache in one call."""
    x = tokens.x
    if cache is None or impl != "native" or x.shape[1] != 1 or not x.shape[0] or tokens.order is not None:
        return False
    return x.is_cpu and not x.is_neg() and decode.takes(cache) and decode.prepared(layer).why is None


def replaced(layer: HyperGLU, names: Sequence[str]) -> str | None:
    """Which of these methods of HyperGLU a subclass, an instance or a patch has replaced; None if none."""
    own, kind = layer.__dict__, type(layer)
    return next((name for name in names if name in own or getattr(kind, name) is not FLOW[name]), None)


class LayerFacts:
    """What a route asks of the layer itself: true until somebody changes it, so asked once."""

    def __init__(self, layer: HyperGLU) -> None:
        self.why = why_modules(layer)
        if self.why is None:
            self.watch, self.parameters, self.shape = Watch(layer), layer.tensors(), layer.shape()

    def holds(self) -> bool:
        """Whether it still is what would be found now."""
        return self.why is None and self.watch.unchanged()

    @functools.cached_property
    def whole(self) -> WholeCall | None:
        """The layer in one call of the native kernel, which must be there; None if it does not take such a layer."""
        p = self.parameters
        shared = (len(p.A1), len(p.A2)) != (self.shape.routing_heads, self.shape.heads)
        if shared or not native.is_addressable(*p, contiguous=True) or not native.fits(p.q[None], p):
            return None
        return WholeCall(p, self.shape)


def why_modules(layer: HyperGLU) -> str | None:
    """Why every module must be called, for what the layer is; None if compiled code may read the parameters instead."""
    hooked = find_hooked(layer)
    if hooked is not None:
        return f"{hooked} {decode.HOOKED}"
    lacks = any(part is None for part in (layer.op1, layer.op2, layer.gate_qk, layer.gate_vo))
    return decode.own_option(layer) or ("the layer lacks a mixing or a gate" if lacks else None)


_facts: OfThread[LayerFacts] = OfThread()


def facts_of(layer: HyperGLU) -> LayerFacts:
    return _facts.get(layer, LayerFacts)


def known_parameters(layer: HyperGLU) -> LayerParameters:
    """Of a layer whose route was just found to be "whole" or "fused"."""
    return _facts.found[layer].parameters


def whole_call(layer: HyperGLU) -> WholeCall:
    """Of a layer whose route was just found to be "whole"."""
    call = _facts.found[layer].whole
    assert call is not None
    return call


def fastest(facts: LayerFacts, tokens: Tokens, cache: Cache | None, impl: str) -> Route:
    """The way of a call that nobody watches."""
    if facts.why is not None:
        return Route("modules", impl, facts.why)
    x, batched = tokens.x, tokens.order is None and not tokens.packed
    plain = impl == "native" and batched and cache is None and native.is_addressable(x)
    if plain and x.shape[0] * x.shape[1] <= native.MOST_TOKENS and facts.whole is not None:
        return Route("whole", impl, f"plain sequences of up to {native.MOST_TOKENS} tokens at a small width")
    return Route("fused", impl, "the usual layer, with no hooks on its modules")
