"""Recurrences of scalars, h_t = e^{g_t} h_{t−1} + x_t for each channel, and Mamba's selective form of them.

They are computed in blocks of time: place by place over all blocks at once, then in the same way over the blocks' last places.
Steps in Python grow with the logarithm of the length, work with the length; nothing is divided by a decay or raised to a
positive power, so decays of any strength are exact. Letters: B batch, T time, E channels, N state width.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hypermlp.ops import flops, foreign, native
from hypermlp.ops.observer import Observer, observer_of, ordinary, transform
from hypermlp.ops.recurrence import expand
from hypermlp.ops.registered import gradients_with_graph
from hypermlp.ops.types import compute_dtype, no_autocast

PLACES = 32  # of a block; a power of two, since ops/slots.py halves it


def scan(
    g: Tensor, x: Tensor, state: Tensor | None = None, *, begins: Tensor | None = None, padding: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """h (B T …) and the state after the last token (B …, in float32 at least).

    Args:
        g: log of the decay (B T …), at most 0.
        x: what is added (B T …).
        state, begins, padding: as in ops.recurrence.
    """
    dtype, exact = x.dtype, compute_dtype(x.dtype)
    if padding is not None:
        g, x = g.masked_fill(expand(padding, g), 0), x.masked_fill(expand(padding, x), 0)
    served = foreign.scan(g, x, state, begins)
    if served is not None:
        return served
    g, x = g.to(exact), x.to(exact)
    if begins is not None:
        g = g.masked_fill(expand(begins, g), float("-inf"))
    state = x.new_zeros(x.shape[0], *x.shape[2:]) if state is None else state.to(exact)
    if x.shape[1] == 0:
        return x.to(dtype), state
    h = scan_op(g, x, state) if transform() is None and ordinary(g, x, state) else plain_scan(g, x, state)
    return h.to(dtype), h[:, -1].clone()  # not a view, which would keep all of h


def plain_scan(g: Tensor, x: Tensor, state: Tensor) -> Tensor:
    """The equation, one token after another, which every kind of differentiation supports."""
    h, states = state, []
    for t in range(x.shape[1]):
        h = g[:, t].exp() * h + x[:, t]
        states.append(h)
    return torch.stack(states, 1)


def accumulate(a: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The products a_1 … a_t, and h_t = a_t h_{t−1} + x_t from h_0 = 0, for a and x (B T …)."""
    B, T, *rest = x.shape
    blocks = -(-T // PLACES)
    places = PLACES if blocks > 1 else T
    gap = [0, 0] * len(rest) + [0, blocks * places - T]
    a, h = (F.pad(t.contiguous(), gap).view(B, blocks, places, *rest) for t in (a, x))  # copies: they change in place
    for j in range(1, places):
        h[:, :, j].addcmul_(a[:, :, j], h[:, :, j - 1])
        a[:, :, j] *= a[:, :, j - 1]
    if blocks > 1:
        past_a, past_h = accumulate(a[:, :-1, -1], h[:, :-1, -1])  # up to the end of each block but the last
        h[:, 1:].addcmul_(a[:, 1:], past_h[:, :, None])
        a[:, 1:] *= past_a[:, :, None]
    return a.flatten(1, 2)[:, :T], h.flatten(1, 2)[:, :T]


@torch.library.custom_op("hypermlp::scan", mutates_args=())
def scan_op(g: Tensor, x: Tensor, state: Tensor) -> Tensor:
    a, h = accumulate(g.exp(), x)
    return h.addcmul_(a, state[:, None]).contiguous()


@scan_op.register_fake
def _(g: Tensor, x: Tensor, state: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("hypermlp::scan_backward", mutates_args=())
def scan_backward_op(d_h: Tensor, g: Tensor, h: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same recurrence from the end: dx_t = dh_t + e^{g_{t+1}} dx_{t+1}."""
    decay = g.contiguous().exp()
    d_x = accumulate(decay.roll(-1, 1).flip(1), d_h.flip(1))[1].flip(1)
    d_past = decay.mul_(d_x)  # of e^{g_t} h_{t−1} with respect to h_{t−1}
    d_state = d_past[:, 0].clone()
    d_past[:, 1:] *= h[:, :-1]
    d_past[:, 0] *= state
    return d_past, d_x, d_state


@scan_backward_op.register_fake
def _(d_h: Tensor, g: Tensor, h: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return g.new_empty(g.shape), g.new_empty(g.shape), g.new_empty(state.shape)


def _save_scan(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    g, _, state = inputs
    ctx.save_for_backward(g, output, state)


def _backward_scan(ctx: Any, d_h: Tensor) -> tuple[Any, ...]:
    backward = scan_gradients if torch.is_grad_enabled() else scan_backward_op
    return backward(d_h, *ctx.saved_tensors)


def scan_gradients(d_h: Tensor, g: Tensor, h: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """scan_backward_op in steps that autograd can differentiate again."""
    d_x = plain_scan(g.roll(-1, 1).flip(1), d_h.flip(1), torch.zeros_like(state)).flip(1)
    d_past = g.exp() * d_x
    return d_past * torch.cat([state[:, None], h[:, :-1]], dim=1), d_x, d_past[:, 0]


scan_op.register_autograd(_backward_scan, setup_context=_save_scan)


def selective_scan(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor | None = None,
    *,
    begins: Tensor | None = None,
    padding: Tensor | None = None,
    impl: str = "dense",
) -> tuple[Tensor, Tensor]:
    """Mamba's h_t = e^{Δ_t A} h_{t−1} + (Δ_t x_t) B_t and y_t = C_t h_t: y (B T E) and the last state (B N E).

    Args:
        x, delta: the channels and their Δ ≥ 0 (B T E).
        A: (E N), at most 0.
        B, C: (B T N), for all channels.
        state: (B N E), in float32 at least, as the result; begins, padding: as in ops.recurrence.
        impl: "native" keeps the states of few tokens only; everything else keeps all of them, B T N E numbers.
    """
    dtype = x.dtype
    if padding is not None:
        delta = delta.masked_fill(padding[..., None], 0)
    served = foreign.selective_scan(x, delta, A, B, C, state, begins)
    if served is not None:
        return served
    x, delta, A, B, C = (t.to(compute_dtype(dtype)) for t in (x, delta, A.mT, B, C))
    state = x.new_zeros(x.shape[0], *A.shape) if state is None else state.to(x.dtype)
    with no_autocast(x):
        compiled = impl == "native" and native.is_addressable(x, delta, A, B, C, state)
        y, last = (native_scan if compiled else plain_selective_scan)(x, delta, A, B, C, state, begins)
    return y.to(dtype), last


def plain_selective_scan(
    x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, begins: Tensor | None
) -> tuple[Tensor, Tensor]:
    h, last = scan(delta[:, :, None] * A, B[..., None] * (delta * x)[:, :, None], state, begins=begins)
    return (C[:, :, None] @ h).squeeze(2), last


def native_scan(
    x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, begins: Tensor | None
) -> tuple[Tensor, Tensor]:
    inputs = x, delta, A, B, C, state
    if torch.compiler.is_exporting():  # without the marks for gradients, whose number depends on the length
        return selective_op(*inputs, begins, False)[:2]
    if observer_of(*inputs) is not Observer.NOBODY:
        return selective_op(*inputs, begins, True)[:2]
    return native.kernels.scan_forward(native.kernels.scan_inputs(*inputs, begins), marks=False)[:2]


@torch.library.custom_op("hypermlp::selective_scan", mutates_args=())
def selective_op(
    x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, begins: Tensor | None, marks: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return native.kernels.scan_forward(native.kernels.scan_inputs(x, delta, A, B, C, state, begins), marks=marks)


@selective_op.register_fake
def _(x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    blocks = -(-x.shape[1] // native.kernels.SCAN_ROWS) if rest[-1] else 0
    return x.new_empty(x.shape), x.new_empty(state.shape), x.new_empty(state.shape[0], blocks, *A.shape)


@torch.library.custom_op("hypermlp::selective_scan_backward", mutates_args=())
def selective_backward_op(
    d_y: Tensor, d_last: Tensor, marks: Tensor, inputs: Sequence[Tensor], begins: Tensor | None
) -> list[Tensor]:
    x, delta, A, B, C, state = inputs
    return list(native.kernels.scan_backward(d_y, d_last, native.kernels.scan_inputs(x, delta, A, B, C, state, begins), marks))


@selective_backward_op.register_fake
def _(d_y: Tensor, d_last: Tensor, marks: Tensor, inputs: Sequence[Tensor], begins: Tensor | None) -> list[Tensor]:
    return [t.new_empty(t.shape) for t in inputs]


def _save_selective(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[2], *inputs[:-1])


def _backward_selective(ctx: Any, d_y: Tensor, d_last: Tensor, d_marks: Tensor) -> tuple[Any, ...]:
    marks, *inputs, begins = ctx.saved_tensors
    if torch.is_grad_enabled():
        plain = functools.partial(plain_selective_scan, begins=begins)
        return (*gradients_with_graph(plain, inputs, (d_y, d_last)), None, None)
    return (*selective_backward_op(d_y, d_last, marks, inputs, begins), None, None)


selective_op.register_autograd(_backward_selective, setup_context=_save_selective)

flops.watch()
