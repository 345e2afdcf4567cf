"""How much each token takes from every token of its past, to look at: softmax weights, HyperGLU's w.

    kept = Weights()
    y = layer(x, weights=kept)
    kept.shown  # B H T N

The output is computed from what is shown, so gradients arrive there too. It takes memory that grows with the square of the
context, so nothing does it unless asked.

Letters: B batch, T time, H heads, S slots of the operator, N tokens so far.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from hypermlp.fixed_cache import FixedCache

if TYPE_CHECKING:
    from hypermlp.cache import Cache
    from hypermlp.mixers.base import Tokens


class Weights:
    """The weights of one layer in one call, in the order of the caller's tokens; zero at padding and beyond a window.

    mask: which of all tokens so far are real (B N); needed where a cache has seen padding, and otherwise found by itself.
    """

    def __init__(self, mask: Tensor | None = None) -> None:
        self.mask = mask
        self.shown: Tensor | None = None  # B H T N

    def keep(self, w: Tensor, tokens: Tokens, spans: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """Show w (B H T S), of the operator's rows and slots, and return it as made from what is shown."""
        if isinstance(cache, FixedCache):
            column = cache.columns.clamp(max=cache.max_len)[:, None, None].expand_as(w)  # slots without a token weigh nothing
            shown = torch.zeros_like(w).scatter_add(3, column, w)[..., : cache.max_len]
            self.shown = shown if tokens.order is None else self._in_order_of_rows(shown, tokens)[0]
            return w
        if cache is None and tokens.order is None:
            self.shown = w
            return w
        column, N = self._columns(w, tokens, spans, cache)
        across = column[:, None, None].expand_as(w)
        shown = w.new_zeros(*w.shape[:3], N + 1).scatter(3, across, w)[..., :N]
        if tokens.order is not None:
            self.shown, down = self._in_order_of_rows(shown, tokens)
            shown = self.shown.gather(2, down)
        else:
            self.shown = shown
        return F.pad(shown, (0, 1)).gather(3, across)

    def _in_order_of_rows(self, shown: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """The rows of w in the caller's order, zero at padding, and where each went."""
        assert tokens.order is not None
        down = tokens.order[:, None, :, None].expand_as(shown)
        shown = shown.masked_fill((tokens.position < 0)[:, None, :, None], 0)
        return torch.zeros_like(shown).scatter(2, down, shown), down

    def _columns(self, w: Tensor, tokens: Tokens, spans: Tensor | None, cache: Cache | None) -> tuple[Tensor, int]:
        """Which column each slot has (B S; the last is for those that hold nothing), and how many columns there are."""
        B, S = w.shape[0], w.shape[3]
        place = torch.arange(S).expand(B, S)  # of each slot, among the real tokens of its row
        if cache is not None:
            if spans is None:
                spans = torch.tensor([[b, 0, 0, 0, S] for b in range(B)])
            place = torch.full((B, S), max(cache.seen, default=0))
            for (b, _, _, begin, end), seen in zip(spans.tolist(), cache.seen, strict=True):
                place[b, torch.arange(begin, end) % S] = torch.arange(seen - (end - begin), seen)
        place = place.to(w.device)
        order = tokens.order if self.mask is None and cache is None else None
        if self.mask is not None:
            order = torch.argsort((self.mask == 0).to(torch.int8), dim=1, stable=True)
        if order is None:
            return place, max(cache.seen, default=0) if cache is not None else S
        N = order.shape[1]
        if cache is not None and max(cache.seen, default=0) > N:
            raise ValueError(f"the mask of the weights has {N} columns, and the cache has seen {max(cache.seen)} tokens")
        return F.pad(order, (0, 1), value=N).gather(1, place.clamp(max=N)), N
