"""Modules that may be computed without being called, where nobody could tell: no hook, no subclass, no replaced forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from hypermlp.ops.observer import ORDINARY
from hypermlp.ops.parameters import join

WORTH_JOINING = 256  # tokens from which joining the weights costs less than it saves
KNOWN: dict[type[nn.Module], Callable[..., Any]] = {nn.Linear: nn.Linear.forward}  # kind → the forward that is known here


Kind = TypeVar("Kind", bound=type[nn.Module])


def known(kind: Kind) -> Kind:
    """Mark a class of modules as one whose forward is known here, so that its parameters may be read instead."""
    KNOWN[kind] = kind.forward
    return kind


def is_unhooked(module: nn.Module) -> bool:
    """Whether calling the module does what its known class does with its own parameters, and nobody listens."""
    kind = type(module)
    if kind not in KNOWN or kind.forward is not KNOWN[kind] or "forward" in module.__dict__ or _has_any_global_hook():
        return False
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return False
    return all(p is None or type(p) in ORDINARY for p in module._parameters.values())


def find_hooked(module: nn.Module) -> str | None:
    """The name of a module inside this one that must be called itself; None if there is none."""
    for name, child in module._modules.items():
        if child is None:
            continue
        inner = find_hooked(child)
        if inner is not None:
            return f"{name}.{inner}"
        if not is_unhooked(child):
            return name
    return None


def join_linears(x: Tensor, modules: Sequence[nn.Module]) -> Tensor | None:
    """All module(x) side by side from one matrix product, where all are unhooked and x is long enough; else None."""
    if not is_long(x) or not all(isinstance(m, nn.Linear) and is_unhooked(m) for m in modules):
        return None
    linears = [m for m in modules if isinstance(m, nn.Linear)]
    return F.linear(x, *join([m.weight for m in linears], [m.bias for m in linears]))


def is_long(x: Tensor) -> bool:
    """Whether x (B T C) surely has WORTH_JOINING tokens; a compiled graph for any length is not split by the question."""
    if not torch.compiler.is_compiling():
        return x.shape[0] * x.shape[1] >= WORTH_JOINING
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(x.shape[0] * x.shape[1] >= WORTH_JOINING)
