"""What Triton's kernels must not contain, read from their source."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from hypermlp.ops.triton import device

SOURCES = sorted(Path(device.__file__).parent.glob("*.py"))


def pairs(node: ast.Assign) -> list[tuple[ast.expr, ast.expr]]:
    """Target and value of every name that an assignment binds; a tuple's one by one where both sides are spelt out."""
    found = []
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            found += list(zip(target.elts, node.value.elts, strict=True))
        else:
            found.append((target, node.value))
    return found


def bound(node: ast.AST) -> set[str]:
    """Names that are assigned anywhere inside."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def uncarried(function: ast.FunctionDef) -> list[str]:
    """Names that a loop changes and that begin as another name's value.

    Triton compares values to find out what a loop carries: two names of one value may become one, and then one of them keeps
    what it had before the loop.
    """
    found: list[str] = []

    def walk(body: list[ast.stmt], aliases: dict[str, str]) -> None:
        for statement in body:
            if isinstance(statement, (ast.For, ast.While)):
                changed = bound(statement)
                found.extend(f"{name} = {aliases[name]}" for name in sorted(changed & aliases.keys()))
                walk(statement.body, {})
                aliases = {name: of for name, of in aliases.items() if name not in changed}
            elif isinstance(statement, ast.If):
                walk(statement.body, aliases)
                walk(statement.orelse, aliases)
            elif isinstance(statement, ast.Assign):
                for target, value in pairs(statement):
                    for name in bound(target):
                        aliases.pop(name, None)
                    if isinstance(target, ast.Name) and isinstance(value, ast.Name):
                        aliases[target.id] = value.id

    walk(function.body, {})
    return found


def kernels(text: str) -> list[ast.FunctionDef]:
    """Functions that Triton compiles."""
    functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)]
    return [f for f in functions if any("triton.jit" in ast.unparse(d) for d in f.decorator_list)]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_what_a_loop_changes_begins_as_a_value_of_its_own(path: Path) -> None:
    for function in kernels(path.read_text()):
        assert not uncarried(function), f"{path.name}: {function.name}"


@pytest.mark.parametrize(
    "line, names",
    [("d2 = d1", ["d2 = d1"]), ("d1, d2 = d2, zero", ["d1 = d2", "d2 = zero"]), ("d2 = tl.zeros([4], tl.float32)", [])],
)
def test_an_alias_is_seen(line: str, names: list[str]) -> None:
    before = ["@triton.jit", "def f(x, n):", "    d1 = x + 1", f"    {line}"]
    text = "\n".join([*before, "    for i in range(n):", "        d2, d1 = d1, x + i"])
    (function,) = kernels(text)
    assert uncarried(function) == names


def test_kernels_add_nothing_atomically() -> None:
    """So the bits do not depend on which program comes first."""
    assert sum(len(kernels(path.read_text())) for path in SOURCES) > 40
    for path in SOURCES:
        assert "atomic_" not in path.read_text(), path
