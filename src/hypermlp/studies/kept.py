"""One small model on a task, trained exactly as the demo trains it and kept in a folder, for those who want to look into it.

config.json          {"model_type": "hypermlp-task", what the model is built from, its setting and its accuracy}
model.safetensors    the weights
"""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file
from torch import Tensor, nn

from hypermlp.checks import choose_from
from hypermlp.files import read_json, write_json
from hypermlp.mixers import build_mixer
from hypermlp.models.mad import build_model
from hypermlp.models.saved import CONFIG, WEIGHTS, save_weights
from hypermlp.provenance import provenance
from hypermlp.studies import demo, mad
from hypermlp.tasks.mad import MAD
from hypermlp.tasks.mad_settings import Setting

MODEL_TYPE = "hypermlp-task"


class Kept(NamedTuple):
    model: nn.Module
    setting: Setting
    accuracy: float | None  # on the test examples
    inputs: Tensor  # N T: test examples
    targets: Tensor  # N T


def keep_model(folder: Path, task: str, mixer: str = demo.SHOWN, *, seed: int = 0, quick: bool = False) -> None:
    """Train the demo's model of this mixer (or another of the same size) on one of the demo's tasks, and save it."""
    choose_from("task", task, demo.TASKS)
    study = demo.demo_study(quick=quick)
    (setting,) = study.settings_of(task)
    matched = study.match(setting, list(dict.fromkeys([*demo.MIXERS, mixer])))[mixer]
    (job,) = study.jobs(setting, mixer, matched, seed)
    model, record = mad.train_model(job)
    about = {"mixer": mixer, "size": job.size, "inner": job.inner, "width": study.width, "depth": study.depth, "seed": seed}
    accuracy = None if record["metrics"] is None else record["metrics"]["accuracy"]
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(model, folder)
    found = {"setting": dataclasses.asdict(setting), "accuracy": accuracy, "provenance": provenance()}
    write_json(folder / CONFIG, {"model_type": MODEL_TYPE, **about, **found})  # last: what has one is complete


def is_kept(folder: Path) -> bool:
    path = folder / CONFIG
    return path.is_file() and read_json(path).get("model_type") == MODEL_TYPE


def open_kept(folder: Path) -> Kept:
    about: dict[str, Any] = read_json(folder / CONFIG)
    setting = Setting(**about["setting"])
    make_mixer = partial(build_mixer, about["mixer"], about["width"], setting.seq_len, about["size"])
    model = build_model(setting, make_mixer, about["width"], about["inner"], about["depth"])
    model.load_state_dict(load_file(folder / WEIGHTS))
    _, _, test = MAD[setting.task].load(setting, about["seed"], clean=True)
    return Kept(model.eval(), setting, about["accuracy"], test.inputs, test.targets)
