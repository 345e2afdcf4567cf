"""What one recorded launch has to do: turns of the innermost loop per program, bytes that move, tensors that are touched.

Everything follows from the launch's own arguments (tables of row blocks and slot blocks, grid, constants), so it follows the
code that makes them. Grids are (blocks, heads, splits · pieces of the width); `per` says how many tiles of a block each split
walks over. A kernel with a loop that nobody described here is an error rather than free.

Letters as in ops/triton/blocks.py: M rows and N columns of a tile, L lags.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Known = Mapping[str, Any]  # arguments and constants of a launch by name
BATCH, FIRST_ROW, POSITION, SLOTS = 0, 1, 4, 5  # columns of the table of row blocks
TABLES = {"table", "order", "slots", "tallies"}
SLOT_TENSORS = {("k", None), ("v", None), ("y", "row_product"), ("out", "slot_product")}  # B S heads width; else B T …
LAG_TENSORS = {"A1", "B1", "D1", "A2", "B2", "D2", "dA", "dB", "dD"}
WRITTEN = {
    "forward_u": {"u"}, "forward_w": {"y2", "rho", "to_w"}, "row_product": {"out", "shares"}, "slot_product": {"out"},
    "row_sum": {"out"}, "backward_rows": {"dr", "dn"}, "backward_dw": {"ds2", "gs2", "shares", "to_dw"},
    "backward_h": {"ds1", "gs1", "shares", "to_z", "to_dh", "to_a", "to_w"}, "backward_control": {"ds", "gs"},
    "backward_parameters": {"dA", "dB", "dD"}, "backward_dz": {"to_dz"},
}  # fmt: skip
ADDED_TO = {"dA", "dB", "dD"}


class Touch(NamedTuple):
    """A part of a tensor: where (to find it again), how large, and whether it is read or written."""

    key: tuple[int, ...]
    size: float
    read: bool
    written: bool


class LaunchWork(NamedTuple):
    """Of one launch."""

    turns: Ints  # of the innermost loop, by program, in the order in which programs start
    moved: float  # bytes between the SMs and the L2 cache
    touched: list[Touch]


def work_of(function: str, grid: tuple[int, ...], arguments: Known, constants: Known) -> LaunchWork:
    """function: the kernel's Python name."""
    known, full = {**arguments, **constants}, (*grid, 1, 1)[:3]
    turns = turns_of(function, full, known)
    touched = touches(function, full, known)
    size = min(x.element_size() for x in arguments.values() if hasattr(x, "element_size") and x.is_floating_point())
    moved = float(turns.sum()) * bytes_per_turn(function, known, size)
    return LaunchWork(turns, max(moved, sum((part.read + part.written) * part.size for part in touched)), touched)


# Turns of the innermost loop.


def turns_of(function: str, grid: tuple[int, ...], known: Known) -> Ints:
    """Of every program; x runs fastest, as programs start."""
    if function not in TURNS:
        raise ValueError(f"bench/work.py must say how often {function} turns its loop; add it to TURNS")
    by_split = TURNS[function](known, grid)  # splits blocks
    pieces = grid[2] // len(by_split)
    return np.concatenate([np.tile(turns, grid[1]) for turns in by_split for _ in range(pieces)])


def array(tensor: Any) -> Ints:
    return np.asarray(tensor.cpu().numpy(), np.int64)


def split(tiles: Ints, known: Known, grid: tuple[int, ...], extra: int = 0) -> list[Ints]:
    """Tiles of blocks shared among splits of `per` each, with `extra` for those that have any."""
    if "per" not in known:
        return [tiles + extra]
    pieces = 1 if known.get("W2", 1) else -(-known["W"] // known["W1"])
    parts = [np.clip(tiles - n * known["per"], 0, known["per"]) for n in range(grid[2] // pieces)]
    return [np.where(part > 0, part + extra, 0) for part in parts]


def reached(known: Known) -> Ints:
    """Tiles of N columns that each row block looks back on, in the order of the programs."""
    at = array(known["table"])[array(known["order"]), POSITION]
    return np.asarray(-(-np.minimum(known["L"], at + known["M"]) // known["N"]), np.int64)


def skewed_turns(known: Known, grid: tuple[int, ...]) -> list[Ints]:
    late = 1 if known["M"] <= known["N"] else 2  # time tiles until a lag tile is complete
    return split(reached(known), known, grid, late)


def row_product_turns(known: Known, grid: tuple[int, ...]) -> list[Ints]:
    columns = reached(known) * known["N"] + known["M"]
    return split(np.asarray(-(-columns // known["SLOTS"]), np.int64), known, grid)


def slot_product_turns(known: Known, grid: tuple[int, ...]) -> list[Ints]:
    slots = array(known["slots"])
    return [slots[:, 5] - slots[:, 4]]


def parameter_turns(known: Known, grid: tuple[int, ...]) -> list[Ints]:
    tallies = array(known["tallies"])
    return [-(-np.clip(tallies - n, 0, None) // grid[2]) for n in range(grid[2])]


TURNS: dict[str, Callable[[Known, tuple[int, ...]], list[Ints]]] = {
    "forward_u": skewed_turns,
    "forward_w": skewed_turns,
    "backward_dw": skewed_turns,
    "backward_h": skewed_turns,
    "backward_dz": lambda known, grid: split(reached(known), known, grid),
    "row_product": row_product_turns,
    "slot_product": slot_product_turns,
    "backward_parameters": parameter_turns,
    "row_sum": lambda known, grid: [np.full(grid[0], known["splits"])],
    "backward_control": lambda known, grid: [np.full(grid[0], known["splits"])],
    "backward_rows": lambda known, grid: [np.zeros(grid[0], np.int64)],
}


# Bytes.


def bytes_per_turn(function: str, c: Known, size: int) -> float:
    """Bytes that a program loads and stores in one turn, elements of `size` bytes; parameters of lags included."""
    M, N, routes = c.get("M", 0), c.get("N", 0), 1 + bool(c.get("GLU", False))
    first = routes * (c["R1"] * size + 4) if c.get("MIX1") else 0  # B1 and D1 of a lag
    second = c["R2"] * size if c.get("MIX2") else 0
    keys, scratch = routes * c.get("K", 0) * size, M * N * size
    per_turn: dict[str, Callable[[], float]] = {
        "forward_u": lambda: N * (keys + routes * c["R"] * size),
        "forward_w": lambda: N * (keys + first + second + 4) + (scratch if c["READ"] else 0),
        "backward_dw": lambda: N * (c["V"] * size + second) + scratch,
        "backward_h": lambda: N * (keys + 2 * first + 2 * second + 4) + scratch * (1 + 2 * routes + 2),
        "backward_parameters": lambda: 2 * M * (c["LAGS"] + c["R"]) * size,
        "backward_dz": lambda: N * (c["R"] * size + 4) + 2 * scratch,
        "row_product": lambda: (M * c["SLOTS"] + c["SLOTS"] * (c["W1"] + c["W2"])) * size,
        "slot_product": lambda: (M * c["SLOTS"] + M * (c["W1"] + c["W2"])) * size,
    }
    return float(per_turn.get(function, lambda: 0.0)())


def touches(function: str, grid: tuple[int, ...], known: Known) -> list[Touch]:
    """The parts of tensors that a launch reads or writes, each once."""
    blocks = array(known["table"]) if "table" in known else None
    found: dict[tuple[int, ...], Touch] = {}
    for name, tensor in known.items():
        if not hasattr(tensor, "data_ptr") or name in TABLES or not tensor.numel():
            continue
        share, where = 1.0, (0, 0)
        if name.startswith(("from_", "to_")):
            share = scratch_share(name, function, grid, known)
        elif blocks is not None and name not in LAG_TENSORS and name != "shares":
            slots = (name, None) in SLOT_TENSORS or (name, function) in SLOT_TENSORS
            share = (slot_share if slots else row_share)(tensor, blocks, known) * head_share(tensor, grid, known)
            where = (0 if slots else int(blocks[0, BATCH]) * known["T"] + int(blocks[0, FIRST_ROW]), known.get("first", 0))
        written = name in WRITTEN[function]
        read = not written or name in ADDED_TO or (name == "out" and bool(known.get("ADD")))
        # Shares are allocated for every chunk, which on a GPU gives the same memory again.
        key = (-tensor.nbytes, 0, 0) if name == "shares" else (tensor.data_ptr(), *where)
        size = min(1.0, share) * tensor.nbytes
        old = found.get(key, Touch(key, 0, False, False))
        found[key] = Touch(key, max(size, old.size), read or old.read, written or old.written)
    return list(found.values())


def scratch_share(name: str, function: str, grid: tuple[int, ...], known: Known) -> float:
    """`cells` for each head of the launch, twice as many where a program writes gate and scale."""
    routes = 2 if function == "backward_h" and known["GLU"] and name in ("to_z", "to_dh") else 1
    return float(known["cells"] * grid[1] * routes / known[name].numel())


def row_share(tensor: Any, blocks: Ints, known: Known) -> float:
    """Rows of the blocks by all rows of a tensor (… B T …)."""
    at = next((n for n in range(1, tensor.dim()) if tensor.shape[n] == known["T"]), None)
    return 1.0 if at is None else min(1.0, len(blocks) * known["M"] / (tensor.shape[at - 1] * known["T"]))


def slot_share(tensor: Any, blocks: Ints, known: Known) -> float:
    """Slots that the blocks reach by all slots of a tensor (B S …)."""
    seen = 0
    for batch in np.unique(blocks[:, BATCH]):
        own = blocks[blocks[:, BATCH] == batch]
        end = min(int(own[:, POSITION].max()) + known["M"], int(own[:, SLOTS].max()))
        seen += end - max(0, int(own[:, POSITION].min()) - known["L"] + 1)
    return min(1.0, seen / (tensor.shape[0] * tensor.shape[1]))


def head_share(tensor: Any, grid: tuple[int, ...], known: Known) -> float:
    """Heads of the launch by all heads of a tensor, of which gates and scales are two."""
    heads = tensor.shape[-1] if tensor.dim() == 3 else tensor.shape[-2]
    routes = 2 if known.get("GLU") and "H" in known and heads > known["H"] else 1
    return min(1.0, grid[1] * routes / heads)
