"""Named configurations of language models, and how to change single fields of them: `model.mixer=softmax train.steps=100`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_type_hints

import torch

from hypermlp import notice
from hypermlp.checks import choose_from, did_you_mean, naming
from hypermlp.data.corpus import INDEX, read_index
from hypermlp.data.tokenizers import find_tokenizer
from hypermlp.mixers import own
from hypermlp.mixers.labels import SAME
from hypermlp.models.budget import match_qk
from hypermlp.models.lm import LanguageModel, ModelConfig, count_parameters, match_inner_width
from hypermlp.overrides import read_overrides
from hypermlp.paper.configs import PAPER
from hypermlp.paper.published import published
from hypermlp.runs.config_files import PARTS, SUFFIXES, is_config_file, read_config_file
from hypermlp.train.config import DataConfig, RunConfig
from hypermlp.train.language import TrainConfig

PADDING = 64  # a vocabulary may be rounded up to a multiple of this, for the sake of matrix products


CONFIGS: dict[str, RunConfig] = {
    # Minutes on two cores, and needs no file.
    "tiny": RunConfig(
        model=ModelConfig(vocabulary=257, width=96, depth=4, length=256, init="decays"),
        data=DataConfig(corpus="stdlib", tokenizer="bytes", context=256),
        train=TrainConfig(
            steps=600, batch=16, micro=8, lr=1.6e-2, warmup=60, evaluate_every=50, evaluate_batches=8, save_every=50
        ),
    ),
    **PAPER,
}

# Learning rates that were searched, by configuration and label: the best of results/rates (docs/training.md says how).
RATES: dict[str, dict[str, float]] = {"tiny": {"G-cg-q-12o": 1.6e-2, "S-p": 2e-3, "S-pc": 8e-3}}
# How a model is made to fit a budget of parameters, where neither its size nor its feed-forward is given:
# paper   q and k pay: HyperGLU, HyperMLP and labels that compress them get the width, between a quarter and an eighth of the
#         model's, at which the layer comes nearest to 4 width² (section 2.6); the rest of the model and the rivals stay
# inner   the feed-forward pays: a changed mixer gets one as wide as makes the whole model equal to the configuration's
# none    nothing is changed
Budget = Literal["paper", "inner", "none"]
BUDGETS: dict[str, Budget] = {"nanogpt-owt2": "paper", "340m-15b": "paper", "1.3b-100b": "paper"}  # the others: "inner"

UNSEARCHED = 4e-3  # for other mixers there: between the highest and the lowest


def configure(name: str, overrides: Iterable[str] = ()) -> RunConfig:
    """The named configuration, or that of a file, with fields changed.

    Dependent fields update unless they are set: model.length with the context, model.vocabulary with the corpus or tokenizer,
    model.inner with the width. With the mixer come its published heads and sizes, where the configuration is one of Table 2
    (published.py), the sizes that the budget asks for (Budget), and train.lr, where rates were searched (RATES).
    A mixer of the user's own, FILE.py:CLASS, is imported here and registered if the overrides name it, not if a file does.

    Args:
        name: of CONFIGS, or a path that ends in .toml, .yaml or .yml.
        overrides: such as "train.steps=100"; "budget=inner" takes another budget than the configuration's.

    >>> configure("tiny", ["train.steps=100", "data.context=128"]).model.length
    128
    """
    with naming(name) if is_config_file(name) else contextlib.nullcontext():
        found = read_config(name, overrides)
    if (how := found.train).steps <= how.warmup:
        notice.once(
            f"training ends (train.steps={how.steps}) before its warm-up does (train.warmup={how.warmup}): the learning rate "
            f"never reaches train.lr={how.lr:g}; give a shorter warm-up, such as train.warmup={how.steps // 10}"
        )
    return found


def read_config(name: str, overrides: Iterable[str]) -> RunConfig:
    base, start, given = find_config(name)
    named = read_overrides(overrides, fields(), "a training run")
    mixer = named.get("model.mixer", ())
    own.adopt([mixer] if isinstance(mixer, str) else mixer)
    changes = {**given, **named}
    budget: Budget = changes.pop("budget", BUDGETS.get(base, "inner"))
    follow_tokenizer(start, changes)
    follow_mixer(start, RATES.get(base, {}), changes)
    size_given = bool(changes.keys() & {"model.inner", "model.size"})
    reference = apply(start, {key: value for key, value in changes.items() if key not in ("model.mixer", "model.size")}).model
    follow_published(base, changes)
    found = apply(start, changes)
    if size_given or budget == "none":
        return found
    model = pay_with_qk(found.model) if budget == "paper" else pay_with_inner(found.model, reference)
    return dataclasses.replace(found, model=model)


def follow_published(base: str, changes: dict[str, Any]) -> None:
    """Add to the changes in what a mixer's published model differs, unless they say otherwise."""
    own = published(base, changes.get("model.mixer", ()))
    fields = {key: value for key, value in own.items() if key == "model.mixer" or key not in changes}
    if fields:
        said = " ".join(f"{key}={shorten(value)}" for key, value in fields.items())
        notice.once(f"{said}: as {changes['model.mixer']} was published at this size")
    changes |= fields


def shorten(value: Any) -> str:
    return f"{value[0]},…,{value[-1]}" if isinstance(value, tuple) else str(value)


def pay_with_qk(model: ModelConfig) -> ModelConfig:
    """The model with the widths of q and k that the paper's rule gives its mixers; itself where the rule changes nothing."""
    found = {mixer: match_qk(mixer, model.width, model.length, model.heads) for mixer in dict.fromkeys(model.turn)}
    sizes = {mixer: one.size for mixer, one in found.items() if one is not None and isinstance(one.size, int)}
    for mixer, size in sizes.items():
        one = found[mixer]
        assert one is not None
        notice.once(
            f"model.size={size} ({size / model.width:.3g} of the width, q and k) gives a layer of {mixer} "
            f"{one.parameters:,} parameters, {one.parameters / one.target:.3f} of 4 · {model.width}²"
        )
    if not sizes:
        return model
    each = tuple(map(sizes.get, model.turn))
    return model.replace(size=each if len(each) > 1 else each[0])


def pay_with_inner(model: ModelConfig, reference: ModelConfig) -> ModelConfig:
    """The model with a feed-forward that makes it equal to the reference; itself where both have the same mixer."""
    if model.mixer == reference.mixer:
        return model
    found = match(model, reference)
    notice.once(
        f"model.inner={found.inner} (not {reference.inner}) gives {shorten(model.mixer)} as many parameters as "
        f"{shorten(reference.mixer)}: {count(found):,} and {count(reference):,}"
    )
    return found


def find_config(name: str) -> tuple[str, RunConfig, dict[str, Any]]:
    """A named configuration; or that of a file (config_files.py): its base, and the changes that the file makes to it.

    The base comes with its name, which is empty for a file that has none.
    """
    if not is_config_file(name):
        if name not in CONFIGS:
            known = ", ".join(CONFIGS)
            hint = did_you_mean(name, CONFIGS)
            raise ValueError(
                f"unknown configuration {name!r}; known are {known}, and files that end in {', '.join(SUFFIXES)}{hint}"
            )
        return name, CONFIGS[name], {}
    base, texts = read_config_file(Path(name))
    changes: dict[str, Any] = {}
    for key, text in texts.items():
        with naming(f"[{key.partition('.')[0]}]"):
            changes |= read_overrides([f"{key}={text}"], fields(), "a training run")
    if base is not None:
        if base not in CONFIGS:
            choose_from("base", base, tuple(CONFIGS))
        return base, CONFIGS[base], changes
    parts: dict[str, dict[str, Any]] = {part: {} for part in PARTS}
    for key, value in changes.items():
        part, _, field = key.partition(".")
        parts[part][field] = value
    try:
        return "", RunConfig.from_dict(parts), {}
    except TypeError as error:  # a field without a default is missing
        raise ValueError(f'it lacks fields ({error}); give them, or a base such as base = "tiny"') from error


def follow_tokenizer(config: RunConfig, changes: dict[str, Any]) -> None:
    """Add the vocabulary of a changed corpus or tokenizer to the changes, unless they have one.

    A configuration's own stays where it is the tokenizer's, rounded up.
    """
    if "model.vocabulary" in changes or not changes.keys() & {"data.corpus", "data.tokenizer"}:
        return
    corpus, tokenizer = (changes.get(f"data.{name}", getattr(config.data, name)) for name in ("corpus", "tokenizer"))
    needed = find_vocabulary(corpus, tokenizer)
    if needed is not None and not needed <= config.model.vocabulary < needed + PADDING:
        changes["model.vocabulary"] = needed
        notice.once(f"model.vocabulary={needed} (not {config.model.vocabulary}): as many tokens as the tokenizer has")


def follow_mixer(config: RunConfig, rates: Mapping[str, float], changes: dict[str, Any]) -> None:
    """Add the learning rate that was searched for a changed mixer to the changes, unless they have one."""
    mixer = changes.get("model.mixer", config.model.mixer)
    if not rates or "train.lr" in changes or mixer == config.model.mixer:
        return
    label = SAME.get(mixer, mixer) if isinstance(mixer, str) else ",".join(mixer)
    rate = rates.get(label, UNSEARCHED)
    if rate != config.train.lr:
        changes["train.lr"] = rate
        why = f"the best of those tried with {label}" if label in rates else f"no rate was searched for {label}, so try others"
        notice.once(f"train.lr={rate:g} (not {config.train.lr:g}): {why}")


def find_vocabulary(corpus: str, tokenizer: str | None) -> int | None:
    """How many tokens a prepared corpus or a tokenizer has; None if that cannot be known before the run starts."""
    if (Path(corpus) / INDEX).is_file():
        return read_index(Path(corpus))["tokenizer"]["vocabulary"]
    kind, _, size = (tokenizer or "bytes").partition(":")
    if kind == "bpe" and size.isdigit():
        return int(size)
    try:
        return find_tokenizer(tokenizer or "bytes").vocabulary
    except ValueError:
        return None  # start() says why


def apply(config: RunConfig, changes: dict[str, Any]) -> RunConfig:
    parts: dict[str, dict[str, Any]] = {"model": {}, "data": {}, "train": {}}
    for key, value in changes.items():
        part, _, field = key.partition(".")
        parts[part][field] = value
    if "context" in parts["data"]:
        parts["model"].setdefault("length", parts["data"]["context"])
    if parts["model"].keys() & {"width", "style"}:
        parts["model"].setdefault("inner", None)
    made: dict[str, Any] = {part: dataclasses.replace(getattr(config, part), **given) for part, given in parts.items()}
    return RunConfig(**made)


def match(model: ModelConfig, reference: ModelConfig) -> ModelConfig:
    """The model with a feed-forward as wide as it takes to have the reference's number of parameters."""
    assert reference.inner is not None
    inner = match_inner_width(count(reference), partial(build_without_memory, model), reference.inner)
    return model.replace(inner=inner)


def build_without_memory(model: ModelConfig, inner: int | None = None) -> LanguageModel:
    with torch.device("meta"):
        return LanguageModel(model if inner is None else model.replace(inner=inner))


def count(model: ModelConfig) -> int:
    return count_parameters(build_without_memory(model))


def fields() -> dict[str, Any]:
    """The fields that can be changed, with their types."""
    parts = {"model": ModelConfig, "data": DataConfig, "train": TrainConfig}
    return {"budget": Budget} | {
        f"{part}.{f.name}": get_type_hints(made)[f.name] for part, made in parts.items() for f in dataclasses.fields(made)
    }
