"""The operator on strips of rows: plain matrix products, memory linear in the context, any device.

A strip is M consecutive rows of one sequence. Its scores are computed in time order into a buffer whose rows are `ld` long;
the *skewed view* of that buffer, with row stride ld + 1 and no copy, is the right-aligned lag layout, where a lag sits in the
same column in every row and future slots fall outside:

    time order (u)          lag order (view)        M = 3 rows at positions 2, 3, 4, N = 5 lags, `·` does not exist
    · · 0 1 2 . .           · · 0 1 2               ld = N + M − 1 = 7: `front` = 2 columns before slot 0,
    . · 0 1 2 3 .    →      · 0 1 2 3               row i's view starts i columns further right
    . . 0 1 2 3 4           0 1 2 3 4

So z·A, (·)·Bᵀ and the diagonal are plain products on the view, and only the triangle `·` needs zeroing after each of them.
In the identity layout the view is the buffer itself. Backward recomputes each strip and keeps nothing of size T × S.

Letters: B batch, T rows, S slots, H heads, G routing heads, K key width, V value width, R mixing rank, L block_size,
M rows of a strip, N mixing columns of a strip.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hypermlp.ops.registered import Inputs, register
from hypermlp.ops.types import Spec, compute_dtype

# Elements of one strip buffer that the program aims at: 4 MiB in float32, small enough for a cache, large enough for BLAS.
BUFFER_ELEMENTS = 1 << 20
DEFAULT_STRIP = 64


class Strip(NamedTuple):
    """M rows of a sequence: which slots they need, and how the columns of its buffers lie."""

    i0: int  # first row, in the span
    i1: int
    c0: int  # first slot that exists, in the span
    c1: int
    front: int  # columns of the time-ordered buffer before slot c0
    width: int  # N
    skew: int  # 1 offset layout, 0 identity layout
    p0: int  # position of the first row

    @property
    def ld(self) -> int:
        return self.front + self.c1 - self.c0

    def buffer(self, like: Tensor, heads: int) -> Tensor:
        """Time-ordered (B heads M ld), zero wherever a product will not write."""
        out = like.new_empty(like.shape[0], heads, self.i1 - self.i0, self.ld)
        out[..., : self.front] = 0
        return out

    def mixing_view(self, buffer: Tensor) -> Tensor:
        """The same memory in mixing order (B heads M N)."""
        *outer, row, column = buffer.stride()
        size = (*buffer.shape[:-1], self.width)
        return buffer.as_strided(size, (*outer, row + self.skew * column, column), buffer.storage_offset())

    def keep_existing(self, y: Tensor, spec: Spec) -> Tensor:
        """Zero, in place, the columns of slots that do not exist; y is in mixing order."""
        rows = torch.arange(self.i1 - self.i0, device=y.device)[:, None]
        if self.skew and self.front:
            part = y[..., : self.front]
            part.masked_fill_(rows + torch.arange(self.front, device=y.device) < self.front, 0)
        elif not self.skew and spec.causal:
            y.masked_fill_(torch.arange(self.width, device=y.device) > rows + self.p0, 0)
        return y

    def to_time(self, y: Tensor) -> Tensor:
        """A copy in time order of the slots that exist (B heads M c1−c0), zeros elsewhere."""
        if not self.skew:
            return y
        buffer = y.new_empty(*y.shape[:-1], self.ld)
        edge = y.shape[-2] - 1
        buffer[..., :edge] = 0
        buffer[..., self.ld - edge :] = 0
        self.mixing_view(buffer).copy_(y)
        return buffer[..., self.front :]


def plan(rows: int, slots: int, spec: Spec, height: int) -> Iterator[Strip]:
    """The strips of one span whose `rows` are the last of its `slots`."""
    for i0 in range(0, rows, height):
        i1 = min(rows, i0 + height)
        p0, end = slots - rows + i0, slots - rows + i1
        if spec.aligner == "identity":
            yield Strip(i0, i1, 0, slots, 0, slots, 0, p0)
            continue
        width = min(end, spec.block_size)
        first = p0 - width + 1  # oldest slot of the oldest row's window, negative before the sequence began
        yield Strip(i0, i1, max(first, 0), end, max(-first, 0), width, 1, p0)


class Factors(NamedTuple):
    """A Mixing cut to the columns of a strip, in the order in which it multiplies: y ↦ y ⊙ D + ((y left) ⊙ s) rightᵀ."""

    left: Tensor  # H N R
    right: Tensor  # H N R
    baseline: Tensor | None  # H 1 N
    control: Tensor  # B H M R

    def forward(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """The product, and y·left for backward."""
        inner = y @ self.left  # B H M R
        out = (inner * self.control) @ self.right.mT
        return (out if self.baseline is None else out.addcmul_(y, self.baseline)), inner

    def backward(self, y: Tensor, inner: Tensor, d_out: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Gradient of y, then of left, right, baseline and control, the parameters summed over the batch."""
        d_inner = d_out @ self.right  # B H M R
        scaled = d_inner * self.control
        d_y = scaled @ self.left.mT
        d_baseline = torch.einsum("bhmn,bhmn->hn", d_out, y)
        if self.baseline is not None:
            d_y.addcmul_(d_out, self.baseline)
        d_left = (y.mT @ scaled).sum(0)
        d_right = (d_out.mT @ (inner * self.control)).sum(0)
        return d_y, (d_left, d_right, d_baseline, inner * d_inner)


class Operator(NamedTuple):
    """One mixing operator over all lags, ready to be cut into strips."""

    left: Tensor  # H L R
    right: Tensor  # H L R
    baseline: Tensor | None  # H L
    control: Tensor  # B H T R

    def cut(self, strip: Strip, lags: slice) -> Factors:
        baseline = None if self.baseline is None else self.baseline[:, None, lags]
        return Factors(self.left[:, lags], self.right[:, lags], baseline, self.control[:, :, strip.i0 : strip.i1])


class Recomputed(NamedTuple):
    """What a strip's forward leaves for its backward; nothing of it outlives the strip."""

    z: Tensor  # B G M N
    z_inner: Tensor | None
    gate: Tensor  # B H M N
    scale: Tensor | None
    active: Tensor  # a
    a_inner: Tensor | None
    w: Tensor  # B H M slots, time order


def strip_forward(
    strip: Strip, q: Tensor, k: Tensor, routing: Factors | None, reading: Factors | None, spec: Spec
) -> Recomputed:
    """Readout weights of a strip; q is (B G M K), k is (B G slots K)."""
    buffer = strip.buffer(q, q.shape[1])
    buffer[..., strip.front :] = q @ k.mT
    h = z = strip.keep_existing(strip.mixing_view(buffer), spec)
    z_inner = a_inner = None
    if routing is not None:
        h, z_inner = routing.forward(z)
        strip.keep_existing(h, spec)
    gate, scale = h.chunk(2, dim=1) if spec.kind == "glu" else (h, None)
    active = w = F.relu(gate)
    if scale is not None:
        active = w = active.mul_(F.softplus(scale))
    if reading is not None:
        w, a_inner = reading.forward(active)
        strip.keep_existing(w, spec)
    return Recomputed(z, z_inner, gate, scale, active, a_inner, strip.to_time(w))


def row_norm(gate: Tensor, spec: Spec) -> Tensor:
    """ρ (B H M 1); one where the layer does not normalise."""
    if spec.norm == "none":
        return gate.new_ones(*gate.shape[:-1], 1)
    return (torch.einsum("bhmn,bhmn->bhm", gate, gate) + spec.eps).sqrt_()[..., None]


def span_forward(
    q: Tensor, k: Tensor, v: Tensor, routing: Operator | None, reading: Operator | None, spec: Spec, height: int
) -> tuple[Tensor, Tensor]:
    """o (B H T V) and ρ (B H T 1) of one span, or of many equal ones as a batch; q, k, v are (B heads time width)."""
    o, rho = v.new_empty(*v.shape[:2], q.shape[2], v.shape[3]), v.new_empty(*v.shape[:2], q.shape[2], 1)
    for strip in plan(q.shape[2], k.shape[2], spec, height):
        lags = slice(spec.block_size - strip.width, None)
        cut = [None if op is None else op.cut(strip, lags) for op in (routing, reading)]
        rows, slots = slice(strip.i0, strip.i1), slice(strip.c0, strip.c1)
        done = strip_forward(strip, q[:, :, rows], k[:, :, slots], cut[0], cut[1], spec)
        rho[:, :, rows] = row_norm(done.gate, spec)
        o[:, :, rows] = (done.w @ v[:, :, slots]).div_(rho[:, :, rows])
    return o, rho


class Gradients(NamedTuple):
    """Where backward adds what it finds; for an absent operator its entry is None."""

    q: Tensor
    k: Tensor
    v: Tensor
    routing: Operator | None
    reading: Operator | None


def add_operator_gradients(into: Operator, strip: Strip, lags: slice, found: tuple[Tensor, ...]) -> None:
    into.left[:, lags] += found[0]
    into.right[:, lags] += found[1]
    if into.baseline is not None:
        into.baseline[:, lags] += found[2]
    into.control[:, :, strip.i0 : strip.i1] = found[3]


def span_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    routing: Operator | None,
    reading: Operator | None,
    o: Tensor,
    rho: Tensor,
    d_o: Tensor,
    grads: Gradients,
    spec: Spec,
    height: int,
) -> None:
    """Add the gradients of one span (or of many equal ones) to `grads`; shapes as in forward."""
    for strip in plan(q.shape[2], k.shape[2], spec, height):
        lags = slice(spec.block_size - strip.width, None)
        rows, slots = slice(strip.i0, strip.i1), slice(strip.c0, strip.c1)
        cut = [None if op is None else op.cut(strip, lags) for op in (routing, reading)]
        done = strip_forward(strip, q[:, :, rows], k[:, :, slots], cut[0], cut[1], spec)

        # Readout: o = õ / ρ, õ = w v.
        d_raw = d_o[:, :, rows] / rho[:, :, rows]
        grads.v[:, :, slots] += done.w.mT @ d_raw
        buffer = strip.buffer(d_raw, d_raw.shape[1])
        buffer[..., strip.front :] = d_raw @ v[:, :, slots].mT
        d_active = strip.keep_existing(strip.mixing_view(buffer), spec)
        if cut[1] is not None and grads.reading is not None and done.a_inner is not None:
            d_active, found = cut[1].backward(done.active, done.a_inner, d_active)
            strip.keep_existing(d_active, spec)
            add_operator_gradients(grads.reading, strip, lags, found)

        # Activation and norm.
        selected = done.gate > 0
        if done.scale is None:
            d_h = d_gate = d_active * selected
        else:
            d_h = torch.empty_like(done.gate).repeat(1, 2, 1, 1)
            d_gate, d_scale = d_h.chunk(2, dim=1)
            torch.mul(d_active * selected, F.softplus(done.scale), out=d_gate)
            torch.mul(d_active * F.relu(done.gate), torch.sigmoid(done.scale), out=d_scale)
        if spec.norm != "none":
            d_rho = -(d_o[:, :, rows] * o[:, :, rows]).sum(-1, keepdim=True) / rho[:, :, rows]
            d_gate.addcmul_(done.gate, d_rho / rho[:, :, rows])

        # Scores: h = z R1, z = q kᵀ.
        d_z = d_h
        if cut[0] is not None and grads.routing is not None and done.z_inner is not None:
            d_z, found = cut[0].backward(done.z, done.z_inner, d_h)
            strip.keep_existing(d_z, spec)
            add_operator_gradients(grads.routing, strip, lags, found)
        d_z = strip.to_time(d_z)
        grads.q[:, :, rows] = d_z @ k[:, :, slots]
        grads.k[:, :, slots] += d_z.mT @ q[:, :, rows]


# The whole operator: batches and spans, types, layouts.


def strip_height(asked: int | None, rows: int) -> int:
    """Rows per strip: what the user asked for, or what fits the caches."""
    return max(1, min(asked or DEFAULT_STRIP, rows))


def groups(q: Tensor, k: Tensor, spans: Tensor | None, height: int) -> Iterator[tuple[slice, slice, slice]]:
    """Batch entries, rows and slots computed together: whole batches where all entries are alike, else span by span."""
    batch, heads, rows, slots = q.shape[0], q.shape[2], q.shape[1], k.shape[1]
    if spans is not None:
        for b, r0, r1, c0, c1 in spans.tolist():
            if r1 > r0:
                yield slice(b, b + 1), slice(r0, r1), slice(c0, c1)
        return
    if rows == 0:
        return
    together = max(1, BUFFER_ELEMENTS // max(1, heads * height * (slots + height)))
    for b in range(0, batch, together):
        yield slice(b, b + together), slice(0, rows), slice(0, slots)


def heads_first(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).transpose(1, 2).contiguous()


def operators(inputs: Inputs, dtype: torch.dtype) -> tuple[Operator | None, Operator | None]:
    """R1 and R2ᵀ in the compute type, controls as (B H T R)."""

    def make(left: Tensor | None, right: Tensor | None, base: Tensor | None, control: Tensor | None) -> Operator | None:
        if left is None or right is None or control is None:
            return None
        base = None if base is None else base.to(dtype)
        return Operator(left.to(dtype), right.to(dtype), base, heads_first(control, dtype))

    return make(*inputs[3:7]), make(*inputs[7:11])


def select(op: Operator | None, batch: slice, rows: slice) -> Operator | None:
    return None if op is None else op._replace(control=op.control[batch, :, rows])


def forward(inputs: Inputs, spec: Spec, chunk: int | None) -> tuple[Tensor, Tensor]:
    q, k, v = inputs[:3]
    dtype, height = compute_dtype(q.dtype), strip_height(chunk, q.shape[1])
    qh, kh, vh = (heads_first(x, dtype) for x in (q, k, v))
    routing, reading = operators(inputs, dtype)
    o = vh.new_zeros(q.shape[0], q.shape[1], v.shape[2], v.shape[3])  # B T H V; zero where there is no span
    rho = vh.new_ones(o.shape[:3])
    for b, rows, slots in groups(q, k, inputs.spans, height):
        part = (qh[b, :, rows], kh[b, :, slots], vh[b, :, slots], select(routing, b, rows), select(reading, b, rows))
        found = span_forward(*part, spec, height)
        o[b, rows], rho[b, rows] = found[0].transpose(1, 2), found[1].squeeze(3).transpose(1, 2)
    return o.to(q.dtype), rho


def backward(d_o: Tensor, o: Tensor, rho: Tensor, inputs: Inputs, spec: Spec, chunk: int | None) -> list[Tensor | None]:
    q, k, v = inputs[:3]
    dtype, height = compute_dtype(q.dtype), strip_height(chunk, q.shape[1])
    qh, kh, vh, oh, d_oh, rho_h = (heads_first(x, dtype) for x in (q, k, v, o, d_o, rho[..., None]))
    routing, reading = operators(inputs, dtype)
    into = Gradients(torch.zeros_like(qh), torch.zeros_like(kh), torch.zeros_like(vh), zeros_like(routing), zeros_like(reading))
    for b, rows, slots in groups(q, k, inputs.spans, height):
        part = (qh[b, :, rows], kh[b, :, slots], vh[b, :, slots], select(routing, b, rows), select(reading, b, rows))
        known = (oh[b, :, rows], rho_h[b, :, rows], d_oh[b, :, rows])
        target = Gradients(
            into.q[b, :, rows],
            into.k[b, :, slots],
            into.v[b, :, slots],
            select(into.routing, b, rows),
            select(into.reading, b, rows),
        )
        span_backward(*part, *known, target, spec, height)
    found = [into.q.transpose(1, 2), into.k.transpose(1, 2), into.v.transpose(1, 2)]
    found += flat_gradients(into.routing) + flat_gradients(into.reading)
    return [None if x is None else g.to(x.dtype).contiguous() for g, x in zip(found, inputs[:11], strict=True)]


def zeros_like(op: Operator | None) -> Operator | None:
    return None if op is None else Operator(*(None if x is None else torch.zeros_like(x) for x in op))  # type: ignore[arg-type]


def flat_gradients(op: Operator | None) -> list[Tensor]:
    if op is None:
        return [torch.empty(0)] * 4
    return [op.left, op.right, torch.empty(0) if op.baseline is None else op.baseline, op.control.transpose(1, 2)]


mix = register("strips", forward, backward)
