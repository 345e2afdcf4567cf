"""Writes what was measured into README.md and docs/ (design, efficiency, gpu, reproduction, tasks, training), and pictures.

python docs/make_results.py
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hypermlp.report import bench_tables, evidence, gpu, table5, task_document
from hypermlp.report.markdown import fill
from hypermlp.report.searches import searches_markdown
from hypermlp.report.style import save
from hypermlp.report.table1 import rates_markdown, table1_markdown
from hypermlp.verdicts.folders import read_studies

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def main() -> None:
    costs = table5.read_folder(ROOT / "results" / "table5")
    save(table5.picture(costs["model-laptop"], costs["growth-laptop"]), DOCS / "efficiency.png")
    made = table5.document_blocks(costs)
    write(DOCS / "efficiency.md", made)
    path = ROOT / "README.md"
    path.write_text(re.sub(r"^As a whole GPT-2 .*$", lambda found: made["summary"], path.read_text(), flags=re.M))

    (registered,) = read_studies(ROOT / "results" / "table1")
    (longer,) = read_studies(ROOT / "results" / "compression")
    save(evidence.picture(registered, longer), DOCS / "evidence.png")
    write(path, {"evidence": evidence.evidence_markdown(registered, longer)})
    blocks = {"table": table1_markdown(registered), "verdicts": evidence.verdicts_markdown(registered)}
    blocks["searches"] = searches_markdown(registered, longer)
    blocks |= {"compression": table1_markdown(longer), "compression verdicts": evidence.longer_markdown(registered, longer)}
    write(DOCS / "reproduction.md", blocks)

    studies = read_studies(ROOT / "results" / "tasks")
    save(task_document.picture(studies), DOCS / "tasks.png")
    write(DOCS / "tasks.md", task_document.document_blocks(studies))

    write(DOCS / "design.md", {"steps": bench_tables.steps_markdown(read_steps(ROOT / "results" / "bench" / "steps"))})

    compiled = (json.loads((ROOT / "results" / "bench" / f"{n}.json").read_text()) for n in ("kernels", "kernel_sizes"))
    write(DOCS / "gpu.md", gpu.document_blocks(*compiled))

    (rates,) = read_studies(ROOT / "results" / "rates")
    write(DOCS / "training.md", {"rates": rates_markdown(rates)})


def read_steps(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {path.stem: json.loads(path.read_text())["rows"] for path in sorted(folder.glob("*.json"))}


def write(path: Path, blocks: Mapping[str, str]) -> None:
    path.write_text(fill(path.read_text(), blocks))


if __name__ == "__main__":
    main()
