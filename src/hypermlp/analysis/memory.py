"""What one head reads at one token, slot by slot, in the words of the paper's section 2.5.

    pool        U = R1(x)ᵀ K and V = R2(x)ᵀ V: one slot (u_i, v_i) per token of the context, in the head's own coordinates
    address     α_i = q · u_i = h_i, and h = z R1(x) with the scores z_i = q · k_i
    activation  a_i = relu(α_i) / ρ, times softplus of the second branch in HyperGLU; the slots with α_i > 0 are active
    readout     β_i = (v_i ⊙ m2) W_o, as wide as the model
    output      Σ_i a_i β_i by slots, and Σ_c w_c (v_c ⊙ m2) W_o by tokens, w = a R2(x)ᵀ; both are what the head adds

Softmax attention, PaTH and differential attention have the same parts: no mixing (R = I), every slot active, and weights that
are a softmax or the difference of two. A mixer that condenses its past into a state has no slots, and is refused.

    >>> from hypermlp import HyperGLU, HyperGLUConfig
    >>> layer = HyperGLU(HyperGLUConfig(n_embd=16, n_head=2, block_size=32))
    >>> x = torch.randn(1, 10, 16)
    >>> head = look(layer, x, token=9, head=0)
    >>> torch.allclose(head.contributions.sum(0) + look(layer, x, token=9, head=1).output, layer(x)[0, 9], atol=1e-5)
    True

Letters: B batch, T rows, S slots, H heads, G routing heads, K and V widths of a head, C width, R mixing rank, L block_size;
n slots that a row sees, M rows at once, N columns of the hidden layer for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp.analysis.trace import Memory, MixingOperator, Trace, identity
from hypermlp.cache import Cache
from hypermlp.mixers import registers
from hypermlp.mixers.base import Mixer, Tokens
from hypermlp.mixers.differential import DifferentialAttention
from hypermlp.mixers.forgetting import ForgettingAttention
from hypermlp.mixers.hyper import HyperGLU
from hypermlp.mixers.parts import NORM_EPS
from hypermlp.mixers.path import PathAttention
from hypermlp.mixers.softmax import SoftmaxAttention
from hypermlp.ops import Mixing
from hypermlp.ops.path import PathInputs
from hypermlp.ops.types import slot_ends


def look(layer: Mixer, x: Tensor, token: int, head: int, batch: int = 0, *, mixing: bool = True, **options: Any) -> Memory:
    """What `head` of `layer` reads at x[batch, token]; options are those of the layer's call.

    mixing=False: as it would be with R1 = R2 = I. A cache is left as it is.
    """
    return trace(layer, x, **options).memory(token, head, batch, mixing=mixing)


@torch.no_grad()
def trace(
    layer: nn.Module,
    x: Tensor,
    *,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cache: Cache | None = None,
) -> Trace:
    """All projections of a layer's input x (B T C), from which any row is decomposed in O(slots)."""
    kind = next((kind for kind in ATTENTIONS if isinstance(layer, kind)), None)
    if kind is None or not isinstance(layer, Mixer):
        known = ", ".join(kind.__name__ for kind in ATTENTIONS)
        raise ValueError(
            f"{type(layer).__name__} keeps no slots: it condenses its past into a state; memory is defined for {known}"
        )
    tokens = layer.prepare(x, attention_mask, cu_seqlens, cache)
    return ATTENTIONS[kind](layer, tokens, None if cache is None else cache.clone())


def can_trace(layer: nn.Module) -> bool:
    """Whether a layer has slots to look at."""
    return isinstance(layer, tuple(ATTENTIONS))


class HyperTrace(Trace):
    """HyperGLU and HyperMLP."""

    def __init__(self, layer: HyperGLU, tokens: Tokens, cache: Cache | None) -> None:
        registers.refuse(layer.config)
        made = layer.project(tokens, None if cache is None else cache.history(), "dense")
        slots, spans = {"k": made.k, "v": made.v}, tokens.spans
        if cache is not None:
            slots, spans = cache.append(slots, tokens.x, tokens.counts())
        super().__init__(layer, tokens, slots, spans)
        self.q, self.n_head, self.spec = made.q, layer.config.n_head, layer.spec
        self.routing, self.reading = made.routing, made.reading
        gate = made.gate_vo
        if gate is not None and layer.config.gate_act == "sigmoid":
            gate = torch.sigmoid(gate)
        self.m2 = None if gate is None else gate.unflatten(-1, (self.n_head, -1))  # B T H V

    def branches(self, head: int) -> tuple[int, ...]:
        return (head, head + self.n_head) if self.spec.kind == "glu" else (head,)

    def columns(self, batch: int, rows: Tensor) -> Tensor:
        """In the lag layout a column is a lag, newest last; in the identity layout it is a slot."""
        position, start = self.position[batch, rows], self.start[batch, rows]
        if self.spec.aligner == "offset":
            N = min(int((position - start).max()) + 1, self.spec.block_size)
            return position[:, None] - (N - 1) + torch.arange(N, device=rows.device)
        last = position.max() if self.spec.causal else self.stop[batch, rows].max() - 1
        return torch.arange(int(start.min()), int(last) + 1, device=rows.device).expand(len(rows), -1)

    def visible(self, batch: int, rows: Tensor, slot: Tensor) -> Tensor:
        last = self.position if self.spec.causal else self.stop - 1
        return (slot >= self.start[batch, rows, None]) & (slot <= last[batch, rows, None])

    def scores(self, batch: int, rows: Tensor, head: int, slot: Tensor) -> tuple[Tensor, ...]:
        return tuple(products(self.q[batch, rows, g], self.k[batch, :, g], slot) for g in self.branches(head))

    def operators(self, batch: int, rows: Tensor, head: int, slot: Tensor) -> tuple[tuple[MixingOperator, ...], MixingOperator]:
        place = self.parameters(batch, rows, slot)
        routing = tuple(self._operator(self.routing, g, batch, rows, place) for g in self.branches(head))
        return routing, self._operator(self.reading, head, batch, rows, place)

    def parameters(self, batch: int, rows: Tensor, slot: Tensor) -> Tensor:
        """Which of the L parameters each column meets (N)."""
        L = self.spec.block_size
        if self.spec.aligner == "offset":
            return L - 1 - (self.position[batch, rows[0]] - slot[0])
        B, S = self.k.shape[:2]
        ends = slot_ends(B, S, self.spans, slot.device).expand(B, S)
        return (slot[0] - ends[batch, slot[0]] + L).clamp(0, L - 1)

    def _operator(self, mixing: Mixing | None, head: int, batch: int, rows: Tensor, place: Tensor) -> MixingOperator:
        if mixing is None:
            return identity(len(place), self.q)
        D = mixing.baseline()
        A, B = mixing.A[head, place], mixing.B[head, place]
        return MixingOperator(A.new_zeros(len(place)) if D is None else D[head, place], A, B, mixing.control[batch, rows, head])

    def activate(self, h: tuple[Tensor, ...], exists: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate = h[0]
        rho = torch.ones_like(gate[:, :1])
        if self.spec.norm != "none":
            rho = (gate.square().sum(-1, keepdim=True) + self.spec.eps).sqrt()
        a = F.relu(gate) / rho
        return gate > 0, rho, a * F.softplus(h[1]) if len(h) > 1 else a

    def readout_gate(self, batch: int, rows: Tensor, head: int, o: Tensor) -> Tensor:
        return torch.ones_like(o) if self.m2 is None else self.m2[batch, rows, head]


class SoftmaxTrace(Trace):
    """Softmax attention: ρ is the sum of exponentials, and every slot is active."""

    def __init__(self, layer: SoftmaxAttention, tokens: Tokens, cache: Cache | None) -> None:
        made = layer.project(tokens, None if cache is None else cache.history(), "dense")
        slots, spans = {"k": made.k, "v": made.v}, tokens.spans
        if cache is not None:
            slots, spans = cache.append(slots, tokens.x, tokens.counts())
        super().__init__(layer, tokens, slots, spans)
        self.q, self.n_head = made.q * made.q.shape[-1] ** -0.5, layer.n_head
        self.m2 = None if made.gate_vo is None else torch.sigmoid(made.gate_vo).unflatten(-1, (self.n_head, -1))

    def scores(self, batch: int, rows: Tensor, head: int, slot: Tensor) -> tuple[Tensor, ...]:
        return tuple(products(self.q[batch, rows, g], self.k[batch, :, g], slot) for g in self.branches(head))

    def activate(self, h: tuple[Tensor, ...], exists: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return exists, *softmax(h[0], exists)

    def readout_gate(self, batch: int, rows: Tensor, head: int, o: Tensor) -> Tensor:
        return torch.ones_like(o) if self.m2 is None else self.m2[batch, rows, head]


class DifferentialTrace(SoftmaxTrace):
    """The difference of two softmax maps. The norm behind it is linear once a row's own size is known: it is part of m2."""

    def __init__(self, layer: DifferentialAttention, tokens: Tokens, cache: Cache | None) -> None:
        q, k, v = layer.project(tokens)
        slots, spans = {"k": k, "v": v}, tokens.spans
        if cache is not None:
            slots, spans = cache.append(slots, tokens.x, tokens.counts())
        Trace.__init__(self, layer, tokens, slots, spans)
        self.q, self.n_head = q * q.shape[-1] ** -0.5, layer.n_head
        self.strength, self.norm = layer.strength().to(q.dtype), layer.norm.to(q.dtype) * (1 - layer.lambda_init)

    def branches(self, head: int) -> tuple[int, ...]:
        return head, head + self.n_head

    def activate(self, h: tuple[Tensor, ...], exists: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (rho, first), (_, second) = (softmax(part, exists) for part in h)
        return exists, rho, first - self.strength * second

    def readout_gate(self, batch: int, rows: Tensor, head: int, o: Tensor) -> Tensor:
        return self.norm * torch.rsqrt(o.square().mean(-1, keepdim=True) + NORM_EPS)


class ForgettingTrace(SoftmaxTrace):
    """Forgetting attention: the decays between a slot and the row are one more channel of the slot's address."""

    def __init__(self, layer: ForgettingAttention, tokens: Tokens, cache: Cache | None) -> None:
        q, slots = layer.project(tokens)
        spans = tokens.spans
        if cache is not None:
            slots, spans = cache.append(slots, tokens.x, tokens.counts())
        Trace.__init__(self, layer, tokens, slots, spans)
        self.n_head, self.m2 = layer.n_head, None
        self.decay = slots["g"].to(q.dtype).cumsum(1)  # B S H 1
        self.q = F.pad(q * q.shape[-1] ** -0.5, (0, 1), value=1.0)
        self.k = torch.cat([self.k, -self.decay], dim=-1)

    def scores(self, batch: int, rows: Tensor, head: int, slot: Tensor) -> tuple[Tensor, ...]:
        (z,) = super().scores(batch, rows, head, slot)
        return (z + self.decay[batch, self.position[batch, rows], head],)

    def addresses(self, batch: int, row: int, head: int, slot: Tensor) -> tuple[Tensor, ...]:
        (u,) = super().addresses(batch, row, head, slot)
        return (u + F.pad(self.decay[batch, self.position[batch, row], head], (u.shape[-1] - 1, 0)),)


class PathTrace(SoftmaxTrace):
    """PaTH: a key is turned by every token that comes after it; u is the key as the row sees it."""

    def __init__(self, layer: PathAttention, tokens: Tokens, cache: Cache | None) -> None:
        conv_inputs = layer.w_up(layer.w_down(tokens.x))
        made: PathInputs = layer.path_inputs(tokens, conv_inputs, None if cache is None else cache.history())
        slots, spans = {"k": made.k, "v": made.v}, tokens.spans
        if cache is not None:
            slots, spans = cache.append(slots, conv_inputs, tokens.counts())  # what it holds is turned up to its newest token
        Trace.__init__(self, layer, tokens, slots, spans)
        self.q, self.n_head, self.m2 = made.q * made.q.shape[-1] ** -0.5, layer.n_head, None
        self.turn_w, self.turn_beta = made.w, made.beta  # B T H K, B T H

    def scores(self, batch: int, rows: Tensor, head: int, slot: Tensor) -> tuple[Tensor, ...]:
        """Queries walk back through the tokens, turned by each they leave."""
        k, shift = self.k[batch, :, head], int(self.position[batch, rows[0]] - rows[0])
        q, own = self.q[batch, rows, head].clone(), self.position[batch, rows]
        z = torch.zeros(slot.shape, dtype=q.dtype, device=q.device)
        for column in range(slot.shape[1] - 1, -1, -1):
            place = int(slot[0, column])
            here = own >= place  # rows that have come this far back, or start here
            z[:, column] = torch.where(here, q @ k[place], 0)
            if place >= shift:
                w, beta = self.turn_w[batch, place - shift, head], self.turn_beta[batch, place - shift, head]
                q = torch.where(here[:, None], q - beta * (q @ w)[:, None] * w, q)
        return (z,)

    def addresses(self, batch: int, row: int, head: int, slot: Tensor) -> tuple[Tensor, ...]:
        shift = int(self.position[batch, row] - row)
        walked = torch.eye(self.k.shape[-1], dtype=self.q.dtype, device=self.q.device)  # H_t … H_{j+1}
        u = []
        for place in reversed(slot.tolist()):
            u.append(walked @ self.k[batch, place, head])
            if place >= shift:
                w, beta = self.turn_w[batch, place - shift, head], self.turn_beta[batch, place - shift, head]
                walked = walked - beta * torch.outer(walked @ w, w)
        return (torch.stack(u[::-1]),)


def products(q: Tensor, k: Tensor, slot: Tensor) -> Tensor:
    """q · k (M N) of rows q (M K) and the keys (S K) of their slots; slots that do not exist give anything."""
    first, last = int(slot.min().clamp(min=0)), int(slot.max()) + 1
    return (q @ k[first:last].mT).gather(1, (slot - first).clamp(min=0))


def softmax(z: Tensor, exists: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of exponentials (M 1), and the weights (M N)."""
    z = z.masked_fill(~exists, float("-inf"))
    return z.logsumexp(-1, keepdim=True).exp(), z.softmax(-1)


ATTENTIONS: dict[type[nn.Module], Callable[[Any, Tokens, Cache | None], Trace]] = {
    HyperGLU: HyperTrace,
    SoftmaxAttention: SoftmaxTrace,
    DifferentialAttention: DifferentialTrace,
    ForgettingAttention: ForgettingTrace,
    PathAttention: PathTrace,
}
