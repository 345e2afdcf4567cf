"""Attention along paths (PaTH, Yang et al., 2025): softmax attention whose positions are products of reflections.

    logit_ij = q_iᵀ H_i H_{i−1} … H_{j+1} k_j / √K        H_t = I − β_t w_t w_tᵀ

Letters: B batch, T time, H heads, K and V widths of a head; G = B H sequences, N chunks of C tokens in each; S slots held.

Within a chunk the products come from one triangular system. Between chunks they are made by halves: the queries of the right
half of a block are carried back, the keys of its left half forward, to the border between the two, where they meet in a plain
product. A query is carried log₂ N times, not N times as when it goes back chunk by chunk; only the logits are quadratic work.
They are made in strips, so training memory grows as T log T.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hypermlp.ops import foreign
from hypermlp.ops.observer import transform
from hypermlp.ops.registered import gradients_with_graph
from hypermlp.ops.types import by_document, compute_dtype, no_autocast

CHUNK = 64  # C, unless the sequence is shorter


class PathInputs(NamedTuple):
    """What attention along a path takes."""

    q: Tensor  # B T H K
    k: Tensor  # B T H K
    v: Tensor  # B T H V
    w: Tensor  # B T H K, at most of length 1
    beta: Tensor  # B T H, from 0 to 2


class Chunks(NamedTuple):
    """Chunks as they look from outside, (… C ·), and the logits inside."""

    q: Tensor  # … C K: queries carried back to the chunk's beginning, scaled by 1 / √K
    k: Tensor  # … C K: keys carried forward to its end
    w: Tensor  # … C K
    u: Tensor  # … C K: the chunk as a whole is H_C … H_1 = I − wᵀ u
    logits: Tensor  # … C C, −∞ where the key comes after the query


def walk(q: Tensor, k: Tensor, w: Tensor, beta: Tensor) -> Chunks:
    """The paths inside chunks (… C K), beta (… C).

    A key j on its way loses Σ_t w_t c_tj, where (I + L) c = β w kᵀ below the diagonal and L = β w wᵀ below the diagonal; the
    same system gives u from β w.
    """
    C, q = q.shape[-2], q * q.shape[-1] ** -0.5
    bw = beta[..., None] * w
    sides = torch.cat([(bw @ k.mT).tril(-1), bw], dim=-1)
    solved = torch.linalg.solve_triangular((bw @ w.mT).tril(-1), sides, upper=False, unitriangular=True)
    c, u = solved[..., :C], solved[..., C:]
    qw = (q @ w.mT).tril()
    later = torch.ones(C, C, dtype=torch.bool, device=q.device).triu(1)
    logits = (q @ k.mT - qw @ c).masked_fill(later, float("-inf"))
    return Chunks(q - qw @ u, k - c.mT @ w, w, u, logits)


def meet(inputs: PathInputs, held_k: Tensor, held_v: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One chunk of new tokens after `lengths` (B) held ones (B S H ·): o (B T H V), held and new keys turned to its end."""
    S, dtype = held_k.shape[1], inputs.q.dtype
    exact = compute_dtype(dtype)
    with no_autocast(inputs.q):
        q, k, v, w, old_k, old_v = (t.to(exact).transpose(1, 2) for t in (*inputs[:4], held_k, held_v))  # B H T|S ·
        chunk = walk(q, k, w, inputs.beta.transpose(1, 2))
        missing = torch.arange(S, device=q.device) >= lengths[:, None]  # B S
        before = (chunk.q @ old_k.mT).masked_fill(missing[:, None, None], float("-inf"))
        o = torch.cat([before, chunk.logits], dim=-1).softmax(-1) @ torch.cat([old_v, v], dim=2)
        turned = old_k - (old_k @ chunk.u.mT) @ w
        return o.to(dtype).transpose(1, 2), turned.transpose(1, 2), chunk.k.transpose(1, 2)


def path_attention(inputs: PathInputs, spans: Tensor | None = None, begins: Tensor | None = None) -> Tensor:
    """o (B T H V) of whole sequences, or of the documents that are packed into one row.

    Args:
        inputs: queries, keys, values and reflections.
        spans: the documents (n 5), see ops.types.dense_spans; None: every row is one sequence.
        begins: where they begin (1 T); a compiled graph, which knows no lengths, masks by it.
    """
    if spans is None:
        return whole_sequences(*inputs)
    if not len(spans):
        return inputs.v
    if torch.compiler.is_compiling():
        return path_by_halves(inputs, begins)
    # Without lengths, on the meta device, only the shape matters.
    return whole_sequences(*inputs) if spans.is_meta else by_document(whole_sequences, spans, *inputs)


def whole_sequences(q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor) -> Tensor:
    inputs = PathInputs(q, k, v, w, beta)
    served = foreign.path(*inputs)
    if served is not None:
        return served
    return path_op(*inputs) if torch.compiler.is_exporting() else path_by_halves(inputs)


@torch.library.custom_op("hypermlp::path_attention", mutates_args=())
def path_op(q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor) -> Tensor:
    """One node of an exported graph, since the halves depend on the length. For inference."""
    return path_by_halves(PathInputs(q, k, v, w, beta)).clone(memory_format=torch.contiguous_format)


@path_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor) -> Tensor:
    return v.new_empty(v.shape)


def path_by_halves(inputs: PathInputs, begins: Tensor | None = None) -> Tensor:
    """begins (1 T): where documents begin, beyond which no query looks."""
    B, T, H, _ = inputs.q.shape
    if B * T == 0:
        return inputs.v
    dtype, C = inputs.q.dtype, min(CHUNK, T)
    with no_autocast(inputs.q):
        q, k, v, w, beta = (split(t.to(compute_dtype(dtype)), C) for t in (*inputs[:4], inputs.beta[..., None]))
        chunks = walk(q, k, w, beta[..., 0])
        halves = list(meetings(chunks))
        places = tuple(half.place for half in halves)
        read = Read.apply if transform() is None else plain_read
        logits, document = chunks.logits, None
        if begins is not None:
            document = split(begins.cumsum(1)[:, :, None, None], C)  # 1 N C 1
            logits = logits.masked_fill(document != document.mT, float("-inf"))
        o = read(logits, v, document, places, *(t for half in halves for t in (half.q, half.k)))  # G N C V
    return o.flatten(1, 2)[:, :T].unflatten(0, (B, H)).transpose(1, 2).to(dtype)


def split(x: Tensor, C: int) -> Tensor:
    """B T H · → G N C ·, padded with zeros: no query sees them and they reflect nothing."""
    x = x.transpose(1, 2).flatten(0, 1)
    return F.pad(x, (0, 0, 0, -x.shape[1] % C)).unflatten(1, (-1, C))


class ChunkBlocks(NamedTuple):
    """`n` equal blocks of chunks from chunk `first` on, each with `left` chunks of keys and then `right` of queries."""

    first: int
    n: int
    left: int
    right: int

    def blocks(self, x: Tensor) -> Tensor:
        """x (G N C ·) → G n left+right C ·, a view."""
        size = self.left + self.right
        return x[:, self.first : self.first + self.n * size].unflatten(1, (self.n, size))


class Half(NamedTuple):
    """Queries and keys of the blocks of `place`, both carried to the border between left and right."""

    place: ChunkBlocks
    q: Tensor  # G n right C K
    k: Tensor  # G n left C K


def meetings(chunks: Chunks) -> Iterator[Half]:
    """Every chunk of keys meets every later chunk of queries in one of these; a block is twice as long from level to level."""
    q, k, N = chunks.q, chunks.k, chunks.q.shape[1]
    M = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device) - chunks.w.mT @ chunks.u if N > 2 else None  # G n K K, by blocks
    size = 1
    while size < N:
        count, rest = divmod(N, 2 * size)
        places = [ChunkBlocks(0, count, size, size)] if count else []
        if rest > size:  # the last block is short on its right
            places.append(ChunkBlocks(N - rest, 1, size, rest - size))
        halves = [Half(p, p.blocks(q)[:, :, size:].contiguous(), p.blocks(k)[:, :, :size].contiguous()) for p in places]
        yield from halves
        size *= 2
        if size < N:
            assert M is not None
            q, k, M = carry(q, k, M, halves)


def carry(q: Tensor, k: Tensor, M: Tensor, halves: list[Half]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of right halves go back over the left, keys of left halves forward over the right; M of the joined blocks."""
    count, size = M.shape[1] // 2, halves[0].place.left
    left, right = M[:, ::2], M[:, 1::2]  # G n K K
    new_q, new_k, end = [], [], 0
    for place, right_q, left_k in halves:
        begin, end = place.first, place.first + place.n * (size + place.right)
        over = left[:, begin // (2 * size) :][:, : place.n, None]
        new_q.append(torch.cat([place.blocks(q)[:, :, :size], right_q @ over], dim=2).flatten(1, 2))
        if place.right == size:
            new_k.append(torch.cat([left_k @ right[:, :, None].mT, place.blocks(k)[:, :, size:]], dim=2).flatten(1, 2))
    new_q.append(q[:, end:])
    new_k.append(k[:, 2 * size * count :])  # no query follows the last whole block
    return torch.cat(new_q, dim=1), torch.cat(new_k, dim=1), right @ left[:, :count]


class Read(torch.autograd.Function):
    """Softmax of the logits inside chunks and of all meetings together, applied to the values; logits in strips of C rows.

    document (1 N C 1): the number of each token's document, where there are several; queries see keys of their own.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, v: Tensor, document: Tensor | None, places: tuple[ChunkBlocks, ...], *carried: Tensor
    ) -> Tensor:
        top = logits.amax(-1, keepdim=True)  # G N C 1
        p = (logits - top).exp_()
        total, o = p.sum(-1, keepdim=True), p @ v
        for place, q, k in zip(places, carried[::2], carried[1::2], strict=True):
            k, left_v = k.flatten(2, 3), place.blocks(v)[:, :, : place.left].flatten(2, 3)
            for i in range(place.right):
                own_top, own_total, own_o = (place.blocks(t)[:, :, place.left + i] for t in (top, total, o))
                p = q[:, :, i] @ k.mT  # G n C left·C
                if document is not None:
                    p.masked_fill_(foreign_keys(document, place, i), float("-inf"))
                highest = torch.maximum(own_top, p.amax(-1, keepdim=True))
                p.sub_(highest).exp_()
                fade = (own_top - highest).exp_()
                own_total.mul_(fade).add_(p.sum(-1, keepdim=True))
                own_o.mul_(fade).add_(p @ left_v)
                own_top.copy_(highest)
        o /= total
        ctx.places = places
        ctx.save_for_backward(logits, v, o, top + total.log(), document, *carried)
        return o

    @staticmethod
    def backward(ctx: Any, d_o: Tensor) -> tuple[Any, ...]:
        logits, v, o, norm, document, *carried = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradients are differentiated again
            inputs = (logits, v, *carried)
            plain = lambda logits, v, *rest: plain_read(logits, v, document, ctx.places, *rest)  # noqa: E731
            found = gradients_with_graph(plain, inputs, (d_o,))
            return found[0], found[1], None, None, *found[2:]
        common = (d_o * o).sum(-1, keepdim=True)
        p = (logits - norm).exp_()
        d_v, d_logits = p.mT @ d_o, (d_o @ v.mT).sub_(common).mul_(p)
        d_carried = []
        for place, q, k in zip(ctx.places, carried[::2], carried[1::2], strict=True):
            left, d_q, d_k = place.blocks(v)[:, :, : place.left], torch.empty_like(q), torch.zeros_like(k)
            k, left_v = k.flatten(2, 3).flatten(0, 1), left.flatten(2, 3).flatten(0, 1)  # G·n left·C ·
            to_k, to_left = d_k.view(k.shape), torch.zeros_like(left_v)
            for i in range(place.right):
                own = (place.blocks(t)[:, :, place.left + i].flatten(0, 1) for t in (norm, common, d_o))
                own_q, (own_norm, own_common, own_d_o) = q[:, :, i].flatten(0, 1), own
                p = (own_q @ k.mT).sub_(own_norm).exp_()  # G·n C left·C
                if document is not None:
                    p.unflatten(0, (-1, place.n)).masked_fill_(foreign_keys(document, place, i), 0)
                to_left.baddbmm_(p.mT, own_d_o)
                d_p = (own_d_o @ left_v.mT).sub_(own_common).mul_(p)
                d_q[:, :, i] = (d_p @ k).view_as(q[:, :, i])
                to_k.baddbmm_(d_p.mT, own_q)
            place.blocks(d_v)[:, :, : place.left] += to_left.view(left.shape)
            d_carried += [d_q, d_k]
        return d_logits, d_v, None, None, *d_carried


def foreign_keys(document: Tensor, place: ChunkBlocks, i: int) -> Tensor:
    """Which keys of the left half are of other documents than the queries of its right half's chunk i (1 n C left·C)."""
    blocks = place.blocks(document)[..., 0]  # 1 n left+right C
    return blocks[:, :, place.left + i, :, None] != blocks[:, :, : place.left].flatten(2)[:, :, None]


def plain_read(logits: Tensor, v: Tensor, document: Tensor | None, places: tuple[ChunkBlocks, ...], *carried: Tensor) -> Tensor:
    """What Read computes, with all logits at once."""
    G, N, C, _ = logits.shape
    tiles = {(n, n): logits[:, n] for n in range(N)}  # chunk of rows, chunk of columns → G C C
    for place, q, k in zip(places, carried[::2], carried[1::2], strict=True):
        for block in range(place.n):
            first = place.first + block * (place.left + place.right)
            for i in range(place.right):
                for j in range(place.left):
                    tiles[first + place.left + i, first + j] = q[:, block, i] @ k[:, block, j].mT
    future = logits.new_full((G, C, C), float("-inf"))
    rows = torch.stack([torch.cat([tiles.get((i, j), future) for j in range(N)], dim=-1) for i in range(N)], 1)
    if document is not None:
        rows = rows.masked_fill(document != document.flatten(1)[:, None, None], float("-inf"))
    return rows.softmax(-1) @ v.flatten(1, 2)[:, None]
