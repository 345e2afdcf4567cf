"""What every implementation of the operator takes: the mixing operators, the fixed choices, the spans.

Letters used throughout `ops`:

    B batch   T rows (new tokens)   S slots (keys and values)   H heads   G routing heads (2H for GLU, else H)
    K width of a routing head   V width of a head   R mixing rank   L block_size   N mixing columns of a strip
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from hypermlp.config import Aligner, AttnKind, AttnNorm


class Mixing(NamedTuple):
    """One operator along the sequence, R(x_t) = D + A Diag(s_t) Bᵀ with D = shortcut + diag, for all heads.

    A, B and diag hold lag ℓ at index L−1−ℓ, so a context of n slots in time order meets the slice [L−n:].
    """

    A: Tensor  # H L R
    B: Tensor  # H L R
    control: Tensor  # B T H R: s, after its activation
    diag: Tensor | None  # H L
    shortcut: bool

    def baseline(self) -> Tensor | None:
        """D over all lags (H L); None where it is zero."""
        if self.diag is None:
            return torch.ones_like(self.A[..., 0]) if self.shortcut else None
        return 1 + self.diag if self.shortcut else self.diag


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The choices of the operator that are not tensors; HyperGLUConfig explains them under the names behind them."""

    kind: AttnKind  # attn_kind
    norm: AttnNorm  # attn_norm
    aligner: Aligner  # aligner_kind
    causal: bool  # do_masking
    block_size: int
    eps: float  # norm_eps


class MixCall(NamedTuple):
    """One call of the operator: what reference.mix takes, and how high a strip of rows is."""

    q: Tensor  # B T G K
    k: Tensor  # B S G K
    v: Tensor  # B S H V
    routing: Mixing | None  # R1, G heads
    reading: Mixing | None  # R2, H heads
    spec: Spec
    spans: Tensor | None = None  # n 5, see dense_spans
    chunk: int | None = None  # rows of a strip for "chunked"; None: as suits the device

    def leaves(self) -> dict[str, Tensor]:
        """All that gradients flow into: q, k, v, R1.A, …, R2.diag."""
        found = {"q": self.q, "k": self.k, "v": self.v}
        for name, mixing in (("R1", self.routing), ("R2", self.reading)):
            if mixing is not None:
                found |= {f"{name}.{f}": t for f, t in mixing._asdict().items() if isinstance(t, Tensor)}
        return found

    def with_leaves(self, leaves: Mapping[str, Tensor]) -> Self:
        """The call with other tensors in the place of those."""

        def mixing(name: str, old: Mixing | None) -> Mixing | None:
            if old is None:
                return None
            given: dict[str, Any] = {f: leaves[f"{name}.{f}"] for f in old._fields if f"{name}.{f}" in leaves}
            return old._replace(**given)

        q, k, v = leaves["q"], leaves["k"], leaves["v"]
        return self._replace(q=q, k=k, v=v, routing=mixing("R1", self.routing), reading=mixing("R2", self.reading))

    def to(self, dtype: torch.dtype) -> Self:
        """The call in another type."""
        return self.with_leaves({name: t.to(dtype) for name, t in self.leaves().items()})


def dense_spans(batch: int, rows: int, slots: int) -> Tensor:
    """The spans of a plain batch: one sequence per batch entry, its rows the last of its slots.

    Spans are an int64 tensor (n 5), each row [batch entry, row begin, row end, slot begin, slot end]: the rows are the last
    rows of the sequence that the slots make. What lies in no span does not exist. Slots are a ring: a span whose end is beyond
    the last slot goes on with the first, so that a cache is read where it lies. Gradients of such spans are `dense` alone.

        >>> dense_spans(2, 3, 5).tolist()
        [[0, 0, 3, 0, 5], [1, 0, 3, 0, 5]]
    """
    return torch.tensor([[b, 0, rows, 0, slots] for b in range(batch)], dtype=torch.int64, device="cpu").reshape(-1, 5)


def row_tables(B: int, T: int, S: int, spans: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """For each row (1|B T): first slot and end of its span, and its own slot (−1: the row lies in no span)."""
    row = torch.arange(T, device=device)
    if spans is None:
        return torch.zeros_like(row)[None], torch.full_like(row, S)[None], (row + S - T)[None]
    batch, r0, r1, c0, c1 = spans.to(device).unbind(1)  # each n
    inside = belongs(batch, r0, r1, B, T)
    start, stop, shift = ((inside * value[:, None, None]).sum(0) for value in (c0, c1, c1 - r1))
    return start, stop, torch.where(inside.any(0), row + shift, -1)


def slot_ends(B: int, S: int, spans: Tensor | None, device: torch.device) -> Tensor:
    """For each slot (1|B S), the end of its span."""
    if spans is None:
        return torch.full((1, S), S, device=device)
    batch, _, _, c0, c1 = spans.to(device).unbind(1)
    return (belongs(batch, c0, c1, B, S) * c1[:, None, None]).sum(0)


def belongs(batch: Tensor, begin: Tensor, end: Tensor, B: int, size: int) -> Tensor:
    """Which places of which batch entries lie in which span (n B size)."""
    place = torch.arange(size, device=batch.device)
    inside = (place >= begin[:, None]) & (place < end[:, None])
    return (batch[:, None] == torch.arange(B, device=batch.device))[..., None] & inside[:, None]


def by_document(compute: Callable[..., Tensor], spans: Tensor, *tensors: Tensor) -> Tensor:
    """compute(*tensors) for each document of a packed row (1 T …), one after another: no T × T mask, no work between them."""
    sizes = (spans[:, 2] - spans[:, 1]).tolist()
    documents = zip(*(t.split(sizes, dim=1) for t in tensors), strict=True)
    return torch.cat([compute(*document) for document in documents], dim=1)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Half precision is summed in float32: row norms and long sums need it."""
    return torch.promote_types(dtype, torch.float32)


def no_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Where types are chosen by hand, for tensors on x's device; the meta device has no autocast."""
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)
