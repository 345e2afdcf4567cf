"""Every module imports with only the core dependencies, and imports point one way."""

import ast
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import hypermlp

PACKAGE = Path(hypermlp.__file__).parent
NEED_TRITON = {
    "fallback",
    "skew",
    "forward",
    "backward",
    "products",
    "decode",
    "pointwise",
    "launch",
    "gradients",
    "stepping",
    "operator",
}
MODULES = sorted(
    ".".join(["hypermlp", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
    if not (path.parent == PACKAGE / "ops" / "triton" and path.stem in NEED_TRITON)  # the extra `gpu`, imported when chosen
)

# A package may import those to its left, and siblings within itself. `data` and `tasks` need only what lies around ops.
ORDER = [
    {"checks", "errors"},
    {
        "overrides",
        "batch",
        "config",
        "eval_mode",
        "provenance",
        "cache",
        "notice",
        "files",
        "interrupts",
        "allocator",
        "collectives",
    },
    {"fixed_cache"},
    {"ops"},
    {"mixers"},
    {"models"},
    {"train", "evals", "bench", "analysis"},
    {"paper", "theory"},
    {"runs"},
    {"studies"},
    {"verdicts"},
    {"report"},
    {"cli"},
    {"__main__"},
    {"testing"},  # nothing imports it
]
DATA = {"data", "tasks"}
DATA_USERS = {"runs", "studies", "verdicts", "report", "cli"}


def core_distributions() -> set[str]:
    """The distributions that `pip install hypermlp` brings, without extras."""
    found: set[str] = set()
    todo = ["hypermlp"]
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in found:
            continue
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # a requirement of another platform
        found.add(name)
        todo += [re.match(r"[A-Za-z0-9._-]+", r)[0] for r in requirements if "extra ==" not in r]
    return found


def test_every_module_imports_with_only_the_core_dependencies() -> None:
    core = core_distributions()
    owners = metadata.packages_distributions()
    allowed = {module for module, names in owners.items() if any(re.sub(r"[-_.]+", "-", n).lower() in core for n in names)}
    forbidden = sorted(set(owners) - allowed)
    assert "pytest" in forbidden, "the test environment must hold something that the core does not"
    script = f"""
import importlib, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {forbidden!r}:
            raise ModuleNotFoundError(f"{{name}} is not a core dependency", name=name)
sys.meta_path.insert(0, Refuse())
for name in {[*MODULES, "hyperglu"]!r}:
    importlib.import_module(name)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def imports_of(path: Path) -> set[str]:
    """Packages directly below hypermlp that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            parts = node.module.split(".")
            if parts == ["hypermlp"]:
                found |= {alias.name for alias in node.names} - {"__version__"}
            elif parts[0] == "hypermlp":
                found.add(parts[1])
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("hypermlp.")}
    return found


def rank(package: str) -> int:
    return next(i for i, names in enumerate(ORDER) if package in names)


@pytest.mark.parametrize(
    "path", [p for p in sorted(PACKAGE.rglob("*.py")) if p != PACKAGE / "__init__.py"], ids=lambda p: p.stem
)
def test_imports_point_one_way(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for other in imports_of(path) - {own}:
        if other in DATA:
            assert own in DATA_USERS, f"{path.name} imports {other}"
        elif own == "testing":
            assert other == "ops", f"{own} imports {other}"
        elif own in DATA:
            assert other in ("batch", "checks", "config", "errors", "eval_mode", "files"), f"{own} imports {other}"
        else:
            assert rank(other) < rank(own), f"{own} imports {other}"
