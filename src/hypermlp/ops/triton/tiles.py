"""Tile sizes by kernel, architecture, type and widths: a table and a rule, not a search at every start.

`tiles.json` beside this file was chosen by ahead-of-time compilation (registers, spills, instructions) for a width of 768 and
rank 16; `hypermlp gpu tune` measures on a GPU and writes a table of its own into the cache folder, which then comes first.
`fitted` makes a tile smaller where keys and factors are wider, so that kernels fit into registers and into the shared memory
of every architecture (`hypermlp.bench.kernel_sizes`). Kernels that share a scratch share its rows and columns.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

from hypermlp.ops.native.build import cache_folder
from hypermlp.ops.triton.device import interpreted

SHIPPED = Path(__file__).with_name("tiles.json")
INTERPRETED = (16, 16, 4, 1)
LEAST = 16  # rows and columns of the smallest tile: a side of a product
MOST_STEPS = 4  # from the largest tile to the smallest
NARROW = 96  # keys + twice the rank up to which the table's tiles of bfloat16 do not spill: 64 + 2·16; at width 768, 48 + 2·16
WIDE_RANK = 64  # from which on factors leave few registers to anything else
FREE = {"forward_v", "backward_parameters", "backward_q", "backward_k", "backward_v", "decode"}  # hold no rows of keys

# With more stages Triton 3.7.1 copies the next tiles over these, which products of warp groups (sm_90) still read.
UNSTAGED = {"backward_parameters"}


class Tile(NamedTuple):
    """M rows and N columns of a kernel's tile; warps and pipeline stages that compute it."""

    M: int
    N: int
    warps: int
    stages: int
    kernel: str


def tile(kernel: str, arch: int, dtype: str) -> Tile:
    """The tile of a kernel for an architecture such as 89 and "bfloat16" or "float32" products."""
    if interpreted():
        return Tile._make((*INTERPRETED, kernel))
    known = [(int(name), types[dtype][kernel]) for name, types in tables().items() if kernel in types.get(dtype, {})]
    _, sizes = max([entry for entry in known if entry[0] <= arch], default=min(known))  # the newest that is not newer than it
    used = Tile._make((*sizes, kernel))
    return used._replace(stages=1) if kernel in UNSTAGED and arch >= 90 else used


def tuned_path() -> Path:
    return cache_folder() / "tiles.json"


@functools.cache
def tables() -> dict[str, Any]:
    """Architecture → type → kernel → [M, N, warps, stages]; what was tuned on this machine overrules what is shipped."""
    found: dict[str, Any] = json.loads(SHIPPED.read_text())
    if tuned_path().is_file():
        for arch, types in json.loads(tuned_path().read_text())["tiles"].items():
            for dtype, kernels in types.items():
                found.setdefault(arch, {}).setdefault(dtype, {}).update(kernels)
    return found


def smaller(used: Tile) -> Tile:
    """The next smaller tile: half of the longer side. A warp keeps its rows."""
    if used.M > used.N:
        return used._replace(M=used.M // 2, warps=max(1, used.warps // 2))
    return used._replace(N=max(LEAST, used.N // 2))


def held_keys(dtype: str, rank: int) -> int:
    """Width of keys up to which a program holds the queries of its rows; wider ones are computed in a loop over pieces."""
    if dtype == "float32":
        return 64
    return 256 if rank <= 16 else 128 if rank < WIDE_RANK else 64


def steps_down(kernel: str, arch: int, dtype: str, K: int, rank: int) -> int:
    """How many steps smaller than the table's a tile is; rank: padded, the larger of two."""
    if kernel in FREE:
        return 0
    wide = rank >= WIDE_RANK
    if dtype == "float32":
        return int(wide)
    more, looped = K + 2 * rank > NARROW, held_keys(dtype, rank) < K
    if kernel.startswith("backward"):
        return more + (wide or looped)
    if arch // 10 == 9 or (arch // 10 == 10 and not wide):
        return 0  # products of warp groups need 64 rows, and leave more registers
    return more + looped


def fitted(used: Tile, steps: int) -> Tile:
    for _ in range(steps):
        used = smaller(used)
    return used
