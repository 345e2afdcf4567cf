"""The operator on strips of rows: plain matrix products, memory linear in the context, any device.

A strip is M consecutive rows of one sequence. Its scores are computed in time order into memory whose rows are `ld` long; the
same memory read with rows of ld + 1 is the right-aligned lag layout, where a lag sits in the same column in every row and
future slots fall outside:

    time order              lag order               M = 3 rows at positions 2, 3, 4, N = 5 lags, `·` does not exist
    · · 0 1 2 . .           · · 0 1 2 | . . .       ld = N + M − 1 = 7: `front` = 2 columns before slot 0,
    . · 0 1 2 3 .    →      · 0 1 2 3 | . . .       row i begins i columns further right
    . . 0 1 2 3 4           0 1 2 3 4 | . . .       the last M columns lie outside

So z·A, (·)·Bᵀ and the diagonal are plain products in place, on all rows of a batch at once, as every sequence of the batch has
M (ld + 1) elements. What does not exist is a rectangle of the time order, what lies outside is one of the lag order; no masks.
In the identity layout both orders are one. Backward recomputes each strip and keeps nothing of size T × S.

Letters: B batch, T rows, S slots, H heads, G routing heads, K key width, V value width, R mixing rank, L block_size,
M rows of a strip, N mixing columns of a strip. Heads come first: tensors over time are (heads·B time width), over lags
(heads B·M N).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hypermlp.ops import sizing
from hypermlp.ops.registered import Inputs, register
from hypermlp.ops.types import Spec, compute_dtype

# Devices on which baddbmm_ with beta=0 does as documented. On MPS, up to torch 2.13, NaN in uninitialised memory stays NaN.
IGNORE_WHAT_WAS_THERE = ("cpu", "cuda", "xpu")


class Sheet(NamedTuple):
    """The scores of a strip: one piece of memory, in two orders."""

    time: Tensor  # heads·B M ld
    lags: Tensor  # heads B·M N
    outside: Tensor  # heads B·M ld+1−N, what `lags` leaves out of each row

    def first(self, heads: int, batch: int) -> Sheet:
        return Sheet(self.time[: heads * batch], self.lags[:heads], self.outside[:heads])


class Strip(NamedTuple):
    """M rows of a sequence: which slots they need, and how the columns of its sheets lie."""

    i0: int  # first row, in the span
    i1: int
    c0: int  # first slot that exists, in the span
    c1: int
    front: int  # columns in time order before slot c0
    width: int  # N
    skew: int  # 1 offset layout, 0 identity layout
    p0: int  # position of the first row

    @property
    def rows(self) -> slice:
        return slice(self.i0, self.i1)

    @property
    def slots(self) -> slice:
        return slice(self.c0, self.c1)

    @property
    def ld(self) -> int:
        return self.front + self.c1 - self.c0

    @property
    def size(self) -> int:
        """Elements of a sheet, for one head of one sequence."""
        return (self.i1 - self.i0) * (self.ld + self.skew)

    def sheets(self, memory: Tensor, batch: int, *heads: int) -> Iterator[Sheet]:
        """Sheets of so many heads each, laid out in `memory` one after the other."""
        height = self.i1 - self.i0
        for part in memory[: sum(heads) * batch * self.size].split([n * batch * self.size for n in heads]):
            time = part.view(-1, self.size)[:, : height * self.ld].unflatten(1, (height, self.ld))
            lags = part.view(-1, batch * height, self.ld + self.skew)
            yield Sheet(time, lags[..., : self.width], lags[..., self.width :])

    def keep_existing(self, sheet: Sheet, spec: Spec) -> None:
        """Zero the slots that do not exist."""
        if self.front:
            sheet.time[..., : self.front].zero_()
        if not self.skew and spec.causal:
            rows, columns = (torch.arange(n, device=sheet.time.device) for n in sheet.time.shape[1:])
            sheet.time.masked_fill_(columns > rows[:, None] + self.p0, 0)

    def to_time(self, sheet: Sheet, spec: Spec) -> Tensor:
        """The slots that exist (heads·B M c1−c0) of a sheet filled in mixing order; zero where it has no entry."""
        if self.skew:
            sheet.outside.zero_()
        else:
            self.keep_existing(sheet, spec)
        return sheet.time[..., self.front :]


def plan(rows: int, slots: int, spec: Spec, height: int) -> list[Strip]:
    """The strips of one span whose `rows` are the last of its `slots`."""
    strips = []
    for i0 in range(0, rows, height):
        i1 = min(rows, i0 + height)
        p0, end = slots - rows + i0, slots - rows + i1
        if spec.aligner == "identity":
            strips.append(Strip(i0, i1, 0, slots, 0, slots, 0, p0))
            continue
        width = min(end, spec.block_size)
        first = p0 - width + 1  # oldest slot of the oldest row's window, negative before the sequence began
        strips.append(Strip(i0, i1, max(first, 0), end, max(-first, 0), width, 1, p0))
    return strips


class Operator(NamedTuple):
    """One mixing operator, y ↦ y ⊙ D + ((y left) ⊙ s) rightᵀ, over all lags and rows, or cut to those of a strip."""

    left: Tensor  # H L R; of a strip H N R
    right: Tensor
    baseline: Tensor | None  # H 1 L; H 1 N
    control: Tensor  # H B T R; H B·M R

    def cut(self, strip: Strip) -> Operator:
        lags = slice(self.left.shape[1] - strip.width, None)
        baseline = None if self.baseline is None else self.baseline[..., lags]
        return Operator(self.left[:, lags], self.right[:, lags], baseline, self.control[:, :, strip.rows].flatten(1, 2))

    def forward(self, y: Tensor, out: Tensor) -> Tensor:
        """Writes the product to `out`, which may be y; returns y·left for backward."""
        inner = torch.bmm(y, self.left)  # H B·M R
        if self.baseline is None:
            write(out, inner * self.control, self.right.mT)
        else:
            torch.mul(y, self.baseline, out=out).baddbmm_(inner * self.control, self.right.mT)
        return inner

    def backward(self, y: Tensor, inner: Tensor, d_out: Tensor, into: Operator, product: Tensor | None) -> Tensor:
        """Turns d_out into the gradient of y, uses up y, adds to the gradients `into`; returns that of the control.

        out · d_out in each row is added to product (H B·M 1), if that is given.
        """
        d_inner = torch.bmm(d_out, self.right)  # H B·M R
        scaled = d_inner * self.control
        accumulate(into.left, y.mT, scaled)
        accumulate(into.right, d_out.mT, inner * self.control)
        if self.baseline is None or into.baseline is None:
            write(d_out, scaled, self.left.mT)
        else:
            into.baseline.add_(y.mul_(d_out).sum(1, keepdim=True, dtype=into.baseline.dtype))
            if product is not None:
                product.add_(row_sums(y.mul_(self.baseline), product.dtype))
            d_out.mul_(self.baseline).baddbmm_(scaled, self.left.mT)
        if product is not None:
            product.add_(row_sums(scaled.mul_(inner), product.dtype))
        return d_inner.mul_(inner)


def row_sums(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.sum(-1, keepdim=True, dtype=dtype)


def write(out: Tensor, x: Tensor, y: Tensor) -> None:
    """out = x y, in place of what was there."""
    if out.device.type in IGNORE_WHAT_WAS_THERE:
        out.baddbmm_(x, y, beta=0)  # names `out`, so a compiler does not take it for the forward's product and keep that
    else:
        torch.bmm(x, y, out=out)


def accumulate(into: Tensor, x: Tensor, y: Tensor) -> None:
    """into += x y; sums over strips keep their precision where the product is in half precision."""
    if into.dtype == x.dtype:
        into.baddbmm_(x, y)
    else:
        into.add_(torch.bmm(x, y))


class Recomputed(NamedTuple):
    """What a strip's forward leaves for its backward; nothing of it outlives the strip. Sheets share memory where they may."""

    z: Sheet  # G heads
    h: Sheet  # G heads: gate, then scale
    softplus: Tensor | None  # of the scale, H B·M N
    active: Sheet  # a
    w: Sheet
    d_w: Sheet  # where the gradient of w comes
    z_inner: Tensor | None
    a_inner: Tensor | None


class Part(NamedTuple):
    """The sequences that are computed together: one span, or many equal ones as a batch."""

    q: Tensor  # G·B T K
    k: Tensor  # G·B S K
    v: Tensor  # H·B S V
    routing: Operator | None
    reading: Operator | None
    batch: int

    @property
    def heads(self) -> tuple[int, int]:
        """G and H."""
        return self.q.shape[0] // self.batch, self.v.shape[0] // self.batch

    def plan(self, spec: Spec, height: int) -> list[Strip]:
        return plan(self.q.shape[1], self.k.shape[1], spec, height)

    def memory(self, strips: list[Strip], sheets: int) -> Tensor:
        """Room for so many heads' sheets of any of the strips."""
        size = sheets * self.batch * max(strip.size for strip in strips)
        return torch.empty(size, dtype=self.q.dtype, device=self.q.device)  # a compiler never takes two `empty` for the same


def scores(strip: Strip, x: Tensor, y: Tensor, out: Sheet, spec: Spec) -> None:
    """x yᵀ on the slots that exist, zero on the others."""
    write(out.time[..., strip.front :], x, y.mT)
    strip.keep_existing(out, spec)


def strip_scores(strip: Strip, part: Part, z: Sheet, h: Sheet, spec: Spec) -> Tensor | None:
    """z and h of a strip, which may be the same sheet; returns z·left."""
    scores(strip, part.q[:, strip.rows], part.k[:, strip.slots], z, spec)
    if part.routing is None:
        return None
    inner = part.routing.cut(strip).forward(z.lags, h.lags)
    strip.keep_existing(h, spec)
    return inner


def activate(gate: Tensor, scale: Tensor | None, softplus: Tensor | None, out: Tensor) -> None:
    """a = relu(gate) ⊙ softplus(scale); each result may overwrite its argument."""
    torch.clamp_min(gate, 0, out=out)
    if scale is not None and softplus is not None:
        out.mul_(torch.ops.aten.softplus(scale, out=softplus))


def span_forward(part: Part, spec: Spec, height: int) -> tuple[Tensor, Tensor]:
    """o (H·B T V) and ρ (H·B T 1); every strip works in one sheet, from the scores to the readout weights."""
    (G, H), rows = part.heads, part.q.shape[1]
    o = part.v.new_empty(part.v.shape[0], rows, part.v.shape[2])
    rho = part.v.new_ones(part.v.shape[0], rows, 1, dtype=compute_dtype(part.v.dtype))
    strips = part.plan(spec, height)
    memory = part.memory(strips, G)
    for strip in strips:
        (h,) = strip.sheets(memory, part.batch, G)
        strip_scores(strip, part, h, h, spec)
        w = h.first(H, part.batch)
        gate, scale = w.lags, h.lags[H:] if spec.kind == "glu" else None
        if spec.norm != "none":
            norm = torch.linalg.vector_norm(gate, dim=-1, dtype=rho.dtype).square_().add_(spec.eps).sqrt_()
            rho[:, strip.rows] = norm.view(part.v.shape[0], -1, 1)
        activate(gate, scale, scale, out=gate)
        if part.reading is not None:
            part.reading.cut(strip).forward(w.lags, w.lags)
        o[:, strip.rows] = torch.bmm(strip.to_time(w, spec), part.v[:, strip.slots]).div_(rho[:, strip.rows])
    return o, rho


def strip_recompute(strip: Strip, part: Part, memory: Tensor, spec: Spec) -> Recomputed:
    """The forward of a strip, with all that its backward needs."""
    G, H = part.heads
    z, h, active, d_w, positive = strip.sheets(memory, part.batch, G, G, H, H, H)
    h, w = (z if part.routing is None else h), (active if part.reading is None else d_w)
    z_inner = strip_scores(strip, part, z, h, spec)
    gate, scale, softplus = h.lags[:H], None, None
    if spec.kind == "glu":
        scale, softplus = h.lags[H:], positive.lags
    activate(gate, scale, softplus, out=active.lags)
    a_inner = None if part.reading is None else part.reading.cut(strip).forward(active.lags, w.lags)
    return Recomputed(z, h, softplus, active, w, d_w, z_inner, a_inner)


def activation_backward(
    gate: Tensor, scale: Tensor | None, softplus: Tensor | None, d_active: Tensor, d_norm: Tensor | None
) -> None:
    """Turns gate and scale into their gradients; d_norm · gate is the row norm's share. Uses up d_active."""
    torch.ops.aten.threshold_backward.grad_input(d_active, gate, 0, grad_input=d_active)  # d_active ⊙ 1[gate > 0]
    if scale is None or softplus is None:
        gate.mul_(0 if d_norm is None else d_norm).add_(d_active)
    else:
        scale.sigmoid_().mul_(d_active).mul_(gate)
        gate.mul_(0 if d_norm is None else d_norm).addcmul_(d_active, softplus)


def span_backward(part: Part, rho: Tensor, d_o: Tensor, grads: Part, spec: Spec, height: int) -> None:
    """Add the gradients of a part to `grads`; ρ as span_forward gives it."""
    G, H = part.heads
    d_raw, squares = (d_o / rho).to(part.v.dtype), rho.square()  # o = õ / ρ, õ = w v
    strips = part.plan(spec, height)
    memory = part.memory(strips, 2 * G + 3 * H)
    for strip in strips:
        rows, slots = strip.rows, strip.slots
        done = strip_recompute(strip, part, memory, spec)

        # Readout. From here on, a sheet that is no longer needed holds a gradient.
        w = strip.to_time(done.w, spec)
        accumulate(grads.v[:, slots], w.mT, d_raw[:, rows])
        d_active = done.d_w
        scores(strip, d_raw[:, rows], part.v[:, slots], d_active, spec)
        # dρ/ρ = −(d_o·o)/ρ². With few slots it nearly cancels the rest of the gate's gradient, so d_o·o is found as w · d_w,
        # from the same numbers as that rest, and not from a rounded o.
        product = None if spec.norm == "none" else torch.zeros_like(squares[:, rows]).view(H, -1, 1)
        if part.reading is None and product is not None:
            product.add_(row_sums(done.active.lags * d_active.lags, product.dtype))
        operator_backward(strip, part.reading, done.active, done.a_inner, d_active, grads.reading, product)
        d_norm = None if product is None else product.div_(squares[:, rows].reshape(product.shape)).neg_()

        gate, scale = done.h.lags[:H], done.h.lags[H:] if spec.kind == "glu" else None
        activation_backward(gate, scale, done.softplus, d_active.lags, d_norm)

        # Scores: h = z R1, z = q kᵀ.
        operator_backward(strip, part.routing, done.z, done.z_inner, done.h, grads.routing)
        d_z = strip.to_time(done.h, spec)
        write(grads.q[:, rows], d_z, part.k[:, slots])
        accumulate(grads.k[:, slots], d_z.mT, part.q[:, rows])


def operator_backward(
    strip: Strip,
    op: Operator | None,
    y: Sheet,
    inner: Tensor | None,
    d_out: Sheet,
    into: Operator | None,
    product: Tensor | None = None,
) -> None:
    """Turns d_out into the gradient of y, uses up y; nothing where there is no operator."""
    if op is None or inner is None or into is None:
        return
    d_control = op.cut(strip).backward(y.lags, inner, d_out.lags, into.cut(strip), product)
    target = into.control[:, :, strip.rows]
    target.copy_(d_control.view_as(target))


# The whole operator: batches and spans, types, layouts.


def groups(q: Tensor, k: Tensor, spans: Tensor | None, together: int) -> Iterator[tuple[slice, slice, slice]]:
    """Batch entries, rows and slots computed together: whole batches where all entries are alike, else span by span."""
    batch, (r0, r1, c0, c1) = q.shape[0], (0, q.shape[1], 0, k.shape[1])
    if spans is not None:
        table = spans.tolist()
        if not table or table != [[b, *table[0][1:]] for b in range(batch)]:
            for b, r0, r1, c0, c1 in table:
                if r1 > r0:
                    yield slice(b, b + 1), slice(r0, r1), slice(c0, c1)
            return
        r0, r1, c0, c1 = table[0][1:]
    if r1 == r0:
        return
    for b in range(0, batch, together):
        yield slice(b, min(batch, b + together)), slice(r0, r1), slice(c0, c1)


def around(x: Tensor, b: slice, slots: slice) -> Tensor:
    """x[b, slots] of x (B S …), whose slots are a ring."""
    over = slots.stop - x.shape[1]
    return torch.cat([x[b, slots], x[b, :over]], 1) if over > 0 else x[b, slots]


def heads_first(x: Tensor, dtype: torch.dtype) -> Tensor:
    """(B time heads width) as (heads·B time width)."""
    return x.permute(2, 0, 1, 3).to(dtype, memory_format=torch.contiguous_format).flatten(0, 1)


def heads_last(x: Tensor, batch: int) -> Tensor:
    """(heads·B time width) as (B time heads width)."""
    return x.unflatten(0, (-1, batch)).permute(1, 2, 0, 3)


def operators(inputs: Inputs, dtype: torch.dtype) -> tuple[Operator | None, Operator | None]:
    """R1 and R2ᵀ in the compute type; of gradients already in it, views."""

    def make(left: Tensor | None, right: Tensor | None, base: Tensor | None, control: Tensor | None) -> Operator | None:
        if left is None or right is None or control is None:
            return None
        base = None if base is None else base.to(dtype).unsqueeze(1)
        return Operator(left.to(dtype), right.to(dtype), base, control.to(dtype).permute(2, 0, 1, 3))

    i = inputs
    return make(i.left1, i.right1, i.base1, i.control1), make(i.left2, i.right2, i.base2, i.control2)


def select(op: Operator | None, batch: slice, rows: slice) -> Operator | None:
    return None if op is None else op._replace(control=op.control[:, batch, rows])


def forward(inputs: Inputs, spec: Spec, chunk: int | None) -> tuple[Tensor, Tensor]:
    q, k, v = inputs.q, inputs.k, inputs.v
    dtype, sums, height, together = sizing.sizes(inputs, spec, chunk)
    routing, reading = operators(inputs, dtype)
    o = q.new_zeros(q.shape[0], q.shape[1], v.shape[2], v.shape[3])  # B T H V; zero where there is no span
    rho = q.new_ones(o.shape[:3], dtype=sums)
    for b, rows, slots in groups(q, k, inputs.spans, together):
        own = heads_first(q[b, rows], dtype), heads_first(around(k, b, slots), dtype), heads_first(around(v, b, slots), dtype)
        part = Part(*own, routing=select(routing, b, rows), reading=select(reading, b, rows), batch=b.stop - b.start)
        found = span_forward(part, spec, height)
        o[b, rows], rho[b, rows] = heads_last(found[0], part.batch), heads_last(found[1], part.batch).squeeze(3)
    return o, rho


def backward(d_o: Tensor, o: Tensor, rho: Tensor, inputs: Inputs, spec: Spec, chunk: int | None) -> list[Tensor | None]:
    inputs.refuse_rings()
    q, k, v = inputs.q, inputs.k, inputs.v
    dtype, sums, height, together = sizing.sizes(inputs, spec, chunk)
    routing, reading = operators(inputs, dtype)
    wanted = inputs.differentiable
    into = inputs.with_differentiable(None if x is None else x.new_zeros(x.shape, dtype=sums) for x in wanted)
    d_routing, d_reading = operators(into, sums)
    for b, rows, slots in groups(q, k, inputs.spans, together):
        own = heads_first(q[b, rows], dtype), heads_first(k[b, slots], dtype), heads_first(v[b, slots], dtype)
        part = Part(*own, routing=select(routing, b, rows), reading=select(reading, b, rows), batch=b.stop - b.start)
        zeros = torch.zeros_like(own[0]), torch.zeros_like(own[1], dtype=sums), torch.zeros_like(own[2], dtype=sums)
        grads = Part(*zeros, routing=select(d_routing, b, rows), reading=select(d_reading, b, rows), batch=part.batch)
        rho_b, d_o_b = heads_first(rho[b, rows, :, None], sums), heads_first(d_o[b, rows], dtype)
        span_backward(part, rho_b, d_o_b, grads, spec, height)
        into.q[b, rows] = heads_last(grads.q, part.batch)
        into.k[b, slots] += heads_last(grads.k, part.batch)
        into.v[b, slots] += heads_last(grads.v, part.batch)
    return [None if x is None or g is None else g.to(x.dtype) for g, x in zip(into.differentiable, wanted, strict=True)]


mix = register("chunked", forward, backward, unrolled=sizing.UNROLLED)
