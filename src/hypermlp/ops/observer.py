"""Who observes a call: it decides what may be bypassed."""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

ORDINARY = (Tensor, torch.nn.Parameter)  # exactly these types: a subclass may keep its numbers elsewhere


class Observer(Enum):
    """Who sees what is computed."""

    NOBODY = "nobody"  # operators may be bypassed
    AUTOGRAD = "autograd"  # reverse mode alone: an autograd.Function will do
    TRACER = "tracer"  # a compiler, a mode or a transform sees operators, or there are no values


def observer_of(*tensors: Tensor | None) -> Observer:
    """Who observes what is made of these tensors."""
    if is_traced() or is_overridden():
        return Observer.TRACER
    if any(t is not None and (type(t) not in ORDINARY or t.is_meta or is_functorch_wrapped_tensor(t)) for t in tensors):
        return Observer.TRACER
    return Observer.AUTOGRAD if needs_gradient(*tensors) else Observer.NOBODY


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd records what is made of these tensors."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def is_traced() -> bool:
    """Whether a compiler, torch.jit.trace or a dispatch mode records the operators."""
    if torch.compiler.is_compiling():
        return True
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._get_tracing_state() is not None


def is_overridden() -> bool:
    """Whether a mode sees every function of torch, and may replace it; torch.device(…) as a context only says where to make."""
    modes = range(torch._C._len_torch_function_stack())
    return any(type(torch._C._get_function_stack_at(n)) is not DeviceContext for n in modes)


def is_recorded() -> bool:
    """Whether torch.export or torch.jit.trace makes a graph that others run, of lengths that are not known yet."""
    return torch.compiler.is_exporting() or torch._C._get_tracing_state() is not None


def ordinary(*tensors: Tensor | None) -> bool:
    """Whether operators with code of their own may take these tensors: a subclass need not have its numbers in memory."""
    return is_traced() or all(t is None or type(t) in ORDINARY for t in tensors)


def transform() -> str | None:
    """The transformation of functions under way, which differentiates in ways that a hand-written gradient does not know."""
    if torch._C._functorch.maybe_current_level() is not None:
        return "inside a torch.func transform"
    return "inside forward-mode differentiation" if forward_ad._current_level >= 0 else None


# What torch.compiler.assume_constant_result does, without its import of the whole compiler.
transform._dynamo_marked_constant = True  # type: ignore[attr-defined]
