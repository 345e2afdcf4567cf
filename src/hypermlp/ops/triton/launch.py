"""From the operator's tensors to kernel launches."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hypermlp.ops.registered import Inputs
from hypermlp.ops.triton import device, fallback
from hypermlp.ops.triton import forward as kernels
from hypermlp.ops.triton.blocks import Ints, Plan, chunk_rows, row_table, span_list
from hypermlp.ops.triton.device import interpreted
from hypermlp.ops.triton.products import row_product
from hypermlp.ops.triton.tiles import Tile, fitted, held_keys, steps_down, tile
from hypermlp.ops.types import Spec

WIDEST = 128  # columns of V in one accumulator
KEYS = 64  # columns of K in one step of a loop
FAR = 2**31  # elements of a batch entry from which on tables, and what kernels compute from them, have 64 bits
SCRATCH = 32 << 20  # bytes where the size of the L2 cache is unknown


def power_of_two(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def key_pieces(K: int, held: int) -> tuple[int, int]:
    """K padded to the sum of two powers of two, the second 0 where one is enough; above `held` pieces of a loop, and 0."""
    first = max(16, power_of_two(K + 1) // 2)
    second = 0 if first >= K else max(16, power_of_two(K - first))
    return (first, second) if first + second <= held else (KEYS, 0)


def value_pieces(V: int) -> tuple[int, int]:
    """V padded to width × pieces."""
    width = max(16, power_of_two(V)) if V <= WIDEST else min((WIDEST, WIDEST // 2), key=lambda w: (-(-V // w) * w, -w))
    return width, -(-V // width)


class Prepared(NamedTuple):
    """The tensors of one call in the types and layouts of the kernels, and its sizes."""

    inputs: Inputs
    spec: Spec
    q: Tensor
    k: Tensor
    v: Tensor
    left1: Tensor
    right1: Tensor
    base1: Tensor
    control1: Tensor
    left2: Tensor
    right2: Tensor
    base2: Tensor
    control2: Tensor
    spans: Ints

    @property
    def device(self) -> str:
        return str(self.q.device)

    @property
    def whole(self) -> bool:
        """Whether every row and slot lies in a span."""
        return self.inputs.spans is None

    def tile(self, kernel: str) -> Tile:
        """The table's tile, made smaller where wide keys or a wide rank, or this GPU, ask for it."""
        s, arch, dtype = self.shape(), device.current.limits(self.device).architecture, dtype_name(product_type(self.q.dtype))
        used = tile(kernel, arch, dtype)
        if interpreted():
            return used
        steps = steps_down(kernel, arch, dtype, s["K"], max(s["RP1"], s["RP2"]))
        used = fitted(used, steps + fallback.steps(kernel, self.inputs))
        more = kernel == "backward_dw" and s["NV"] > 3  # V in a loop of its own, which loads ahead
        return used._replace(stages=used.stages + more)

    def plan(self, used: Tile) -> Plan:
        return Plan(self.spans.tobytes(), self.spec.block_size, used.M, used.N, self.device, self.far)

    @property
    def far(self) -> bool:
        """Whether offsets within a batch entry may exceed 32 bits."""
        tensors = (self.q, self.k, self.v)
        apart = max(max(x.stride(1), x.shape[2] * x.shape[3]) for x in tensors)
        return apart * max(x.shape[1] for x in tensors) >= FAR

    def shape(self) -> dict[str, Any]:
        """Sizes and choices that kernels are compiled for."""
        i, K, V = self.inputs, self.q.shape[3], self.v.shape[3]
        R1, R2 = (1 if x is None else x.shape[2] for x in (i.left1, i.left2))
        RP1, RP2 = (max(16, power_of_two(r)) for r in (R1, R2))
        held = held_keys(dtype_name(product_type(self.q.dtype)), max(RP1, RP2))
        (K1, K2), (BV, NV) = key_pieces(K, held), value_pieces(V)
        nvidia = device.current.limits(self.device).backend == "cuda"
        return {
            "K": K, "K1": K1, "K2": K2, "V": V, "BV": BV, "NV": NV,
            "R1": R1, "RP1": RP1, "R2": R2, "RP2": RP2,
            "GLU": self.spec.kind == "glu", "NORM": self.spec.norm != "none",
            "MIX1": i.left1 is not None, "BASE1": i.base1 is not None,
            "MIX2": i.left2 is not None, "BASE2": i.base2 is not None,
            "PACK": self.q.dtype == torch.bfloat16, "PREC": "tf32" if nvidia else "ieee", "PTX": nvidia,
        }  # fmt: skip


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def product_type(dtype: torch.dtype) -> torch.dtype:
    """float16 is multiplied as bfloat16: products of two scores do not fit into its range."""
    return torch.float32 if dtype == torch.float32 else torch.bfloat16


def rows_apart(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x (B S H W) with contiguous heads; its sequences and tokens may lie apart, as in a cache."""
    x = x.to(dtype)
    return x if x.stride(3) == 1 and x.stride(2) == x.shape[3] else x.contiguous()


def prepare(inputs: Inputs, spec: Spec, keep_type: bool = False) -> Prepared:
    """keep_type: for kernels without matrix products, which take any type as it is."""
    dtype = inputs.q.dtype if keep_type else product_type(inputs.q.dtype)
    q = inputs.q.to(dtype).contiguous()
    k, v = rows_apart(inputs.k, dtype), rows_apart(inputs.v, dtype)

    def given(x: Tensor | None, dtype: torch.dtype) -> Tensor:
        return q if x is None else x.to(dtype).contiguous()  # a pointer that is never read

    def mixing(
        left: Tensor | None, right: Tensor | None, base: Tensor | None, control: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return given(left, dtype), given(right, dtype), given(base, torch.float32), given(control, dtype)

    spans = span_list(inputs.spans, q.shape[0], q.shape[1], k.shape[1])
    return Prepared(inputs, spec, q, k, v, *mixing(*inputs[3:7]), *mixing(*inputs[7:11]), spans)


def run(kernel: Any, grid: tuple[int, ...], used: Tile, call: Prepared, *arguments: Any, **constants: Any) -> None:
    """Launch a kernel with the constants it takes; nothing where there is nothing to do."""
    if 0 in grid:
        return
    known = {**call.shape(), "M": used.M, "N": used.N, **constants}
    chosen = {name: known[name] for name in kernel.arg_names[len(arguments) :]}
    device.current.start(kernel, grid, arguments, chosen, used)


def scratch_bytes(where: str) -> int:
    """The scratch of a chunk of rows: half of the L2 cache, so that the next kernel finds there what one has written."""
    return max(SCRATCH, device.current.limits(where).cache_bytes // 2)


def product(kernel: Any, name: str, grid: tuple[int, ...], call: Prepared, *arguments: Any, **constants: Any) -> None:
    """Launch a product over the scratch, in tiles of SLOTS; its rows and their reach are those of the blocks."""
    used, blocks = call.tile(name), call.tile("forward_w" if name == "forward_v" else "backward_h")
    run(kernel, grid, used._replace(M=blocks.M, N=blocks.N), call, *arguments, SLOTS=used.N, **constants)


@fallback.smaller_if_needed("forward")
def forward(inputs: Inputs, spec: Spec, chunk: int | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o (B T H V), ρ (B T H), u = z·left1 (B T G R) and y2 = a·left2 (B T H R); what lies in no span is 0, and ρ 1."""
    call = prepare(inputs, spec)
    q, k, v, shape = call.q, call.k, call.v, call.shape()
    (B, T, G, _), (H, V), L = q.shape, v.shape[2:], spec.block_size

    def fresh(*size: int, dtype: torch.dtype = torch.float32, fill: float = 0) -> Tensor:
        if call.whole:
            return torch.empty(size, dtype=dtype, device=q.device)
        return torch.full(size, fill, dtype=dtype, device=q.device)

    o, rho = fresh(B, T, H, V, dtype=inputs.q.dtype), fresh(B, T, H, fill=1)
    u = fresh(B, T, G, shape["R1"]) if shape["MIX1"] else fresh(0)
    y2 = fresh(B, T, H, shape["R2"]) if shape["MIX2"] else fresh(0)
    k_at, v_at = k.stride()[:2], v.stride()[:2]
    if shape["MIX1"]:
        used, sizes = call.tile("forward_u"), {"R": shape["R1"], "RP": shape["RP1"]}
        rows, order = row_table(call.plan(used))
        run(kernels.forward_u, (len(rows), H), used, call, q, k, call.left1, u, rows, order, T, L, H, *k_at, **sizes)
    tensors = (q, k, call.right1, call.base1, call.control1, u, call.right2, call.left2, call.base2, call.control2, y2, rho)
    if shape["MIX2"]:
        used = call.tile("forward_y")
        rows, order = row_table(call.plan(used))
        table = (q, rows, order, 0, T, L, H, *k_at, spec.eps)
        run(kernels.forward_w, (len(rows), H), used, call, *tensors, *table, READ=False)
    used = call.tile("forward_w")
    width, pieces = value_pieces(V)
    widths = {"W": V, "W1": width, "W2": 0, "DIVIDE": True}
    chunks, _ = chunk_rows(call.plan(used), scratch_bytes(call.device) // max(1, H * q.element_size()), used.N, used.N)
    w = torch.empty(max((c.cells for c in chunks), default=0) * H, dtype=q.dtype, device=q.device)
    for part in chunks:
        table = (part.rows, part.order, part.cells, T, L, H)
        grid = (len(part.rows), H)
        run(kernels.forward_w, grid, used, call, *tensors, w, *table, *k_at, spec.eps, READ=True)
        product(row_product, "forward_v", (*grid, pieces), call, w, v, o, rho, *table, *v_at, **widths)
    return o, rho, u, y2
