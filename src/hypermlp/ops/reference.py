"""The operator as the paper writes it: dense, differentiable, slow. The oracle of every other implementation.

Letters: B batch, T rows, S slots, H heads, G routing heads, K key width, V value width, R mixing rank, L block_size,
N columns of the hidden layer. Columns are lags, newest last, in the offset layout and slots in the identity layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hypermlp.ops.types import Mixing, Spec, compute_dtype, no_autocast, row_tables, slot_ends


class Layout(NamedTuple):
    """Which slot a row meets in each column, whether it exists, and which lag parameter the column has."""

    slot: Tensor  # B T N; any where it does not exist
    exists: Tensor  # B 1 T N
    lag: Tensor  # B N, index into the L lag parameters


def mix(
    q: Tensor,  # B T G K, rotated and gated
    k: Tensor,  # B S G K
    v: Tensor,  # B S H V
    routing: Mixing | None,  # R1, G heads
    reading: Mixing | None,  # R2, H heads
    spec: Spec,
    spans: Tensor | None = None,
    keep: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Readout o (B T H V), before the gate m2. Equations (7) to (11) of the paper.

    keep: is given what each row weighs each slot by (B H T S), the w of o = w v, and gives what to go on with.
    """
    out_dtype, dtype = q.dtype, compute_dtype(q.dtype)
    with no_autocast(q):
        layout = make_layout(q.shape[0], q.shape[1], k.shape[1], spec, spans, q.device)
        z = torch.einsum("btgk,bsgk->bgts", q.to(dtype), k.to(dtype))
        z = z.gather(3, layout.slot[:, None].expand(*z.shape[:3], -1))
        h = apply(routing, torch.where(layout.exists, z, 0), layout)  # eq. (7): h = z R1

        gate, scale = h.chunk(2, dim=1) if spec.kind == "glu" else (h, None)
        rho = (gate.square().sum(-1, keepdim=True) + spec.eps).sqrt()  # B H T 1
        a = F.relu(gate / rho) if spec.norm == "l2" else F.relu(gate)
        if scale is not None:
            a = F.softplus(scale) * a  # eq. (11)

        w = apply(reading, a, layout, transpose=True)  # eq. (10): w = a R2ᵀ
        time = w.new_zeros(*w.shape[:3], k.shape[1])
        time = time.scatter_add(3, layout.slot[:, None].expand_as(w), w)
        if keep is not None:
            time = keep(time / rho if spec.norm == "out_scale" else time)
        o = torch.einsum("bhts,bshv->bthv", time, v.to(dtype))
        if keep is None and spec.norm == "out_scale":
            o = o / rho.transpose(1, 2)
        return o.to(out_dtype)


def apply(mixing: Mixing | None, y: Tensor, layout: Layout, transpose: bool = False) -> Tensor:
    """y R = y ⊙ D + ((y A) ⊙ s) Bᵀ, or y Rᵀ, on the slots that exist. Lemma G.1: the N × N matrix is never formed."""
    if mixing is None:
        return y
    A, B = (mixing.B, mixing.A) if transpose else (mixing.A, mixing.B)
    A, B = A[:, layout.lag].to(y.dtype), B[:, layout.lag].to(y.dtype)  # H B N R
    low_rank = torch.einsum("bhtn,hbnr->bhtr", y, A) * mixing.control.transpose(1, 2).to(y.dtype)
    out = torch.einsum("bhtr,hbnr->bhtn", low_rank, B)
    D = mixing.baseline()
    if D is not None:
        out = out + y * D[:, layout.lag].to(y.dtype).transpose(0, 1)[:, :, None]  # B H 1 N
    return torch.where(layout.exists, out, 0)


def make_layout(B: int, T: int, S: int, spec: Spec, spans: Tensor | None, device: torch.device) -> Layout:
    """Rows sit at the end of their slots; a row sees its own span's slots, at most L of them, none of the future."""
    start, stop, position = row_tables(B, T, S, spans, device)  # each B T
    L = spec.block_size
    if spec.aligner == "offset":
        N = torch.sym_min(S, L)
        column = torch.arange(N, device=device)
        slot = position[..., None] - (N - 1) + column  # B T N: right-aligned lags
        exists = slot >= start[..., None]
        slot = slot.clamp(min=0) if spans is None else slot.remainder(S)  # a span goes around
        lag = (L - N + column)[None]
    else:
        column = torch.arange(S, device=device)
        slot = column.expand(*position.shape, S)
        last = position if spec.causal else stop - 1
        exists = (slot >= start[..., None]) & (slot <= last[..., None])
        lag = (column - slot_ends(B, S, spans, device) + L).clamp(0, L - 1)  # right-aligned in the slot's own span
    return Layout(slot.expand(B, -1, -1), (exists & (position >= 0)[..., None])[:, None], lag)
