"""`python -m hypermlp.bench.kernel_sizes FILE`: compile the Triton kernels for other widths, heads and ranks, with no GPU.

A row says whether one kernel fits: registers, spilled bytes, shared memory. Sizes that lead to the same code are compiled once.
FILE keeps the rows, and the next run resumes. Not for tests: all of it takes hours.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hypermlp.bench import kernels
from hypermlp.files import write_json
from hypermlp.ops.triton import tiles
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


def cover(arch: int, dtype: str, size: tuple[int, int, int], record: Row) -> Iterator[Row]:
    """Compile what a record does not have yet of one size, and add it to the record."""
    if (covered := [arch, dtype, *size]) in record["covered"]:
        return
    known, (width, heads, rank) = {row["code"] for row in record["rows"]}, size
    for launch in kernels.record_launches(arch, dtype, width, heads, rank):
        code = code_of(launch, arch)
        if code not in known:
            row = {"width": width, "heads": heads, "rank": rank, **measure(launch, arch, dtype), "code": code}
            record["rows"].append(row)
            yield row
    record["covered"].append(covered)


def code_of(launch: Launch, arch: int) -> str:
    """A name for what is compiled."""
    made_of = (launch.kernel.cache_key, arch, launch.signature, launch.constants, launch.divisible, launch.warps, launch.stages)
    return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:12]


def measure(launch: Launch, arch: int, dtype: str) -> Row:
    found = (kernels.guarded_measure if arch in kernels.AMD else kernels.kept_measure)(launch, arch, dtype)
    names = ("kernel", "arch", "dtype", "tile", "warps", "registers", "spill", "shared", "failure")
    return {name: found[name] for name in names if name in found} | {"fits": not kernels.misfits(found)}


def summary(record: Mapping[str, Any]) -> list[Row]:
    """One row per architecture and type: which sizes are covered, and the worst of what was compiled for them."""
    made = []
    for arch, dtype in dict.fromkeys((entry[0], entry[1]) for entry in record["covered"]):
        sizes = [entry[2:] for entry in record["covered"] if entry[:2] == [arch, dtype]]
        own = [row for row in record["rows"] if (row["arch"], row["dtype"]) == (arch, dtype)]
        counted = [row for row in own if "failure" not in row]
        made.append(
            {
                "arch": arch, "dtype": dtype, "kernels": len(own), "misfits": sum(not row["fits"] for row in own),
                **{name: sorted({size[n] for size in sizes}) for n, name in enumerate(("width", "heads", "rank"))},
                "shared": max((row["shared"] for row in counted), default=0),
                "forward_spill": max((r["spill"] for r in counted if not r["kernel"].startswith("backward")), default=0),
                "backward_spill": max((r["spill"] for r in counted if r["kernel"].startswith("backward")), default=0),
            }
        )  # fmt: skip
    return made


def sources() -> str:
    """A digest of the kernels' source: a record of other kernels is begun anew."""
    files = sorted(Path(tiles.__file__).parent.glob("*.*"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--arch", nargs="+", default=list(ARCHITECTURES), type=int)
    parser.add_argument("--dtype", nargs="+", default=list(kernels.TYPES))
    for name, values in (("width", WIDTHS), ("heads", HEADS), ("rank", RANKS)):
        parser.add_argument(f"--{name}", nargs="+", default=values, type=int)
    asked = parser.parse_args()
    record: Row = {"sources": sources(), "rows": [], "covered": []}
    if asked.file.is_file() and (old := json.loads(asked.file.read_text())).get("sources") == record["sources"]:
        record = old
    for dtype, arch in itertools.product(asked.dtype, asked.arch):
        for size in sizes(asked.width, asked.heads, asked.rank):
            for row in cover(arch, dtype, size, record):
                print(json.dumps(row), flush=True)
            write_json(asked.file, {"provenance": provenance(), **record})


if __name__ == "__main__":
    main()
