"""Climbing to the worst instance of a bound, where random draws would stay far below it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def on_sphere(x: Tensor, radius: float) -> Tensor:
    """Rows of x (… d), or x itself, at this distance from the origin."""
    return radius * x / x.norm(dim=-1, keepdim=True)


def climb(value: Callable[[Tensor], Tensor], start: Tensor, keep: Callable[[Tensor], Tensor], steps: int = 40) -> Tensor:
    """Gradient ascent on `value` from `start`, brought back by `keep` after each step; a step that does not help is halved."""
    best = keep(start).detach()
    top, rate = float(value(best)), 0.3
    for _ in range(steps):
        at = best.clone().requires_grad_()
        (slope,) = torch.autograd.grad(value(at), at)
        size = float(slope.norm())
        if not size:
            break
        there = keep(best + rate * float(best.norm()) * slope / size).detach()
        found = float(value(there))
        if found > top:
            best, top, rate = there, found, min(1.5 * rate, 1.0)
        else:
            rate /= 2
    return best
