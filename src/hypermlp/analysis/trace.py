"""One row of a layer taken apart: the notions of `analysis.memory`, and what all attentions compute in the same way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp.mixers.base import Tokens
from hypermlp.ops.types import row_tables


class MixingOperator(NamedTuple):
    """R(x_t) = Diag(D) + A Diag(s) Bᵀ on the slots that a row sees; without mixing it has rank 0 and D = 1."""

    D: Tensor  # n
    A: Tensor  # n R
    B: Tensor  # n R
    s: Tensor  # R, or M R for several rows

    def apply(self, y: Tensor, transpose: bool = False) -> Tensor:
        """y R (… n), or y Rᵀ; Lemma G.1."""
        A, B = (self.B, self.A) if transpose else (self.A, self.B)
        return y * self.D + ((y @ A) * self.s) @ B.mT

    def dense(self) -> Tensor:
        """The matrix itself (n n), to look at."""
        return torch.diag(self.D) + self.low_rank()

    def low_rank(self) -> Tensor:
        """A Diag(s) Bᵀ (n n)."""
        return (self.A * self.s) @ self.B.mT


class Branch(NamedTuple):
    """One way through the first layer: HyperGLU and differential attention have two."""

    u: Tensor  # n K: mixed addresses
    z: Tensor  # n: scores before mixing
    h: Tensor  # n: after it, α(x; u)
    R1: MixingOperator


@dataclass(frozen=True)
class Memory:
    """One head at one token. Slots are in time order, the oldest first; `place` is where a slot's token stands in the input.

    A negative place is in the cache: −1 is the newest token that it holds.
    """

    place: Tensor  # n
    lag: Tensor  # n
    gate: Branch  # decides which slots are active
    scale: Branch | None  # HyperGLU: how strong they are; differential attention: the map that is taken away
    R2: MixingOperator
    active: Tensor  # n, bool
    rho: Tensor  # what the hidden layer is divided by
    a: Tensor  # n: hidden layer
    w: Tensor  # n: readout weights of the tokens' own values
    v: Tensor  # n V: mixed values, the contents of the slots
    values: Tensor  # n V: the tokens' own values
    beta: Tensor  # n C: what slot i adds per unit of a_i
    readouts: Tensor  # n C: what the value of token c adds per unit of w_c

    @property
    def z(self) -> Tensor:
        return self.gate.z

    @property
    def h(self) -> Tensor:
        return self.gate.h

    @property
    def alpha(self) -> Tensor:
        """Addresses α(x; u_i) = h_i (n)."""
        return self.gate.h

    @property
    def u(self) -> Tensor:
        return self.gate.u

    @property
    def R1(self) -> MixingOperator:
        return self.gate.R1

    @property
    def contributions(self) -> Tensor:
        """What each slot of the pool adds to the output (n C)."""
        return self.a[:, None] * self.beta

    @property
    def token_contributions(self) -> Tensor:
        """What each token's own value adds to the output (n C)."""
        return self.w[:, None] * self.readouts

    @property
    def output(self) -> Tensor:
        """What the head adds to the layer's output (C)."""
        return self.contributions.sum(0)

    @property
    def shares(self) -> Tensor:
        """How much of the output each slot makes, along the output's direction (n); they sum to one, some are negative."""
        return shares_of(self.contributions)

    @property
    def token_shares(self) -> Tensor:
        """The same for the tokens' own values."""
        return shares_of(self.token_contributions)


class HiddenRows(NamedTuple):
    """The hidden layer of some rows of one sequence and head, without the values: nothing here is wider than slots."""

    slot: Tensor  # M N: which slot a column holds
    exists: Tensor  # M N
    z: tuple[Tensor, ...]  # M N each; one per branch
    h: tuple[Tensor, ...]
    active: Tensor  # M N
    rho: Tensor  # M 1
    a: Tensor  # M N
    w: Tensor  # M N


def shares_of(contributions: Tensor) -> Tensor:
    """Zero where there is no output, as when no slot is active."""
    output = contributions.sum(0)
    size = output.square().sum()
    return contributions @ output / torch.where(size > 0, size, 1)


class Trace(ABC):
    """A layer and what it made of one input: queries of all rows, keys and values of all slots, the gates behind them.

    Sequences are as the layer sees them: padding is gone, and `row_of` finds a token of the input.
    """

    layer: nn.Module
    n_head: int
    q: Tensor  # B T G K
    k: Tensor  # B S G K
    v: Tensor  # B S H V

    def __init__(self, layer: nn.Module, tokens: Tokens, slots: dict[str, Tensor], spans: Tensor | None) -> None:
        self.layer, self.tokens, self.spans = layer, tokens, spans
        self.k, self.v = (slots[name].to(tokens.x.dtype) for name in ("k", "v"))
        B, T, _ = tokens.x.shape
        tables = row_tables(B, T, self.k.shape[1], spans, tokens.x.device)
        self.start, self.stop, self.position = (table.expand(B, T) for table in tables)

    # What a subclass says

    @abstractmethod
    def scores(self, batch: int, rows: Tensor, head: int, slot: Tensor) -> tuple[Tensor, ...]:
        """z (M N) of every branch, at the slots (M N) of some rows of one sequence."""

    @abstractmethod
    def activate(self, h: tuple[Tensor, ...], exists: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """active, ρ (M 1) and a (M N) from the mixed scores."""

    def addresses(self, batch: int, row: int, head: int, slot: Tensor) -> tuple[Tensor, ...]:
        """k (n K) of every branch as the row sees it, so that z = k · query."""
        return tuple(self.k[batch, slot, g] for g in self.branches(head))

    def operators(self, batch: int, rows: Tensor, head: int, slot: Tensor) -> tuple[tuple[MixingOperator, ...], MixingOperator]:
        """R1 of every branch and R2, for columns that hold these slots (M N)."""
        one = identity(slot.shape[1], self.q)
        return (one,) * len(self.branches(head)), one

    def readout_gate(self, batch: int, rows: Tensor, head: int, o: Tensor) -> Tensor:
        """m2 (M V), by which the readouts o (M V) are multiplied."""
        return torch.ones_like(o)

    def branches(self, head: int) -> tuple[int, ...]:
        """Routing heads of a head."""
        return (head,)

    def columns(self, batch: int, rows: Tensor) -> Tensor:
        """The slots of the hidden layer's columns (M N), in time order for every row; some may not exist."""
        begin, end = int(self.start[batch, rows].min()), int(self.position[batch, rows].max()) + 1
        return torch.arange(begin, end, device=self.q.device).expand(len(rows), -1)

    def visible(self, batch: int, rows: Tensor, slot: Tensor) -> Tensor:
        """Which of the slots (M N) the rows see."""
        return (slot >= self.start[batch, rows, None]) & (slot <= self.position[batch, rows, None])

    # What follows

    def row_of(self, token: int, batch: int = 0) -> int:
        """The row of a token of the input; a ValueError at padding."""
        B, T, _ = self.tokens.x.shape
        if not 0 <= batch < B or not 0 <= token < T:
            raise ValueError(f"batch ({batch}) and token ({token}) must be below {B} and {T}, the input's size")
        order = self.tokens.order
        row = token if order is None else int((order[batch] == token).nonzero())
        if int(self.tokens.position.expand(B, T)[batch, row]) < 0:
            raise ValueError(f"token {token} of row {batch} is padding, and padding reads nothing")
        return row

    def place_of(self, batch: int, row: int, slot: Tensor) -> Tensor:
        """Where the tokens of slots stand in the input; negative in the cache."""
        local = slot - (self.position[batch, row] - row)
        order = self.tokens.order
        return local if order is None else torch.where(local < 0, local, order[batch][local.clamp(min=0)])

    @torch.no_grad()
    def rows(self, rows: Sequence[int] | Tensor, head: int, batch: int = 0, *, mixing: bool = True) -> HiddenRows:
        """The hidden layer of rows of one sequence (a document of its own, where documents are packed)."""
        self._check_head(head)
        index = torch.as_tensor(rows, device=self.q.device)
        slot = self.columns(batch, index)
        exists = self.visible(batch, index, slot)
        z = tuple(torch.where(exists, part, 0) for part in self.scores(batch, index, head, slot))
        R1, R2 = self._operators(batch, index, head, slot, mixing)
        h = tuple(torch.where(exists, R.apply(part), 0) for R, part in zip(R1, z, strict=True))
        active, rho, a = self.activate(h, exists)
        return HiddenRows(slot, exists, z, h, active, rho, a, torch.where(exists, R2.apply(a, transpose=True), 0))

    @torch.no_grad()
    def memory(self, token: int, head: int, batch: int = 0, *, mixing: bool = True) -> Memory:
        """One head at one token of the input."""
        row = self.row_of(token, batch)
        found = self.rows([row], head, batch, mixing=mixing)
        here = found.exists[0]
        slot = found.slot[0][here]
        index = torch.tensor([row], device=slot.device)
        R1, R2 = self._operators(batch, index, head, slot[None], mixing)
        R1, R2 = tuple(R._replace(s=R.s.reshape(-1)) for R in R1), R2._replace(s=R2.s.reshape(-1))
        keys = self.addresses(batch, row, head, slot)
        branches = tuple(
            Branch(mixed(R, k), z[0][here], h[0][here], R) for R, k, z, h in zip(R1, keys, found.z, found.h, strict=True)
        )
        a, w = found.a[0][here], found.w[0][here]
        values = self.v[batch, slot, head]
        m2 = self.readout_gate(batch, index, head, (w @ values)[None])[0]
        v = mixed(R2, values)
        return Memory(
            place=self.place_of(batch, row, slot),
            lag=self.position[batch, row] - slot,
            gate=branches[0],
            scale=branches[1] if len(branches) > 1 else None,
            R2=R2,
            active=found.active[0][here],
            rho=found.rho[0, 0],
            a=a,
            w=w,
            v=v,
            values=values,
            beta=self.read_out(v * m2, head),
            readouts=self.read_out(values * m2, head),
        )

    def read_out(self, o: Tensor, head: int) -> Tensor:
        """What gated readouts (… V) of a head add to the layer's output (… C)."""
        V = self.v.shape[-1]
        output = self.layer.get_submodule("o")
        padded = F.pad(o, (head * V, (self.n_head - 1 - head) * V))
        return output(padded) - output(torch.zeros_like(padded[:1]))

    def bias(self) -> Tensor:
        """What the layer adds whatever it reads (C); zero unless its output projection has a bias."""
        return self.layer.get_submodule("o")(self.v.new_zeros(self.n_head * self.v.shape[-1]))

    def _operators(
        self, batch: int, rows: Tensor, head: int, slot: Tensor, mixing: bool
    ) -> tuple[tuple[MixingOperator, ...], MixingOperator]:
        if mixing:
            return self.operators(batch, rows, head, slot)
        return Trace.operators(self, batch, rows, head, slot)

    def _check_head(self, head: int) -> None:
        if not 0 <= head < self.n_head:
            raise ValueError(f"head ({head}) must be at least 0 and below the layer's {self.n_head} heads")


def mixed(R: MixingOperator, y: Tensor) -> Tensor:
    """Rᵀ y (n K): row i is the content of slot i."""
    return R.apply(y.mT).mT


def identity(n: int, like: Tensor) -> MixingOperator:
    return MixingOperator(like.new_ones(n), like.new_zeros(n, 0), like.new_zeros(n, 0), like.new_zeros(0))
