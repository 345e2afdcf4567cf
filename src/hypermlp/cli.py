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
    "Start with [bold]hypermlp demo[/bold]: a few minutes on two cores.",
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
    quick: Annotated[bool, typer.Option("--quick", help="Fewer steps: to see it work, in a minute.")] = False,
    seeds: Seeds = 1,
    workers: Workers = None,
    retry_failed: Retry = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for runs and page; goes on where it was stopped. Default: runs/demo, runs/demo-quick."),
    ] = None,
) -> None:
    """The paper's claims in minutes: train HyperGLU, HyperMLP and rivals on two MAD tasks, and see which claims hold."""
    from hypermlp.experiments.demo import make_plan
    from hypermlp.report.demo import show

    folder = out or Path("runs/demo-quick" if quick else "runs/demo")
    show(Console(), folder, make_plan(quick=quick), seeds=seeds, workers=workers, retry_failed=retry_failed)


Width = Annotated[int, typer.Option(min=16, help="Width of the layer.")]
Length = Annotated[int, typer.Option(min=1, help="Longest context.")]


@app.command()
def mixers(width: Width = 768, length: Length = 1024) -> None:
    """Every mixer by its name: where it comes from, its parameters, and the bytes that decoding keeps."""
    from hypermlp.report.budget import show_mixers

    show_mixers(Console(), width, length)


@app.command()
def explain(
    label: Annotated[str, typer.Argument(help="A label of Table 1's grammar, such as G-cg-q-12o.")],
    width: Width = 768,
    length: Length = 1024,
) -> None:
    """What a label of Table 1 means, letter by letter, and where its parameters are."""
    from hypermlp.report.budget import show_explanation

    show_explanation(Console(), label, width, length)


@app.command()
def budget(width: Width = 768, length: Length = 1024) -> None:
    """Parameters of all labels and rivals by component, and the sizes at which they equal softmax attention's."""
    from hypermlp.report.budget import show_budget

    show_budget(Console(), width, length)


mad = typer.Typer(help="The MAD benchmark: six small tasks that tell architectures apart.", no_args_is_help=True)
app.add_typer(mad, name="mad")

MixersOption = Annotated[
    str,
    typer.Option(
        "--mixers",
        help="Names, labels, groups (core, labels, rivals, all), mixers of your own (FILE.py:CLASS), with commas between them.",
    ),
]
Seeds = Annotated[int, typer.Option(min=1, help="Runs of each, with other weights and data.")]
Workers = Annotated[int | None, typer.Option(min=1, help="Processes at work at once. Default: one a core.")]
Retry = Annotated[bool, typer.Option("--retry-failed", help="Run again what failed.")]


@mad.command("show")
def mad_show(
    task: Annotated[str, typer.Argument(help="Such as selective-copying; `all` shows every task.")] = "all",
    count: Annotated[int, typer.Option(min=1, help="Examples of each.")] = 2,
    seed: Annotated[int, typer.Option(help="Of the examples.")] = 0,
) -> None:
    """Examples of a task, coloured by what the tokens are, with the answers that are scored."""
    from hypermlp.config import choose_from
    from hypermlp.data.mad import TASKS
    from hypermlp.report.mad_examples import show

    choose_from("task", task, ("all", *TASKS))
    for name in TASKS if task == "all" else (task,):
        show(Console(), name, count, seed)


@mad.command("run")
def mad_run(
    mixers: MixersOption = "G-cg-q-12o,S-pc",
    tasks: Annotated[str, typer.Option(help="Tasks with commas between them, or `all`.")] = "all",
    protocol: Annotated[
        str, typer.Option(help="clean, or faithful: as the published benchmark behaves, selection on the test set included.")
    ] = "clean",
    scale: Annotated[
        str, typer.Option(help="full (66 settings), baseline (6), both as published; laptop; quick (minutes).")
    ] = "quick",
    seeds: Seeds = 1,
    workers: Workers = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Instead of the scale's.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Instead of the scale's, for every task.")] = None,
    examples: Annotated[int | None, typer.Option(min=1, help="To train on, at most.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Instead of the scale's.")] = None,
    width: Annotated[int | None, typer.Option(min=16, help="Of the models, instead of the scale's.")] = None,
    lr: Annotated[list[float] | None, typer.Option(help="Learning rate; may be given several times.")] = None,
    retry_failed: Retry = False,
    out: Annotated[Path, typer.Option(help="Folder for the runs; started again with it, finished runs are kept.")] = Path(
        "runs/mad"
    ),
) -> None:
    """Train models on MAD, all cores at work, and score them. Stop and start it as you like."""
    from hypermlp.data.mad import TASKS
    from hypermlp.experiments.table1 import contestants
    from hypermlp.report.mad import show_mad_run

    show_mad_run(
        Console(),
        out,
        contestants(mixers),
        list(TASKS) if tasks == "all" else tasks.split(","),
        protocol,
        scale,
        seeds,
        workers,
        retry_failed=retry_failed,
        epochs=epochs,
        steps=steps,
        examples=examples,
        batch=batch,
        width=width,
        lr=lr,
    )
    Console().print(f"A page with all of it: hypermlp report {out}")


@app.command()
def table1(
    mixers: MixersOption = "core",
    scale: Annotated[
        str, typer.Option(help="paper (faithful protocol, 66 settings; needs --corpus), laptop, or quick: to see it work.")
    ] = "laptop",
    half: Annotated[str, typer.Option(help="mad, language, or both.")] = "both",
    seeds: Seeds = 2,
    workers: Workers = None,
    corpus: Annotated[
        str | None, typer.Option(help="A prepared corpus for the language half. Default: Python's own source.")
    ] = None,
    retry_failed: Retry = False,
    out: Annotated[Path, typer.Option(help="Folder for the runs; started again with it, finished runs are kept.")] = Path(
        "runs/table1"
    ),
) -> None:
    """The paper's Table 1: MAD and language models for labels and rivals, and the page that compares them with the paper."""
    from hypermlp.config import choose_from
    from hypermlp.data.mad import TASKS
    from hypermlp.experiments.table1 import contestants
    from hypermlp.report.mad import show_language_run, show_mad_run
    from hypermlp.report.page import write_report

    choose_from("half", half, ("both", "mad", "language"))
    choose_from("scale", scale, ("paper", "laptop", "quick"))
    if scale == "paper" and half != "mad" and corpus is None:
        raise ValueError(
            "the language half at the paper's scale needs --corpus: OpenWebText2, made ready with hypermlp data prepare; "
            "--half mad does without"
        )
    protocol, mad_scale = ("faithful", "full") if scale == "paper" else ("clean", scale)
    console, names = Console(), contestants(mixers)
    if half != "language":
        show_mad_run(console, out / "mad", names, list(TASKS), protocol, mad_scale, seeds, workers, retry_failed=retry_failed)
    if half != "mad":
        show_language_run(console, out / "language", names, scale, seeds, workers, retry_failed=retry_failed, corpus=corpus)
    console.print(f"Report: {write_report(out)}")


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="A folder with runs, such as results/table1.")],
    out: Annotated[Path | None, typer.Option(help="Where the page goes. Default: report.html in the folder.")] = None,
) -> None:
    """One page from finished runs: the table beside the paper's, curves, findings with verdicts, budgets, provenance."""
    from hypermlp.report.page import write_report
    from hypermlp.report.study import read_studies
    from hypermlp.report.table1 import show_table1

    console = Console()
    for study in read_studies(folder):
        show_table1(console, study)
    console.print(f"Report: {write_report(folder, out)}")


@app.command()
def train(
    name: Annotated[str, typer.Argument(help="tiny (minutes on two cores), nanogpt-owt2, 340m-15b or 1.3b-100b.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Fields to change, such as model.mixer=softmax train.steps=100.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print the plan: parameters, tokens, operations, memory, time.")
    ] = False,
    processes: Annotated[int, typer.Option(min=1, help="For --dry-run: how many there would be.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest undamaged checkpoint in --out.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the run. Default: runs/NAME.")] = None,
) -> None:
    """Train a language model. On several processes: torchrun --nproc-per-node N --no-python hypermlp train NAME …"""
    from hypermlp.report.train import show_plan, show_training

    if dry_run:
        show_plan(Console(), name, overrides or (), processes=processes)
    elif not show_training(Console(), name, overrides or (), out=out or Path("runs") / name, resume=resume):
        raise typer.Exit(130)


Model = Annotated[Path, typer.Option("--model", help="Folder of a saved model or of a training run.")]


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to go on from.")],
    model: Model = Path("runs/tiny"),
    count: Annotated[int, typer.Option(min=1, help="Tokens to write.")] = 300,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample from the k likeliest.")] = None,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest that make up this share.")] = 0.95,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
) -> None:
    """Let a trained model write, token by token."""
    from hypermlp.report.train import show_text

    show_text(Console(), model, prompt, count, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)


@app.command("eval")
def evaluate(
    model: Annotated[list[Path], typer.Option("--model", help="Folder of a saved model or training run; may be repeated.")],
    corpus: Annotated[str, typer.Option(help="Text for the perplexity: stdlib, a path, a prepared corpus.")] = "stdlib",
    tasks: Annotated[
        str | None,
        typer.Option(help="Benchmarks instead: open-llm and general (Table 2), or any tasks of lm-evaluation-harness."),
    ] = None,
    include: Annotated[Path | None, typer.Option(help="A folder with task files of your own.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Examples of each task, for a trial.")] = None,
    size: Annotated[str | None, typer.Option(help="Put the paper's models of this size (340M, 1.3B) beside.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the numbers.")] = Path("runs/eval"),
) -> None:
    """Perplexity on a text, or the paper's benchmarks; with several models or --size, ranks and first places as in Table 2."""
    from hypermlp.evals.harness import scores
    from hypermlp.report.evals import show_eval, show_perplexity, show_summary

    console, found = Console(), {}
    for folder in model:
        if tasks is None:
            show_perplexity(console, folder, corpus, out=out / f"{folder.name}-perplexity.json")
            continue
        result = show_eval(
            console, folder, tasks.split(","), out=out / f"{folder.name}-tasks.json", include=include, limit=limit
        )
        found[folder.name] = scores(result)
    if found and (len(found) > 1 or size is not None):
        show_summary(console, found, size)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="Folder of a training run.")],
    out: Annotated[Path, typer.Argument(help="Folder for config.json, model.safetensors and the tokenizer.")],
) -> None:
    """Save the newest checkpoint as a model that this package and Hugging Face's Auto classes load."""
    from hypermlp.train.checkpoint import export_newest

    Console().print(f"{export_newest(run, out)} → {out}")


data = typer.Typer(help="Text to train language models on.", no_args_is_help=True)
app.add_typer(data, name="data")


@data.command("prepare")
def data_prepare(
    source: Annotated[str, typer.Argument(help="stdlib, a file or folder of txt, jsonl, parquet, or hub:owner/name.")],
    out: Annotated[Path, typer.Option(help="Folder for the shards; started again with it, finished shards are kept.")],
    tokenizer: Annotated[str, typer.Option(help="bytes, bpe:4096 (trained on the text), or a tokenizer.json.")] = "bytes",
    end: Annotated[str | None, typer.Option(help="The token of a tokenizer.json that ends a document.")] = None,
    field: Annotated[str, typer.Option(help="Field of jsonl and parquet that holds the text.")] = "text",
    validation: Annotated[float, typer.Option(help="Share that is held out.")] = 0.05,
    workers: Workers = None,
) -> None:
    """Tokenise a corpus into memory-mapped shards with checksums."""
    from hypermlp.experiments.runs import cores
    from hypermlp.report.prepare import show

    show(
        Console(),
        source,
        out,
        tokenizer=tokenizer,
        end=end,
        field=field,
        validation=validation,
        workers=workers or cores(),
    )


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
            help="Instead: names, labels and groups (core, labels, rivals, all) with commas between them, at equal parameters."
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
    from hypermlp.bench.layer import DEFAULT_SHAPES, MIXER_SHAPES, Shape
    from hypermlp.experiments.table1 import contestants
    from hypermlp.report.bench import show_layer, show_mixers

    check_contestants(only, against)
    shapes = [Shape.parse(text) for text in shape or []]
    counts = whole_numbers("--threads", threads)
    if mixers is not None:
        if only or against:
            raise ValueError("--mixers are measured instead of the contestants; leave out --only and --against")
        show_mixers(
            Console(),
            out,
            shapes or list(MIXER_SHAPES),
            contestants(mixers),
            rounds=rounds,
            thread_counts=counts,
            with_memory=memory,
        )
        return
    show_layer(
        Console(),
        out,
        shapes or list(DEFAULT_SHAPES),
        names=only or list(CONTESTANTS),
        rounds=rounds,
        thread_counts=counts,
        match=match,
        against=str(against) if against else None,
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
    from hypermlp.report.bench import show_model

    kinds = [model.mad(Shape.parse(mad)), model.language(Shape.parse(language), depth, vocabulary)]
    show_model(Console(), out, kinds, rounds=rounds, thread_counts=whole_numbers("--threads", threads))


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
    if only and "authors" in only and against is None:
        raise ValueError("--only authors needs --against, the path of the authors' hyperglu.py")
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
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        print(f"hypermlp: {error}", file=sys.stderr)
        raise SystemExit(1) from error
    except KeyboardInterrupt:
        print("hypermlp: stopped", file=sys.stderr)
        raise SystemExit(130) from None
