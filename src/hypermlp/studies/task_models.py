"""Small models on tasks as a study saves them, for those who want to look into them: models/TASK-MIXER in its folder.

config.json          {"model_type": "hypermlp-task", what the model is built from, its setting and its accuracy}
model.safetensors    the weights
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file
from torch import Tensor, nn

from hypermlp.files import Record, read_json, write_json
from hypermlp.mixers import new_layers
from hypermlp.models.bundled import find_model
from hypermlp.models.mad import build_model
from hypermlp.models.saved import CONFIG, WEIGHTS, save_weights
from hypermlp.provenance import provenance
from hypermlp.studies.mad import TaskJob
from hypermlp.tasks.mad import MAD
from hypermlp.tasks.mad_settings import MADSetting
from hypermlp.tasks.scores import evaluate

BATCH = 64  # test examples at a time
MODEL_TYPE = "hypermlp-task"


class TaskModel(NamedTuple):
    mixer: str
    model: nn.Module
    setting: MADSetting
    accuracy: float | None  # on the test examples
    inputs: Tensor  # N T: test examples
    targets: Tensor  # N T


def save_task_model(models: Path, model: nn.Module, job: TaskJob, record: Record) -> None:
    folder, study = model_folder(models, job.setting.task, job.mixer), job.study
    about = {"mixer": job.mixer, "size": job.size, "inner": job.inner, "width": study.width, "depth": study.depth}
    accuracy = None if record["metrics"] is None else record["metrics"]["accuracy"]
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(model, folder)
    found = {"seed": job.seed, "setting": dataclasses.asdict(job.setting), "accuracy": accuracy, "provenance": provenance()}
    write_json(folder / CONFIG, {"model_type": MODEL_TYPE, **about, **found})  # last: what has one is complete


def model_folder(models: Path, task: str, mixer: str) -> Path:
    return models / f"{task}-{mixer.replace('!', '').replace('*', 'x')}"


def is_task_model(folder: str | Path) -> bool:
    path = find_model(folder) / CONFIG
    return path.is_file() and read_json(path).get("model_type") == MODEL_TYPE


def find_task_models(study: Path, task: str, mixers: Sequence[str]) -> list[Path]:
    """The folders of these models in the folder of a study; a ValueError that says what is there if one is missing."""
    found = [model_folder(study / "models", task, mixer) for mixer in mixers]
    if missing := [folder.name for folder in found if not is_task_model(folder)]:
        there = sorted(path.name for path in study.glob("models/*") if is_task_model(path))
        cure = f"there are {', '.join(there)}" if there else f"hypermlp demo --out {study} trains them"
        raise ValueError(f"{study} has no model {', '.join(missing)}; {cure}")
    return found


def open_task_model(folder: str | Path) -> TaskModel:
    """The model of a folder, or a bundled one by its name, with its test examples."""
    folder = find_model(folder)
    about: dict[str, Any] = read_json(folder / CONFIG)
    setting = MADSetting(**about["setting"])
    make_mixer = new_layers(about["mixer"], about["depth"], about["width"], setting.seq_len, about["size"])
    model = build_model(setting, make_mixer, about["width"], about["inner"], about["depth"])
    model.load_state_dict(load_file(folder / WEIGHTS))
    _, _, test = MAD[setting.task].load(setting, about["seed"], clean=True)
    return TaskModel(about["mixer"], model.eval(), setting, about["accuracy"], test.inputs, test.targets)


def task_accuracy(saved: TaskModel) -> float:
    """The share of right answers on the test examples."""
    return evaluate(saved.model, saved.inputs, saved.targets, BATCH).accuracy
