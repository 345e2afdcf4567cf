"""What one recorded launch has to do: turns of the innermost loop per program, bytes that move, tensors that are touched.

Everything follows from the launch's own arguments (tables of row blocks and slot blocks, grid, constants), so it follows the
code that makes them. A grid with more programs than blocks × heads × pieces splits each block's walk evenly.

Letters as in ops/triton/blocks.py: M rows and N columns of a tile, L lags, n row blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
POSITION, SLOT, FIRST_ROW, BATCH = 4, 3, 1, 0  # columns of the table of row blocks
ROW_TENSORS = {
    "q", "u", "s1", "s2", "y2", "rho", "dr", "ds1", "ds2", "gs1", "gs2", "ys2", "us", "gs", "dn", "d_o", "o",
}  # fmt: skip
WRITTEN = {
    "forward_u": {"u"}, "forward_w": {"y2", "rho", "to_w"}, "row_product": {"out"}, "slot_product": {"out"},
    "backward_rows": {"dr", "dn"}, "backward_dw": {"ds2", "gs2", "to_dw"}, "backward_dz": {"to_dz"},
    "backward_h": {"ds1", "gs1", "to_z", "to_dh", "to_a", "to_w"}, "backward_parameters": {"dA", "dB", "dD"},
}  # fmt: skip
READ_TOO = {"dA", "dB", "dD"}  # sums that are continued


class Touch(NamedTuple):
    """A part of a tensor: where (to find it again), how large, and whether it is read or written."""

    key: tuple[int, ...]
    size: float
    read: bool
    written: bool


class Work(NamedTuple):
    """Of one launch."""

    turns: Ints  # of the innermost loop, by program, in the order in which programs start
    moved: float  # bytes between the SMs and the L2 cache
    touched: list[Touch]


def work_of(function: str, grid: tuple[int, ...], arguments: Mapping[str, Any], constants: Mapping[str, Any]) -> Work:
    """function: the kernel's Python name; constants: with those arguments that Triton made constants."""
    known = {**arguments, **constants}
    turns = turns_of(function, grid, known)
    # A split repeats the whole grid, so each turn moves the same; outside of the loop only accumulators count.
    size = next(x.element_size() for x in arguments.values() if hasattr(x, "element_size"))
    moved = float(turns.sum()) * bytes_per_turn(function, known, size)
    touched = touches(function, known)
    return Work(turns, max(moved, sum((t.read + t.written) * t.size for t in touched)), touched)


def table_of(known: Mapping[str, Any]) -> Ints:
    return np.asarray(known["table"].cpu().numpy(), np.int64)


def reach(at: Ints, known: Mapping[str, Any]) -> Ints:
    """Tiles of N columns that blocks at these positions look back on."""
    return np.asarray(-(-np.minimum(known["L"], at + known["M"]) // known["N"]), np.int64)


def late(known: Mapping[str, Any]) -> int:
    """Time tiles until a lag tile is complete."""
    return 1 if known["M"] <= known["N"] else 2


def turns_of(function: str, grid: tuple[int, ...], known: Mapping[str, Any]) -> Ints:
    """Turns of the innermost loop of every program; x runs fastest, as programs start."""
    programs = int(np.prod(grid))
    if function == "backward_parameters":
        tallies = np.asarray(known["tallies"].cpu().numpy(), np.int64)
        splits = grid[2]
        return np.concatenate([np.tile(-(-(tallies - split).clip(0) // splits), grid[1]) for split in range(splits)])
    if function not in BLOCK_TURNS:
        return np.zeros(programs, np.int64)
    turns, overhead = BLOCK_TURNS[function](known)
    splits = max(1, programs // unsplit(len(turns), known))
    each = -(-turns // splits) + overhead
    if grid[0] == len(turns) * splits:
        each = np.repeat(each, splits)
    return np.resize(each, programs)


def unsplit(blocks: int, known: Mapping[str, Any]) -> int:
    """Programs of a launch that does not split blocks."""
    heads = known["heads"] if "heads" in known else known["H"]
    pieces = -(-known["W"] // (known["W1"] + known["W2"])) if "W1" in known else 1
    return int(blocks * heads * pieces)


def ordered_positions(known: Mapping[str, Any]) -> Ints:
    table, order = table_of(known), np.asarray(known["order"].cpu().numpy(), np.int64)
    return table[order, POSITION]


def skewed_turns(known: Mapping[str, Any]) -> tuple[Ints, int]:
    return reach(ordered_positions(known), known), late(known)


def plain_turns(known: Mapping[str, Any]) -> tuple[Ints, int]:
    return reach(ordered_positions(known), known), 0


def row_product_turns(known: Mapping[str, Any]) -> tuple[Ints, int]:
    columns = reach(ordered_positions(known), known) * known["N"] + known["M"]
    return np.asarray(-(-columns // known["SLOTS"]), np.int64), 0


def slot_product_turns(known: Mapping[str, Any]) -> tuple[Ints, int]:
    slots = np.asarray(known["slots"].cpu().numpy(), np.int64)
    return slots[:, 5] - slots[:, 4], 0


BLOCK_TURNS: dict[str, Callable[[Mapping[str, Any]], tuple[Ints, int]]] = {
    "forward_u": skewed_turns, "forward_w": skewed_turns, "backward_dw": skewed_turns, "backward_h": skewed_turns,
    "backward_dz": plain_turns, "row_product": row_product_turns, "slot_product": slot_product_turns,
}  # fmt: skip


def bytes_per_turn(function: str, c: Mapping[str, Any], size: int) -> float:
    """Bytes that a program loads and stores in one turn, elements of `size` bytes; parameters of lags included."""
    M, N, routes = c.get("M", 0), c.get("N", 0), 1 + bool(c.get("GLU", False))
    first = routes * (c.get("R1", 0) * size + 4) if c.get("MIX1", False) else 0  # B1 and D1 per lag
    keys = routes * c.get("K", 0) * size
    second = c.get("R2", 0) * size if c.get("MIX2", False) else 0
    scratch = M * N * size
    per_turn = {
        "forward_u": lambda: N * (keys + routes * c["R"] * size),
        "forward_w": lambda: N * (keys + first + second + 4) + (scratch if c["READ"] else 0),
        "backward_dw": lambda: N * (c["V"] * size + second) + scratch,
        "backward_h": lambda: N * (keys + 2 * first + 2 * second + 4) + scratch * (1 + 2 * routes + 2),
        "backward_parameters": lambda: 2 * M * (c["LAGS"] + c["R"]) * size,
        "backward_dz": lambda: N * (c["R"] * size + 4) + 2 * scratch,
        "row_product": lambda: (M * c["SLOTS"] + c["SLOTS"] * (c["W1"] + c["W2"])) * size,
        "slot_product": lambda: (M * c["SLOTS"] + M * (c["W1"] + c["W2"])) * size,
    }
    return float(per_turn[function]()) if function in per_turn else 0.0


def touches(function: str, known: Mapping[str, Any]) -> list[Touch]:
    """The parts of tensors that a launch reads or writes, each once."""
    blocks = table_of(known) if "table" in known else None
    first, seen, seen_slots, all_rows = (0, 1.0, 1.0, 1)
    if blocks is not None and blocks.shape[1] == 8 and "M" in known:
        all_rows = max(1, row_count(known))
        seen = min(1.0, len(blocks) * known["M"] / all_rows)
        first = int(blocks[0, BATCH]) * known["T"] + int(blocks[0, FIRST_ROW])
        seen_slots = slot_share(blocks, known)
    found: dict[tuple[int, ...], Touch] = {}
    for name, tensor in known.items():
        if not hasattr(tensor, "data_ptr") or name in ("table", "order", "slots", "tallies") or not tensor.numel():
            continue
        whole = tensor.numel() * tensor.element_size()
        written = name in WRITTEN.get(function, ())
        read = not written or name in READ_TOO or (name == "out" and bool(known.get("ADD")))
        if name.startswith(("from_", "to_")):
            key, share = (tensor.data_ptr(),), min(1.0, scratch_share(tensor, known))
        elif name in ROW_TENSORS or (name, function) in (("out", "row_product"), ("y", "slot_product")):
            key, share = (tensor.data_ptr(), first), seen
        elif name in ("k", "v") or (name, function) in (("y", "row_product"), ("out", "slot_product")):
            key, share = (tensor.data_ptr(),), seen_slots
        else:
            key, share = (tensor.data_ptr(),), 1.0
        before = found.get(key)
        found[key] = Touch(
            key, share * whole, read or (before is not None and before.read), written or (before is not None and before.written)
        )
    return list(found.values())


def row_count(known: Mapping[str, Any]) -> int:
    """Rows of the batch: of the first tensor that has B and T."""
    tensor = next(known[name] for name in ("q", "dr", "gs1", "gs", "out", "y") if name in known and known[name].dim() >= 3)
    return int(tensor.shape[0]) * int(tensor.shape[1]) if tensor.shape[1] == known["T"] else int(known["T"])


def slot_share(blocks: Ints, known: Mapping[str, Any]) -> float:
    """Which share of all slots the row blocks of a launch reach."""
    ends = blocks[:, POSITION] + known["M"]
    begins = np.maximum(0, blocks[:, POSITION] - known["L"] + 1)
    whole = sum(
        min(int(ends[blocks[:, BATCH] == b].max()), int(blocks[blocks[:, BATCH] == b, 5].max()))
        - int(begins[blocks[:, BATCH] == b].min())
        for b in np.unique(blocks[:, BATCH])
    )
    tensor = next((known[name] for name in ("k", "v", "out", "y") if name in known and known[name].dim() == 4), None)
    return 1.0 if tensor is None else min(1.0, whole / max(1, tensor.shape[0] * tensor.shape[1]))


def scratch_share(tensor: Any, known: Mapping[str, Any]) -> float:
    heads = known["heads"] if "heads" in known else known["H"] * (2 if tensor.numel() > 1.5 * known["cells"] * known["H"] else 1)
    return float(known["cells"] * heads / tensor.numel())
