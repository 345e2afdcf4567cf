"""Whatever the top level offers says what it is and names its arguments."""

from __future__ import annotations

import dataclasses
import inspect
import re

import pytest

import hypermlp

PUBLIC = {name: getattr(hypermlp, name) for name in hypermlp.__all__}
CALLED = {name: value for name, value in PUBLIC.items() if callable(value)}
METHODS = {
    f"{name}.{method}": function
    for name, value in CALLED.items()
    if inspect.isclass(value)
    for method, function in vars(value).items()
    if inspect.isfunction(function) and not method.startswith("_")
}


def unnamed(value: object) -> list[str]:
    """Arguments that the docstring does not name."""
    text = inspect.getdoc(value) or ""
    if inspect.isclass(value):
        text += inspect.getdoc(value.__init__) or ""
    return [name for name in inspect.signature(value).parameters if name != "self" and not re.search(rf"\b{name}\b", text)]


def test_an_argument_without_a_word_is_found() -> None:
    def scale(x: float, by: float) -> float:
        """x, larger."""
        return x * by

    assert unnamed(scale) == ["by"]


@pytest.mark.parametrize("name", [*CALLED, *METHODS])
def test_every_argument_is_named(name: str) -> None:
    value = CALLED.get(name) or METHODS[name]
    assert inspect.getdoc(value)
    if inspect.isclass(value) and (issubclass(value, tuple | BaseException) or dataclasses.is_dataclass(value)):
        return  # a field stands beside its type and its comment
    assert unnamed(value) == []
