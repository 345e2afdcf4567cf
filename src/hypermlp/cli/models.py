"""Language models: data, training, generation, evaluation, export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hypermlp.checks import choose_from
from hypermlp.cli.app import app, commands, shows_tables
from hypermlp.cli.console import open_console
from hypermlp.cli.options import COMES, FOLDER, Force, Model, OwnMixers, Workers, closed, complete, config_names, default_model
from hypermlp.models.bundled import LANGUAGE
from hypermlp.report.terminal import say


@app.command(context_settings={"ignore_unknown_options": True})  # --train.steps=100 is train.steps=100
@shows_tables
def train(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(
            help="tiny (for two cores), nanogpt-owt2, 340m-15b, 1.3b-100b; or a file: my.toml, my.yaml.",
            autocompletion=complete(config_names),
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FIELD=VALUE",
            help="Fields to change, such as model.mixer=softmax train.steps=100. A mixer of your own is FILE.py:CLASS.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and stop: parameters, tokens, operations, memory, time.")
    ] = False,
    processes: Annotated[int, typer.Option(min=1, help="For --dry-run: the number of processes to plan for.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out from its newest checkpoint.")] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the configuration as TOML and stop; keep it in a file and change it.")
    ] = False,
    logger: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="tensorboard (the default, if it is installed) or wandb. May be repeated.",
            autocompletion=closed("tensorboard", "wandb"),
        ),
    ] = None,
    begin: Annotated[
        Path | None,
        typer.Option("--from", help="Begin with the weights of this saved model or run; model.length may grow.", **FOLDER),
    ] = None,
    lag_extension: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="How to initialise new lags of HyperGLU when model.length grows: hold, decay, zero (a window) or fresh.",
            autocompletion=closed("hold", "decay", "zero", "fresh"),
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run. Default: runs/NAME.")] = None,
) -> None:
    """Train a language model. On several processes: torchrun --nproc-per-node N --no-python hypermlp train NAME …"""
    from hypermlp.cli.train import run_training, show_plan
    from hypermlp.runs.config_files import is_config_file, to_toml
    from hypermlp.runs.configs import configure

    known = [option for parameter in context.command.params for option in parameter.opts if option.startswith("--")]
    for text in overrides or ():
        if text.startswith("-") and "=" not in text:
            choose_from("option", text, known)
    folder = out or Path("runs") / (Path(name).stem if is_config_file(name) else name)
    if print_config:
        print(to_toml(configure(name, overrides or ()).to_dict()), end="")
        return
    if dry_run:
        show_plan(open_console(), name, overrides or (), processes=processes)
        return
    finished = run_training(
        open_console(),
        name,
        overrides or (),
        out=folder,
        resume=resume,
        loggers=logger or ("tensorboard",),
        begin=begin,
        lag_extension=lag_extension,
    )
    if not finished:
        raise typer.Exit(130)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    model: Model = None,
    count: Annotated[int, typer.Option(min=1, help="Tokens to write.")] = 300,
    temperature: Annotated[float, typer.Option(min=0, help="Higher varies more; 0 always takes the likeliest token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample from this many of the likeliest tokens.")] = None,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens that make up this share.")] = 0.95,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    weights: Annotated[
        str,
        typer.Option(
            metavar="KIND",
            help="saved, bfloat16, or int8 (linear layers; the rest in bfloat16). Smaller kinds read fewer bytes for a token.",
            autocompletion=closed("saved", "bfloat16", "int8"),
        ),
    ] = "saved",
    own: OwnMixers = None,
) -> None:
    """Continue a text with a trained model, token by token."""
    from hypermlp.cli.train import write
    from hypermlp.mixers.own import adopt

    adopt(own or ())
    sampling: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    write(open_console(), model or default_model(), prompt, count, weights=weights, **sampling)


@app.command("eval")
@shows_tables
def evaluate(
    model: Annotated[
        list[Path] | None,
        typer.Option(
            "--model",
            help=f"Folder of a saved model or training run; or {COMES}. May be repeated. Default: runs/tiny, else {LANGUAGE}.",
            **FOLDER,
        ),
    ] = None,
    corpus: Annotated[str, typer.Option(help="Text to measure on: stdlib, a path or a prepared corpus.")] = "stdlib",
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Benchmarks instead of a text: open-llm, general (Table 2), any of "
            "lm-evaluation-harness, or your own (my/task.yaml)."
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only this many examples of each task, for a trial.")] = None,
    size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Compare with the paper's models of this size: 340M or 1.3B.",
            autocompletion=closed("340M", "1.3B"),
        ),
    ] = None,
    own: OwnMixers = None,
    out: Annotated[Path, typer.Option(help="Folder for the numbers.")] = Path("runs/eval"),
) -> None:
    """Measure a model: its loss on a text, or the paper's benchmarks. Several models are ranked as in Table 2.

    For a model of a task, such as the demo leaves, it prints the share of right answers.
    """
    from hypermlp.cli.evaluate import model_names, run_benchmarks, run_perplexity, run_task
    from hypermlp.evals.harness import scores
    from hypermlp.mixers.own import adopt
    from hypermlp.report.evals import summary_table
    from hypermlp.studies.task_models import is_task_model

    adopt(own or ())
    console, found, folders = open_console(), {}, model or [default_model()]
    for folder, name in zip(folders, model_names(folders), strict=True):
        if tasks is None and is_task_model(folder):
            run_task(console, folder, out=out / f"{name}-task.json", title=name)
            continue
        if tasks is None:
            run_perplexity(console, folder, corpus, out=out / f"{name}-perplexity.json", title=name)
            continue
        numbers = out / f"{name}-tasks.json"
        result = run_benchmarks(console, folder, tasks.split(","), out=numbers, title=name, limit=limit)
        found[name] = scores(result)
    if found and (len(found) > 1 or size is not None):
        console.print(summary_table(found, size, console.width))


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help=f"Folder of a training run or of a saved model; or {LANGUAGE}.", **FOLDER)],
    out: Annotated[Path, typer.Argument(help="Folder for config.json, model.safetensors and the tokenizer.")],
    own: OwnMixers = None,
    force: Force = False,
) -> None:
    """Save a model, or the newest checkpoint of a run, so that this package and Hugging Face's Auto classes can load it."""
    from hypermlp.mixers.own import adopt
    from hypermlp.models.saved import refuse_foreign_folder
    from hypermlp.runs.generate import export_model

    adopt(own or ())
    refuse_foreign_folder(out, force=force)
    say(open_console(), f"{export_model(run, out)} → {out}")


data = commands("data", "Prepare text to train language models on.")


@data.command("prepare")
def data_prepare(
    source: Annotated[
        str,
        typer.Argument(
            help="stdlib; packages (pinned ones, 200 MB); a file or folder of txt, jsonl, jsonl.zst or parquet; "
            "debian:NAME; or hub:owner/name."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the shards. A command that was stopped goes on there.")],
    tokenizer: Annotated[str, typer.Option(help="bytes, bpe:4096 (trained on the text) or a tokenizer.json.")] = "bytes",
    end: Annotated[str | None, typer.Option(help="The token of a tokenizer.json that ends a document.")] = None,
    field: Annotated[str, typer.Option(help="Field of jsonl and parquet that holds the text.")] = "text",
    validation: Annotated[float, typer.Option(help="Share of the text that is held out.")] = 0.05,
    workers: Workers = None,
) -> None:
    """Tokenise a corpus into memory-mapped shards with checksums."""
    from hypermlp.cli.prepare import run_prepare
    from hypermlp.studies.executors import cores

    run_prepare(
        open_console(),
        source,
        out,
        tokenizer=tokenizer,
        end=end,
        field=field,
        validation=validation,
        workers=workers or cores(),
    )
