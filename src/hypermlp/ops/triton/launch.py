"""From the operator's tensors to kernel launches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hypermlp.ops.registered import Inputs
from hypermlp.ops.triton import device, fallback
from hypermlp.ops.triton import forward as kernels
from hypermlp.ops.triton.blocks import Plan, all_rows, chunk_rows, span_list
from hypermlp.ops.triton.device import Limits, interpreted
from hypermlp.ops.triton.products import row_product, row_sum
from hypermlp.ops.triton.tiles import Tile, fitted, held_keys, steps_down, tile
from hypermlp.ops.triton.work import Section, room, sections, split
from hypermlp.ops.types import Spec

WIDEST = 128  # columns of V in one accumulator
SUM = Tile(16, 16, 4, 1, "row_sum")  # rows of a program that adds up shares
KEYS = 64  # columns of K in one step of a loop
FAR = 2**31  # elements of a batch entry from which on tables, and what kernels compute from them, have 64 bits


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


def pieces_of(widths: Mapping[str, int]) -> int:
    """Programs that share a width W, in pieces of W1 and W2 columns."""
    return -(-widths["W"] // (widths["W1"] + widths["W2"]))


class LaunchInputs(NamedTuple):
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

    @property
    def device(self) -> str:
        return str(self.q.device)

    @property
    def whole(self) -> bool:
        """Whether every row and slot lies in a span."""
        return self.inputs.spans is None

    @property
    def routes(self) -> int:
        """Routing heads of a head: gate and scale, or the gate alone."""
        return 2 if self.spec.kind == "glu" else 1

    @property
    def limits(self) -> Limits:
        return device.current.limits(self.device)

    def tile(self, kernel: str) -> Tile:
        """The table's tile, made smaller where wide keys or a wide rank, or this GPU, ask for it."""
        s, arch, dtype = self.shape(), self.limits.architecture, dtype_name(product_type(self.q.dtype))
        used = tile(kernel, arch, dtype)
        if interpreted():
            return used
        steps = steps_down(kernel, arch, dtype, s["K"], max(s["RP1"], s["RP2"]))
        used = fitted(used, steps + fallback.steps(kernel, self.inputs))
        more = kernel == "backward_dw" and s["NV"] > 3  # V in a loop of its own, which loads ahead
        return used._replace(stages=used.stages + more)

    def geometry(self, kernel: str) -> Tile:
        """The tile whose rows and columns a scratch has."""
        return self.tile("forward_w" if kernel.startswith("forward") else "backward_h")

    def plan(self, used: Tile) -> Plan:
        spans = span_list(self.inputs.spans, self.q.shape[0], self.q.shape[1], self.k.shape[1])
        return Plan(spans.tobytes(), self.spec.block_size, used.M, used.N, self.device, self.far)

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


def prepare(inputs: Inputs, spec: Spec, keep_type: bool = False) -> LaunchInputs:
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

    return LaunchInputs(inputs, spec, q, k, v, *mixing(*inputs[3:7]), *mixing(*inputs[7:11]))


def run(kernel: Any, grid: tuple[int, ...], used: Tile, call: LaunchInputs, *arguments: Any, **constants: Any) -> None:
    """Launch a kernel with the constants it takes; nothing where there is nothing to do."""
    if 0 in grid:
        return
    known = {**call.shape(), "M": used.M, "N": used.N, **constants}
    chosen = {name: known[name] for name in kernel.arg_names[len(arguments) :]}
    device.current.start(kernel, grid, arguments, chosen, used)


def empty(call: LaunchInputs, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=call.q.device)


def row_products(
    name: str, call: LaunchInputs, of: Section, routes: int, x: Tensor, y: Tensor, out: Tensor, rho: Tensor,
    DIVIDE: bool, **widths: int,
) -> None:  # fmt: skip
    """out = x y of a section, `routes` times for each head; x is the scratch in time order."""
    used, blocks = call.tile(name), call.geometry(name)
    part, programs, W = of.part, of.heads * routes, widths["W"]
    pieces = pieces_of(widths)
    per, splits = split(call.limits, part, programs * pieces, max(1, used.N // blocks.N))
    tiles = -(-(part.most_tiles * blocks.N + blocks.M) // used.N)  # in time order a block of rows is M columns longer
    per, splits = (per, -(-tiles // per)) if splits > 1 else (tiles, 1)
    rows, order, *_ = part.tables.views()
    heads = (call.v.shape[2], y.shape[2], of.first, of.heads)
    shares = empty(call, splits, part.blocks, blocks.M, programs, W) if splits > 1 else out
    numbers = (per, part.blocks, part.cells, call.q.shape[1], call.spec.block_size, *heads, *y.stride()[:2])
    constants = {"SLOTS": used.N, "DIVIDE": DIVIDE, "SPLIT": splits > 1, **widths}
    grid, tile = (part.blocks, programs, pieces * splits), used._replace(M=blocks.M, N=blocks.N)
    run(row_product, grid, tile, call, x, y, out, rho, shares, rows, order, *numbers, **constants)
    if splits > 1:
        constants = {"W": W, "WP": power_of_two(W), "DIVIDE": DIVIDE, "PART": SUM.M}
        each, tile = (part.blocks * (blocks.M // SUM.M), programs), SUM._replace(M=blocks.M)
        run(row_sum, each, tile, call, shares, out, rho, rows, splits, part.blocks, call.q.shape[1], *heads, **constants)


@fallback.smaller_if_needed("forward")
def forward(inputs: Inputs, spec: Spec, chunk: int | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o (B T H V), ρ (B T H), u = z·left1 (B T G R) and y2 = a·left2 (B T H R); what lies in no span is 0, and ρ 1."""
    if inputs.goes_around:  # several tokens at once: their slots twice, since a block of them lies in one piece
        inputs = inputs._replace(k=torch.cat([inputs.k] * 2, 1), v=torch.cat([inputs.v] * 2, 1))
    call = prepare(inputs, spec)
    (B, T, _, _), (H, V) = call.q.shape, call.v.shape[2:]
    u = first_sums(call)
    y2, rho = second_sums(call, u)
    o = (torch.empty if call.whole else torch.zeros)(B, T, H, V, dtype=inputs.q.dtype, device=call.q.device)
    used = call.tile("forward_w")
    plan = call.plan(used)
    held = room(call.limits, plan, H, call.q.element_size())
    chunks, _ = chunk_rows(plan, held.cells, used.N, used.N)
    w = empty(call, max((c.cells for c in chunks), default=0) * held.heads, dtype=call.q.dtype)
    width, _ = value_pieces(V)
    for of in sections(chunks, H, held.heads):
        per, splits = split(call.limits, of.part, of.heads)
        hidden_pass(call, used, of, per, splits, u, y2, rho, w, READ=True)
        row_products("forward_v", call, of, 1, w, call.v, o, rho, True, W=V, W1=width, W2=0)
    return o, rho, u, y2


def shares_of(call: LaunchInputs, splits: int, *shape: int) -> Tensor:
    """Room for the shares of a sum over slots, zero where no program writes."""
    return (torch.empty if call.whole else torch.zeros)(splits, *shape, dtype=torch.float32, device=call.q.device)


def total(shares: Tensor) -> Tensor:
    """The sum of all splits' shares, in a fixed order."""
    return shares[0] if len(shares) == 1 else shares.sum(0)


def first_sums(call: LaunchInputs) -> Tensor:
    """u = z·left1 (B T G R); empty without R1."""
    (B, T, G, _), H, shape = call.q.shape, call.v.shape[2], call.shape()
    if not shape["MIX1"]:
        return empty(call, 0)
    used, R = call.tile("forward_u"), shape["R1"]
    part = all_rows(call.plan(used))
    per, splits = split(call.limits, part, H)
    shares = shares_of(call, splits, B, T, G, R)
    rows, order, *_ = part.tables.views()
    tensors = (call.q, call.k, call.left1, shares, rows, order, per, B * T * G * R)
    grid = (part.blocks, H, splits)
    run(kernels.forward_u, grid, used, call, *tensors, T, call.spec.block_size, H, *call.k.stride()[:2], R=R, RP=shape["RP1"])
    return total(shares)


def second_sums(call: LaunchInputs, u: Tensor) -> tuple[Tensor, Tensor]:
    """y2 = a·left2 (B T H R), empty without R2, and ρ (B T H)."""
    (B, T), H, shape = call.q.shape[:2], call.v.shape[2], call.shape()
    if not shape["MIX2"] and not shape["NORM"]:
        return empty(call, 0), torch.ones(B, T, H, device=call.q.device)
    used = call.tile("forward_y")
    part = all_rows(call.plan(used))
    per, splits = split(call.limits, part, H)
    y2 = shares_of(call, splits, B, T, H, shape["R2"]) if shape["MIX2"] else empty(call, 1, 0)
    rho = shares_of(call, splits, B, T, H)
    if not call.whole:
        rho[0] = 1  # which the sum gives where no program writes
    hidden_pass(call, used, Section(part, 0, H), per, splits, u, y2, rho, call.q, READ=False)
    if splits == 1:
        return y2[0], rho[0]
    return total(y2), rho.sum(0).add_(call.spec.eps).sqrt_() if shape["NORM"] else torch.ones_like(rho[0])


def hidden_pass(
    call: LaunchInputs,
    used: Tile,
    of: Section,
    per: int,
    splits: int,
    u: Tensor,
    y2: Tensor,
    rho: Tensor,
    w: Tensor,
    READ: bool,
) -> None:
    """One launch of forward_w."""
    (B, T), H = call.q.shape[:2], call.v.shape[2]
    rows, order, *_ = of.part.tables.views()
    tensors = (call.q, call.k, call.right1, call.base1, call.control1, u, call.right2, call.left2, call.base2, call.control2)
    table = (rows, order, per, B * T * H, of.part.cells, T, call.spec.block_size, H, of.first, of.heads)
    grid, more = (of.part.blocks, of.heads, splits), (*call.k.stride()[:2], call.spec.eps)
    run(kernels.forward_w, grid, used, call, *tensors, y2, rho, w, *table, *more, READ=READ, SPLIT=splits > 1)
