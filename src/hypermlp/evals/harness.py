"""The benchmarks of Table 2, and any other task of lm-evaluation-harness, run on a model within this process.

Tasks, shots and metrics are those of section M. Where the harness has both accuracies, the normalised one is reported: the
paper says so for GPQA, BBH and MuSR and leaves the rest to convention, and its scores (0.32 to 0.35 on OpenBookQA) are of that
size. Appendix M's rescaling by a random baseline is not done: the paper's printed scores are not rescaled (GPQA at 0.25 to
0.27). Both IFEval columns count in the ranking, as they do in the paper: its average ranks come out only so.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hypermlp import notice
from hypermlp.provenance import provenance

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from hypermlp.models.hf import HyperForCausalLM


@dataclass(frozen=True)
class Evaluation:
    """A column of Table 2."""

    name: str
    task: str  # of the harness
    metric: str
    shots: int = 0
    generates: int = 0  # tokens that the task lets a model write


SUITES: dict[str, tuple[Evaluation, ...]] = {
    "open-llm": (
        Evaluation("MMLU-P", "leaderboard_mmlu_pro", "acc", shots=5),
        Evaluation("GPQA", "leaderboard_gpqa", "acc_norm"),
        Evaluation("BBH", "leaderboard_bbh", "acc_norm", shots=3),
        Evaluation("MATH", "leaderboard_math_hard", "exact_match", shots=4, generates=1024),
        Evaluation("MuSR", "leaderboard_musr", "acc_norm"),
        Evaluation("IFE-I", "leaderboard_ifeval", "inst_level_strict_acc", generates=1280),
        Evaluation("IFE-P", "leaderboard_ifeval", "prompt_level_strict_acc", generates=1280),
    ),
    "general": (
        Evaluation("ARC-C", "arc_challenge", "acc_norm"),
        Evaluation("ARC-E", "arc_easy", "acc_norm"),
        Evaluation("HS", "hellaswag", "acc_norm"),
        Evaluation("PIQA", "piqa", "acc_norm"),
        Evaluation("BoolQ", "boolq", "acc"),
        Evaluation("WinoG", "winogrande", "acc"),
        Evaluation("COPA", "copa", "acc"),
        Evaluation("OBQA", "openbookqa", "acc_norm"),
        Evaluation("SciQ", "sciq", "acc_norm"),
    ),
}


def evaluate(
    model: HyperForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    tasks: Sequence[str],
    *,
    include: Path | None = None,
    length: int | None = None,
    limit: int | None = None,
    batch: int = 8,
    seed: int = 0,
) -> dict[str, Any]:
    """Run suites ("open-llm", "general") and tasks of the harness by their names; "rows" of the result are the scores.

    include: a folder with your own task files. length: where longer inputs are cut, from the left; by default the model's.
    limit: only so many examples of each task, for a trial. Data that are not on this machine are fetched from the Hub, unless
    HF_HUB_OFFLINE and HF_DATASETS_OFFLINE are set.
    """
    try:
        from lm_eval import simple_evaluate  # type: ignore[import-untyped]
        from lm_eval.models.huggingface import HFLM  # type: ignore[import-untyped]
        from lm_eval.tasks import TaskManager  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise ImportError("benchmarks need lm-evaluation-harness: pip install 'hypermlp[eval]'") from error
    length = model.config.length if length is None else length
    wanted = [b for name in tasks for b in SUITES.get(name, ())]
    check_length(wanted, length, learned_positions=model.config.plain().learned_positions)
    manager = TaskManager(include_path=None if include is None else str(include))
    others = [name for name in tasks if name not in SUITES]
    check_names(others, set(manager.all_tasks))
    begin = time.perf_counter()
    found = simple_evaluate(
        model=HFLM(pretrained=model.eval(), tokenizer=tokenizer, batch_size=batch, max_length=length),
        tasks=list(dict.fromkeys([b.task for b in wanted] + others)),
        task_manager=manager,
        limit=limit,
        bootstrap_iters=1000,
        log_samples=False,
        random_seed=seed,
        numpy_random_seed=seed,
        torch_random_seed=seed,
        fewshot_random_seed=seed,
    )
    rows = [row(found, b.task, f"{b.metric},none", b.name) for b in wanted]
    for benchmark, own in zip(wanted, rows, strict=True):
        if own["shots"] != benchmark.shots:
            notice.once(f"{benchmark.task} ran with {own['shots']} shots, in the paper with {benchmark.shots}")
    inside = {part for b in wanted for part in (b.task, *found["group_subtasks"].get(b.task, ()))}
    rows += [row(found, task, key) for task, own in found["results"].items() if task not in inside for key in metrics(own)]
    versions = {name: metadata.version(name) for name in ("lm_eval", "transformers", "datasets")}
    return {
        "provenance": {**provenance(seed), **versions, "seconds": time.perf_counter() - begin},
        "model": model.config.plain().to_dict(),
        "tasks": list(tasks),
        "length": length,
        "limit": limit,
        "rows": rows,
    }


def check_length(wanted: Sequence[Evaluation], length: int, *, learned_positions: bool) -> None:
    most = max(wanted, key=lambda b: b.generates, default=None)
    if most is not None and most.generates >= length:
        remedy = f"give a length of {2 * most.generates}, past which a model without learned positions reads on"
        if learned_positions:
            remedy = "a model with learned positions cannot read on past its own length, so leave this task out"
        raise ValueError(f"{most.task} writes up to {most.generates} tokens, and length ({length}) must be more; {remedy}")


def check_names(names: Sequence[str], known: set[str]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(
            f"unknown tasks {unknown}; known are the suites {', '.join(SUITES)}, the harness's own (lm_eval ls tasks) and "
            "those of the folder given as include"
        )


def metrics(results: Mapping[str, Any]) -> list[str]:
    """The harness's keys "metric,filter" that hold a score."""
    return [key for key, value in results.items() if "," in key and "_stderr," not in key and isinstance(value, (int, float))]


def row(found: Mapping[str, Any], task: str, key: str, name: str | None = None) -> dict[str, Any]:
    """One score of what the harness returned."""
    results = found["results"][task]
    metric, _, chosen = key.partition(",")
    parts = found["group_subtasks"].get(task) or [task]
    error = results.get(f"{metric}_stderr,{chosen}")
    return {
        "benchmark": name or " ".join([task, metric, *([] if chosen == "none" else [chosen])]),
        "task": task,
        "metric": metric,
        "score": float(results[key]),
        "standard_error": float(error) if isinstance(error, (int, float)) and math.isfinite(error) else None,
        "higher_is_better": bool((found["higher_is_better"].get(task) or {}).get(metric, True)),
        "shots": found["n-shot"].get(parts[0]),
        "examples": sum(found["n-samples"][part]["effective"] for part in parts if part in found["n-samples"]),
    }


def scores(result: Mapping[str, Any]) -> dict[str, float]:
    """Benchmark → score, for benchmarks where higher is better."""
    return {row["benchmark"]: row["score"] for row in result["rows"] if row["higher_is_better"]}


class Standing(NamedTuple):
    """A model among others, as in the last two columns of Table 2."""

    average_rank: float
    first_places: int


def summary(models: Mapping[str, Mapping[str, float]]) -> dict[str, Standing]:
    """Name → standing, from name → scores, over the benchmarks that all models have. Ties share the mean of their ranks."""
    columns = [name for name in next(iter(models.values()), {}) if all(name in own for own in models.values())]
    if not columns:
        raise ValueError(f"the models ({', '.join(models) or 'none'}) have no benchmark in common; evaluate all on the same")
    ranks: dict[str, list[float]] = {name: [] for name in models}
    for column in columns:
        everyone = [own[column] for own in models.values()]
        for name, own in models.items():
            better, equal = sum(s > own[column] for s in everyone), everyone.count(own[column])
            ranks[name].append(better + (equal + 1) / 2)
    best = {column: max(own[column] for own in models.values()) for column in columns}
    return {
        name: Standing(sum(ranks[name]) / len(columns), sum(own[column] == best[column] for column in columns))
        for name, own in models.items()
    }
