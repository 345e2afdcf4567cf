"""Linear layers computed together, when hooks or adapters cannot observe the difference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp.ops import native
from hypermlp.ops.registered import ORDINARY, recording

WORTH_JOINING = 256  # tokens from which joining the weights costs less than it saves
FEW_TOKENS = 16  # up to which a product is bound by reading its weights


def apply_linears(products: Sequence[tuple[Tensor, nn.Module]], impl: str) -> list[Tensor]:
    """[module(x) for x, module in products], read in one pass over the weights where there are few tokens and no gradients."""
    x = products[0][0]
    if impl == "native" and not torch.is_grad_enabled() and not watched(x) and x.shape[0] * x.shape[1] <= FEW_TOKENS:
        linears = [(x, m.weight, m.bias) for x, m in products if isinstance(m, nn.Linear) and is_plain_linear(m)]
        if len(linears) == len(products) and all(native.is_plain(*product) for product in linears):
            return native.linears(linears)
    return [module(x) for x, module in products]


def watched(x: Tensor) -> bool:
    """Whether the modules must be called themselves: a compiler or a transform observes the call, or autocast chooses types."""
    return recording(x.detach()) or torch.is_autocast_enabled(x.device.type)


def join_linears(x: Tensor, modules: Sequence[nn.Module]) -> Tensor | None:
    """All module(x) side by side from one matrix product, where all are plain linear layers and x is long enough; else None."""
    if not is_long(x) or not all(is_plain_linear(m) for m in modules):
        return None
    linears = [m for m in modules if isinstance(m, nn.Linear)]
    bias = None
    if any(m.bias is not None for m in linears):
        bias = torch.cat([m.weight.new_zeros(m.out_features) if m.bias is None else m.bias for m in linears])
    return F.linear(x, torch.cat([m.weight for m in linears]), bias)


def is_long(x: Tensor) -> bool:
    """Whether x (B T C) surely has WORTH_JOINING tokens; a compiled graph for any length is not split by the question."""
    if not torch.compiler.is_compiling():
        return x.shape[0] * x.shape[1] >= WORTH_JOINING
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(x.shape[0] * x.shape[1] >= WORTH_JOINING)


def is_plain_linear(module: nn.Module) -> bool:
    """Whether calling the module is nothing but x Wᵀ + b: no subclass, adapter, parametrisation, hook or quantised weight."""
    return is_plain(module, nn.Linear)


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether calling the module is nothing but what `kind` does with its own parameters, and nobody listens."""
    if type(module) is not kind or "forward" in module.__dict__:
        return False
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return False
    return all(p is None or type(p) in ORDINARY for p in module._parameters.values())
