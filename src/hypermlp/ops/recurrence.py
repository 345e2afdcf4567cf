"""The matrix-valued recurrence that most rivals of attention share, and what reads it out.

    S_t = Diag(e^{g_t}) S_{t−1} + b_t (a_tᵀ S_{t−1}) + k_t v_tᵀ        o_t = S_tᵀ q_t

Without g and a it is linear attention; with g gated linear attention, retention, Mamba-2; with a and b the delta rules, RWKV-7.

Many tokens go in chunks of C: inside a chunk everything is matrix products over all chunks at once, and a loop over the chunks
carries the state. A decay between two tokens is always e to the sum of the g between them, never a quotient of longer decays,
so nothing overflows or cancels however strong it is.

Letters: B batch, T time, H heads, K key width, V value width, n chunks, C tokens of a chunk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hypermlp.ops import foreign
from hypermlp.ops.observer import is_recorded, transform
from hypermlp.ops.registered import gradients_with_graph
from hypermlp.ops.types import compute_dtype, no_autocast

CHUNK = 32  # C, of long inputs: on a CPU faster than 64 for narrow heads, about level for wide ones
FEW_TOKENS = 4  # up to which one token at a time is faster
FORGOTTEN = -1000.0  # e to this is 0, in float64 too: stands for all stronger decays, so that sums stay finite


class Steps(NamedTuple):
    """What every token does to the state."""

    q: Tensor  # B T H K
    k: Tensor  # B T H K
    v: Tensor  # B T H V
    g: Tensor | None = None  # B T H or B T H K: log of the decay, at most 0; −inf forgets everything
    a: Tensor | None = None  # B T H K
    b: Tensor | None = None  # B T H K; None where a is given: b = k, as in the delta rules
    beta: Tensor | None = None  # B T H 1, of the delta rules: k is this times the key. Only kernels of others ask for it


def recurrence(
    steps: Steps, state: Tensor | None = None, *, begins: Tensor | None = None, padding: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Readouts o (B T H V) and the state after the last token (B H K V, in float32 at least).

    Args:
        steps: what every token does to the state, and how it reads it.
        state: what came before (B H K V); None: nothing.
        begins: tokens (1|B T) before which the state is emptied.
        padding: tokens (B T) that leave the state alone.
    """
    dtype = steps.q.dtype
    if foreign.on_gpu(steps.q):
        served = foreign.recurrence(isolate(steps, None, padding), state, begins)
        if served is not None:
            return served
    exact = Steps._make(None if t is None else t.to(compute_dtype(dtype)) for t in steps)
    with no_autocast(steps.q):
        own = isolate(exact, begins, padding)
        if is_recorded():
            o, state = recurrence_op(*own[:-1], state)
        else:
            o, state = (run if transform() is None else step_by_step)(own, state)
    return o.to(dtype), state


def run(steps: Steps, state: Tensor | None) -> tuple[Tensor, Tensor]:
    return (step_by_step if steps.q.shape[1] <= FEW_TOKENS else chunked)(steps, state)


@torch.library.custom_op("hypermlp::recurrence", mutates_args=())
def recurrence_op(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, a: Tensor | None, b: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One node of an exported or traced graph, since the loop over the chunks depends on the length. For inference."""
    o, last = run(Steps(q, k, v, g, a, b), state)
    return o.contiguous(), last.clone()


@recurrence_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor | None) -> tuple[Tensor, Tensor]:
    B, T, H, K = q.shape
    return v.new_empty(B, T, H, v.shape[-1]), v.new_empty(B, H, K, v.shape[-1])


def isolate(steps: Steps, begins: Tensor | None, padding: Tensor | None) -> Steps:
    """The steps with borders between documents and idle padding written into decays, keys and a."""
    q, k, v, g, a, b, beta = steps
    if begins is not None:
        g = k.new_zeros(k.shape[:3]) if g is None else g
        g = g.masked_fill(expand(begins, g), float("-inf"))
        a = None if a is None else a.masked_fill(expand(begins, a), 0)
    if padding is not None:
        k = k.masked_fill(expand(padding, k), 0)
        g = None if g is None else g.masked_fill(expand(padding, g), 0)
        b = None if b is None else b.masked_fill(expand(padding, b), 0)
    return Steps(q, k, v, g, a, b, beta)


def expand(mask: Tensor, like: Tensor) -> Tensor:
    """mask (1|B T) with as many dimensions as `like` (B T …)."""
    return mask.reshape(*mask.shape, *[1] * (like.dim() - 2))


def step_by_step(steps: Steps, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """The equations, one token after another: the oracle of the chunked form, and the path of single tokens."""
    q, k, v, g, a, b, _ = steps
    B, T, H, K = q.shape
    S = q.new_zeros(B, H, K, v.shape[-1]) if state is None else state.to(q.dtype)
    o = []
    for t in range(T):
        new = k[:, t, :, :, None] * v[:, t, :, None]
        if a is not None:
            new = new + (k if b is None else b)[:, t, :, :, None] * torch.einsum("bhk,bhkv->bhv", a[:, t], S)[:, :, None]
        if g is not None:
            decay = g[:, t].exp()
            S = S * (decay[..., None, None] if g.dim() == 3 else decay[..., None])
        S = S + new
        o.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return (torch.stack(o, 1) if o else v[:, :0]), S


def chunked(steps: Steps, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """The same in chunks.

    Within a chunk the readouts u_t = S_{t−1}ᵀ a_t depend on each other and on the state S before it: (I − A) U = Ā S + A' V,
    where A holds the products of a with b, and A' those of a with k. So U = W S + U₀, with W and U₀ for all chunks at once.
    Where b is k, U stands for everything that is written along it: U + V = W S + U₀ with (I − A) U₀ = V.
    """
    q, k, v, g, a, b, _ = steps
    B, T, H, K = q.shape
    C = min(CHUNK, 1 << (T - 1).bit_length())
    V, n = v.shape[-1], -(-T // C)
    N = B * H * n
    # a meets the state that the token before it left, so it is read there.
    reads = [chunks(q, C)] if a is None else [chunks(q, C), chunks(a, C, ahead=1)]
    writes = [chunks(k, C)] if b is None else [chunks(k, C), chunks(b, C)]
    left, right = (torch.stack(t, -2).reshape(N, C, len(t), K) for t in (reads, writes))
    values = chunks(v, C).reshape(N, C, V)
    if g is None or g.dim() == 3:
        pairs, left, right, keep = scalar_decays(left, right, None if g is None else chunks(g, C).reshape(N, C))
    else:
        pairs, left, right, keep = ChannelDecays.apply(left, right, chunks(g, C).clamp(min=FORGOTTEN).reshape(N, C, K))
    q_left, *a_left = left.unbind(2)  # N C K, with the decays since the chunk began
    rights = right.unbind(2)  # N C K, with the decays until it ends
    q_pairs, *a_pairs = (p.unbind(3) for p in pairs.unbind(2))  # N C C each

    inner, news, solved = None, None, None
    if a is None or b is not None:
        inner, news = torch.bmm(q_pairs[0], values), torch.bmm(rights[0].mT, values).unflatten(0, (B * H, n))
    if a is not None:
        A = [F.pad(p[:, :-1], (0, 0, 1, 0)) for p in a_pairs[0]]
        W = torch.cat([chunks(a, C)[:, :, :, :1].reshape(N, 1, K), a_left[0][:, :-1]], 1)
        U = values if b is None else torch.bmm(A[0], values)
        WU = torch.linalg.solve_triangular(-A[-1], torch.cat([W, U], -1), upper=False, unitriangular=True)
        solved = tuple(t.unflatten(0, (B * H, n)) for t in (*WU.split([K, V], -1), rights[-1].mT))
    S = q.new_zeros(B * H, K, V) if state is None else state.to(q.dtype).reshape(B * H, K, V)
    before, read, S = carry(S, keep.unflatten(0, (B * H, n)), news, solved)

    o = torch.bmm(q_left, before.reshape(N, K, V))
    o = o if inner is None else o + inner
    o = o if read is None else torch.baddbmm(o, q_pairs[-1], read.reshape(N, C, V))
    return o.reshape(B, H, n * C, V).transpose(1, 2)[:, :T], S.reshape(B, H, K, V)


def carry(
    S: Tensor, keep: Tensor, news: Tensor | None, solved: tuple[Tensor, ...] | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The state before every chunk (B*H n K V), what a reads in each (B*H n C V), and the state after the last.

    keep (B*H n K|1 1) and news (B*H n K V) are the decay of a chunk and what it adds by itself; solved are W (B*H n C K) and
    U₀ (B*H n C V) of the readouts, and b, transposed, with the decays until the end of the chunk (B*H n K C).
    """
    before, read = [], []
    columns = [t.unbind(1) for t in (keep, news, *(solved or ())) if t is not None]
    for decay, *others in zip(*columns, strict=True):
        rest = list(others)  # which to the compiler of torch 2.12 is a tuple
        before.append(S)
        S_next = S * decay
        if news is not None:
            S_next = S_next + rest.pop(0)
        if solved is not None:
            W, U, end = rest
            read.append(torch.baddbmm(U, W, S))
            S_next = torch.baddbmm(S_next, end, read[-1])
        S = S_next
    return torch.stack(before, 1), torch.stack(read, 1) if read else None, S


def chunks(x: Tensor, C: int, ahead: int = 0) -> Tensor:
    """B T H … → B H n C …, padded with steps that change nothing. ahead: begin so many tokens later."""
    fill = -x.shape[1] % C
    if fill or ahead:
        x = F.pad(x, (*[0, 0] * (x.dim() - 2), -ahead, fill + ahead))
    return x.unflatten(1, (-1, C)).movedim(3, 1)


def scalar_decays(left: Tensor, right: Tensor, g: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ChannelDecays where all channels of a head decay alike; left (N C s K), right (N C r K), g (N C)."""
    N, C, s, K = left.shape
    r = right.shape[2]
    pairs = torch.bmm(left.reshape(N, C * s, K), right.reshape(N, C * r, K).mT).reshape(N, C, s, C, r)
    if g is None:
        seen = torch.ones(C, C, dtype=left.dtype, device=left.device).tril()
        return pairs * seen[:, None, :, None], left, right, left.new_ones(N, 1, 1)
    g = g.clamp(min=FORGOTTEN)
    later = torch.ones(C, C, dtype=torch.bool, device=g.device).triu(1)  # j i: i > j
    between = torch.where(later, g[:, None], 0).cumsum(-1).exp().triu().mT  # i j: e^{g of j+1 … i}
    since = g.cumsum(-1).exp()
    decayed = left * since[..., None, None], right * between[:, -1, :, None, None]
    return pairs * between[:, :, None, :, None], *decayed, since[:, -1, None, None]


class ChannelDecays(torch.autograd.Function):
    """Products of left (N C s K) and right (N C r K) through the decays g (N C K) that lie between, in N chunks.

    Returns pairs (N C s C r), pairs[i, j] = Σ left_i ⊙ right_j ⊙ e^{g of j+1 … i} for j ≤ i and else 0; left with the decays
    since the chunk began; right with those until it ends; the decay of the whole chunk (N K 1).

    The chunk is halved repeatedly: later rows meet earlier columns at the border between two halves, left with the decays
    since the border and right with those until it. The sums of g for blocks of one size follow from those of half the size.
    """

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ctx.save_for_backward(left, right, g)
        N, C, s, K = left.shape
        r = right.shape[2]
        pairs = left.new_zeros(N, C * s, C * r)
        same_token(pairs, C).copy_(torch.bmm(left.reshape(N * C, s, K), right.reshape(N * C, r, K).mT).view(N, C, s, r))
        levels, since, until = border_decays(g)
        for level in levels:
            blocks, m = level.shape[1], level.shape[3]
            later = halves(left, m)[:, :, 1] * level[:, :, 1, :, None]  # N blocks m s K
            earlier = halves(right, m)[:, :, 0] * level[:, :, 0, :, None]
            found = torch.bmm(later.reshape(N * blocks, m * s, K), earlier.reshape(N * blocks, m * r, K).mT)
            across_borders(pairs, blocks).copy_(found.view(N, blocks, m * s, m * r))
        return pairs.view(N, C, s, C, r), left * since[:, :, None], right * until[:, :, None], since[:, -1, :, None]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        left, right, g = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradients are differentiated again
            return tuple(gradients_with_graph(plain_channel_decays, (left, right, g), grads))
        d_pairs, d_left_since, d_right_until, d_keep = grads
        N, C, s, K = left.shape
        r = right.shape[2]
        levels, since, until = border_decays(g)
        d_left, d_right = d_left_since * since[:, :, None], d_right_until * until[:, :, None]
        # Gradients of the sums of g, propagated in the reverse order of border_decays.
        d_since, d_until = (d_left * left).sum(2), (d_right * right).sum(2)
        d_since[:, -1] += d_keep[..., 0] * since[:, -1]
        d_pairs = d_pairs.reshape(N, C * s, C * r)
        d_same = same_token(d_pairs, C).reshape(N * C, s, r)
        d_left += torch.bmm(d_same, right.reshape(N * C, r, K)).view_as(left)
        d_right += torch.bmm(d_same.mT, left.reshape(N * C, s, K)).view_as(right)
        for level in reversed(levels):
            blocks, m = level.shape[1], level.shape[3]
            x, y = halves(left, m)[:, :, 1], halves(right, m)[:, :, 0]
            to_border, from_border = level[:, :, 0, :, None], level[:, :, 1, :, None]
            later, earlier = (x * from_border).reshape(N * blocks, m * s, K), (y * to_border).reshape(N * blocks, m * r, K)
            d_found = across_borders(d_pairs, blocks).reshape(N * blocks, m * s, m * r)
            d_x = torch.bmm(d_found, earlier).view_as(x).mul_(from_border)
            d_y = torch.bmm(d_found.mT, later).view_as(y).mul_(to_border)
            halves(d_left, m)[:, :, 1] += d_x
            halves(d_right, m)[:, :, 0] += d_y
            d_sums, d_rests = halves(d_since, m), halves(d_until, m)
            d_sums[:, :, 0, -1] += d_sums[:, :, 1].sum(2)
            d_sums[:, :, 1, -1] += d_rests[:, :, 0].sum(2)
            d_sums[:, :, 1] += (d_x * x).sum(3)
            d_rests[:, :, 0] += (d_y * y).sum(3)
        return d_left, d_right, d_since


def plain_channel_decays(left: Tensor, right: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ChannelDecays with the decay between any two tokens of a chunk at once (N C C K)."""
    later = torch.ones(g.shape[1], g.shape[1], dtype=torch.bool, device=g.device).triu(1)  # j i: i > j
    between = torch.where(later[..., None], g[:, None], 0).cumsum(2).exp()  # j i: e^{g of j+1 … i}
    seen = torch.where(later.mT[..., None], 0, between)
    since = g.cumsum(1).exp()
    pairs = torch.einsum("nisk,njrk,njik->nisjr", left, right, seen)
    return pairs, left * since[:, :, None], right * between[:, :, -1, None], since[:, -1, :, None]


def border_decays(g: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
    """For blocks of 2, 4, … C tokens the decays (N blocks 2 m K) until the border between their halves and since it.

    Then those since the whole chunk began and until it ends (N C K).
    """
    since, until, levels, m = g.clone(), torch.zeros_like(g), [], 1
    while m < g.shape[1]:
        sums, rests = halves(since, m), halves(until, m)
        levels.append(torch.stack([rests[:, :, 0], sums[:, :, 1]], 2).exp_())
        rests[:, :, 0] += sums[:, :, 1, -1:]
        sums[:, :, 1] += sums[:, :, 0, -1:]
        m *= 2
    return levels, since.exp_(), until.exp_()


def halves(x: Tensor, m: int) -> Tensor:
    """N C … → N blocks 2 m …"""
    return x.view(x.shape[0], x.shape[1] // (2 * m), 2, m, *x.shape[2:])


def same_token(pairs: Tensor, C: int) -> Tensor:
    """The part of pairs (N C*s C*r) in which a token meets itself (N C s r), a view."""
    return pairs.unflatten(2, (C, -1)).unflatten(1, (C, -1)).diagonal(dim1=1, dim2=3).movedim(-1, 1)


def across_borders(pairs: Tensor, blocks: int) -> Tensor:
    """The part of pairs (N C*s C*r) in which the second half of a block meets the first (N blocks m*s m*r), a view."""
    tiles = pairs.unflatten(2, (blocks, 2, -1)).unflatten(1, (blocks, 2, -1))
    return tiles[:, :, 1, :, :, 0].diagonal(dim1=1, dim2=3).movedim(-1, 1)
