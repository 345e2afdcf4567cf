"""The command line: parsing and printing only."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(
    help="HyperMLP and HyperGLU: attention read as a two-layer MLP whose hidden layer is the context.\n\n"
    "Start with [bold]hypermlp demo[/bold]: about a minute on two cores.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.command()
def info() -> None:
    """Versions, device, and which implementation would be chosen and why."""
    import torch

    from hypermlp.ops import choose
    from hypermlp.ops.build import cache_folder
    from hypermlp.provenance import machine

    shown = Table(show_header=False, box=None)
    for name, value in machine().items():
        shown.add_row(name, "none" if value is None else str(value))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shown.add_row("device", device)
    for dtype in ("float32", "float64"):
        choice = choose("auto", device, dtype)
        shown.add_row(f"implementation, {dtype}", f"{choice.impl} ({choice.reason})")
    shown.add_row("compiled kernels in", str(cache_folder()))
    Console().print(shown)


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each model.")] = 720,
    seed: Annotated[int, typer.Option(help="Of the initial weights and the data.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the picture and the numbers.")] = Path("runs/demo"),
) -> None:
    """Train HyperGLU and softmax attention, equal in parameters, side by side on a copying task."""
    from hypermlp.report.demo import show

    show(Console(), steps=steps, seed=seed, out=out)


bench = typer.Typer(help="Measure speed and memory against softmax attention, on this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@bench.command("layer")
def bench_layer(
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="B,T,d; may be given several times. Default: 8,1024,768 2,2048,768 1,4096,768 1,8192,768 128,128,128."
        ),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="A contestant's name, such as 'hyperglu native'; may be given several times.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which the contestants take turns.")] = 5,
    threads: Annotated[str, typer.Option(help="Numbers of threads to measure, such as 2,1. One thread is CPU time.")] = "2,1",
    match: Annotated[
        bool, typer.Option("--match", help="Choose qk_rank so that parameter counts agree with softmax attention's.")
    ] = False,
    against: Annotated[
        Path | None, typer.Option(help="The authors' hyperglu.py, to be timed too (the file is executed).")
    ] = None,
    memory: Annotated[bool, typer.Option(help="Measure peak memory, each in a fresh process.")] = True,
    out: Annotated[Path, typer.Option(help="Folder for numbers and picture.")] = Path("runs/bench"),
) -> None:
    """Whole layers, forward and training step: time, memory, operations. About half an hour for the default shapes."""
    from hypermlp.bench.contestants import CONTESTANTS
    from hypermlp.bench.layer import DEFAULT_SHAPES, Shape
    from hypermlp.report.bench import show_layer

    check_contestants(only, against)
    show_layer(
        Console(),
        out,
        [Shape.parse(text) for text in shape] if shape else list(DEFAULT_SHAPES),
        names=only or list(CONTESTANTS),
        rounds=rounds,
        thread_counts=whole_numbers("--threads", threads),
        match=match,
        against=str(against) if against else None,
        with_memory=memory,
    )


@bench.command("profile")
def bench_profile(
    shape: Annotated[
        list[str] | None, typer.Option(help="B,T,d; may be given several times. Default: 8,1024,768 128,128,128.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="A contestant's name; may be given several times.")] = None,
    against: Annotated[
        Path | None, typer.Option(help="The authors' hyperglu.py, to be profiled too (the file is executed).")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the numbers.")] = Path("runs/bench"),
) -> None:
    """Where a training step's time goes: mixing, projections, convolutions and gates, the rest."""
    from hypermlp.bench.contestants import BASELINE
    from hypermlp.bench.layer import Shape
    from hypermlp.report.bench import show_profile

    check_contestants(only, against)
    names = only or ["hyperglu native", BASELINE, *(["authors"] if against else [])]
    shapes = [Shape.parse(text) for text in shape or ("8,1024,768", "128,128,128")]
    show_profile(Console(), out, shapes, names, against=str(against) if against else None)


@bench.command("decode")
def bench_decode(
    context: Annotated[
        str, typer.Option(help="Lengths of the context, each with a block_size to match.")
    ] = "256,1024,4096,16384",
    batch: Annotated[str, typer.Option(help="Sequences decoded at once.")] = "1,8",
    width: Annotated[int, typer.Option(min=16, help="Width of the layer.")] = 768,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which the contestants take turns.")] = 15,
    out: Annotated[Path, typer.Option(help="Folder for numbers and picture.")] = Path("runs/bench"),
) -> None:
    """One token after another: milliseconds per token and bytes of cache; and what a cache adds to the prefill."""
    from hypermlp.report.bench import show_decode

    lengths, batches = whole_numbers("--context", context), whole_numbers("--batch", batch)
    show_decode(Console(), out, lengths, batches, width=width, rounds=rounds)


def check_contestants(only: list[str] | None, against: Path | None) -> None:
    """Bad names fail before anything is measured."""
    from hypermlp.bench.contestants import CONTESTANTS
    from hypermlp.config import choose_from

    for name in only or []:
        choose_from("--only", name, tuple(CONTESTANTS))
    if against is not None and not against.is_file():
        raise ValueError(f"--against ({against}) must be the authors' hyperglu.py")


def whole_numbers(name: str, text: str) -> list[int]:
    if not all(part.isdigit() and int(part) > 0 for part in text.split(",")):
        raise ValueError(f"{name} ({text}) must be whole numbers with commas between them, such as 2,1")
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Entry point: a user's mistake ends in one line, not in a traceback."""
    try:
        app()
    except (ValueError, OSError, RuntimeError) as error:
        print(f"hypermlp: {error}", file=sys.stderr)
        raise SystemExit(1) from error
    except KeyboardInterrupt:
        print("hypermlp: stopped", file=sys.stderr)
        raise SystemExit(130) from None
