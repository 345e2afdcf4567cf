"""Every command and every piece of Python in docs/ and CONTRIBUTING.md runs as printed, at a small size.

Blocks are fenced, ```bash or ```python. Those of a document run in order, in one folder. A Python block whose first line names
a file (`# my_mixer.py`) is written there too. Commands get the options of SMALL, which make them small; SUBSTITUTES replaces
what is large or needs a cluster. A command of a new kind needs an entry in SMALL, or in ELSEWHERE with the file that runs it.
"""

import ast
import importlib
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from hypermlp.cli import app
from hypermlp.cli.app import ALIASES

ROOT = Path(__file__).parent.parent
DOCUMENTS = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "CONTRIBUTING.md"]
OTHERS = ("README.md", "RELEASING.md", "SECURITY.md", "CHANGELOG.md", "examples/README.md")
EVERYWHERE = [*DOCUMENTS, *(ROOT / name for name in OTHERS)]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

TRAIN = (
    "data.context=24 model.width=32 model.depth=1 train.steps=4 train.batch=4 train.micro=2 train.warmup=2 train.save_every=2 "
    "train.evaluate_every=2 train.evaluate_batches=2 train.sample=8"
)
STUDY = "steps=2 batch=8 width=16 --scale quick --seeds 1 --workers 1"
SMALL = {
    "hypermlp --version": "",
    "hypermlp info": "",
    "hypermlp mixers": "--width 64 --length 64",
    "hypermlp theory": "C.1",
    "hypermlp study list": "",
    "hypermlp study show": "",
    "hypermlp study run": STUDY,
    "hypermlp study report": "",
    "hypermlp explore": "",
    "hypermlp data prepare": "--tokenizer bpe:300 --workers 1",
    "hypermlp train": TRAIN,
    "hypermlp generate": "--count 5",
    "hypermlp eval": "--corpus my_folder",
    "hypermlp export": "",
    "hypermlp bench layer": "rounds=1 threads=1 memory=false",
    "hypermlp bench mixers": "rounds=1 threads=1 memory=false",
    "hypermlp bench decode": "context=20 batch=1 width=48 rounds=1",
    "hypermlp bench latency": "context=16 batch=1 weights=float32 width=48 steps=8 threads=1",
    "hypermlp bench model": "mad=2x32x32 language=1x32x32 depth=1 vocabulary=32 rounds=1 threads=1",
    "hypermlp bench profile": "shape=1x32x32",
}
SUBSTITUTES = {
    r"--over stdlib": "--over my_folder",
    r"(--nproc-per-node|--processes) 8": r"\1 2",
    r"train (340m-15b|1\.3b-100b|nanogpt-owt2)": r"train tiny --out runs/\1",
    r"bench layer": "bench layer 'only=hyperglu native,softmax sdpa 2 heads'",
    r"bench mixers$": "bench mixers mixers=softmax",
    r"bench model( scale=.*)?$": "bench model part=equal",  # tests/bench/test_table5.py runs Table 5's models
    r"(bench (?:layer|mixers).*?) shape=\S+|(bench (?:layer|mixers)\b)": r"\1\2 shape=1x32x32",
    r"--mixers hyperglu,softmax --tasks \S+": "--mixers hyperglu --tasks in-context-recall examples=32",
    r"--mixers (my_mixer.py:RunningMean),S-pc": r"--mixers \1 --tasks in-context-recall examples=32",
}
ELSEWHERE = {  # too long for here: which file runs it
    "hypermlp demo": ".ci/run",
    "hypermlp explore runs/demo": ".ci/newcomer",
    "hypermlp study run table1": "tests/test_cli.py",
    "hypermlp theory --out": "tests/report/test_theory_report.py",
    "pytest": ".ci/run",
    "ruff check": ".ci/run",
    "ruff format": ".ci/run",
    "mypy": ".ci/run",
    "mkdocs": ".ci/run",
}


# How blocks of a language are tested; what is not run has a reason.
KINDS = {
    "bash": "run here",
    "python": "run here",
    "py": "run by tests/models/test_clients.py, in a process of its own; guides of BY_HAND there need packages that tests lack",
    "sh": "as py",
    "yaml": "data that tests/models/test_clients.py writes",
    "json": "data that tests/models/test_clients.py writes",
    "text": "not run: needs a cluster or a registered study; the options are checked",
    "console": "not run: needs a network, or minutes; the options are checked",
    "dockerfile": "not run: needs Docker; the options are checked",
    "bibtex": "not code",
}


def blocks(document: Path) -> list[tuple[str, str]]:
    """The fenced blocks in order: language and text."""
    return re.findall(r"^```(bash|python)\n(.*?)^```", document.read_text(), re.M | re.S)


def commands(block: str) -> list[str]:
    lines = block.replace("\\\n", " ").splitlines()
    return [text for line in lines if (text := re.sub(r"(^|\s+)#.*", "", line).strip())]


def make_small(command: str) -> list[str]:
    for pattern, smaller in SUBSTITUTES.items():
        command = re.sub(pattern, smaller, command)
    kind = re.search(
        r"hypermlp (--?\w+|\w+ (list|show|run|report|prepare|layer|mixers|decode|latency|model|profile)(?= |$)|\w+)", command
    )
    assert kind is not None, f"{command}: what does it run?"
    found = " ".join(kind[0].split())
    assert found in SMALL, f"{command}: say in SMALL how {found!r} is made small"
    return [*shlex.split(command), *SMALL[found].split()]


def run_command(command: str, folder: Path) -> None:
    for start, file in ELSEWHERE.items():
        if f"{command} ".startswith(f"{start} "):
            assert start.removeprefix("hypermlp ") in (ROOT / file).read_text(), f"{file} does not run {command}"
            check_options(command)
            return
    if command.startswith("pip install "):
        for extras in re.findall(r"\.\[([\w,]+)\]", command):
            assert set(extras.split(",")) <= set(EXTRAS), command
        return
    command, _, target = command.partition(" > ")
    words = make_small(command)
    if words[0] == "torchrun":
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *words[1:]], cwd=folder, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return
    assert words[0] == "hypermlp", f"{command}: say in ELSEWHERE or run_command how it is tested"
    result = CliRunner().invoke(app, words[1:], prog_name="hypermlp")
    assert result.exit_code == 0, f"{' '.join(words)}\n{result.output}\n{result.exception!r}"
    if target:
        (folder / target).write_text(result.stdout)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the documents take for granted: a folder of text, a series, and a trained model where a page does not train one."""
    text = "".join(f"{n} squared is {n * n}, déjà vu.\n" for n in range(400))
    (tmp_path / "my_folder").mkdir()
    for name in ("one", "two", "three"):
        (tmp_path / "my_folder" / f"{name}.txt").write_text(text, encoding="utf-8")
    hours = "".join(f"2020-01-{1 + i // 24} {i % 24}:00,{i % 24}\n" for i in range(720))
    (tmp_path / "my.csv").write_text(f"date,load\n{hours}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("document", [path for path in DOCUMENTS if blocks(path)], ids=lambda path: path.stem)
def test_the_blocks_run_as_printed(document: Path, folder: Path) -> None:
    text = document.read_text()
    if "my_mixer.py" in text and "# my_mixer.py" not in text:
        ((_, mixer), *_) = blocks(ROOT / "docs" / "add-a-mixer.md")
        (folder / "my_mixer.py").write_text(mixer)
    if "--model runs/tiny" in text and "hypermlp train tiny" not in text:
        run_command("hypermlp train tiny", folder)
    space: dict[str, object] = {"__name__": document.stem}
    for language, block in blocks(document):
        if language == "python":
            if name := re.match(r"# (\w+\.py)\n", block):
                (folder / name[1]).write_text(block)
            exec(compile(block, str(document), "exec"), space)
        else:
            for command in commands(block):
                run_command(command, folder)


def inline() -> list[tuple[str, str]]:
    """Commands within sentences, and in blocks that are not run."""
    found = [(path.name, text) for path in EVERYWHERE for text in re.findall(r"`(hypermlp [^`|…]+)`", path.read_text())]
    plain = [
        (path.name, block.replace("\\\n", " "))
        for path in EVERYWHERE
        for block in re.findall(r"^```(?:text|console|dockerfile)\n(.*?)^```", path.read_text(), re.M | re.S)
    ]
    return found + [(name, text) for name, block in plain for text in re.findall(r"\bhypermlp (?=[\w-])(?:[^#\n]*\S)", block)]


@pytest.mark.parametrize("document", EVERYWHERE, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_block_is_of_a_kind_that_is_tested_or_has_a_reason(document: Path) -> None:
    fences = re.findall(r"^```(.*)$", document.read_text(), re.M)
    assert len(fences) % 2 == 0
    assert set(fences[::2]) <= set(KINDS), "say in KINDS how such a block is tested"


@pytest.mark.parametrize("guide", sorted((ROOT / "docs" / "clients").glob("*.md")), ids=lambda path: path.stem)
def test_what_a_guide_takes_from_this_package_exists(guide: Path) -> None:
    """Also of guides whose other packages are not installed here."""
    for block in re.findall(r"^```py\n(.*?)^```", guide.read_text(), re.M | re.S):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("hypermlp"):
                module = importlib.import_module(str(node.module))
                assert [name.name for name in node.names if not hasattr(module, name.name)] == []


@pytest.mark.parametrize("document", EVERYWHERE, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(document: Path) -> None:
    for target, heading in re.findall(r"\]\((?!http)([^)#\s]*)(?:#([^)\s]+))?\)", document.read_text()):
        path = (document.parent / target).resolve() if target else document
        assert path.exists(), target
        if heading:
            heads = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
            assert heading in {slug(head) for head in heads}, f"{target} has no heading {heading}"


def slug(head: str) -> str:
    """A heading as the anchor that GitHub and mkdocs make of it."""
    return re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-")


@pytest.mark.parametrize("document, command", inline())
def test_a_command_in_a_sentence_has_options_that_exist(document: str, command: str) -> None:
    check_options(command)


def check_options(command: str) -> None:
    """Take a command apart without running it."""
    program, *words = shlex.split(command)
    if program != "hypermlp":
        return
    words = [*ALIASES.get(words[0], words[:1]), *words[1:]]
    at: Any = typer.main.get_command(app)
    while hasattr(at, "commands") and words:
        word = words.pop(0)
        assert word in at.commands or word in options_of(at), f"{command}: there is no {word}"
        at = at.commands.get(word, at)
    for word in words:
        assert not word.startswith("--") or word.split("=")[0] in options_of(at), f"{command}: there is no {word}"


def options_of(command: Any) -> set[str]:
    return {"--help", *(name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts))}


def test_docstrings_become_markdown() -> None:
    make = runpy.run_path(str(ROOT / "docs" / "docstrings.py"))["to_markdown"]
    text = "It adds.\n\n>>> 1 + 1\n2\n\nArgs:\n    x, y: numbers\n        of any size\n\nA law:\n    x = y"
    assert make(text).split("\n\n") == [
        "It adds.",
        "```python\n>>> 1 + 1\n2\n```",
        "**Args**",
        "- `x`, `y`: numbers of any size",
        "A law:\n    x = y",
    ]
