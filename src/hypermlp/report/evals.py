"""Tables of evaluations: perplexity, scores of benchmarks, and models ranked beside those of the paper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group

from hypermlp.checks import choose_from
from hypermlp.evals.harness import summary
from hypermlp.paper.tables import TABLE2
from hypermlp.report.terminal import Column, tabulate

FIGURES = ("tokens", "bytes", "loss", "perplexity", "bits per byte")


def score_table(title: str, result: Mapping[str, Any], width: int) -> Group:
    trial = "" if result["limit"] is None else f", a trial with {result['limit']} examples of each task"
    heads = [*(Column(name, left=True, wraps=name != "benchmark") for name in ("benchmark", "task", "metric"))]
    heads += [Column(name) for name in ("shots", "examples", "score", "±")]
    rows = []
    for row in result["rows"]:
        error = "" if row["standard_error"] is None else f"{row['standard_error']:.3f}"
        shots = "" if row["shots"] is None else str(row["shots"])
        names = [row["benchmark"], row["task"], row["metric"]]
        rows.append([*names, shots, str(row["examples"]), f"{row['score']:.3f}", error])
    return tabulate(width, f"{title}{trial}", heads, rows)


def perplexity_table(title: str, result: Mapping[str, Any], width: int) -> Group:
    values = [result[name] for name in FIGURES]
    row = [f"{value:,}" if isinstance(value, int) else f"{value:.4f}" for value in values]
    heading = f"{title} on {result['corpus']} ({result['split']})"
    return tabulate(width, heading, [Column(name) for name in FIGURES], [row], keys=0)


def task_score_table(title: str, result: Mapping[str, Any], width: int) -> Group:
    heads = [Column("mixer"), Column("task", left=True), Column("examples"), Column("right, %")]
    row = [result["mixer"], result["task"], str(result["examples"]), f"{100 * result['accuracy']:.1f}"]
    return tabulate(width, title, heads, [row])


def summary_table(models: Mapping[str, Mapping[str, float]], size: str | None, width: int) -> Group:
    """Scores, average ranks and first places of models (name → benchmark → score), beside the paper's of a size ("340M")."""
    everyone: dict[str, Mapping[str, float]] = dict(models)
    if size is not None:
        choose_from("size", size, tuple(TABLE2))
        everyone |= {f"{name} (paper, {size})": row.scores for name, row in TABLE2[size].items()}
    standings = summary(everyone)
    shared = [name for name in next(iter(everyone.values())) if all(name in own for own in everyone.values())]
    heads = [Column("model"), *map(Column, (*shared, "average rank", "first places"))]
    rows = []
    for name, standing in sorted(standings.items(), key=lambda item: item[1].average_rank):
        cells = [f"{everyone[name][column]:.3f}" for column in shared]
        rows.append([name, *cells, f"{standing.average_rank:.2f}", str(standing.first_places)])
    return tabulate(width, f"{len(everyone)} models on {len(shared)} benchmarks", heads, rows)
