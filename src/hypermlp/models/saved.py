"""A saved model: one folder of plain data that loads without running code.

config.json          {"model_type": "hypermlp", and the fields of ModelConfig}
model.safetensors    the weights; a tied head is absent; codes and scales where they were quantised (mixers/int8.py)
tokenizer.json       what turns text into tokens, as the corpus had it

Folders that models/hf exports load too: weights may be split over several files with an index, their names may begin with
"model.", and config.json may have fields of transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hypermlp.files import TOKENIZER, whole_file, write_json
from hypermlp.mixers.int8 import CODES, quantize
from hypermlp.mixers.lags import LagExtension
from hypermlp.models.bundled import find_model, full_name
from hypermlp.models.lm import LanguageModel, ModelConfig

CONFIG, WEIGHTS = "config.json", "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
MODEL_TYPE = "hypermlp"


def weights(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that make up a model, by name, each once; they share memory with it."""
    found: dict[str, Tensor] = {}
    parameters = {id(p): name for name, p in reversed([*model.named_parameters(remove_duplicate=False)])}  # the first name
    for name, tensor in model.state_dict(keep_vars=True).items():
        if parameters.get(id(tensor), name) == name:
            found[name] = tensor.detach()
    return found


def save_model(model: LanguageModel, folder: Path, tokenizer: dict[str, Any] | None = None) -> None:
    """Write config.json, model.safetensors and, if given, tokenizer.json, which Hugging Face's Auto classes read too.

    Args:
        model: the model; its weights are written in their own types.
        folder: made where it does not exist.
        tokenizer: what a tokenizer's to_dict gives.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(model, folder)
    if tokenizer is not None:
        write_json(folder / TOKENIZER, tokenizer)
    write_json(folder / CONFIG, {"model_type": MODEL_TYPE, **model.config.to_dict()})  # last: what has one is complete


def refuse_foreign_folder(folder: Path, *, force: bool = False) -> None:
    """Raise if there are files in a folder that holds no model of ours."""
    path = folder / CONFIG
    ours = path.is_file() and str(json.loads(path.read_text(encoding="utf-8")).get("model_type", "")).startswith(MODEL_TYPE)
    if not force and not ours and (folder.is_file() or (folder.is_dir() and any(folder.iterdir()))):
        raise ValueError(f"{folder} holds files that hypermlp did not write; give a new folder, or write there with --force")


def save_weights(model: nn.Module, folder: Path) -> None:
    """Write model.safetensors, whole or not at all."""
    with whole_file(folder / WEIGHTS) as fresh:
        save_file({name: tensor.cpu().contiguous() for name, tensor in weights(model).items()}, fresh, {"format": "pt"})


def load_model(folder: str | Path, length: int | None = None, lag_extension: LagExtension | None = None) -> LanguageModel:
    """The model that `save_model` or `hypermlp export` wrote; no code of the folder is executed.

    Args:
        folder: where it is, or "hypermlp:language", which comes with the package.
        length: a longer context than it was trained for.
        lag_extension: what the new lags of a longer context get (LanguageModel.extended).
    """
    folder = find_model(folder)
    config = read_config(folder)
    model = LanguageModel(config)
    saved = read_weights(folder)
    if any(name.endswith(CODES) for name in saved):
        quantize(model)
    own = weights(model)
    wrong = sorted(name for name in own.keys() | saved.keys() if name not in own or name not in saved)
    wrong = wrong or sorted(name for name in own if own[name].shape != saved[name].shape)
    if wrong:
        names = ", ".join(wrong[:3])
        raise ValueError(f"{folder / WEIGHTS} does not fit its {CONFIG}: {names} is missing, unknown or of another shape")
    for name, tensor in own.items():
        tensor.copy_(saved[name])
    return model if length in (None, config.length) else model.extended(length, lag_extension)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, from one file or several, under the names of LanguageModel."""
    found: dict[str, Tensor] = {}
    index, path = folder / INDEX, folder / WEIGHTS
    try:
        names = [WEIGHTS]
        if index.is_file() and not path.is_file():
            path = index
            names = sorted({Path(name).name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
        for path in (folder / name for name in names):
            found |= load_file(path)
    except (OSError, SafetensorError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error}); save the model again") from error
    return {name.removeprefix("model."): tensor for name, tensor in found.items()}


def read_config(folder: Path) -> ModelConfig:
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"{folder} holds no saved model: it has no {CONFIG}")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        kind = values.pop("model_type", None)
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if str(kind).startswith(MODEL_TYPE) and kind != MODEL_TYPE:
        name = full_name(folder)
        raise ValueError(
            f"{name} is a model of a task and reads no text; hypermlp explore --model {name} shows it on the task's examples, "
            f"and hypermlp eval --model {name} scores it"
        )
    if kind != MODEL_TYPE:
        raise ValueError(f"{path} has model_type {kind!r}; it must be {MODEL_TYPE!r}")
    if "transformers_version" in values:
        values = {name: value for name, value in values.items() if name in ModelConfig.__dataclass_fields__}
    return ModelConfig.from_dict(values)
