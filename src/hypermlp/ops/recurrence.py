"""The matrix-valued recurrence that most rivals of attention share, and what reads it out.

    S_t = Diag(e^{g_t}) S_{t−1} + b_t (a_tᵀ S_{t−1}) + k_t v_tᵀ        o_t = S_tᵀ q_t

Without g and a it is linear attention; with g gated linear attention, retention, Mamba-2; with a and b the delta rules, RWKV-7.
Letters: B batch, T time, H heads, K key width, V value width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hypermlp.ops.types import compute_dtype


class Steps(NamedTuple):
    """What every token does to the state."""

    q: Tensor  # B T H K
    k: Tensor  # B T H K
    v: Tensor  # B T H V
    g: Tensor | None = None  # B T H or B T H K: log of the decay, at most 0; −inf forgets everything
    a: Tensor | None = None  # B T H K
    b: Tensor | None = None  # B T H K, given with a


def recurrence(
    steps: Steps, state: Tensor | None = None, *, begins: Tensor | None = None, padding: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Readouts o (B T H V) and the state after the last token (B H K V, in float32 at least).

    state: what came before (None: nothing). begins (1|B T): tokens before which the state is emptied. padding (B T): tokens
    that leave the state alone.
    """
    dtype = steps.q.dtype
    exact = Steps._make(None if t is None else t.to(compute_dtype(dtype)) for t in steps)
    with torch.autocast(steps.q.device.type, enabled=False):
        o, state = step_by_step(isolate(exact, begins, padding), state)
    return o.to(dtype), state


def isolate(steps: Steps, begins: Tensor | None, padding: Tensor | None) -> Steps:
    """The steps with borders between documents and idle padding written into decays, keys and a."""
    q, k, v, g, a, b = steps
    if begins is not None:
        g = k.new_zeros(k.shape[:3]) if g is None else g
        g = g.masked_fill(expand(begins, g), float("-inf"))
        a = None if a is None else a.masked_fill(expand(begins, a), 0)
    if padding is not None:
        k = k.masked_fill(expand(padding, k), 0)
        g = None if g is None else g.masked_fill(expand(padding, g), 0)
        b = None if b is None else b.masked_fill(expand(padding, b), 0)
    return Steps(q, k, v, g, a, b)


def expand(mask: Tensor, like: Tensor) -> Tensor:
    """mask (1|B T) with as many dimensions as `like` (B T …)."""
    return mask.reshape(*mask.shape, *[1] * (like.dim() - 2))


def step_by_step(steps: Steps, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """The equations, one token after another: the oracle of the chunked form, and the way a single token goes."""
    q, k, v, g, a, b = steps
    B, T, H, K = q.shape
    S = q.new_zeros(B, H, K, v.shape[-1]) if state is None else state.to(q.dtype)
    o = []
    for t in range(T):
        new = k[:, t, :, :, None] * v[:, t, :, None]
        if a is not None and b is not None:
            new = new + b[:, t, :, :, None] * torch.einsum("bhk,bhkv->bhv", a[:, t], S)[:, :, None]
        if g is not None:
            decay = g[:, t].exp()
            S = S * (decay[..., None, None] if g.dim() == 3 else decay[..., None])
        S = S + new
        o.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return (torch.stack(o, 1) if o else v[:, :0]), S
