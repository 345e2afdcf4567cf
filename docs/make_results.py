"""Writes what was measured into README.md and docs/ (benchmark, efficiency, gpu, reproduction, tasks, training), and pictures.

python docs/make_results.py
"""

import json
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hypermlp.report import bench_tables, evidence, experiments, gpu, table5, task_document
from hypermlp.report.markdown import fill
from hypermlp.report.ranks import ranked_markdown
from hypermlp.report.searches import searches_markdown
from hypermlp.report.style import save
from hypermlp.report.table1 import rates_markdown, training_markdown
from hypermlp.verdicts.folders import read_studies
from hypermlp.verdicts.results import Results

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def main() -> None:
    costs = table5.read_folder(ROOT / "results" / "table5")
    save(table5.picture(costs["model-laptop"], costs["growth-laptop"]), DOCS / "efficiency.png")
    made = table5.document_blocks(costs)
    write(DOCS / "efficiency.md", made)

    found = reproduction_blocks()
    save(evidence.picture(*registered_studies()), DOCS / "evidence.png")
    write(DOCS / "reproduction.md", found)
    layers = map(rows_of, ("layer", "narrow/layer", "small/layer", "second/narrow/layer", "second/small/layer"))
    speed = f"{bench_tables.speed_markdown(*layers)}\n{made['summary']}"
    write(ROOT / "README.md", {"standing": found["standing"], "speed": speed})
    write(DOCS / "benchmark.md", benchmark_blocks())

    studies = read_studies(ROOT / "results" / "tasks")
    save(task_document.picture(studies), DOCS / "tasks.png")
    write(DOCS / "tasks.md", task_document.document_blocks(studies))

    compiled = (json.loads((ROOT / "results" / "bench" / f"{n}.json").read_text()) for n in ("kernels", "kernel_sizes"))
    write(DOCS / "gpu.md", gpu.document_blocks(*compiled))

    (rates,), (trained,) = (read_studies(ROOT / "results" / name) for name in ("rates", "train"))
    write(DOCS / "training.md", {"rates": rates_markdown(rates), "trained": training_markdown(trained)})
    runpy.run_path(str(DOCS / "make_coverage.py"))["main"]()  # it says which records there are


def registered_studies() -> tuple[Results, Results]:
    """Table 1 at laptop scale, and compression with longer runs."""
    (registered,), (longer,) = (read_studies(ROOT / "results" / name) for name in ("table1", "compression"))
    return registered, longer


def reproduction_blocks() -> dict[str, str]:
    """What docs/reproduction.md prints, and README of it (standing), by the names of the blocks."""
    registered, longer = registered_studies()
    done = experiments.read_experiments(ROOT / "results")
    at_16 = done.get("rank16")
    return {
        "evidence": evidence.evidence_markdown(registered, longer, at_16=at_16),
        "standing": evidence.standing_markdown(registered, longer, at_16=at_16),
        "table": ranked_markdown(registered, [at_16] if at_16 else []),
        "verdicts": evidence.verdicts_markdown(registered),
        "searches": searches_markdown(registered, longer),
        "noise": experiments.noise_markdown(registered, done.get("noise")),
        "compression": ranked_markdown(longer),
        "compression verdicts": evidence.longer_markdown(registered, longer),
        "experiments": experiments.experiments_markdown(done),
        "prepared": experiments.prepared_markdown(done),
    }


def benchmark_blocks() -> dict[str, str]:
    """What docs/benchmark.md prints, by the names of its blocks."""
    return {
        "layer": bench_tables.layer_markdown(rows_of("layer")),
        "bfloat16": bench_tables.layer_markdown(rows_of("bfloat16/layer")),
        "profile": bench_tables.profile_markdown(rows_of("profile")),
        "decode": bench_tables.decode_markdown(rows_of("decode")),
        "latency": bench_tables.latency_markdown(*(rows_of(f"latency/{name}") for name in ("warm", "cold", "model"))),
    }


def rows_of(name: str) -> list[dict[str, Any]]:
    """Of a benchmark."""
    rows: list[dict[str, Any]] = json.loads((ROOT / "results" / "bench" / f"{name}.json").read_text())["rows"]
    return rows


def write(path: Path, blocks: Mapping[str, str]) -> None:
    path.write_text(fill(path.read_text(), blocks))


if __name__ == "__main__":
    main()
