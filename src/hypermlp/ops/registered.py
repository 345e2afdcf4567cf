"""How an implementation becomes one opaque node for torch.compile and autograd.

An implementation with a hand-written backward provides two functions over flat tensors, forward and backward; `register` makes
a function with the signature of reference.mix out of them. Letters as in ops/types.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hypermlp.ops.types import Mixing, Spec, compute_dtype


class Inputs(NamedTuple):
    """The operator's tensors. Both mixings act as y ↦ y ⊙ base + ((y left) ⊙ control) rightᵀ; R2, transposed, has left = B."""

    q: Tensor  # B T G K
    k: Tensor  # B S G K
    v: Tensor  # B S H V
    left1: Tensor | None  # G L R
    right1: Tensor | None
    base1: Tensor | None  # G L
    control1: Tensor | None  # B T G R
    left2: Tensor | None  # H L R
    right2: Tensor | None
    base2: Tensor | None  # H L
    control2: Tensor | None  # B T H R
    spans: Tensor | None  # n 5


class Forward(Protocol):
    def __call__(self, inputs: Inputs, spec: Spec, chunk: int | None) -> tuple[Tensor, Tensor]:
        """o (B T H V) in q's type and ρ (B T H) in the compute type."""


class Backward(Protocol):
    def __call__(
        self, d_o: Tensor, o: Tensor, rho: Tensor, inputs: Inputs, spec: Spec, chunk: int | None
    ) -> list[Tensor | None]:
        """The gradients of all inputs but the spans, in the order and types of Inputs."""


class Mix(Protocol):
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        routing: Mixing | None,
        reading: Mixing | None,
        spec: Spec,
        spans: Tensor | None = None,
        chunk: int | None = None,
    ) -> Tensor: ...


def register(name: str, forward: Forward, backward: Backward) -> Mix:
    """Define the operators hypermlp::name and hypermlp::name_backward; returns the function that calls them."""

    def forward_op(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        left1: Tensor | None,
        right1: Tensor | None,
        base1: Tensor | None,
        control1: Tensor | None,
        left2: Tensor | None,
        right2: Tensor | None,
        base2: Tensor | None,
        control2: Tensor | None,
        spans: Tensor | None,
        kind: str,
        norm: str,
        aligner: str,
        causal: bool,
        block_size: int,
        eps: float,
        chunk: int | None,
    ) -> tuple[Tensor, Tensor]:
        inputs = Inputs(q, k, v, left1, right1, base1, control1, left2, right2, base2, control2, spans)
        with torch.autocast(q.device.type, enabled=False):
            return forward(inputs, make_spec(kind, norm, aligner, causal, block_size, eps), chunk)

    def backward_op(
        d_o: Tensor,
        o: Tensor,
        rho: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        left1: Tensor | None,
        right1: Tensor | None,
        base1: Tensor | None,
        control1: Tensor | None,
        left2: Tensor | None,
        right2: Tensor | None,
        base2: Tensor | None,
        control2: Tensor | None,
        spans: Tensor | None,
        kind: str,
        norm: str,
        aligner: str,
        causal: bool,
        block_size: int,
        eps: float,
        chunk: int | None,
    ) -> list[Tensor]:
        inputs = Inputs(q, k, v, left1, right1, base1, control1, left2, right2, base2, control2, spans)
        with torch.autocast(q.device.type, enabled=False):
            found = backward(d_o, o, rho, inputs, make_spec(kind, norm, aligner, causal, block_size, eps), chunk)
        return [q.new_empty(0) if g is None else g for g in found]

    def fake_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        B, T, H, V = q.shape[0], q.shape[1], v.shape[2], v.shape[3]
        return q.new_empty(B, T, H, V), q.new_empty(B, T, H, dtype=compute_dtype(q.dtype))

    def fake_backward(d_o: Tensor, o: Tensor, rho: Tensor, *rest: Any) -> list[Tensor]:
        return [d_o.new_empty(0) if x is None else x.new_empty(x.shape) for x in rest[:11]]

    opaque = torch.library.custom_op(f"hypermlp::{name}", forward_op, mutates_args=())
    opaque_backward = torch.library.custom_op(f"hypermlp::{name}_backward", backward_op, mutates_args=())
    opaque.register_fake(fake_forward)
    opaque_backward.register_fake(fake_backward)

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*output, *inputs[:12])
        ctx.options = inputs[12:]

    def differentiate(ctx: Any, d_o: Tensor, d_rho: Tensor) -> tuple[Any, ...]:
        o, rho, *inputs = ctx.saved_tensors
        found = opaque_backward(d_o, o, rho, *inputs, *ctx.options)
        grads = [None if x is None else g for x, g in zip(inputs[:11], found, strict=True)]
        return (*grads, None, *(None for _ in ctx.options))

    opaque.register_autograd(differentiate, setup_context=save)

    def mix(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        routing: Mixing | None,
        reading: Mixing | None,
        spec: Spec,
        spans: Tensor | None = None,
        chunk: int | None = None,
    ) -> Tensor:
        inputs = Inputs._make((q, k, v, *flat(routing, False), *flat(reading, True), spans))
        if not recording(*inputs):
            with torch.autocast(q.device.type, enabled=False):
                return forward(inputs, spec, chunk)[0]
        options = (spec.kind, spec.norm, spec.aligner, spec.causal, spec.block_size, spec.eps, chunk)
        return opaque(*inputs, *options)[0]

    return mix


def recording(*tensors: Tensor | None) -> bool:
    """Whether somebody watches: autograd, a compiler, a transform. If not, a registered operator may be called directly."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    present = [t for t in tensors if t is not None]
    if any(type(t) not in (Tensor, torch.nn.Parameter) or torch._C._functorch.is_functorch_wrapped_tensor(t) for t in present):
        return True
    return torch.is_grad_enabled() and any(t.requires_grad for t in present)


def flat(mixing: Mixing | None, transpose: bool) -> tuple[Tensor | None, ...]:
    """left, right, base and control."""
    if mixing is None:
        return (None, None, None, None)
    left, right = (mixing.B, mixing.A) if transpose else (mixing.A, mixing.B)
    return left, right, mixing.baseline(), mixing.control


def make_spec(kind: Any, norm: Any, aligner: Any, causal: bool, block_size: int, eps: float) -> Spec:
    return Spec(kind=kind, norm=norm, aligner=aligner, causal=causal, block_size=block_size, eps=eps)
