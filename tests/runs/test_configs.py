"""Configurations by name or from a file, and their changes."""

import json
from pathlib import Path

import pytest
import yaml

from hypermlp import notice
from hypermlp.runs.config_files import to_toml
from hypermlp.runs.configs import CONFIGS, RATES, UNSEARCHED, configure, count
from hypermlp.train.config import RunConfig

RESULTS = Path(__file__).parents[2] / "results"


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations_are_json_data(name: str) -> None:
    config = CONFIGS[name]
    assert RunConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    "name, parameters, tokens, warmup",
    [("340m-15b", 340e6, 15e9, 1e9), ("1.3b-100b", 1.3e9, 100e9, 1e9), ("nanogpt-owt2", 124e6, 40_000 * 0.5e6, 2000 * 0.5e6)],
)
def test_the_papers_settings(name: str, parameters: float, tokens: float, warmup: float) -> None:
    config = CONFIGS[name]
    update = config.train.batch * config.data.context
    assert update == pytest.approx(0.5e6, rel=0.05)
    assert count(config.model) == pytest.approx(parameters, rel=0.05)
    assert config.tokens == pytest.approx(tokens, rel=0.02)
    assert config.train.warmup * update == pytest.approx(warmup, rel=0.02)
    assert (config.train.weight_decay, config.train.clip, config.train.betas) == (0.1, 1.0, (0.9, 0.95))


def test_fields_are_changed_and_what_follows_from_them_follows() -> None:
    config = configure(
        "tiny", ["data.context=64", "model.width=48", "train.lr=1e-3", "train.checkpointing=TRUE", "model.size=none"]
    )
    assert (config.data.context, config.model.length, config.model.inner) == (64, 64, 128)
    assert (config.train.lr, config.train.checkpointing, config.model.size) == (1e-3, True, None)
    assert configure("tiny", ["train.betas=0.8,0.9"]).train.betas == (0.8, 0.9)
    assert configure("tiny", ["data.context=64", "model.length=32"]).model.length == 32


@pytest.mark.parametrize("mixer", ["softmax", "hyperglu,softmax", "gla"])
def test_another_mixer_gets_as_many_parameters(mixer: str) -> None:
    reference = count(CONFIGS["tiny"].model)
    changed = configure("tiny", [f"model.mixer={mixer}"]).model
    assert changed.mixer == (tuple(mixer.split(",")) if "," in mixer else mixer)
    assert count(changed) == pytest.approx(reference, rel=0.005)
    assert configure("tiny", [f"model.mixer={mixer}", "model.inner=64"]).model.inner == 64


def test_the_learning_rate_follows_the_mixer_unless_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(notice, "once", told.append)
    rates = RATES["tiny"]
    assert len(set(rates.values())) > 1
    for names, label in ((("hyperglu", "G-cg-q-12o"), "G-cg-q-12o"), (("softmax", "S-p"), "S-p"), (("S-pc",), "S-pc")):
        for name in names:
            assert configure("tiny", [f"model.mixer={name}"]).train.lr == rates[label]
            assert configure("tiny", [f"model.mixer={name}", "train.lr=1e-3"]).train.lr == 1e-3
    assert CONFIGS["tiny"].train.lr == rates["G-cg-q-12o"]
    for mixer in ("gla", "hyperglu,softmax"):
        assert configure("tiny", [f"model.mixer={mixer}"]).train.lr == UNSEARCHED
        assert any(f"no rate was searched for {mixer}" in message for message in told)
    path = tmp_path / "my.toml"
    path.write_text('base = "tiny"\n[model]\nmixer = "softmax"')
    assert configure(str(path)).train.lr == rates["S-p"]
    path.write_text(to_toml(configure("tiny", ["train.lr=1e-4"]).to_dict()))
    assert configure(str(path), ["model.mixer=softmax"]).train.lr == 1e-4
    assert configure("nanogpt-owt2", ["model.mixer=softmax"]).train.lr == CONFIGS["nanogpt-owt2"].train.lr


@pytest.mark.parametrize(
    "override, rule",
    [
        ("train.step=3", "no field 'train.step'; it has model.vocabulary, .*did you mean 'train.steps'"),
        ("train.steps", "must be FIELD=VALUE"),
        ("train.steps=many", r"train.steps \(many\) must be a whole number"),
        ("train.steps=1.5", "must be a whole number"),
        ("train.lr=fast", "must be a number"),
        ("train.checkpointing=yes", "must be true or false"),
        ("train.parallel=both", "must be one of ddp, fsdp"),
        ("train.betas=0.9", "numbers with commas"),
        ("model.mixer=attention", "attention"),
        ("train.micro=5", "divisible"),
    ],
)
def test_bad_overrides_are_refused(override: str, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        configure("tiny", [override])


@pytest.mark.parametrize("suffix", [".toml", ".yaml"])
def test_a_configuration_is_printed_and_read_from_a_file(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"my{suffix}"
    model = ("model.width=16", "model.mixer=hyperglu,softmax")
    train = ("train.steps=6", "train.betas=0.8,0.9", "train.clip=none", "train.decayed=all")
    changed = configure("tiny", [*model, *train, "data.documents=true"])
    assert (changed.train.clip, changed.train.decayed) == (None, "all")
    path.write_text(
        to_toml(changed.to_dict()) if suffix == ".toml" else yaml.safe_dump(json.loads(json.dumps(changed.to_dict())))
    )
    assert configure(str(path)) == changed
    assert configure(str(path), ["train.steps=7"]).train.steps == 7
    small = {"base": "tiny", "train": {"steps": 3, "lr": 1e-4}, "data": {"context": 64}}
    path.write_text(
        'base = "tiny"\n[train]\nsteps = 3\nlr = 1e-4\n[data]\ncontext = 64' if suffix == ".toml" else yaml.safe_dump(small)
    )
    found = configure(str(path))
    assert found == configure("tiny", ["train.steps=3", "train.lr=1e-4", "data.context=64"])


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*/*/run.json")), ids=lambda path: path.parent.name)
def test_runs_of_earlier_versions_have_the_configuration_that_they_had(path: Path) -> None:
    stored = json.loads(path.read_text())["config"]
    assert json.loads(json.dumps(RunConfig.from_dict(stored).to_dict())) == stored


@pytest.mark.parametrize(
    "text, rule",
    [
        ("[train]\nstep = 3", r"my.toml: \[train\]: a training run has no field .train.step.; .* did you mean .train.steps."),
        ('base = "tiny"\n[train]\nsteps = "many"', r"train.steps \(many\) must be a whole number"),
        ("[train]\nsteps = 3", r'lacks fields .* or a base such as base = "tiny"'),
        ('base = "tny"', r"my.toml: base .'tny'. must be one of .*did you mean 'tiny'"),
        ("[optimizer]\nlr = 3", "has optimizer; it may have base, and the sections model, data, train"),
        ("train = 3", "train in .* must be a section"),
        ("[train", "cannot be read"),
        ('base = "tiny"\n[model]\nmixer = "mine.py:Mine"', "somebody's own code"),
    ],
)
def test_mistakes_in_a_configuration_file_are_named(text: str, rule: str, tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=rule):
        configure(str(path))
    with pytest.raises(ValueError, match="--print-config"):
        configure(str(tmp_path / "none.toml"))


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"known are tiny, nanogpt-owt2, 340m-15b, 1.3b-100b"):
        configure("tny")
