"""Commands about the kernels for GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hypermlp.cli.bench import bench
from hypermlp.cli.options import whole_numbers
from hypermlp.errors import RunError
from hypermlp.files import write_json
from hypermlp.provenance import provenance
from hypermlp.report.terminal import new_console, say, status


@bench.command("kernels")
def bench_kernels(
    arch: Annotated[
        str, typer.Option(help="Compute capabilities to compile for; 942 is AMD's gfx942.")
    ] = "80,86,89,90,100,120,942",
    dtype: Annotated[str, typer.Option(help="Types to compile for: bfloat16, float32 or both.")] = "bfloat16,float32",
    out: Annotated[Path, typer.Option(help="Folder for the numbers and tables.")] = Path("runs/bench"),
) -> None:
    """Compile every kernel for GPUs, with no GPU: registers, spills, shared memory, multiply-adds; predicted times. Minutes.

    Ends with an error if a kernel does not compile or shared memory does not suffice, and for NVIDIA's if a forward or decode
    kernel spills, a backward kernel spills more than 256 bytes, or tensor cores do more than the algorithm needs. What is
    compiled is kept in the cache folder.
    """
    from hypermlp.bench.kernels import SHARED_LIMIT, TYPES
    from hypermlp.checks import choose_from
    from hypermlp.ops.triton.device import CURE, installed

    types = [name.strip() for name in dtype.split(",")]
    for name in types:
        choose_from("--dtype", name, TYPES)
    wanted = whole_numbers("--arch", arch)
    for number in wanted:
        choose_from("--arch", str(number), tuple(map(str, SHARED_LIMIT)))
    if installed() is None:
        raise ImportError(f"bench kernels needs triton: {CURE}")
    broken = run_kernels(new_console(), out, wanted, types)
    if broken:
        raise RunError(f"{len(broken)} promises are broken, see above; other tile sizes may keep them (ops/triton/tiles.json)")


@bench.command("gpu")
def bench_gpu(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of which the median counts.")] = 20,
    against: Annotated[
        Path | None, typer.Option(help="The authors' hyperglu.py, to be timed too (the file is executed).")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the numbers.")] = Path("results/bench"),
) -> None:
    """On a machine with a GPU: parity with the reference, then layers, GPT-2 small and decoding beside SDPA."""
    from hypermlp.bench import gpu
    from hypermlp.cli.measure import record_rows

    gpu.need_gpu("bench gpu")
    console = new_console()
    rows = record_rows(console, out / "gpu.json", gpu.run, rounds=rounds, against=str(against) if against else None)
    for row in rows:
        say(console, ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
    say(console, f"Numbers: {out / 'gpu.json'}")


@bench.command("tune")
def bench_tune(
    out: Annotated[
        Path | None, typer.Option(help="Where to write the table. Default: the cache folder, where it is used.")
    ] = None,
) -> None:
    """On a machine with a GPU: try tile sizes of the kernels and keep the fastest for this architecture. Minutes."""
    from hypermlp.bench import gpu
    from hypermlp.ops.triton.device import gpu_limits
    from hypermlp.ops.triton.tiles import tuned_path

    gpu.need_gpu("bench tune")
    console = new_console()
    with status(console, "tuning") as tell:
        best = gpu.tune(tell=tell)
    path = out or tuned_path()
    write_json(path, {"provenance": provenance(), "tiles": {str(gpu_limits("cuda").architecture): {"bfloat16": best}}})
    say(console, f"Table: {path}; new processes use it")


def run_kernels(console: Console, out: Path, architectures: Sequence[int], types: Sequence[str]) -> list[str]:
    """Compile, count, predict; leaves kernels.json and kernels.md in `out`. Returns what breaks a promise."""
    from hypermlp.bench import kernels, predictions, roofline
    from hypermlp.cli.measure import record_rows
    from hypermlp.report.gpu import kernel_table, markdown, predicted_markdown, predicted_table, target_table

    rows = record_rows(console, out / "kernels.json", kernels.run, architectures, types)
    console.print(kernel_table(rows, console.width))
    text = markdown(rows)
    if {device.arch for device in roofline.DEVICES} <= set(architectures) and "bfloat16" in types:
        with status(console, "predicting"):
            predicted = predictions.predict()
        console.print(predicted_table(predicted, console.width), target_table(predicted, console.width))
        record = {"provenance": provenance(), "rows": rows, "predicted": predicted, "assumptions": roofline.ASSUMPTIONS}
        write_json(out / "kernels.json", record)
        text += "\n\n" + predicted_markdown(predicted)
    (out / "kernels.md").write_text(text + "\n")
    broken = kernels.problems(rows)
    for problem in broken:
        say(console, problem)
    return broken
