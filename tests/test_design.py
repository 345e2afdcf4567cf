"""What docs/design.md and docs/maths.md name exists: modules, functions, and those of the C++ sources."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import hypermlp

PACKAGE = Path(hypermlp.__file__).parent
DOCS = Path(__file__).parents[1] / "docs"
SOURCES = (
    "\n".join(
        path.read_text()
        for folder in ("ops", "mixers")
        for path in sorted((PACKAGE / folder).rglob("*"))
        if path.suffix in (".py", ".h", ".cpp")
    )
    + (PACKAGE / "cache.py").read_text()
)


def code_spans() -> set[str]:
    walk = (DOCS / "design.md").read_text().split("## A tensor through the layer and back")[1].split("\n## ")[0]
    tables = [line for line in (DOCS / "maths.md").read_text().splitlines() if line.startswith("|")]
    return set(re.findall(r"`([^`\s]+)`", "\n".join([walk, *tables])))


def exists(name: str) -> bool:
    if name.endswith((".h", ".cpp", ".py")):
        return any(PACKAGE.rglob(Path(name).name))
    if name.startswith(("ops.", "mixers.")):
        module, found = hypermlp.__name__, None
        for part in name.split("."):
            try:
                module = f"{module}.{part}"
                found = importlib.import_module(module)
            except ModuleNotFoundError:
                found = getattr(found, part, None)
        return found is not None
    word = re.escape(re.split(r"[(.]", name.removesuffix(")"))[-1] if "(" not in name else name.split("(")[0])
    return re.search(rf"(def|class|struct|void|int|>) {word}\b|\b{word} = ", SOURCES) is not None


@pytest.mark.parametrize("name", sorted(code_spans()))
def test_what_the_documents_name_exists(name: str) -> None:
    if re.fullmatch(r"[\w./]+(\([^)]*\))?", name) and not name.endswith("()"):
        assert exists(name), name


def named_objects() -> set[tuple[str, str]]:
    """What the document writes as `folder/file.py: name`."""
    spans = re.findall(r"`((?:\w+/)*\w+\.py): ([\w.]+)(?:\([^)`]*\))?`", (DOCS / "design.md").read_text())
    assert len(spans) > 30
    return set(spans)


@pytest.mark.parametrize("file, name", sorted(named_objects()))
def test_functions_stand_in_the_files_that_the_design_names(file: str, name: str) -> None:
    paths = [path for path in PACKAGE.rglob(Path(file).name) if path.as_posix().endswith(f"/{file}")]
    modules = [
        importlib.import_module(".".join((hypermlp.__name__, *p.relative_to(PACKAGE).with_suffix("").parts))) for p in paths
    ]

    def has(found: object) -> bool:
        for part in name.split("."):
            found = getattr(found, part, None)
        return found is not None

    assert any(map(has, modules)), f"{file}: {name}"
