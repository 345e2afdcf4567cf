"""Records as the runner writes them, with made-up numbers: for tests of the report, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Record = dict[str, Any]
START = {
    "command": "hypermlp made-up",
    "date": "2026-01-02T03:04:05+00:00",
    "commit": None,
    "seed": None,
    "hypermlp": "0.1.0",
    "python": "3.12.1",
    "torch": "2.9.0",
    "system": "Linux x86_64",
    "cpu": "a <b>CPU</b>",
    "gpu": None,
}


def mad(mixer: str, task: str, percent: float, seed: int = 0, *, setting: str = "baseline", **fields: Any) -> Record:
    """A run of the clean protocol that ends with this accuracy."""
    points = [{"step": 100 * i, "train_loss": 1.0, "accuracy": percent * i / 400, "loss": 2 - i / 4} for i in (1, 2, 3, 4)]
    record = {
        "protocol": "clean",
        "mixer": mixer,
        "task": task,
        "setting": f"{task}/{setting}",
        "seed": seed,
        "lr": 1e-3,
        "weight_decay": 0.1,
        "error": None,
        "parameters": 80_000,
        "inner": 176,
        "size": None,
        "budget": "",
        "metrics": {"step": 400, "accuracy": percent / 100, "loss": 1.0, "validation_loss": 1.0},
        "stopped": None,
        "curve": points,
        "seconds": 40.0,
        **fields,
    }
    return {"key": "/".join(str(record[name]) for name in ("mixer", "setting", "seed", "lr")), **record}


def language(mixer: str, loss: float, seed: int = 0, **fields: Any) -> Record:
    """A language run of ten evaluations; the last five have this mean."""
    losses = [loss + max(0.0, 0.1 * (5 - i)) for i in range(10)]
    return {
        "key": f"language/{mixer}/{seed}",
        "kind": "language",
        "mixer": mixer,
        "seed": seed,
        "error": None,
        "parameters": 1_200_000,
        "inner": 512,
        "curve": [{"step": 50 * i, "train_loss": y, "loss": y} for i, y in enumerate(losses, 1)],
        "final": {"loss": loss},
        "seconds": 100.0,
        **fields,
    }


def write(folder: Path, records: Iterable[Record], plan: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    plan = {"study": "mad", "width": 64, "depth": 2} if plan is None else plan
    (folder / "plan.json").write_text(json.dumps({"plan": plan, "starts": [START]}))
    (folder / "runs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


# A small registered study, in the words of the first ones.
PROTOCOL = """
title = "a small one"
contestants = ["S", "R"]
seeds = 5

[mad]
protocol = "clean"
tasks = ["memorization"]
scale = "baseline"
width = 16
depth = 1
batch = 16
examples = 64
tests = 32
steps = {memorization = 12}
decays = [0.1]
changes = {memorization = {vocab_size = 16, seq_len = 8}}
search = {rates = [1e-3, 1e-2], rungs = [1.0], widen = 0}

[terms]
interval = "bootstrap"
seeds = 5

[[comparisons]]
title = "R is as good as S"
better = "S"
worse = "R"
expect = "level"
on = ["memorization"]
"""
