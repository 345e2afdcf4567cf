"""Configurations of training runs as files: TOML or YAML to read, TOML to write.

base = "tiny"              # a named configuration that the file changes; without it the file has every field
budget = "paper"           # how the model fits its budget: paper, inner or none (configs.py: Budget); may be left out
[model]                    # the fields of ModelConfig, DataConfig and TrainConfig, by their names
mixer = ["hyperglu", "softmax"]
[data]
corpus = "my.jsonl"
[train]
steps = 2000
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

SUFFIXES = (".toml", ".yaml", ".yml")
PARTS = ("model", "data", "train")


def is_config_file(name: str) -> bool:
    return Path(name).suffix in SUFFIXES


def read_config_file(path: Path) -> tuple[str | None, dict[str, str]]:
    """The base, if the file has one, and its fields as a command line would give them: "train.steps" → "2000"."""
    values = load(path)
    base = values.pop("base", None)
    budget = {"budget": to_text(values.pop("budget"))} if "budget" in values else {}
    unknown = [name for name in values if name not in PARTS]
    if unknown:
        raise ValueError(f"{path} has {', '.join(unknown)}; it may have base, budget, and the sections {', '.join(PARTS)}")
    for part, fields in values.items():
        if not isinstance(fields, dict):
            raise ValueError(f"{part} in {path} must be a section with fields, not {fields!r}")
    return base, budget | {
        f"{part}.{name}": to_text(value) for part, fields in values.items() for name, value in fields.items()
    }


def load(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ValueError(
            f"there is no configuration {path}; hypermlp train tiny --print-config writes one to begin with"
        ) from error
    try:
        found = tomllib.loads(text) if path.suffix == ".toml" else load_yaml(text)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must have sections ({', '.join(PARTS)}) with fields")
    return found


def load_yaml(text: str) -> Any:
    try:
        import yaml  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise ValueError("YAML needs PyYAML (pip install pyyaml); TOML needs no package") from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def to_text(value: Any) -> str:
    """A value as it would be given on the command line."""
    if isinstance(value, list):
        return ",".join(map(to_text, value))
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    return str(value)


def to_toml(values: dict[str, dict[str, Any]]) -> str:
    """A configuration (RunConfig.to_dict) as TOML. It has no word for None, which is written as on the command line."""
    sections = []
    for part, fields in values.items():
        lines = [f"{name} = {toml_value(value)}" for name, value in fields.items()]
        sections.append("\n".join([f"[{part}]", *lines]))
    return "\n\n".join(sections) + "\n"


def toml_value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    return json.dumps("none" if value is None else value, ensure_ascii=False)  # all others are written alike
