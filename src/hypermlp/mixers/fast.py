"""What the fast routes compute; see mixers/route.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from hypermlp.cache import Cache
from hypermlp.mixers import decode
from hypermlp.mixers.parts import heads
from hypermlp.mixers.route import known_parameters, whole_call
from hypermlp.ops import layer as nodes
from hypermlp.ops import pointwise

if TYPE_CHECKING:
    from hypermlp.mixers.base import Tokens
    from hypermlp.mixers.hyper import HyperGLU

Run = Callable[["HyperGLU", "Tokens", Cache | None, str, int | None], Tensor]


def run_whole(layer: HyperGLU, tokens: Tokens, cache: Cache | None, impl: str, chunk: int | None) -> Tensor:
    """The layer in one call."""
    return nodes.run_whole(tokens.x, whole_call(layer))


def run_step(layer: HyperGLU, tokens: Tokens, cache: Cache | None, impl: str, chunk: int | None) -> Tensor:
    """One token for each row in one call, which writes into the cache itself."""
    assert cache is not None
    return decode.run(layer, tokens.x, cache)


def run_fused(layer: HyperGLU, tokens: Tokens, cache: Cache | None, impl: str, chunk: int | None) -> Tensor:
    """Projections and readout as a node of autograd each."""
    assert layer.op1 is not None
    assert layer.op2 is not None
    c, G, H = layer.config, layer.config.routing_heads, layer.config.n_head
    p, history = known_parameters(layer), None if cache is None else cache.history()
    made = nodes.project(tokens.x, p, tokens.document_position, history, use=pointwise.kernels_for(impl, tokens.x))
    q, k, v = heads(made.q, G, c.head_key_width), heads(made.k, G, c.head_key_width), heads(made.v, H, c.head_value_width)
    call = layer.arrange(tokens, cache, q, k, v, layer.op1(made.s1), layer.op2(made.s2), chunk)
    return nodes.mix_and_read(impl, call, made.gate_vo, p.o, p.o_bias)


RUN: dict[str, Run] = {"whole": run_whole, "step": run_step, "fused": run_fused}
