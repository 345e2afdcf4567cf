"""The initial scale of a mixer's linear layers: one choice for every mixer, kept when it begins again."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hypermlp.config import InitScale
from hypermlp.mixers import MIXERS, build_mixer
from hypermlp.models.lm import LanguageModel, ModelConfig

WIDTH = 64
ALL = (*MIXERS, "S-pc", "G-cg-q-12o", "R-12!", "G-cg-q-12o+lora_vo=2")
STD = {"0.02": lambda weight: 0.02, "torch": lambda weight: (3 * weight.shape[1]) ** -0.5, "width": lambda weight: WIDTH**-0.5}


def new(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return build_mixer(name, WIDTH, 32, **options)


def weights(mixer: Any) -> dict[str, Tensor]:
    return {name: m.weight.detach() for name, m in mixer.named_modules() if isinstance(m, nn.Linear)}


@pytest.mark.parametrize("name", ALL)
def test_linear_layers_begin_at_the_scale_and_nothing_else_changes(name: str) -> None:
    usual = new(name)
    assert usual.init_scale == "0.02"
    for scale in ("torch", "width"):
        mixer = new(name, init_scale=scale)
        scaled = {id(module) for module in mixer.scaled()} | {id(m) for m in mixer.modules() if hasattr(m, "reset_adapter")}
        names = {n for n, m in mixer.named_modules() if id(m) in scaled}
        assert {"o", "into", "q", "qkv", "r", "i"} & names
        for n in names:
            weight = mixer.get_submodule(n).weight
            if weight.numel() >= 1000:
                assert weight.std().item() == pytest.approx(STD[scale](weight), rel=0.15)
            if scale == "torch":
                assert weight.abs().max() <= weight.shape[1] ** -0.5
        for n, p in usual.named_parameters():
            other = mixer.get_parameter(n)
            assert other.shape == p.shape
            if n.rpartition(".")[0] not in names and p.numel() > 1 and p.std() == 0:
                assert torch.equal(other, p), f"{n} is the same constant"


@pytest.mark.parametrize("name", ["hyperglu", "S-pc", "mamba", "kda", "linear"])
@pytest.mark.parametrize("scale", ["torch", "width"])
def test_a_mixer_that_begins_again_keeps_its_scale(name: str, scale: InitScale) -> None:
    mixer = new(name, init_scale=scale)
    before = {n: w.std().item() for n, w in weights(mixer).items()}
    with torch.no_grad():
        for p in mixer.parameters():
            p.zero_()
    mixer.reset_parameters()
    for n, w in weights(mixer).items():
        assert w.std().item() == pytest.approx(before[n], rel=0.4), n
    assert mixer.made_with().init_scale == scale
    meta = LanguageModel(ModelConfig(vocabulary=32, width=WIDTH, depth=1, length=16, mixer=name, init_scale=scale))
    meta.to_empty(device="cpu").reset_parameters()
    o = meta.blocks[0].mixer.o.weight
    assert o.std().item() == pytest.approx(STD[scale](o), rel=0.1)


@pytest.mark.parametrize("name", ["hyperglu", "S-pc", "gated_deltanet"])
def test_the_usual_scale_draws_the_same_numbers_as_ever(name: str) -> None:
    """The first linear layer that a model draws: those of a normal distribution with the published deviation."""
    given, usual = new(name, init_scale="0.02"), new(name)
    for p, q in zip(given.parameters(), usual.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_language_models_embeddings_feed_forwards_and_head_keep_their_scale() -> None:
    config = ModelConfig(vocabulary=300, width=WIDTH, depth=2, length=16, mixer="S-pc", init_scale="torch", tied=False)
    model = LanguageModel(config)
    for weight in (model.embedding.weight, model.head.weight, model.blocks[0].ffn.up.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.blocks[1].mixer.q.weight.std().item() == pytest.approx(1 / math.sqrt(3 * WIDTH), rel=0.05)
    small = LanguageModel(config.replace(style="nanogpt"))
    for block in small.blocks:
        assert block.mixer.o.weight.std().item() == pytest.approx(1 / math.sqrt(3 * WIDTH) / 2, rel=0.1)
        assert block.ffn.down.weight.std().item() == pytest.approx(0.01, rel=0.1)


def test_files_from_before_and_after_are_read_by_each_other() -> None:
    config = ModelConfig(vocabulary=30, width=16, depth=1, length=16)
    assert "init_scale" not in config.to_dict()
    other = config.replace(init_scale="torch")
    assert other.to_dict()["init_scale"] == "torch"
    assert ModelConfig.from_dict(other.to_dict()) == other
    with pytest.raises(ValueError, match=r"init_scale \('big'\) must be one of '0.02', 'torch', 'width'"):
        config.replace(init_scale="big")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"init_scale \('big'\)"):
        build_mixer("hyperglu", 16, 16, init_scale="big")  # type: ignore[arg-type]
