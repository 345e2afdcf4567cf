"""`python -m hypermlp.bench.kernel_sizes FILE`: compile the Triton kernels for other widths, heads and ranks, with no GPU.

A row says whether one kernel fits: registers, spilled bytes, shared memory. Sizes that lead to the same code are compiled once.
FILE keeps the rows, and a run goes on where the last one stopped. Not for tests: all of it takes hours.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hypermlp.bench import kernels
from hypermlp.files import write_json
from hypermlp.ops.triton.specialise import Launch
from hypermlp.provenance import provenance

WIDTHS = (256, 512, 768, 1024, 1280, 1536, 2048, 2560, 3072, 4096)
HEADS = (2, 4, 8, 16, 32)
RANKS = (8, 16, 32, 64)
ARCHITECTURES = (*kernels.ARCHITECTURES, 910)
LEAST_KEYS = 4
Row = dict[str, Any]


def sizes(
    widths: Sequence[int] = WIDTHS, heads: Sequence[int] = HEADS, ranks: Sequence[int] = RANKS
) -> list[tuple[int, int, int]]:
    """Width, heads and rank; few heads and wide layers first, since they ask for most."""
    every = itertools.product(heads, ranks, sorted(widths, reverse=True))
    return [(width, n, rank) for n, rank, width in every if width // (8 * n) >= LEAST_KEYS]


def sweep(arch: int, dtype: str, wanted: Sequence[tuple[int, int, int]], known: set[str]) -> Iterator[Row]:
    """Rows of the kernels whose code is not known yet."""
    for width, heads, rank in wanted:
        for launch in kernels.record_launches(arch, dtype, width, heads, rank):
            code = code_of(launch, arch)
            if code not in known:
                known.add(code)
                yield {"width": width, "heads": heads, "rank": rank, **measure(launch, arch, dtype), "code": code}


def code_of(launch: Launch, arch: int) -> str:
    """A name for what is compiled."""
    made_of = (launch.kernel.cache_key, arch, launch.signature, launch.constants, launch.divisible, launch.warps, launch.stages)
    return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:12]


def measure(launch: Launch, arch: int, dtype: str) -> Row:
    found = (kernels.guarded_measure if arch in kernels.AMD else kernels.kept_measure)(launch, arch, dtype)
    names = ("kernel", "arch", "dtype", "tile", "warps", "registers", "spill", "shared", "failure")
    return {name: found[name] for name in names if name in found} | {"fits": not kernels.misfits(found)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--arch", nargs="+", default=list(ARCHITECTURES), type=int)
    parser.add_argument("--dtype", nargs="+", default=list(kernels.TYPES))
    for name, values in (("width", WIDTHS), ("heads", HEADS), ("rank", RANKS)):
        parser.add_argument(f"--{name}", nargs="+", default=values, type=int)
    asked = parser.parse_args()
    rows = json.loads(asked.file.read_text())["rows"] if asked.file.is_file() else []
    known = {row["code"] for row in rows}
    for dtype, arch in itertools.product(asked.dtype, asked.arch):
        for row in sweep(arch, dtype, sizes(asked.width, asked.heads, asked.rank), known):
            print(json.dumps(row), flush=True)
            rows.append(row)
            write_json(asked.file, {"provenance": provenance(), "rows": rows})


if __name__ == "__main__":
    main()
