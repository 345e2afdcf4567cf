"""Modules that may be computed without being called, which makes no difference: no hook, subclass or replaced forward."""

from __future__ import annotations

import operator
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from hypermlp.ops.observer import ORDINARY
from hypermlp.ops.parameters import join, placement

WORTH_JOINING = 256  # tokens from which joining the weights costs less than it saves
KNOWN: dict[type[nn.Module], Callable[..., Any]] = {}  # kind → the forward that is known here


Kinds = Mapping[type[nn.Module], Callable[..., Any]]
Kind = TypeVar("Kind", bound=type[nn.Module])
Module = TypeVar("Module", bound=nn.Module)
Laid = TypeVar("Laid", bound="LaidOut")


def known(kind: Kind) -> Kind:
    """Mark a class of modules as one whose forward is known here, so that its parameters may be read instead.

    A forward that somebody has replaced already is not: it stands in another module than the class.
    """
    owner = next(base for base in kind.__mro__ if "forward" in vars(base))
    if getattr(kind.forward, "__globals__", None) is vars(sys.modules[owner.__module__]):
        KNOWN[kind] = kind.forward
    return kind


known(nn.Linear)


def is_unhooked(module: nn.Module, kinds: Kinds = KNOWN) -> bool:
    """Whether calling the module does what its class does with its own parameters, and no hook listens.

    A tensor in the place of a parameter (weights that another network makes) may be another one at every call.
    """
    kind = type(module)
    if kind not in kinds or kind.forward is not kinds[kind] or "forward" in module.__dict__ or _has_any_global_hook():
        return False
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return False
    if module._buffers or any(isinstance(value, Tensor) for value in module.__dict__.values()):
        return False
    return all(p is None or type(p) in ORDINARY for p in module._parameters.values())


def find_hooked(module: nn.Module, kinds: Kinds = KNOWN) -> str | None:
    """The name of a module inside this one that must be called itself; None if there is none."""
    for name, child in module._modules.items():
        if child is None:
            continue
        inner = find_hooked(child, kinds)
        if inner is not None:
            return f"{name}.{inner}"
        if not is_unhooked(child, kinds):
            return name
    return None


SETTINGS = ("eps", "max_norm", "config", "spec", "shortcut", "heads")  # attributes that say what a module computes


class Watch:
    """Notices changes to modules that were found unhooked, in a few microseconds for each call.

    So a question over all modules and parameters is answered once, and asked again only where something has changed: a hook, an
    attribute, a setting, a class or its forward, a part, a parameter or where its numbers lie. Numbers may change. Hooks of the
    outermost module itself are not its business: they run around it. Nor does it keep that module alive.
    """

    def __init__(self, root: nn.Module) -> None:
        modules = list(root.modules())
        self.root, self.inner = ref(root), modules[1:]
        self.kinds: list[type[nn.Module]] = list(map(type, modules))
        self.forwards = [(kind, kind.forward) for kind in dict.fromkeys(self.kinds)]
        self.attributes = [m.__dict__ for m in modules]
        self.sizes = [len(found) for found in self.attributes]
        self.settings = [(d, name) for d in self.attributes for name in SETTINGS if name in d]
        self.values = [d[name] for d, name in self.settings]
        self.hooks = [
            d for m in modules[1:] for d in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)
        ]
        self.own: list[dict[str, Any]] = [d for m in modules for d in (m._modules, m._parameters)]
        self.counts = list(map(len, self.own))
        self.full = [d for d in self.own if d]
        self.parts = list(chain.from_iterable(d.values() for d in self.full))
        self.parameters = [p for p in self.parts if isinstance(p, Tensor)]
        self.places = placement(self.parameters)

    def unchanged(self) -> bool:
        if any(self.hooks) or _has_any_global_hook() or [type(self.root()), *map(type, self.inner)] != self.kinds:
            return False
        if list(map(len, self.attributes)) != self.sizes or any(kind.forward is not known for kind, known in self.forwards):
            return False
        if list(map(len, self.own)) != self.counts or [d[name] for d, name in self.settings] != self.values:
            return False
        parts = chain.from_iterable(d.values() for d in self.full)
        return all(map(operator.is_, parts, self.parts)) and placement(self.parameters) == self.places


class LaidOut(Protocol):
    """What was found out about a module, and stays true until somebody changes the module."""

    def holds(self) -> bool: ...


class OfThread(threading.local, Generic[Laid]):
    """What each thread has laid out for a module: a call in the making is no one else's."""

    def __init__(self) -> None:
        self.found: WeakKeyDictionary[nn.Module, Laid] = WeakKeyDictionary()

    def get(self, module: Module, lay_out: Callable[[Module], Laid]) -> Laid:
        """What was laid out before, if that still holds; what is laid out must not hold the module itself."""
        found = self.found.get(module)
        if found is None or not found.holds():
            found = self.found[module] = lay_out(module)
        return found


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
