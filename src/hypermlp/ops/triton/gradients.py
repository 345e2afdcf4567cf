"""The backward of the operator: chunks of rows, each a sequence of launches over a scratch of bounded size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hypermlp.ops.registered import Inputs
from hypermlp.ops.triton import backward as kernels
from hypermlp.ops.triton.blocks import Chunk, chunk_rows
from hypermlp.ops.triton.fallback import smaller_if_needed
from hypermlp.ops.triton.launch import Prepared, power_of_two, prepare, product, run, scratch_bytes, value_pieces
from hypermlp.ops.triton.products import row_product, slot_product
from hypermlp.ops.triton.tiles import Tile
from hypermlp.ops.types import Spec

PROGRAMS = 512  # that the parameter gradients are split into, at least where there are rows enough
MOST_SPLITS = 16
PER_ROW = Tile(8, 8, 4, 1, "backward_rows")


@smaller_if_needed("backward")
def backward(
    d_o: Tensor, o: Tensor, rho: Tensor, u: Tensor, y2: Tensor, inputs: Inputs, spec: Spec, chunk: int | None
) -> list[Tensor | None]:
    """The gradients of all inputs but the spans; o, ρ, u and y2 as `forward` gives them."""
    call = prepare(inputs, spec)
    plan, cells = call.plan(call.tile("backward_h")), scratch_bytes(call.device) // scratch_cell(call)
    lags, slots = call.tile("backward_parameters").N, call.tile("backward_k").N
    chunks, shared = chunk_rows(plan, cells, lags, slots)
    made = Gradients(call, d_o, o, rho, u, y2, shared)
    scratch = Scratch(call, max((c.cells for c in chunks), default=0))
    for part in chunks:
        made.add(part, scratch)
    return made.result()


class Scratch:
    """What is kept per pair of a row and a slot: dw, w and a for each head, z (later dz) and dh for each routing head."""

    def __init__(self, call: Prepared, cells: int) -> None:
        sizes = [n * cells for n in scratch_planes(call).values()]
        memory = torch.empty(sum(sizes), dtype=call.q.dtype, device=call.q.device)
        self.plane = dict(zip(scratch_planes(call), memory.split(sizes), strict=True))

    def __getattr__(self, name: str) -> Tensor:
        plane: Tensor = self.plane.get(name, self.plane["dw"])  # not read where there is none
        return plane


def scratch_planes(call: Prepared) -> dict[str, int]:
    G, H = call.q.shape[2], call.v.shape[2]
    mixings = ({"dh": G} if call.inputs.left1 is not None else {}) | ({"a": H} if call.inputs.left2 is not None else {})
    return {"dw": H, "w": H, "z": G, **mixings}


def scratch_cell(call: Prepared) -> int:
    """Bytes of scratch per pair of a row and a column, all heads together."""
    return max(1, sum(scratch_planes(call).values())) * call.q.element_size()


class Gradients:
    """The gradients of one call while they are being made."""

    def __init__(self, call: Prepared, d_o: Tensor, o: Tensor, rho: Tensor, u: Tensor, y2: Tensor, shared: bool) -> None:
        """shared: the gradients of a slot come from several chunks, and are added up in float32."""
        q, i = call.q, call.inputs
        self.call, self.shape, self.u, self.y2, self.shared = call, call.shape(), u, y2, shared
        (self.B, self.T, self.G, self.K), (self.H, self.V) = q.shape, call.v.shape[2:]
        self.us = (u * call.control1).to(q.dtype) if self.shape["MIX1"] else q
        self.ys = (y2 * call.control2).to(q.dtype) if self.shape["MIX2"] else q
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

    def _partial_sums(self, mixing: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """Zeros (splits heads L …): programs that share the lags of a head each add up their own rows."""
        heads, lags = (1, 1) if mixing[0] is None else mixing[0].shape[:2]
        tiles = -(-lags // self.call.tile("backward_parameters").N)
        splits = max(1, min(MOST_SPLITS, PROGRAMS // max(1, tiles * heads)))
        device = self.call.q.device
        return [None if x is None else torch.zeros(splits, *x.shape, dtype=torch.float32, device=device) for x in mixing]

    def add(self, part: Chunk, scratch: Scratch) -> None:
        """The shares of one chunk of rows."""
        call, G, H = self.call, self.G, self.H
        q, k, v, n = call.q, call.k, call.v, len(part.rows)
        k_at, v_at = (k.stride(0), k.stride(1)), (v.stride(0), v.stride(1))
        rows = part.rows, part.order, part.cells, self.T, call.spec.block_size
        BV, pieces = value_pieces(self.V)

        tensors: tuple[Tensor, ...] = (self.dr, v, call.right2, call.control2, self.y2, self.ds2, self.gs2, scratch.dw)
        run(kernels.backward_dw, (n, H), call.tile("backward_dw"), call, *tensors, *rows, H, *v_at, NV=pieces)
        tensors = (q, k, call.right1, call.base1, call.control1, self.u, self.ds1, self.gs1)
        tensors += (call.right2, call.left2, call.base2, self.gs2, self.ys, self.dn)
        tensors += (scratch.dw, scratch.z, scratch.dh, scratch.a, scratch.w)
        run(kernels.backward_h, (n, H), call.tile("backward_h"), call, *tensors, *rows, H, *k_at)
        if self.shape["MIX2"]:
            self._parameters(part, 1, scratch.a, scratch.dw, self.ys, self.gs2)
        if self.shape["MIX1"]:
            self._parameters(part, 0, scratch.z, scratch.dh, self.us, self.gs1)
            tensors = (scratch.dh, call.left1, call.base1, self.gs1, scratch.z)
            run(kernels.backward_dz, (n, G), call.tile("backward_dz"), call, *tensors, *rows, G, **self._sizes(0))
        keys = {"W": self.K, "W1": self.shape["K1"], "W2": self.shape["K2"]}
        key_parts = -(-self.K // (keys["W1"] + keys["W2"]))
        arguments = (scratch.z, k, self.dq, self.dn, *rows, G, *k_at)
        product(row_product, "backward_q", (n, G, key_parts), call, *arguments, DIVIDE=False, **keys)
        self._slots(part, "backward_k", scratch.z, q, self.dk, key_parts, keys)
        self._slots(part, "backward_v", scratch.w, self.dr, self.dv, pieces, {"W": self.V, "W1": BV, "W2": 0})

    def _sizes(self, which: int) -> dict[str, Any]:
        number = which + 1
        return {name: self.shape[f"{name}{number}"] for name in ("R", "RP", "BASE")}

    def _parameters(self, part: Chunk, which: int, y: Tensor, dy: Tensor, us: Tensor, gs: Tensor) -> None:
        """dA, dB and dD of an operator y ↦ y ⊙ D + ((y A) ⊙ s) Bᵀ; R2, transposed, has them the other way round."""
        dA, dB, dD = self.sums[which]
        assert dA is not None
        heads = dA.shape[1]
        used = self.call.tile("backward_parameters")
        tensors = (y, dy, us, gs, dA, dB, dA if dD is None else dD, part.rows, part.order, part.tallies)
        numbers = (part.cells, self.T, self.call.spec.block_size, heads)
        grid = (part.tiles, heads, dA.shape[0])
        blocks = self.call.tile("backward_h")
        run(
            kernels.backward_parameters, grid, used._replace(M=blocks.M, N=blocks.N), self.call,
            *tensors, *numbers, LAGS=used.N, **self._sizes(which),
        )  # fmt: skip

    def _slots(self, part: Chunk, name: str, x: Tensor, y: Tensor, out: Tensor, pieces: int, widths: dict[str, int]) -> None:
        heads = y.shape[2]
        arguments = (x, y, out, part.rows, part.slots, part.cells, self.T, self.call.spec.block_size, heads)
        grid = (len(part.slots), heads, pieces)
        product(
            slot_product, name, grid, self.call, *arguments, *out.stride()[:2], ADD=self.shared, ALIGNED=part.aligned, **widths
        )

    def result(self) -> list[Tensor | None]:
        """In the order and types of Inputs. Partial sums are added in a fixed order."""
        i = self.call.inputs
        found: list[Tensor | None] = [self.dq, self.dk, self.dv]
        for sums, control in zip(self.sums, (self.ds1, self.ds2), strict=True):
            found += [*(None if x is None else x.sum(0) for x in sums), control]
        return [None if x is None or g is None else g.to(x.dtype) for g, x in zip(found, i[:11], strict=True)]
