"""What surrounds the operator in a layer and is limited by memory: convolutions and gates, each in one pass where possible.

Letters: B batch, T time, C width, W taps.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from hypermlp.ops import native
from hypermlp.ops.observer import Observer, observer_of, ordinary
from hypermlp.ops.registered import gradients_with_graph

TRITON_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def convs(
    x: Tensor, wk: Tensor, wv: Tensor, position: Tensor | None = None, history: Tensor | None = None, *, impl: str
) -> tuple[Tensor, Tensor]:
    """Two depthwise causal convolutions of x (B T C) with weights (C W): y[t] = Σ_j w[:, W−1−j] ⊙ x[t−j].

    A tap beyond a token's own sequence sees zero: `position` (1|B T) is the token's place in it (None: sequences begin at 0).
    Before t = 0 taps see `history` (B, W−1, C), for inference only.
    """
    if impl == "dense" or not ordinary(x, wk, wv, history):
        return plain_convs(x, wk, wv, position, history)
    use = kernels_for(impl, x, wk, wv)
    if use and observer_of(x, wk, wv) is Observer.NOBODY:
        return kernels(use).convs_forward(x, wk, wv, position, history)
    return convs_op(x, wk, wv, position, history, use)


def gate(x: Tensor, g: Tensor, *, impl: str) -> Tensor:
    """x ⊙ σ(g), both (B T C)."""
    use = kernels_for(impl, x, g)
    if use and ordinary(x, g):
        free = observer_of(x, g) is Observer.NOBODY
        return cast("Tensor", kernels(use).gate_forward(x, g) if free else gate_op(x, g, use))
    return plain_gate(x, g)


def kernels_for(impl: str, *tensors: Tensor) -> str:
    """Whose kernels may take these tensors as they are: "native", "triton" or nobody's, ""."""
    if impl == "native":
        return "native" if native.is_addressable(*tensors, half=True) else ""
    return "triton" if impl == "triton" and all(t.dtype in TRITON_TYPES for t in tensors) else ""


def kernels(use: str) -> Any:
    if use == "native":
        return native
    from hypermlp.ops.triton import pointwise  # imports triton

    return pointwise


def plain_gate(x: Tensor, g: Tensor) -> Tensor:
    return x * torch.sigmoid(g)


def plain_convs(
    x: Tensor, wk: Tensor, wv: Tensor, position: Tensor | None, history: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return plain_conv(x, wk, position, history), plain_conv(x, wv, position, history)


def plain_conv(x: Tensor, weight: Tensor, position: Tensor | None, history: Tensor | None) -> Tensor:
    """One convolution in differentiable steps."""
    taps, time = weight.shape[1], x.shape[1]
    before = x.new_zeros(x.shape[0], taps - 1, x.shape[2]) if history is None else history.to(x.dtype)
    padded = torch.cat([before, x], dim=1)
    y = x * weight[:, -1]
    for j in range(1, taps):
        y = y + tap(padded[:, taps - 1 - j : taps - 1 - j + time], position, j) * weight[:, taps - 1 - j]
    return y


def tap(shifted: Tensor, position: Tensor | None, j: int) -> Tensor:
    return shifted if position is None else torch.where((position >= j)[..., None], shifted, 0)


def plain_backward(
    d_yk: Tensor, d_yv: Tensor, x: Tensor, wk: Tensor, wv: Tensor, position: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    taps, time = wk.shape[1], x.shape[1]
    d_x, d_wk, d_wv = torch.zeros_like(x), torch.zeros_like(wk), torch.zeros_like(wv)
    for j in range(min(taps, time)):
        index, place = taps - 1 - j, None if position is None else position[:, j:]
        for d_y, weight, d_weight in ((d_yk, wk, d_wk), (d_yv, wv, d_wv)):
            d_tap = tap(d_y[:, j:], place, j)
            d_x[:, : time - j] += d_tap * weight[:, index]
            d_weight[:, index] = (d_tap * x[:, : time - j]).sum((0, 1))
    return d_x, d_wk, d_wv


def convs_forward(
    x: Tensor, wk: Tensor, wv: Tensor, position: Tensor | None, history: Tensor | None, use: str
) -> tuple[Tensor, Tensor]:
    compute = kernels(use).convs_forward if use else plain_convs
    yk, yv = compute(x, wk, wv, position, history)
    return yk, yv


def convs_backward(
    d_yk: Tensor, d_yv: Tensor, x: Tensor, wk: Tensor, wv: Tensor, position: Tensor | None, use: str
) -> tuple[Tensor, Tensor, Tensor]:
    compute = kernels(use).convs_backward if use else plain_backward
    d_x, d_wk, d_wv = compute(d_yk, d_yv, x, wk, wv, position)
    return d_x, d_wk, d_wv


@torch.library.custom_op("hypermlp::convs", mutates_args=())
def convs_op(
    x: Tensor, wk: Tensor, wv: Tensor, position: Tensor | None, history: Tensor | None, use: str
) -> tuple[Tensor, Tensor]:
    return convs_forward(x, wk, wv, position, history, use)


@convs_op.register_fake
def _(x: Tensor, wk: Tensor, wv: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(x.dtype, wk.dtype)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape, dtype=dtype)


@torch.library.custom_op("hypermlp::convs_backward", mutates_args=())
def convs_backward_op(
    d_yk: Tensor, d_yv: Tensor, x: Tensor, wk: Tensor, wv: Tensor, position: Tensor | None, use: str
) -> tuple[Tensor, Tensor, Tensor]:
    return convs_backward(d_yk, d_yv, x, wk, wv, position, use)


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
        found = gradients_with_graph(functools.partial(plain_convs, position=position), (x, wk, wv), (d_yk, d_yv))
    else:
        found = convs_backward_op(d_yk, d_yv, x, wk, wv, position, ctx.use)
    return (*found, None, None, None)


convs_op.register_autograd(_backward_convs, setup_context=_save_convs)


def gate_forward(x: Tensor, g: Tensor, use: str) -> Tensor:
    return cast("Tensor", kernels(use).gate_forward(x, g) if use else plain_gate(x, g))


def gate_backward(d_y: Tensor, x: Tensor, g: Tensor, use: str, *, overwrite: bool = False) -> tuple[Tensor, Tensor]:
    """Gradients of x and g; overwrite: that of x in the place of d_y."""
    if not use:
        s = torch.sigmoid(g)
        return d_y * s, torch.ops.aten.sigmoid_backward(d_y * x, s)
    d_x, d_g = d_y if overwrite else x.new_empty(x.shape), g.new_empty(g.shape)
    kernels(use).gate_backward(d_y, x, g, d_x, d_g)
    return d_x, d_g


@torch.library.custom_op("hypermlp::gate", mutates_args=())
def gate_op(x: Tensor, g: Tensor, use: str) -> Tensor:
    return gate_forward(x, g, use)


@gate_op.register_fake
def _(x: Tensor, g: Tensor, use: str) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, g.dtype))


@torch.library.custom_op("hypermlp::gate_backward", mutates_args=())
def gate_backward_op(d_y: Tensor, x: Tensor, g: Tensor, use: str) -> tuple[Tensor, Tensor]:
    return gate_backward(d_y, x, g, use)


@gate_backward_op.register_fake
def _(d_y: Tensor, x: Tensor, g: Tensor, use: str) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), g.new_empty(g.shape)


def _save_gate(ctx: Any, inputs: tuple[Tensor, Tensor, str], output: Tensor) -> None:
    x, g, ctx.use = inputs
    ctx.save_for_backward(x, g)


def _backward_gate(ctx: Any, d_y: Tensor) -> Any:
    if torch.is_grad_enabled():
        return (*gradients_with_graph(plain_gate, ctx.saved_tensors, (d_y,)), None)
    return (*gate_backward_op(d_y, *ctx.saved_tensors, ctx.use), None)


gate_op.register_autograd(_backward_gate, setup_context=_save_gate)


# The small projections, made in one product and used in four ways, activated without taking them apart: y (B T C) holds q, m1,
# s1, s2 side by side, and its gradient comes back in one piece. ops/layer.py differentiates them.


def plain_gates(y: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """q ⊙ σ(m1), σ(s1) and σ(s2) of y with the widths `sizes`."""
    q, m1, s1, s2 = y.split(list(sizes), dim=-1)
    return q * torch.sigmoid(m1), torch.sigmoid(s1), torch.sigmoid(s2)


def gates_forward(y: Tensor, sizes: Sequence[int], use: str) -> tuple[Tensor, Tensor, Tensor]:
    q, s1, s2 = kernels(use).gates_forward(y, sizes) if use else plain_gates(y, sizes)
    return q, s1, s2


def gates_backward(d_q: Tensor, d_s1: Tensor, d_s2: Tensor, y: Tensor, sizes: Sequence[int], use: str) -> Tensor:
    if not use:
        q, m1, s1, s2 = y.split(list(sizes), dim=-1)
        d_s1, d_s2 = (torch.ops.aten.sigmoid_backward(d, torch.sigmoid(s)) for d, s in ((d_s1, s1), (d_s2, s2)))
        return torch.cat([*gate_backward(d_q, q, m1, use), d_s1, d_s2], dim=-1)
    d_y = y.new_empty(y.shape)
    kernels(use).gates_backward(d_q, d_s1, d_s2, y, sizes, d_y)
    return d_y
