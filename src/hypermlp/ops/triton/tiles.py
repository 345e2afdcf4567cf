"""Tile sizes by kernel, architecture and type: a table, not a search at every start.

`tiles.json` beside this file was chosen by ahead-of-time compilation (registers, spills, instructions); `hypermlp bench tune`
measures on a GPU and writes a table of its own into the cache folder, which then comes first.
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
    return Tile._make((*sizes, kernel))


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
