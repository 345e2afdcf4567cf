"""Hybrids: a pattern names the mixers of a model's layers, each has the size of its own budget, and a model is a model."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
import torch
from hf_small import VOCABULARY, native, some_tokens, write
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from helpers import assert_same
from hypermlp.cli import app
from hypermlp.mixers import MIXERS, build_mixer, is_known, new_layers
from hypermlp.mixers.hybrid import is_hybrid, layers, outside_budget, pattern, spell
from hypermlp.models.budget import TOLERANCE, count_mixer, match, match_models
from hypermlp.models.generate import generate
from hypermlp.models.lm import LanguageModel, ModelConfig, count_parameters, published_inner
from hypermlp.models.saved import load_model, save_model
from hypermlp.report.page import write_report
from hypermlp.report.tasks import show_plan
from hypermlp.report.terminal import new_console
from hypermlp.runs.config_files import to_toml
from hypermlp.runs.configs import configure
from hypermlp.studies.catalogue import StudyOptions, plan_study
from hypermlp.studies.executors import LocalPool
from hypermlp.studies.folder import Folder
from hypermlp.studies.language import language_study
from hypermlp.studies.mad import task_study
from hypermlp.studies.task_models import model_folder
from hypermlp.verdicts.folders import read_studies
from hypermlp.verdicts.results import plain_name

PATTERN = "gated_deltanet*3+hyperglu"
NAMES = ["gated_deltanet+S-pc", "G-cg-q-12o@8+gla", "hyperglu+registers=2+softmax*3"]


@pytest.mark.parametrize(
    "name, mixers",
    [
        ("hyperglu", ("hyperglu",)),
        ("hyperglu+registers=4", ("hyperglu+registers=4",)),
        ("gated_deltanet+hyperglu", ("gated_deltanet", "hyperglu")),
        (PATTERN, ("gated_deltanet",) * 3 + ("hyperglu",)),
        ("gla+hyperglu+registers=4+use_op1=false*2+S-pc", ("gla", *["hyperglu+registers=4+use_op1=false"] * 2, "S-pc")),
        ("my.py:Mine*2+gla", ("my.py:Mine", "my.py:Mine", "gla")),
    ],
)
def test_a_pattern_is_read_and_spelled(name: str, mixers: tuple[str, ...]) -> None:
    assert pattern(name) == mixers
    assert spell(mixers) == name
    assert is_hybrid(name) is (len(mixers) > 1)


@pytest.mark.parametrize("name", ["gla++hyperglu", "gla*0+hyperglu", "gla*x", "gla*2*2", "+gla", "*2"])
def test_what_is_no_pattern_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"NAME\*COUNT\+NAME"):
        pattern(name)
    assert not is_hybrid(name)
    assert not is_known(name)


def test_a_pattern_repeats_over_the_depth_or_an_error_says_what_would() -> None:
    config = ModelConfig(vocabulary=9, width=16, depth=8, length=8, mixer=PATTERN)
    assert config.mixers == pattern(PATTERN) * 2
    with pytest.raises(ValueError, match=r"depth \(6\) must be a multiple of the 4 layers of gated.*; try depth 8"):
        config.replace(mixer=PATTERN, depth=6)
    with pytest.raises(ValueError, match=r"depth \(2\) must be a multiple"):
        task_study("clean", "quick").check([PATTERN], 1)
    with pytest.raises(ValueError, match="one number for each"):
        config.replace(size=(8, 8))
    assert config.replace(size=(8, None, 12, 16)).layers[-4:] == list(zip(pattern(PATTERN), (8, None, 12, 16), strict=True))


def test_a_layer_is_one_mixer_and_a_part_must_be_known() -> None:
    with pytest.raises(ValueError, match="is a hybrid, the mixers of several layers; a single layer takes one of gla, softmax"):
        build_mixer("gla+softmax", 16, 8)
    with pytest.raises(ValueError, match="unknown mixer 'delta-net'; did you mean 'deltanet'"):
        build_mixer("gla+delta-net", 16, 8)
    assert is_known(PATTERN)
    assert not is_known("gla+nothing")


@pytest.mark.parametrize("name", ["gated_deltanet+hyperglu", "hyperglu+gated_deltanet", PATTERN, "S-pc+mamba", "gla+S-g-q"])
@pytest.mark.parametrize("width, length", [(128, 128), (256, 512)])
def test_every_layer_has_the_size_that_its_mixer_has_alone(name: str, width: int, length: int) -> None:
    alone = {mixer: match(mixer, width, length) for mixer in pattern(name)}
    found = match(name, width, length)
    assert [size for _, size in layers(name, len(pattern(name)), found.size)] == [alone[mixer].size for mixer in pattern(name)]
    assert found.parameters == sum(alone[mixer].parameters for mixer in pattern(name))
    assert found.target == 4 * width**2 * len(pattern(name))
    make = new_layers(name, len(pattern(name)), width, length, found.size)
    with torch.device("meta"):
        assert sum(count_parameters(make()) for _ in pattern(name)) == found.parameters
    if all(one.reached for one in alone.values()):
        assert abs(found.deviation) <= TOLERANCE
        assert not found.note


def test_models_of_hybrids_and_single_mixers_are_equal() -> None:
    names = ["S-pc", "gated_deltanet", "hyperglu", "gated_deltanet+hyperglu", "gated_deltanet+S-pc", "R-12o!+gla"]

    def build(mixer: str, size: object, inner: int) -> LanguageModel:
        return LanguageModel(
            ModelConfig(vocabulary=65, width=64, depth=2, length=64, mixer=mixer, size=size, inner=inner)  # type: ignore[arg-type]
        )

    found = match_models(names, 64, 64, build, published_inner(64))
    counts = [found[name].parameters for name in names if not outside_budget(name)]
    assert max(counts) <= (1 + TOLERANCE) * min(counts)
    assert found["R-12o!+gla"].inner == published_inner(64), "nobody is made to match a label with !"


@pytest.mark.parametrize("name", [PATTERN, *NAMES])
def test_a_hybrid_decodes_writes_and_is_reloaded(name: str, tmp_path: Path) -> None:
    net, tokens = native(name, depth=4).double(), some_tokens(2, 9)
    cache = net.new_cache(2)
    parts = [net(part, cache=cache) for part in tokens.split([4, 1, 1, 3], 1)]
    assert_same(torch.cat(parts, 1), net(tokens))
    net = net.float()
    save_model(net, tmp_path)
    again, theirs = load_model(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config == net.config == theirs.config.plain()
    assert torch.equal(again(tokens), net(tokens))
    assert torch.equal(theirs(tokens).logits, net(tokens))
    assert write(theirs, tokens, 6) == generate(net, tokens, 6).tolist() == generate(again, tokens, 6).tolist()


def test_sizes_of_the_layers_are_exported(tmp_path: Path) -> None:
    net = native("gated_deltanet+hyperglu", size=(24, 8))
    save_model(net, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["size"] == [24, 8]
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.plain() == load_model(tmp_path).config == net.config
    parts = [count_mixer(mixer, 16, net.config.length, size) for mixer, size in net.config.layers]
    assert [count_parameters(block.get_submodule("mixer")) for block in net.blocks] == parts
    assert load_model(tmp_path)(torch.zeros(1, 3, dtype=torch.long)).shape == (1, 3, VOCABULARY)


def test_training_runs_take_a_pattern_and_the_papers_budget_pays_in_each_layer(tmp_path: Path) -> None:
    model = configure("tiny", [f"model.mixer={PATTERN}"]).model
    assert model.mixers == pattern(PATTERN)
    config = configure("nanogpt-owt2", ["model.mixer=hyperglu+S-pc"])
    assert config.model.size == (configure("nanogpt-owt2", ["model.mixer=hyperglu"]).model.size, None)
    file = tmp_path / "my.toml"
    file.write_text(to_toml(config.to_dict()))
    assert configure(str(file)) == config
    assert configure("tiny", ["model.mixer=gla+hyperglu", "model.size=none,24"]).model.size == (None, 24)


STUDY = dataclasses.replace(language_study("quick"), width=16, depth=2, steps=4, evaluations=2, sample=1, length=32)


def test_a_study_has_a_hybrid_beside_its_single_mixers(tmp_path: Path) -> None:
    mixers = ("S-pc", "gla", "gla+S-pc", "gla*2")
    records = STUDY.run(tmp_path, mixers, seeds=2, executor=LocalPool(1))
    assert [record["error"] for record in records] == [None] * 8
    counts = [record["parameters"] for record in records]
    assert max(counts) <= (1 + TOLERANCE) * min(counts)
    sizes = {record["mixer"]: record["size"] for record in records}
    assert sizes["gla+S-pc"] == [sizes["gla"], sizes["S-pc"]]
    twice = {record["seed"]: record["final"] for record in records if record["mixer"] == "gla*2"}
    assert twice == {record["seed"]: record["final"] for record in records if record["mixer"] == "gla"}
    assert STUDY.run(tmp_path, mixers, seeds=2) == records, "nothing is run again"
    (found,) = read_studies(tmp_path)
    assert set(found.mixers) == set(mixers)
    assert found.gain("gla+S-pc", "gla", "loss") is not None
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "gla+S-pc" in page
    assert "Gated linear attention, then softmax attention" in page
    assert plain_name("gla*2") == "2 layers of Gated linear attention"


def test_a_mixer_of_ones_own_takes_part(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from hypermlp.mixers.gla import GLA\n\nclass Mine(GLA):\n    pass\n")
    name = f"{file}:Mine+gla"
    try:
        STUDY.check([name], 1)
        with Folder(tmp_path / "runs") as folder:
            STUDY.plan_jobs(folder, [name], 1)
            assert list(folder.plan["own"]) == [f"{file}:Mine"]
    finally:
        MIXERS.pop(f"{file}:Mine", None)


def test_names_are_safe_in_folders() -> None:
    assert model_folder(Path("models"), "copying", "gla*2+R-12o!").name == "copying-glax2+R-12o"


def test_the_sizes_of_a_hybrid_are_shown() -> None:
    shown = CliRunner().invoke(app, ["mixers", "gated_deltanet+hyperglu", "--width", "256", "--length", "64", "--json"])
    (table,) = json.loads(shown.stdout)
    assert [row["mixer"] for row in table["rows"]] == ["gated_deltanet", "hyperglu"]
    assert [row["parameters"] for row in table["rows"]] == [
        match(n, 256, 64).parameters for n in ("gated_deltanet", "hyperglu")
    ]


def test_a_plan_shows_the_sizes_of_its_hybrids() -> None:
    console = new_console(width=200, file=io.StringIO())
    show_plan(console, plan_study("mqar", StudyOptions(scale="quick", mixers="gated_deltanet+hyperglu,S-pc")))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "gated_deltanet (value width 22), hyperglu (as published)" in shown
