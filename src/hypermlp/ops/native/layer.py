"""A whole layer in one call of the compiled code forward and one back: for few tokens, where every call counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hypermlp.ops.native.bindings import ADDRESSES, LayerArguments, call, pointer, thread_pool, whole
from hypermlp.ops.types import Spec

CONV_K = 14  # its place among the parameters, see Form
MOST_TOKENS = 512  # from which the calls are a small part, and nodes that free their tensors one by one need less memory

Optional = Sequence[Tensor | None]


class Form(NamedTuple):
    """What is fixed about a layer. Its parameters: those of ops.layer.Projections, then A, B and diag of both mixings, then
    weight and bias of the readout."""

    spec: Spec
    heads: int
    routing_heads: int
    shortcut1: bool
    shortcut2: bool

    def arguments(self, x: Tensor, parameters: Optional) -> LayerArguments:
        """For contiguous tensors."""
        q, _, s1, s2, _, v, *_ = (0 if w is None else w.shape[0] for w in parameters[:7])
        (B, T, C), H, G, spec = x.shape, self.heads, self.routing_heads, self.spec
        conv = parameters[CONV_K]
        return LayerArguments(
            *(B, T, C, 0 if conv is None else conv.shape[1], H, G, q // G, v // H, s1 // G, s2 // H, spec.block_size),
            *(spec.kind == "relu", spec.norm != "none", self.shortcut1, self.shortcut2, spec.eps),
            *(torch.get_num_threads(), thread_pool(), ADDRESSES(*map(pointer, parameters)), pointer(x), None),
            B * T * (4 * q + 2 * s1 + 2 * s2 + 3 * v + H),
        )


def layer_forward(x: Tensor, parameters: Optional, form: Form) -> tuple[Tensor, Tensor]:
    """y (B T C) with contiguous parameters, and what backward needs of the way there."""
    x = whole(x)
    a = form.arguments(x, parameters)
    y, kept = x.new_empty(x.shape), x.new_empty(a.kept_size)
    a.y, a.kept = pointer(y), pointer(kept)
    call("hm_layer_forward", a)
    return y, kept


def layer_backward(
    d_y: Tensor, x: Tensor, kept: Tensor, parameters: Optional, form: Form, wanted: Sequence[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    """Gradients of x and of the wanted parameters."""
    d_y, x = whole(d_y), whole(x)
    a = form.arguments(x, parameters)
    d_x = x.new_empty(x.shape)
    found = [t.new_empty(t.shape) if want and t is not None else None for t, want in zip(parameters, wanted, strict=True)]
    a.kept, a.dy, a.dx, a.gradient = pointer(kept), pointer(d_y), pointer(d_x), ADDRESSES(*map(pointer, found))
    if kept.numel() != a.kept_size:
        raise ValueError("the layer's parameters changed their shapes between forward and backward")
    call("hm_layer_backward", a)
    return d_x, found
