"""The backward of the operator: chunks of rows, each a sequence of launches over a scratch of bounded size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hypermlp.ops.registered import Inputs
from hypermlp.ops.triton import backward as kernels
from hypermlp.ops.triton.blocks import Chunk, chunk_rows
from hypermlp.ops.triton.fallback import smaller_if_needed
from hypermlp.ops.triton.launch import (
    LaunchInputs,
    empty,
    pieces_of,
    power_of_two,
    prepare,
    row_products,
    run,
    total,
    value_pieces,
)
from hypermlp.ops.triton.products import slot_product
from hypermlp.ops.triton.tiles import Tile
from hypermlp.ops.triton.work import Section, fill, room, sections, split
from hypermlp.ops.types import Spec

MOST_SPLITS = 16  # of the rows, for parameter gradients
PER_ROW = Tile(8, 8, 4, 1, "backward_rows")


@smaller_if_needed("backward")
def backward(
    d_o: Tensor, o: Tensor, rho: Tensor, u: Tensor, y2: Tensor, inputs: Inputs, spec: Spec, chunk: int | None
) -> list[Tensor | None]:
    """The gradients of all inputs but the spans; o, ρ, u and y2 as `forward` gives them."""
    inputs.refuse_rings()
    call = prepare(inputs, spec)
    H, plan = call.v.shape[2], call.plan(call.tile("backward_h"))
    planes = scratch_planes(call)
    held = room(call.limits, plan, H, sum(planes.values()) * call.q.element_size())
    chunks, shared = chunk_rows(plan, held.cells, call.tile("backward_parameters").N, call.tile("backward_k").N)
    made = Gradients(call, d_o, o, rho, u, y2, shared)
    scratch = Scratch(call, held.heads * max((c.cells for c in chunks), default=0))
    for of in sections(chunks, H, held.heads):
        made.add(of, scratch)
    return made.result()


class Scratch:
    """What is kept per pair of a row and a slot: dw, w and a for each head, z (later dz) and dh for each routing head."""

    def __init__(self, call: LaunchInputs, cells: int) -> None:
        """cells: of all heads of a chunk."""
        planes = scratch_planes(call)
        sizes = [n * cells for n in planes.values()]
        memory = torch.empty(sum(sizes), dtype=call.q.dtype, device=call.q.device)
        self.plane = dict(zip(planes, memory.split(sizes), strict=True))

    def __getattr__(self, name: str) -> Tensor:
        plane: Tensor = self.plane.get(name, self.plane["dw"])  # not read where there is none
        return plane


def scratch_planes(call: LaunchInputs) -> dict[str, int]:
    """Planes of each kind per head."""
    routes = call.routes
    mixings = ({"dh": routes} if call.inputs.left1 is not None else {}) | ({"a": 1} if call.inputs.left2 is not None else {})
    return {"dw": 1, "w": 1, "z": routes, **mixings}


class Gradients:
    """The gradients of one call while they are being made."""

    def __init__(self, call: LaunchInputs, d_o: Tensor, o: Tensor, rho: Tensor, u: Tensor, y2: Tensor, shared: bool) -> None:
        """shared: the gradients of a slot come from several chunks, and are added up in float32."""
        q, i = call.q, call.inputs
        self.call, self.shape, self.u, self.y2, self.shared = call, call.shape(), u, y2, shared
        (self.B, self.T, self.G, self.K), (self.H, self.V) = q.shape, call.v.shape[2:]
        self.us = torch.mul(u, call.control1, out=torch.empty_like(u, dtype=q.dtype)) if self.shape["MIX1"] else q
        self.ys = torch.mul(y2, call.control2, out=torch.empty_like(y2, dtype=q.dtype)) if self.shape["MIX2"] else q
        self.dr, self.dn = torch.empty(d_o.shape, dtype=q.dtype, device=q.device), torch.empty_like(rho)
        tensors = d_o.contiguous(), o.contiguous(), rho.contiguous(), self.dr, self.dn
        grid = (-(-rho.numel() // PER_ROW.M),)
        run(kernels.backward_rows, grid, PER_ROW, call, *tensors, rho.numel(), VP=power_of_two(self.V))

        def fresh(x: Tensor | None, dtype: torch.dtype | None = None, zeros: bool = not call.whole) -> Tensor:
            if x is None:
                return q  # a pointer that is never read
            return (torch.zeros if zeros else torch.empty)(x.shape, dtype=dtype or x.dtype, device=q.device)

        self.dq, self.ds1, self.ds2 = fresh(i.q), fresh(i.control1), fresh(i.control2)
        self.gs1, self.gs2 = fresh(i.control1, q.dtype), fresh(i.control2, q.dtype)
        slot_type = torch.float32 if shared else None
        self.dk, self.dv = (fresh(x, slot_type, zeros=shared or not call.whole or self.T == 0) for x in (i.k, i.v))
        self.sums = [self._partial_sums(mixing) for mixing in (i[3:6], i[7:10])]

    def _partial_sums(self, mixing: tuple[Tensor | None, ...]) -> Tensor:
        """Zeros (splits, numbers of dA, dB and dD): programs that share the lags of a head each add up their own rows."""
        heads, lags = (1, 1) if mixing[0] is None else mixing[0].shape[:2]
        tiles = -(-lags // self.call.tile("backward_parameters").N)
        splits = max(1, min(MOST_SPLITS, fill(self.call.limits) // max(1, tiles * heads)))
        numbers = sum(0 if x is None else x.numel() for x in mixing)
        return torch.zeros(splits, numbers, dtype=torch.float32, device=self.call.q.device)

    def add(self, of: Section, scratch: Scratch) -> None:
        """The shares of a section."""
        call, shape, part, count, routes = self.call, self.shape, of.part, of.heads, self.call.routes
        q, k, v = call.q, call.k, call.v
        rows, order, *_ = part.tables.views()
        per, splits = split(call.limits, part, count)
        table = (rows, order, per, part.blocks, part.cells, self.T, call.spec.block_size, self.H, of.first, count)
        grid = (part.blocks, count, splits)

        shares = self._shares(part, splits, count, 2)
        tensors: tuple[Tensor, ...] = (self.dr, v, call.right2, shares, scratch.dw)
        run(kernels.backward_dw, grid, call.tile("backward_dw"), call, *tensors, *table, *v.stride()[:2])
        if shape["MIX2"]:
            self._control(of, 2, shares, self.y2, call.control2, self.ds2, self.gs2)
        shares = self._shares(part, splits, count * routes, 1)
        tensors = (q, k, call.right1, call.base1, self.us, call.right2, call.left2, call.base2, self.gs2, self.ys, self.dn)
        tensors += (shares, scratch.dw, scratch.z, scratch.dh, scratch.a, scratch.w)
        run(kernels.backward_h, grid, call.tile("backward_h"), call, *tensors, *table, *k.stride()[:2])
        if shape["MIX2"]:
            self._parameters(of, 2, scratch.a, scratch.dw, self.ys, self.gs2)
        if shape["MIX1"]:
            self._control(of, 1, shares, self.u, call.control1, self.ds1, self.gs1)
            self._parameters(of, 1, scratch.z, scratch.dh, self.us, self.gs1)
            self._scores(of, scratch)
        keys = {"W": self.K, "W1": shape["K1"], "W2": shape["K2"]}
        row_products("backward_q", call, of, routes, scratch.z, k, self.dq, self.dn, False, **keys)
        self._slots("backward_k", of, routes, scratch.z, q, self.dk, keys)
        values = {"W": self.V, "W1": value_pieces(self.V)[0], "W2": 0}
        self._slots("backward_v", of, 1, scratch.w, self.dr, self.dv, values)

    def _heads(self, operator: int) -> tuple[int, int]:
        """Heads of R1 or R2, and how many of them belong to one head of the layer."""
        return (self.G, self.call.routes) if operator == 1 else (self.H, 1)

    def _sizes(self, operator: int) -> dict[str, Any]:
        return {name: self.shape[f"{name}{operator}"] for name in ("R", "RP", "BASE")}

    def _shares(self, part: Chunk, splits: int, heads: int, operator: int) -> Tensor:
        """Room for what each split of the slots adds to g of an operator's rows."""
        if not self.shape[f"MIX{operator}"]:
            return self.dn  # a pointer that is never read
        rows = part.blocks * self.call.tile("backward_h").M
        return empty(self.call, splits, rows, heads, self.shape[f"RP{operator}"])

    def _control(self, of: Section, operator: int, shares: Tensor, y: Tensor, control: Tensor, ds: Tensor, gs: Tensor) -> None:
        """ds = g ⊙ y and gs = g ⊙ s."""
        (heads, routes), blocks = self._heads(operator), of.part.blocks
        arguments = (shares, y, control, ds, gs, of.part.tables.views()[0], len(shares), blocks, self.T, self.H, heads)
        used = PER_ROW._replace(M=self.call.tile("backward_h").M, kernel="backward_control")
        grid = (blocks, of.heads * routes)
        run(kernels.backward_control, grid, used, self.call, *arguments, of.first, of.heads, **self._sizes(operator))

    def _scores(self, of: Section, scratch: Scratch) -> None:
        """dz over z."""
        call, part, routes = self.call, of.part, self.call.routes
        rows, order, *_ = part.tables.views()
        per, splits = split(call.limits, part, of.heads * routes, free=True)
        tensors = (scratch.dh, call.left1, call.base1, self.gs1, scratch.z, rows, order)
        numbers = (per, part.cells, self.T, call.spec.block_size, self.H, self.G, of.first, of.heads)
        grid = (part.blocks, of.heads * routes, splits)
        run(kernels.backward_dz, grid, call.tile("backward_dz"), call, *tensors, *numbers, **self._sizes(1))

    def _parameters(self, of: Section, operator: int, y: Tensor, dy: Tensor, us: Tensor, gs: Tensor) -> None:
        """dA, dB and dD of an operator y ↦ y ⊙ D + ((y A) ⊙ s) Bᵀ; R2, transposed, has them the other way round."""
        (heads, routes), part, sums = self._heads(operator), of.part, self.sums[operator - 1]
        size = heads * self.call.spec.block_size * self.shape[f"R{operator}"]
        dA, dB, dD = sums, sums[:, size:], sums[:, 2 * size :]  # of the first split; the others are len(sums[0]) further on
        used, blocks = self.call.tile("backward_parameters"), self.call.tile("backward_h")
        rows, order, _, tallies = part.tables.views()
        tensors = (y, dy, us, gs, dA, dB, dD, rows, order, tallies)
        numbers = (sums.shape[1], part.cells, self.T, self.call.spec.block_size, self.H, heads, of.first, of.heads)
        grid, tile = (part.lag_tiles, of.heads * routes, len(sums)), used._replace(M=blocks.M, N=blocks.N)
        sizes = {"LAGS": used.N, **self._sizes(operator)}
        run(kernels.backward_parameters, grid, tile, self.call, *tensors, *numbers, **sizes)

    def _slots(self, name: str, of: Section, routes: int, x: Tensor, y: Tensor, out: Tensor, widths: dict[str, int]) -> None:
        """out = xᵀ y of the slots that a section reaches."""
        call, part = self.call, of.part
        used, blocks = call.tile(name), call.geometry(name)
        rows, _, slots, _ = part.tables.views()
        numbers = (part.cells, self.T, call.spec.block_size, self.H, y.shape[2], of.first, of.heads, *out.stride()[:2])
        grid, tile = (part.slot_blocks, of.heads * routes, pieces_of(widths)), used._replace(M=blocks.M, N=blocks.N)
        constants = {"SLOTS": used.N, "ADD": self.shared, "ALIGNED": part.aligned, **widths}
        run(slot_product, grid, tile, call, x, y, out, rows, slots, *numbers, **constants)

    def result(self) -> list[Tensor | None]:
        """In the order and types of Inputs. Partial sums are added in a fixed order."""
        i = self.call.inputs
        found: list[Tensor | None] = [self.dq, self.dk, self.dv]
        for shares, mixing, control in zip(self.sums, (i[3:6], i[7:10]), (self.ds1, self.ds2), strict=True):
            sizes = [0 if x is None else x.numel() for x in mixing]
            parts = total(shares).split(sizes)
            # Copies: an operator's results must not share memory.
            copied = (None if x is None else p.view(x.shape).to(x.dtype, copy=True) for x, p in zip(mixing, parts, strict=True))
            found += copied
            found.append(control)
        return [None if x is None or g is None else g.to(x.dtype) for g, x in zip(found, i[:11], strict=True)]
