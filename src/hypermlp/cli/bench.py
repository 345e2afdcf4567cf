"""Benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hypermlp.cli.app import app
from hypermlp.cli.options import whole_numbers
from hypermlp.report.terminal import new_console

bench = typer.Typer(help="Measure speed and memory against softmax attention, on this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@bench.command("layer")
def bench_layer(
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="B,T,d; may be given several times. Default: 8,1024,768 2,2048,768 1,4096,768 1,8192,768 128,128,128; "
            "with --mixers 4,512,256 4,1024,256 4,2048,256."
        ),
    ] = None,
    mixers: Annotated[
        str | None,
        typer.Option(
            help="Instead: names, labels, groups (core, labels, rivals, variants, all), mixers of your own (FILE.py:CLASS), "
            "with commas between them, at equal parameters."
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
    dtype: Annotated[str, typer.Option(help="Of weights and inputs: float32 or bfloat16.")] = "float32",
    memory: Annotated[bool, typer.Option(help="Measure peak memory, each in a fresh process.")] = True,
    out: Annotated[Path, typer.Option(help="Folder for numbers and picture.")] = Path("runs/bench"),
) -> None:
    """Whole layers, forward and training step: time, memory, operations. About half an hour for the default shapes."""
    from hypermlp.bench.contestants import CONTESTANTS, TOLERANCE
    from hypermlp.bench.layer import DEFAULT_SHAPES, MIXER_SHAPES, Shape
    from hypermlp.checks import choose_from
    from hypermlp.cli import measure
    from hypermlp.studies.table1 import contestants

    check_contestants(only, against)
    choose_from("--dtype", dtype, tuple(TOLERANCE))
    shapes = [Shape.parse(text) for text in shape or []]
    counts = whole_numbers("--threads", threads)
    if mixers is not None:
        if only or against:
            raise ValueError("--mixers are measured instead of the contestants; leave out --only and --against")
        measure.run_mixers(
            new_console(),
            out,
            shapes or list(MIXER_SHAPES),
            contestants(mixers),
            dtype=dtype,
            rounds=rounds,
            thread_counts=counts,
            with_memory=memory,
        )
        return
    measure.run_layer(
        new_console(),
        out,
        shapes or list(DEFAULT_SHAPES),
        names=only or list(CONTESTANTS),
        rounds=rounds,
        thread_counts=counts,
        match=match,
        against=str(against) if against else None,
        dtype=dtype,
        with_memory=memory,
    )


@bench.command("model")
def bench_model(
    mad: Annotated[str, typer.Option(help="B,T,d of the MAD model, of two layers.")] = "128,128,128",
    language: Annotated[str, typer.Option(help="B,T,d of the language model.")] = "1,1024,512",
    depth: Annotated[int, typer.Option(min=1, help="Layers of the language model.")] = 8,
    vocabulary: Annotated[int, typer.Option(min=2, help="Of the language model.")] = 32000,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which the models take turns.")] = 5,
    threads: Annotated[str, typer.Option(help="Numbers of threads to measure, such as 2,1. One thread is CPU time.")] = "2,1",
    out: Annotated[Path, typer.Option(help="Folder for the numbers.")] = Path("runs/bench"),
) -> None:
    """Training steps of whole models, HyperGLU's against softmax attention's of equal size. About three minutes."""
    from hypermlp.bench import model
    from hypermlp.bench.layer import Shape
    from hypermlp.cli import measure

    kinds = [model.mad(Shape.parse(mad)), model.language(Shape.parse(language), depth, vocabulary)]
    measure.run_model(new_console(), out, kinds, rounds=rounds, thread_counts=whole_numbers("--threads", threads))


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
    from hypermlp.cli import measure

    check_contestants(only, against)
    names = only or ["hyperglu native", BASELINE, *(["authors"] if against else [])]
    shapes = [Shape.parse(text) for text in shape or ("8,1024,768", "128,128,128")]
    measure.run_profile(new_console(), out, shapes, names, against=str(against) if against else None)


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
    from hypermlp.cli import measure

    lengths, batches = whole_numbers("--context", context), whole_numbers("--batch", batch)
    measure.run_decode(new_console(), out, lengths, batches, width=width, rounds=rounds)


@bench.command("latency")
def bench_latency(
    context: Annotated[str, typer.Option(help="Lengths of the window, which is full.")] = "256,1024,4096,16384",
    batch: Annotated[str, typer.Option(help="Streams decoded at once.")] = "1,8",
    weights: Annotated[
        str, typer.Option(help="float32, bfloat16, int8 (linear layers, the rest in bfloat16).")
    ] = "float32,bfloat16,int8",
    only: Annotated[
        list[str] | None,
        typer.Option(help="hyperglu, 'softmax 12 heads' (in a ring), mamba, gated_deltanet; may be given several times."),
    ] = None,
    model: Annotated[
        bool, typer.Option("--model", help="Instead: a language model of 1.1 M parameters, in one call and by its modules.")
    ] = False,
    width: Annotated[int, typer.Option(min=12, help="Width of the layers.")] = 768,
    steps: Annotated[int, typer.Option(min=1, help="Tokens of each stream.")] = 20000,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch and of the kernels.")] = 2,
    out: Annotated[Path, typer.Option(help="Folder for numbers and picture; the same command resumes.")] = Path("runs/bench"),
) -> None:
    """Every token timed alone: median, tail, deadlines, first token. Hours by default; --steps 2000 is a trial."""
    from hypermlp.cli import measure

    measure.run_latency(
        new_console(),
        out,
        context=whole_numbers("--context", context),
        batch=whole_numbers("--batch", batch),
        weights=weights.split(","),
        only=only or (),
        model=model,
        width=width,
        steps=steps,
        threads=threads,
    )


def check_contestants(only: list[str] | None, against: Path | None) -> None:
    """Bad names fail before anything is measured."""
    from hypermlp.bench.contestants import CONTESTANTS
    from hypermlp.checks import choose_from

    for name in only or []:
        choose_from("--only", name, tuple(CONTESTANTS))
    if only and "authors" in only and against is None:
        raise ValueError("--only authors needs --against, the path of the authors' hyperglu.py")
    if against is not None and not against.is_file():
        raise ValueError(f"--against ({against}) must be the authors' hyperglu.py")
