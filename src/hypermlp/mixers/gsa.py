"""Gated slot attention (Zhang et al. 2024): softmax attention over M slots that are overwritten gradually.

    K_t = K_{t−1} Diag(e^{g_t}) + k_t s_tᵀ        V_t = Diag(e^{g_t}) V_{t−1} + s_t v_tᵀ        s_t = 1 − e^{g_t}
    o_t = V_tᵀ softmax(K_tᵀ q_t)

Letters: B batch, T time, C width, H heads, K and V widths of a head, M slots, n blocks, P places of a block.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp.checks import divisible
from hypermlp.mixers.base import Tokens
from hypermlp.mixers.parts import RMSNorm, head_width, heads, init_linears
from hypermlp.mixers.recurrent import Past, RecurrentMixer, Step
from hypermlp.ops import foreign
from hypermlp.ops.recurrence import Steps, expand, recurrence
from hypermlp.ops.scan import scan
from hypermlp.ops.types import compute_dtype, no_autocast

MOST_SLOTS = 64
SLOWNESS = 8  # what the log of the decay is divided by
PLACES = 32  # P, a power of two


class GSA(RecurrentMixer):
    """min(64, K) slots; silu of q, k, v and of the readout, RMSNorm over all heads together. About 4 C² parameters."""

    def __init__(self, width: int, n_head: int = 2, *, value_width: int | None = None) -> None:
        super().__init__()
        divisible("width", width, n_head, f"n_head ({n_head})")
        self.width, self.n_head, self.head_key_width = width, n_head, width // n_head
        self.head_value_width = head_width(width if value_width is None else value_width, n_head)
        self.slots = min(MOST_SLOTS, self.head_key_width)
        inner = n_head * self.head_value_width
        self.q, self.k = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.v, self.f = nn.Linear(width, inner, bias=False), nn.Linear(width, n_head * self.slots, bias=False)
        self.o = nn.Linear(inner, width, bias=False)
        init_linears(self)
        self.norm = RMSNorm(inner)

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"K": (self.n_head, self.head_key_width, self.slots), "V": (self.n_head, self.slots, self.head_value_width)}

    def step(self, tokens: Tokens, past: Past) -> Step:
        x, borders = tokens.x, {"begins": tokens.begins, "padding": tokens.padding}
        q, k = (heads(F.silu(layer(x)), self.n_head, self.head_key_width) for layer in (self.q, self.k))
        v = heads(F.silu(self.v(x)), self.n_head, self.head_value_width)
        g = heads(F.logsigmoid(self.f(x)) / SLOWNESS, self.n_head, self.slots)  # B T H M
        s = -torch.expm1(g)
        o, keys, values = slot_attention(q, k, v, s, g, past, **borders)
        return Step(self.o(self.norm(F.silu(o.flatten(2)))), {"K": keys, "V": values})


def slot_attention(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, g: Tensor, past: Past, *, begins: Tensor | None, padding: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """o (B T H V), K and V of the slots after the last token."""
    K, V = past.get("K"), past.get("V")
    if foreign.on_gpu(q):
        idle_s, idle_g = (s, g) if padding is None else (t.masked_fill(expand(padding, t), 0) for t in (s, g))
        served = foreign.gsa(q, k, v, idle_s, idle_g, None if K is None or V is None else (K, V), begins)
        if served is not None:
            return served
    scores, keys = slot_scores(q, k, s, g, K, begins=begins, padding=padding)
    o, values = recurrence(Steps(scores.softmax(-1), s, v, g), V, begins=begins, padding=padding)
    return o, keys, values


def slot_scores(
    q: Tensor,
    k: Tensor,
    s: Tensor,
    g: Tensor,
    state: Tensor | None = None,
    *,
    begins: Tensor | None = None,
    padding: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """K_tᵀ q_t (B T H M) and the last K (B H K M), for q and k (B T H K) and s and g (B T H M); see ops.recurrence.

    Here the decays sit on what is read, not on what is summed over, so recurrence does not apply. The scores of token t are
    Σ_{j≤t} (q_tᵀ k_j) e^{g_{j+1} + … + g_t} s_j: q_tᵀ k_j serves all slots, and within a block of time the decay between j and
    t is split at a border between them, of halves, quarters …, so that no exponent is ever positive.
    """
    dtype, exact = q.dtype, compute_dtype(q.dtype)
    with no_autocast(q):
        q, k, s, g = (t.to(exact) for t in (q, k, s, g))
        if begins is not None:
            g = g.masked_fill(expand(begins, g), float("-inf"))
        if padding is not None:
            g, s = g.masked_fill(expand(padding, g), 0), s.masked_fill(expand(padding, s), 0)
        first = None if state is None else state.to(exact)
        scores, last = (slot_op if torch.compiler.is_exporting() else in_blocks)(q, k, s, g, first)
    return scores.to(dtype), last


def in_blocks(q: Tensor, k: Tensor, s: Tensor, g: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """slot_scores without borders, in blocks of time."""
    T = q.shape[1]
    q, k, s, g = (blocks_of_time(t) for t in (q, k, s, g))  # B n H P …
    B, n, H, _, K = q.shape
    first = q.new_zeros(B, 1, H, K, s.shape[-1]) if state is None else state[:, None]
    ends = k.mT @ (s * until_end(g).exp())  # what a block adds to the state
    total = g.sum(3)[..., None, :].expand_as(ends)
    after, last = scan(total, ends, first[:, 0])
    before = torch.cat([first, after], dim=1)[:, :n]
    scores = (q @ before) * g.cumsum(3).exp() + within_blocks(q @ k.mT, s, g)
    return scores.transpose(2, 3).flatten(1, 2)[:, :T], last


@torch.library.custom_op("hypermlp::slot_scores", mutates_args=())
def slot_op(q: Tensor, k: Tensor, s: Tensor, g: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """One node of an exported graph, since the number of blocks depends on the length. For inference."""
    scores, last = in_blocks(q, k, s, g, state)
    return scores.contiguous(), last.clone()


@slot_op.register_fake
def _(q: Tensor, k: Tensor, s: Tensor, g: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    return s.new_empty(s.shape), s.new_empty(q.shape[0], q.shape[2], q.shape[3], s.shape[3])


def blocks_of_time(x: Tensor) -> Tensor:
    """B T H D → B n H P D, padded at the end with steps that change nothing."""
    x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % PLACES))
    return x.unflatten(1, (-1, PLACES)).transpose(2, 3).contiguous()


def until_end(g: Tensor) -> Tensor:
    """Sums of the g after each place (… P M), up to the last place."""
    behind = F.pad(g[..., 1:, :], (0, 0, 0, 1))
    return behind.flip(-2).cumsum(-2).flip(-2)


def within_blocks(weights: Tensor, s: Tensor, g: Tensor) -> Tensor:
    """Σ_{j≤t} weights_tj e^{g_{j+1} + … + g_t} s_j for weights (… P P), s and g (… P M)."""
    P = s.shape[-2]
    o = weights.diagonal(dim1=-2, dim2=-1)[..., None] * s
    half = P // 2
    while half:
        early_s = s.unflatten(-2, (-1, 2, half))[..., 0, :, :]
        early_g, late_g = g.unflatten(-2, (-1, 2, half)).unbind(-3)  # … blocks half M
        cross = weights.unflatten(-2, (-1, 2, half))[..., 1, :, :].unflatten(-1, (-1, 2, half))[..., 0, :]
        cross = cross.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)  # … blocks half half
        late = late_g.cumsum(-2).exp() * (cross @ (early_s * until_end(early_g).exp()))
        o = o + torch.stack([torch.zeros_like(late), late], dim=-3).flatten(-4, -2)
        half //= 2
    return o
