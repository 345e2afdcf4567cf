"""Fields changed on a command line, `train.steps=100`: from text to a value of the field's type.

Training runs, studies and benchmarks read their fields here. A leading -- is taken too, since other trainers write it.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Union, get_args, get_origin

from hypermlp.checks import did_you_mean


def read_overrides(texts: Iterable[str], kinds: Mapping[str, Any], of: str) -> dict[str, Any]:
    """Field → value, from texts such as "train.steps=100".

    Args:
        texts: FIELD=VALUE each.
        kinds: the known fields with their types.
        of: whose fields they are, for messages.
    """
    return dict(read_override(text, kinds, of) for text in texts)


def read_override(text: str, kinds: Mapping[str, Any], of: str) -> tuple[str, Any]:
    key, equals, value = text.removeprefix("--").partition("=")
    if not equals:
        raise ValueError(f"{text!r} must be FIELD=VALUE{known_fields(key, kinds, of)}")
    if key not in kinds:
        raise ValueError(f"{of} has no field {key!r}{known_fields(key, kinds, of)}")
    try:
        return key, parse(kinds[key], value)
    except ValueError as error:
        choices = get_args(kinds[key]) if get_origin(kinds[key]) is Literal else ()
        raise ValueError(f"{key} ({value}) must be {describe(kinds[key])}{did_you_mean(value, choices)}") from error


def known_fields(key: str, kinds: Mapping[str, Any], of: str) -> str:
    """The nearest field first, since the list may be long."""
    hint = did_you_mean(key, kinds)
    if not kinds:
        return f"; {of} has no fields to change"
    return f"{f'{hint} The' if hint else '; the'} fields of {of} are {', '.join(kinds)}"


def parse(kind: Any, text: str) -> Any:
    """`text` as a value of this type; a ValueError if it is none."""
    if get_origin(kind) in (Union, types.UnionType):
        for choice in sorted(get_args(kind), key=takes_much):
            try:
                if get_origin(choice) is tuple and str in get_args(kind) and "," not in text:
                    continue  # one word is a text, several are a list
                return parse(choice, text)
            except ValueError:
                continue
    elif get_origin(kind) is tuple:
        parts = text.split(",")
        kinds = get_args(kind)
        if kinds[-1] is ... or len(parts) == len(kinds):
            return tuple(parse(kinds[0], part.strip()) for part in parts)
    elif get_origin(kind) is Literal:
        if text in get_args(kind):
            return text
    elif kind is bool or kind is type(None):
        words = {"true": True, "false": False} if kind is bool else {"none": None}
        if text.lower() in words:
            return words[text.lower()]
    else:
        return kind(text)
    raise ValueError(f"{text!r} is not {describe(kind)}")


def takes_much(kind: Any) -> int:
    """The order in which the types of a union are tried: everything is a text, and what is no list may be one of one entry."""
    return 2 if kind is str else int(get_origin(kind) is tuple)


def describe(kind: Any) -> str:
    """A type in the words of a message."""
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(map(describe, get_args(kind)))
    if get_origin(kind) is tuple:
        return f"comma-separated {describe(get_args(kind)[0]).removeprefix('a ')}s"
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}.get(kind, "none")
