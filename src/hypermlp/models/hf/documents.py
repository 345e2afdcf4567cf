"""Documents packed into rows without padding, as position_ids tell them: where positions restart, a document begins.

A restart goes back, or to 0. Positions that jump forward are those of one document with a gap.

Letters: B batch, T time, C width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Documents(NamedTuple):
    """Documents in the rows of a batch, and how to lay them into the one row that mixers take them in."""

    cu_seqlens: Tensor  # n + 1, from 0 to B*T
    batch: int
    order: Tensor | None = None  # B T: where each token came from; real tokens stand before padding

    def pack(self, x: Tensor) -> Tensor:
        """B T C to 1 B*T C."""
        if self.order is not None:
            x = x.gather(1, self.order[..., None].expand_as(x))
        return x.reshape(1, -1, x.shape[2])

    def unpack(self, x: Tensor) -> Tensor:
        """1 B*T C to B T C."""
        x = x.reshape(self.batch, -1, x.shape[2])
        if self.order is None:
            return x
        return torch.zeros_like(x).scatter(1, self.order[..., None].expand_as(x), x)


def find_documents(position: Tensor, mask: Tensor | None = None) -> Documents | None:
    """The documents of position (B T, of the real tokens where there is a mask); None where each row is one sequence.

    While a graph is traced no value can be read: then there is always a result, of static shape, with empty documents behind.
    """
    B, T = position.shape
    order, real = None, torch.ones_like(position, dtype=torch.bool)
    if mask is not None:
        order = torch.argsort((mask == 0).to(torch.int8), dim=1, stable=True)
        position, real = position.gather(1, order), (mask != 0).gather(1, order)
    restarts = ((position[:, 1:] < position[:, :-1]) | (position[:, 1:] == 0)) & real[:, 1:]
    if not torch.compiler.is_compiling() and not bool(restarts.any()):
        return None
    padding_begins = real[:, :-1] & ~real[:, 1:]
    begins = torch.cat([torch.ones_like(real[:, :1]), restarts | padding_begins], dim=1).flatten()
    total = torch.full((1,), B * T, dtype=torch.int64, device=position.device)
    if torch.compiler.is_compiling():
        place = torch.arange(B * T, device=position.device)
        starts = torch.where(begins, place, B * T).sort().values
    else:
        starts = begins.nonzero()[:, 0]
    return Documents(torch.cat([starts, total]), B, order)
