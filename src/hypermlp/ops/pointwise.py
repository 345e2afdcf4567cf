"""What surrounds the operator in a layer and is limited by memory: convolutions and gates, each in one pass where possible.

Three modules have the same functions for it: plain.py, native/kernels.py and triton/pointwise.py. Letters: B batch, T time,
C width, W taps.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from hypermlp.ops import native, plain
from hypermlp.ops.observer import Observer, needs_gradient, observer_of, ordinary
from hypermlp.ops.registered import gradients_with_graph

TRITON_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def convs(
    x: Tensor, wk: Tensor, wv: Tensor, position: Tensor | None = None, history: Tensor | None = None, *, impl: str
) -> tuple[Tensor, Tensor]:
    """Two depthwise causal convolutions of x (B T C) with weights (C W): y[t] = Σ_j w[:, W−1−j] ⊙ x[t−j].

    Args:
        x: the inputs (B T C).
        wk, wv: weights (C W), newest tap last.
        position: each token's place in its own sequence (1|B T), beyond which taps see zero; None: sequences begin at 0.
        history: the inputs before t = 0 (B W−1 C), for inference only.
        impl: from dispatch.resolve.
    """
    if impl == "dense" or not ordinary(x, wk, wv, history):
        return plain.convs_forward(x, wk, wv, position, history)
    use = kernels_for(impl, x, wk, wv)
    if observer_of(x, wk, wv) is Observer.NOBODY:
        return kernels(use).convs_forward(x, wk, wv, position, history)
    return convs_op(x, wk, wv, position, history, use)


def gate(x: Tensor, g: Tensor, *, impl: str) -> Tensor:
    """x ⊙ σ(g), both (B T C); in plain steps for a compiler, which fuses them with what is around."""
    use = kernels_for(impl, x, g)
    if use == "plain" or observer_of(x, g) is Observer.TRACER:
        return plain.gate_forward(x, g)
    made: Tensor = Gate.apply(x, g, use) if needs_gradient(x, g) else kernels(use).gate_forward(x, g)
    return made


def kernels_for(impl: str, *tensors: Tensor) -> str:
    """Whose kernels take these tensors as they are: "native", "triton" or, where neither can, "plain"."""
    if impl == "native" and native.is_addressable(*tensors, half=True):
        return "native"
    return "triton" if impl == "triton" and all(t.dtype in TRITON_TYPES for t in tensors) else "plain"


def kernels(use: str) -> Any:
    """The module of these kernels."""
    if use != "triton":
        return native.kernels if use == "native" else plain
    from hypermlp.ops.triton import pointwise  # imports triton

    return pointwise


@torch.library.custom_op("hypermlp::convs", mutates_args=())
def convs_op(
    x: Tensor, wk: Tensor, wv: Tensor, position: Tensor | None, history: Tensor | None, use: str
) -> tuple[Tensor, Tensor]:
    return kernels(use).convs_forward(x, wk, wv, position, history)


@convs_op.register_fake
def _(x: Tensor, wk: Tensor, wv: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(x.dtype, wk.dtype)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape, dtype=dtype)


@torch.library.custom_op("hypermlp::convs_backward", mutates_args=())
def convs_backward_op(
    d_yk: Tensor, d_yv: Tensor, x: Tensor, wk: Tensor, wv: Tensor, position: Tensor | None, use: str
) -> tuple[Tensor, Tensor, Tensor]:
    return kernels(use).convs_backward(d_yk, d_yv, x, wk, wv, position)


@convs_backward_op.register_fake
def _(d_yk: Tensor, d_yv: Tensor, x: Tensor, wk: Tensor, wv: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), wk.new_empty(wk.shape), wv.new_empty(wv.shape)


def _save_convs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, wk, wv, position, history, ctx.use = inputs
    if history is not None and any(t.requires_grad for t in (x, wk, wv)):
        raise ValueError("a convolution with history is for inference; it has no gradients")
    ctx.save_for_backward(x, wk, wv, position)


def _backward_convs(ctx: Any, d_yk: Tensor, d_yv: Tensor) -> tuple[Any, ...]:
    x, wk, wv, position = ctx.saved_tensors
    if torch.is_grad_enabled():
        found = gradients_with_graph(functools.partial(plain.convs_forward, position=position), (x, wk, wv), (d_yk, d_yv))
    else:
        found = convs_backward_op(d_yk, d_yv, x, wk, wv, position, ctx.use)
    return (*found, None, None, None)


convs_op.register_autograd(_backward_convs, setup_context=_save_convs)


class Gate(torch.autograd.Function):
    """A gate whose backward is one pass, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, g: Tensor, use: str) -> Tensor:
        ctx.use = use
        ctx.save_for_backward(x, g)
        made: Tensor = kernels(use).gate_forward(x, g)
        return made

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            return (*gradients_with_graph(plain.gate_forward, ctx.saved_tensors, (d_y,)), None)
        return (*kernels(ctx.use).gate_backward(d_y, *ctx.saved_tensors), None)
