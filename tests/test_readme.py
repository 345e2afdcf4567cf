"""What the documents promise runs as printed."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

from hypermlp.models.bundled import LANGUAGE, bundled_models
from hypermlp.report.bench_tables import mixers_markdown, model_markdown, speed_markdown
from hypermlp.report.markdown import fill
from hypermlp.report.table1 import rate_losses, rates_markdown, training_markdown
from hypermlp.report.table5 import document_blocks as costs
from hypermlp.report.table5 import read_folder
from hypermlp.report.task_document import document_blocks as scores
from hypermlp.runs.configs import RATES
from hypermlp.verdicts.folders import read_studies

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_python_block_runs() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README, re.S)
    run(block)


def test_the_set_up_is_two_commands_where_the_checks_look_for_them() -> None:
    commands = re.findall(r"^    (pip install .*)$", README, re.M)
    assert commands == [
        "pip install -c constraints.txt . && hypermlp demo",
        "pip install -c constraints.txt '.[test]' && pytest",
    ]
    patterns = re.findall(r'grep -E "(.*?)" README.md', (ROOT / ".ci" / "run").read_text())
    found = [line for pattern in patterns for line in re.findall(pattern, README, re.M)]
    assert sorted(found) == sorted(f"    {command}" for command in commands)


def test_the_figures_are_those_of_the_results() -> None:
    for name, table, document in (
        ("mixers", mixers_markdown, "docs/mixers.md"),
        ("labels", mixers_markdown, "docs/mixers.md"),
        ("model", model_markdown, "docs/mixers.md"),
    ):
        shown = table(json.loads((ROOT / "results" / "bench" / f"{name}.json").read_text())["rows"])
        assert shown in (ROOT / document).read_text(), f"{document} should print\n{shown}"


def test_the_benchmarks_are_those_of_the_results() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_results.py"))["benchmark_blocks"]()
    document = (ROOT / "docs" / "benchmark.md").read_text()
    assert fill(document, made) == document, "python docs/make_results.py writes the tables anew"
    assert set(made) == {"layer", "bfloat16", "profile", "decode", "latency"}


def rows_of(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((ROOT / "results" / "bench" / f"{name}.json").read_text())["rows"]
    return rows


def test_the_costs_are_those_of_the_results() -> None:
    made = costs(read_folder(ROOT / "results" / "table5"))
    document = (ROOT / "docs" / "efficiency.md").read_text()
    assert fill(document, made) == document, "python docs/make_results.py writes the tables anew"
    files = ("layer", "narrow/layer", "small/layer", "second/narrow/layer", "second/small/layer")
    speed = f"{speed_markdown(*map(rows_of, files))}\n{made['summary']}"
    assert f"<!-- speed -->\n\n{speed}\n\n<!-- end -->" in README, "python docs/make_results.py writes the list anew"


def test_the_tasks_are_those_of_the_results() -> None:
    document = (ROOT / "docs" / "tasks.md").read_text()
    made = scores(read_studies(ROOT / "results" / "tasks"))
    assert fill(document, made) == document, "python docs/make_results.py writes the tables anew"


def test_the_learning_rates_are_the_best_of_those_tried() -> None:
    (study,), (final,) = (read_studies(ROOT / "results" / name) for name in ("rates", "train"))
    document = (ROOT / "docs" / "training.md").read_text()
    made = {"rates": rates_markdown(study), "trained": training_markdown(final)}
    assert fill(document, made) == document, "python docs/make_results.py writes the tables anew"
    found = rate_losses(study)
    assert RATES["tiny"] == {mixer: min(losses, key=lambda rate: losses[rate]) for mixer, losses in found.items()}
    for mixer, losses in found.items():
        assert min(losses) < RATES["tiny"][mixer] < max(losses), f"the best rate of {mixer} is at the end of its grid"
    assert {record["mixer"]: record["lr"] for record in final.language} == RATES["tiny"]


def test_the_evidence_is_that_of_the_registered_studies() -> None:
    blocks = runpy.run_path(str(ROOT / "docs" / "make_results.py"))["reproduction_blocks"]()
    document = (ROOT / "docs" / "reproduction.md").read_text()
    assert fill(document, blocks) == document, "python docs/make_results.py writes the tables anew"
    assert {name for name in blocks if f"<!-- {name} -->" not in document} == {"standing"}
    table = f"<!-- standing -->\n\n{blocks['standing']}\n\n<!-- end -->"
    assert table in README, "python docs/make_results.py writes the table anew"


def test_what_heads_read_is_what_the_bundled_models_read() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_reading.py"))
    document = (ROOT / "docs" / "what-does-this-head-read.md").read_text()
    assert fill(document, made["blocks"]()) == document, "python docs/make_reading.py writes the tables anew"
    told = json.loads((ROOT / "results" / "reading.json").read_text())["sha256"]
    assert told == bundled_models()[LANGUAGE]["sha256"], "python docs/make_reading.py --over reads the text anew"


def test_the_authors_quick_start_runs_verbatim() -> None:
    assert run((ROOT / "tests" / "authors_quickstart.txt").read_text()) == "torch.Size([2, 128, 512])\n"


def test_the_readme_is_short_and_its_links_exist() -> None:
    assert len(README.splitlines()) < 110
    for document in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))):
        for target in re.findall(r"\]\(((?!http)[^)#]+)[^)]*\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_the_tree_of_the_design_exists() -> None:
    tree = (ROOT / "docs" / "design.md").read_text().split("    src/hypermlp/\n")[1].split("\n\n")[0]
    for name in re.findall(r"^ {6}(\S+)", tree, re.M):
        assert (ROOT / "src" / "hypermlp" / name).exists(), name


def test_the_documents_promise_what_the_program_says() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "src" / "hypermlp" / "ops").rglob("*.py"))
    ((how_long,),) = {tuple(re.findall(r"kernel into .*\(once, (about [a-z ]+)\)", sources))}
    for name in ("README.md", "docs/design.md"):
        assert how_long in (ROOT / name).read_text(), f"{name} should say that compiling takes {how_long}"
    (pinned,) = re.findall(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert f"pip install torch=={pinned} --index-url https://download.pytorch.org/whl/cpu" in README
