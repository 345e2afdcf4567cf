"""Heads are a choice: mixers with any number of them obey the laws, and those that have none say so."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from helpers import assert_same, perturb, randn
from hypermlp.mixers import MIXERS, Entry, build_mixer
from hypermlp.mixers.labels import TABLE1
from hypermlp.models.budget import match, size_of
from hypermlp.models.lm import LanguageModel, ModelConfig, count_parameters
from hypermlp.models.saved import load_model, save_model
from hypermlp.runs.configs import configure
from hypermlp.train.config import RunConfig

WIDTH, T = 48, 13
WITH_HEADS = [name for name in sorted(MIXERS) if MIXERS[name].heads]
each_count = pytest.mark.parametrize("heads", [1, 2, 4])
each_mixer = pytest.mark.parametrize("name", [*WITH_HEADS, "S-pcg-q", "R-cg-q-12o", "G-pcg-q-12o", "G-cg-q-12o@8"])


def build(name: str, heads: int) -> nn.Module:
    """Of the smallest size that is odd in the steps of this number of heads, beside the smallest."""
    size = None if "@" in name else 3 * size_of(name, heads)[1]
    return perturb(build_mixer(name, WIDTH, 24, size, heads=heads).double())


@each_mixer
@each_count
def test_any_number_of_heads_obeys_the_laws(name: str, heads: int) -> None:
    mixer, x, bounds = build(name, heads), randn(1, T, WIDTH), [0, 4, 5, T]
    y = mixer(x)
    changed = torch.cat([x[:, :6], 5 * randn(1, T - 6, WIDTH, seed=1)], 1)
    assert_same(mixer(changed)[:, :6], y[:, :6])
    packed = mixer(x, cu_seqlens=torch.tensor(bounds))
    for a, b in pairwise(bounds):
        assert_same(packed[:, a:b], mixer(x[:, a:b]))
    cache = mixer.new_cache(1)
    assert_same(torch.cat([mixer(x[:, a:b], cache=cache) for a, b in pairwise(bounds)], 1), y)


@each_mixer
@each_count
def test_it_has_as_many_as_were_asked_for(name: str, heads: int) -> None:
    mixer = build(name, heads)
    assert getattr(mixer, "config", mixer).n_head == heads


@pytest.mark.parametrize("name", [*WITH_HEADS, *TABLE1])
def test_without_a_choice_there_are_two(name: str) -> None:
    """Mamba-2 has heads of 64, but at least two."""
    shapes = [{n: p.shape for n, p in build_mixer(name, WIDTH, 24, heads=heads).named_parameters()} for heads in (None, 2)]
    assert shapes[0] == shapes[1]


def test_mamba2_as_published_has_heads_of_64() -> None:
    assert (build_mixer("mamba2", 128, 24).n_head, build_mixer("mamba2", 128, 24, heads=2).n_head) == (4, 2)


@pytest.mark.parametrize("name", [name for name in sorted(MIXERS) if not MIXERS[name].heads])
def test_a_mixer_without_heads_says_so(name: str) -> None:
    with pytest.raises(ValueError, match=rf"heads \(4\) must be left unset: {name} has no heads to choose"):
        build_mixer(name, WIDTH, 24, heads=4)


def test_an_entry_that_takes_three_arguments_goes_on_working(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Entry(lambda d, n, s: build_mixer("gla", d, n, s), "Own", "nobody", 2026)
    monkeypatch.setitem(MIXERS, "own", own)
    assert build_mixer("own", WIDTH, 24).n_head == 2
    with pytest.raises(ValueError, match="own has no heads to choose"):
        build_mixer("own", WIDTH, 24, heads=2)


@pytest.mark.parametrize("heads", [0, -1, 2.5, True])
def test_heads_are_counted_from_one(heads: object) -> None:
    with pytest.raises(ValueError, match=r"heads .* must be a whole number of at least 1"):
        ModelConfig(vocabulary=11, width=16, depth=1, length=16, heads=heads)
    with pytest.raises(ValueError, match=r"heads .* must be a whole number of at least 1"):
        build_mixer("gla", 16, 16, heads=heads)


@pytest.mark.parametrize("name", ["softmax", "gla", "G-cg-q-12o", "hyperglu"])
@each_count
def test_budgets_count_the_heads(name: str, heads: int) -> None:
    found = match(name, 512, 128, heads=heads)
    built = build_mixer(name, 512, 128, found.size, heads=heads)
    assert found.reached
    assert found.parameters == count_parameters(built)


def test_a_saved_model_keeps_its_heads(tmp_path: Path) -> None:
    net = LanguageModel(ModelConfig(vocabulary=11, width=32, depth=1, length=16, heads=4))
    save_model(net, tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.config.heads == loaded.blocks[0].mixer.config.n_head == 4
    tokens = torch.arange(11)[None]
    assert torch.equal(loaded(tokens), net(tokens))


def test_files_without_heads_are_what_they_were() -> None:
    config = ModelConfig(vocabulary=11, width=16, depth=1, length=16)
    assert "heads" not in config.to_dict()
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_a_run_takes_heads() -> None:
    config = configure("tiny", ["model.heads=4"])
    assert config.model.heads == 4
    assert RunConfig.from_dict(config.to_dict()) == config
    assert "heads" not in configure("tiny").to_dict()["model"]


def test_hugging_face_knows_them_by_its_own_name() -> None:
    from hypermlp.models.hf import HyperConfig, HyperForCausalLM

    config = HyperConfig(vocabulary=11, width=32, depth=1, length=16, num_attention_heads=4)
    assert config.heads == config.num_attention_heads == config.plain().heads == 4
    assert HyperForCausalLM(config).model.blocks[0].mixer.config.n_head == 4
    assert HyperConfig.from_dict(config.to_dict()).heads == 4
    assert HyperConfig().heads is None
