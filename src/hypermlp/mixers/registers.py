"""Registers: learned rows that stand in front of every sequence as further slots (appendix H.3).

The head's context becomes X ∥ R in lag order: register i is i + 1 lags older than the first token. Every document of a packed
row has them, and padding stays outside. A cache does not hold them: they are parameters, joined to what it gives, so that
crop, reorder and stack know nothing of them. In an input beyond block_size they are the first to leave the window.

Letters: B batch, T time, S slots, n registers, G routing heads, H heads, K and V widths of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hypermlp.cache import Cache
from hypermlp.config import HyperGLUConfig
from hypermlp.fixed_cache import FixedCache
from hypermlp.mixers.base import Tokens

Slots = tuple[Tensor, Tensor, Tensor | None]  # k (B S G K), v (B S H V), spans


def refuse(config: HyperGLUConfig) -> None:
    """For what shows the slots of a layer as its tokens."""
    if config.registers:
        raise ValueError("registers are no tokens: this view is defined for layers without them")


def join(k0: Tensor, v0: Tensor, tokens: Tokens, cache: Cache | None, k: Tensor, v: Tensor) -> Slots:
    """The slots of the registers (1 n …), and behind them those of the tokens and of what a cache holds."""
    if cache is not None:
        return join_cached(k0, v0, tokens, cache, k, v)
    if tokens.packed:
        return join_packed(k0, v0, tokens, k, v)
    return in_front(k0, k), in_front(v0, v), None


def in_front(registers: Tensor, slots: Tensor) -> Tensor:
    return torch.cat([registers.to(slots.dtype).expand(slots.shape[0], -1, -1, -1), slots], dim=1)


def join_packed(k0: Tensor, v0: Tensor, tokens: Tokens, k: Tensor, v: Tensor) -> Slots:
    """Each document with registers of its own."""
    assert tokens.spans is not None
    n, spans = k0.shape[1], tokens.spans.clone()
    documents = torch.arange(len(spans), device=spans.device)
    spans[:, 3] += n * documents
    spans[:, 4] += n * (documents + 1)
    begin = spans[:, 3]  # of each document's registers
    own = (begin[:, None] + torch.arange(n, device=begin.device)).flatten()
    count = (spans[:, 2] - spans[:, 1]).to(k.device)
    place = torch.arange(k.shape[1], device=k.device)
    place = place + n * (documents.to(k.device) + 1).repeat_interleave(count, output_size=k.shape[1])

    def joined(registers: Tensor, slots: Tensor) -> Tensor:
        repeated = registers.to(slots.dtype).repeat(1, len(spans), 1, 1)
        order = torch.cat([own.to(place.device), place]).argsort()
        return torch.cat([repeated, slots], dim=1)[:, order]

    return joined(k0, k), joined(v0, v), spans


def join_cached(k0: Tensor, v0: Tensor, tokens: Tokens, cache: Cache, k: Tensor, v: Tensor) -> Slots:
    """Rows whose first token is still in the window have the registers in front of it; of the others they have left it."""
    if isinstance(cache, FixedCache):
        raise ValueError("registers need a cache that lets them leave the window: make it without fixed")
    assert cache.window is not None
    first = [max(old, seen - cache.window + 1) for old, seen in zip(cache.oldest, cache.seen, strict=True)]
    slots, spans = cache.append({"k": k, "v": v}, tokens.x, tokens.counts())
    if spans is None and any(first):
        return slots["k"], slots["v"], None
    if spans is not None:
        n, whole = k0.shape[1], torch.tensor(first, device=spans.device)[spans[:, 0]] == 0
        spans = torch.stack([*spans[:, :3].unbind(1), (spans[:, 3] + n).masked_fill(whole, 0), spans[:, 4] + n], dim=1)
    return in_front(k0, slots["k"]), in_front(v0, slots["v"]), spans
