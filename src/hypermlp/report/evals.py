"""What evaluation shows: perplexity, scores of benchmarks, and models ranked beside those of the paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from hypermlp.checks import choose_from
from hypermlp.data.corpus import INDEX, Corpus, SplitName, open_corpus, read_corpus
from hypermlp.data.text import find_source
from hypermlp.data.tokenizers import Tokenizer
from hypermlp.evals.harness import evaluate, summary
from hypermlp.evals.perplexity import measure
from hypermlp.experiments.generate import open_model
from hypermlp.experiments.paper import TABLE2
from hypermlp.files import free_path, write_json
from hypermlp.provenance import provenance


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


def show_eval(
    console: Console, folder: Path, tasks: Sequence[str], *, out: Path, title: str = "", **options: Any
) -> dict[str, Any]:
    """Run benchmarks on a saved model or a training run; the options are those of harness.evaluate.

    Leaves the file `out`, or where that exists a numbered one beside it.
    """
    from hypermlp.models.hf import HyperForCausalLM, fast_tokenizer  # late: transformers takes seconds

    model, tokenizer = open_model(folder)
    out = free_path(out)
    result = evaluate(HyperForCausalLM.wrap(model), fast_tokenizer(tokenizer.to_dict()), tasks, **options)
    write_json(out, result)
    console.print(score_table(title or folder.name, result))
    console.print(f"Numbers: {out}", soft_wrap=True)
    return result


def score_table(title: str, result: Mapping[str, Any]) -> Table:
    trial = "" if result["limit"] is None else f", a trial with {result['limit']} examples of each task"
    table = Table(title=f"{title}{trial}", box=box.SIMPLE_HEAD)
    for column in ("benchmark", "task", "metric", "shots", "examples", "score", "±"):
        table.add_column(column, justify="left" if column in ("benchmark", "task", "metric") else "right")
    for row in result["rows"]:
        error = "" if row["standard_error"] is None else f"{row['standard_error']:.3f}"
        shots = "" if row["shots"] is None else str(row["shots"])
        table.add_row(row["benchmark"], row["task"], row["metric"], shots, str(row["examples"]), f"{row['score']:.3f}", error)
    return table


def show_perplexity(
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
    figures = {
        "tokens": found.tokens,
        "bytes": found.bytes,
        "loss": found.loss,
        "perplexity": found.perplexity,
        "bits per byte": found.bits_per_byte,
    }
    result = {"provenance": provenance(), "model": model.config.to_dict(), "corpus": text.name, "split": split, **options}
    write_json(out, {**result, **figures})
    table = Table(title=f"{title or folder.name} on {text.name} ({split})", box=box.SIMPLE_HEAD)
    for name in figures:
        table.add_column(name, justify="right")
    table.add_row(*(f"{value:,}" if isinstance(value, int) else f"{value:.4f}" for value in figures.values()))
    console.print(table)
    console.print(f"Numbers: {out}", soft_wrap=True)
    return {**result, **figures}


def corpus_for(name: str, tokenizer: Tokenizer) -> Corpus:
    """A prepared corpus, if it was made with this tokenizer, or a text tokenised by it."""
    if not (Path(name) / INDEX).is_file():
        return read_corpus(find_source(name), tokenizer)
    corpus = open_corpus(name)
    if corpus.tokenizer.fingerprint != tokenizer.fingerprint:
        raise ValueError(
            f"the corpus {name} was prepared with another tokenizer ({corpus.tokenizer.name}) than the model's "
            f"({tokenizer.name}); give the text itself"
        )
    return corpus


def show_summary(console: Console, models: Mapping[str, Mapping[str, float]], size: str | None = None) -> None:
    """Scores, average ranks and first places of models (name → benchmark → score), beside the paper's of a size ("340M")."""
    everyone: dict[str, Mapping[str, float]] = dict(models)
    if size is not None:
        choose_from("size", size, tuple(TABLE2))
        everyone |= {f"{name} (paper, {size})": row.scores for name, row in TABLE2[size].items()}
    standings = summary(everyone)
    shared = [name for name in next(iter(everyone.values())) if all(name in own for own in everyone.values())]
    table = Table(title=f"{len(everyone)} models on {len(shared)} benchmarks", box=box.SIMPLE_HEAD)
    table.add_column("model", no_wrap=True)
    for column in (*shared, "average rank", "first places"):
        table.add_column(column, justify="right")
    for name, standing in sorted(standings.items(), key=lambda item: item[1].average_rank):
        cells = [f"{everyone[name][column]:.3f}" for column in shared]
        table.add_row(name, *cells, f"{standing.average_rank:.2f}", str(standing.first_places))
    console.print(table)
