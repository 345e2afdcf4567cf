"""Benchmarks, on this machine and on one with a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hypermlp.cli.app import app, commands, shows_tables
from hypermlp.cli.console import open_console
from hypermlp.cli.options import complete
from hypermlp.report.terminal import Column, say, show_table, status

Fields = Annotated[
    list[str] | None,
    typer.Argument(metavar="FIELD=VALUE", help="Fields to change, such as threads=1 rounds=3.", show_default=False),
]


def benchmark_names() -> list[str]:
    from hypermlp.bench.registry import BENCHMARKS

    return list(BENCHMARKS)


@app.command("bench")
@shows_tables
def bench(
    name: Annotated[
        str | None,
        typer.Argument(
            help="layer, mixers, model, decode, latency, profile or kernels. Without a name: the list.",
            autocompletion=complete(benchmark_names),
        ),
    ] = None,
    changes: Fields = None,
    out: Annotated[Path, typer.Option(help="Folder for numbers and pictures.")] = Path("runs/bench"),
) -> None:
    """Measure speed and memory against softmax attention, on this machine.

    layer takes the fields shape=8x1024x768,2x2048x768 rounds=5 threads=2,1 match=true memory=false dtype=bfloat16. mixers takes
    these and mixers=rivals; model takes scale=paper part=model mixers=hyperglu,gla batch=1. hypermlp bench lists all fields.
    """
    from hypermlp.bench.registry import BENCHMARKS, read_fields
    from hypermlp.checks import choose_from
    from hypermlp.cli import measure

    console = open_console()
    if name is None:
        list_benchmarks()
        return
    choose_from("benchmark", name, tuple(BENCHMARKS))
    benchmark = BENCHMARKS[name]
    fields = read_fields(name, benchmark, changes or ())
    with status(console, "starting") as tell:
        paths = benchmark.run(fields, out, tell)
    measure.show(console, name, paths)


def list_benchmarks() -> None:
    import dataclasses

    from hypermlp.bench.registry import BENCHMARKS

    console = open_console()
    heads = [Column("benchmark"), *(Column(title, left=True, wraps=True) for title in ("measures", "takes", "fields"))]
    rows = [
        [name, one.about, one.takes, ", ".join(field.name for field in dataclasses.fields(one.fields))]
        for name, one in BENCHMARKS.items()
    ]
    show_table(console, "", heads, rows)
    say(console, "For example: hypermlp bench layer shape=2x512x256 threads=1 rounds=3")


gpu = commands("gpu", "On a machine with a GPU: check the kernels, measure them, choose their tile sizes.")
Folder = Annotated[Path, typer.Option(help="Folder for the numbers.")]


@gpu.command("check")
@shows_tables
def gpu_check() -> None:
    """Compare the kernels with the reference in float64: values and every gradient. Run this first on a GPU."""
    from hypermlp.bench import gpu, parity
    from hypermlp.cli.measure import show_rows

    gpu.need_gpu("gpu check")
    console = open_console()
    with status(console, "starting") as tell:
        rows = parity.run("triton", "cuda", tell=tell)
    show_rows(console, list(rows))


@gpu.command("bench")
@shows_tables
def gpu_bench(changes: Fields = None, out: Folder = Path("results/bench")) -> None:
    """Check the kernels, then time layers, GPT-2 small and decoding beside SDPA.

    Fields: rounds=20; against=PATH, the authors' hyperglu.py.
    """
    from hypermlp.bench.registry import ON_GPU, read_fields
    from hypermlp.cli import measure

    fields, console = read_fields("gpu", ON_GPU, changes or ()), open_console()
    with status(console, "starting") as tell:
        paths = ON_GPU.run(fields, out, tell)
    measure.show(console, "gpu", paths)


@gpu.command("tune")
def gpu_tune() -> None:
    """Try tile sizes of the kernels and keep the fastest for this architecture in the cache folder. It takes minutes."""
    from hypermlp.bench import gpu
    from hypermlp.files import write_json
    from hypermlp.ops.triton.device import gpu_limits
    from hypermlp.ops.triton.tiles import tuned_path
    from hypermlp.provenance import provenance

    gpu.need_gpu("gpu tune")
    console = open_console()
    with status(console, "tuning") as tell:
        best = gpu.tune(tell=tell)
    path = tuned_path()
    write_json(path, {"provenance": provenance(), "tiles": {str(gpu_limits("cuda").architecture): {"bfloat16": best}}})
    say(console, f"Table: {path}; new processes use it")
