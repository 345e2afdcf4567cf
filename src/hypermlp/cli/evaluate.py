"""Evaluate models and show it: perplexity or benchmarks, each with a file of its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from hypermlp.data.corpus import SplitName
from hypermlp.evals.harness import evaluate
from hypermlp.evals.perplexity import measure
from hypermlp.files import free_path, write_json
from hypermlp.provenance import provenance
from hypermlp.report.evals import perplexity_table, score_table, task_score_table
from hypermlp.report.terminal import say
from hypermlp.runs.generate import corpus_for, open_model
from hypermlp.studies.task_models import open_task_model, task_accuracy


def model_names(folders: Sequence[Path]) -> list[str]:
    """A name for each folder: the end of its path, as long as it takes to tell the folders apart.

    >>> model_names([Path("a/model"), Path("b/model"), Path("c/tiny")])
    ['a-model', 'b-model', 'tiny']
    """
    paths = [folder.resolve() for folder in folders]
    for path in paths:
        if paths.count(path) > 1:
            raise ValueError(f"--model {path} is given more than once")

    def shortest(path: Path) -> str:
        ends = [path.parts[-length:] for length in range(1, len(path.parts))]
        alone = (end for end in ends if sum(other.parts[-len(end) :] == end for other in paths) == 1)
        return "-".join(next(alone, path.parts)).strip("/")

    names = [shortest(path) for path in paths]
    return [f"{name}-{i}" if names.count(name) > 1 else name for i, name in enumerate(names, 1)]


def run_benchmarks(
    console: Console, folder: Path, tasks: Sequence[str], *, out: Path, title: str = "", **options: Any
) -> dict[str, Any]:
    """Run benchmarks on a saved model or a training run; the options are those of harness.evaluate.

    Leaves the file `out`, or where that exists a numbered one beside it.
    """
    from hypermlp.models.hf import HyperForCausalLM, fast_tokenizer  # late: transformers takes seconds

    model, tokenizer = open_model(folder)
    out = free_path(out)
    files = [Path(task) for task in tasks if task.endswith(".yaml")]
    if len({file.resolve().parent for file in files}) > 1:
        raise ValueError(f"task files ({', '.join(map(str, files))}) must be in one folder")
    names, include = [Path(task).stem if task.endswith(".yaml") else task for task in tasks], files[0].parent if files else None
    result = evaluate(HyperForCausalLM.wrap(model), fast_tokenizer(tokenizer.to_dict()), names, include=include, **options)
    write_json(out, result)
    console.print(score_table(title or folder.name, result, console.width))
    say(console, f"Numbers: {out}")
    return result


def run_perplexity(
    console: Console,
    folder: Path,
    corpus: str,
    *,
    out: Path,
    title: str = "",
    split: SplitName = "validation",
    **options: Any,
) -> dict[str, Any]:
    """Measure a saved model or a training run on a corpus; the options are those of perplexity.measure.

    Leaves the file `out`, or where that exists a numbered one beside it.
    """
    out = free_path(out)
    model, tokenizer = open_model(folder)
    text = corpus_for(corpus, tokenizer)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("tokens", total=len(text.split(split)))
        found = measure(
            model,
            text.split(split),
            tokenizer,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
            **options,
        )
    result = {
        "provenance": provenance(),
        "model": model.config.to_dict(),
        "corpus": text.name,
        "split": split,
        **options,
        "tokens": found.tokens,
        "bytes": found.bytes,
        "loss": found.loss,
        "perplexity": found.perplexity,
        "bits per byte": found.bits_per_byte,
    }
    write_json(out, result)
    console.print(perplexity_table(title or folder.name, result, console.width))
    say(console, f"Numbers: {out}")
    return result


def run_task(console: Console, folder: Path, *, out: Path, title: str = "") -> dict[str, Any]:
    """Score a model of a task on its test examples; leaves the file `out`, or where that exists a numbered one beside it."""
    out = free_path(out)
    saved = open_task_model(folder)
    result = {
        "provenance": provenance(),
        "mixer": saved.mixer,
        "task": saved.setting.task,
        "examples": len(saved.inputs),
        "accuracy": task_accuracy(saved),
    }
    write_json(out, result)
    console.print(task_score_table(title or folder.name, result, console.width))
    say(console, f"Numbers: {out}")
    return result
