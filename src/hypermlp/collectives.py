"""What processes that share one layer send each other, and which rows of a sequence each has.

Letters: B batch, T time, n processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint


class SumGradient(torch.autograd.Function):
    """x as it is, in processes that each use it in another way; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor, None]:
        return summed(d_x, ctx.group), None


class Sum(torch.autograd.Function):
    """The sum over all processes, which then go on in the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor, None]:
        return d_x, None


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def total(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The sum over processes that each go on with it in another way; x itself where there is one process (None)."""
    return x if group is None else cast("Tensor", SumGradient.apply(Sum.apply(x, group), group))


class Gather(torch.autograd.Function):
    """x of all processes (n …); the gradient of each is the sum of what all processes have for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        found = x.new_empty(group.size(), *x.shape)
        dist.all_gather(list(found.unbind()), x.contiguous(), group=group)
        return found

    @staticmethod
    def backward(ctx: Any, d_found: Tensor) -> tuple[Tensor, None]:
        d_x = d_found.new_empty(d_found.shape[1:])
        dist.reduce_scatter(d_x, list(d_found.contiguous().unbind()), group=ctx.group)
        return d_x, None


class HandOver(torch.autograd.Function):
    """y as it is; `passed` are sent to a process, whose gradients of them come back before y's is used."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, to: int, y: Tensor, *passed: Tensor) -> Tensor:
        ctx.group, ctx.to, ctx.passed = group, to, [(t.shape, t.dtype) for t in passed]
        wanted = torch.tensor([float(any(ctx.needs_input_grad))], device=y.device)
        for t in (wanted, *passed):
            dist.send(t.detach().contiguous(), group=group, group_dst=to)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Any, ...]:
        d_passed = [d_y.new_empty(shape, dtype=dtype) for shape, dtype in ctx.passed]
        for t in d_passed:
            dist.recv(t, group=ctx.group, group_src=ctx.to)
        return None, None, d_y, *d_passed


class TakeOver(torch.autograd.Function):
    """What a process sent, in tensors like `empty`; their gradients go back to it. `after`: computed before, and no input."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, source: int, after: Tensor, *empty: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.source = group, source
        wanted = torch.zeros(1, device=after.device)
        found = tuple(torch.empty_like(t) for t in empty)
        for t in (wanted, *found):
            dist.recv(t, group=group, group_src=source)
        if not wanted.item():
            ctx.mark_non_differentiable(*found)
        return found

    @staticmethod
    def backward(ctx: Any, *d_found: Tensor) -> tuple[Any, ...]:
        for t in d_found:
            dist.send(t.contiguous(), group=ctx.group, group_dst=ctx.source)
        return (None, None, None, *(None for _ in d_found))


@dataclass(frozen=True)
class RowShare:
    """The rows that this process has of every sequence: of 2 n pieces of equal length, piece `rank` and piece 2 n − 1 − `rank`.

    A causal row costs the more, the later it is, so an early piece and a late one make all processes work equally long:

        n = 2     piece      0 1 2 3
                  process    0 1 1 0
    """

    group: dist.ProcessGroup

    @property
    def pieces(self) -> tuple[int, int]:
        rank = self.group.rank()
        return rank, 2 * self.group.size() - 1 - rank

    def of(self, x: Tensor) -> Tensor:
        """This process's rows of x (B T …)."""
        n = 2 * self.group.size()
        if x.shape[1] % n:
            raise ValueError(f"{x.shape[1]} tokens must be divisible by {n}, twice the processes that share a sequence")
        parts = x.chunk(n, dim=1)
        return torch.cat([parts[i] for i in self.pieces], dim=1)

    def __deepcopy__(self, memo: object) -> RowShare:
        return self  # a group of processes has no copies

    def stacked(self, x: Tensor, before: int = 0) -> Tensor:
        """The two pieces of x (B T …) one below the other (2B …), each with the rows before it; zeros before the first."""
        two = torch.cat(x.chunk(2, dim=1))
        if not before:
            return two
        if two.shape[1] < before:
            raise ValueError(
                f"pieces of {two.shape[1]} tokens are shorter than the {before} inputs that a convolution looks back on; "
                "divide sequences between fewer processes"
            )
        last = self.in_order(two[:, -before:]).unflatten(1, (-1, before))  # B 2n before …
        ahead = torch.cat([torch.zeros_like(last[:, :1]), last[:, :-1]], dim=1)
        return torch.cat([torch.cat([ahead[:, i] for i in self.pieces]), two], dim=1)

    def side_by_side(self, x: Tensor) -> Tensor:
        """The inverse of stacked."""
        return torch.cat(x.chunk(2), dim=1)

    def in_order(self, x: Tensor) -> Tensor:
        """All rows (B T …) of which each process has two stacked pieces (2B …), in the order of time."""
        first, second = cast("Tensor", Gather.apply(x, self.group)).unflatten(1, (2, -1)).unbind(1)  # each n B …
        return torch.cat([*first, *second.flip(0)], dim=1)

    def forgetful(self, compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """compute(*inputs), of which the inputs alone are kept for the backward pass, where it is computed again.

        What it gathers is as long as the whole sequence, and would be kept in every layer.
        """
        if not torch.is_grad_enabled():
            return compute(*inputs)
        return cast("Tensor", checkpoint(compute, *inputs, use_reentrant=False, preserve_rng_state=False))

    def in_turn(
        self,
        x: Tensor,
        compute: Callable[[int, Tensor, tuple[Tensor, ...] | None], tuple[Tensor, tuple[Tensor, ...]]],
        empty: Callable[[], tuple[Tensor, ...]],
    ) -> Tensor:
        """y (B T …) of the two pieces of x (B T …), where each begins with what the piece before it, in time, has left.

        Processes wait for each other: forward the first piece is first, backward the last.

        Args:
            x: this process's rows.
            compute: from a piece's number, its rows and what the piece before it left (None: it is the first) to its y and what
                it leaves.
            empty: tensors like those that a piece leaves.
        """
        rank, last = self.group.rank(), 2 * self.group.size() - 1
        found: list[Tensor] = []
        left: tuple[Tensor, ...] | None = None
        for piece, part in zip(self.pieces, x.chunk(2, dim=1), strict=True):
            source, to = (min(other, last - other) for other in (piece - 1, piece + 1))
            if piece > 0 and source != rank:  # the gradient of what was handed over before is asked for after this one's
                after = torch.zeros((), device=x.device, requires_grad=torch.is_grad_enabled())
                after = found[-1] if found and found[-1].requires_grad else after
                left = TakeOver.apply(self.group, source, after, *empty())
            y, left = compute(piece, part, left)
            if piece < last and to != rank:
                y = cast("Tensor", HandOver.apply(self.group, to, y, *left))
            found.append(y)
        return torch.cat(found, dim=1)

    def places(self, length: int, device: torch.device) -> Tensor:
        """Where in time the rows of the two stacked pieces of `length` lie (2 length)."""
        return torch.stack([torch.arange(i * length, (i + 1) * length, device=device) for i in self.pieces])

    def each(self, length: int) -> Iterator[tuple[int, int]]:
        """For each of the two pieces of `length`: which one, and where in time it ends."""
        for i, piece in enumerate(self.pieces):
            yield i, (piece + 1) * length
