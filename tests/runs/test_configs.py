"""Configurations by name or from a file, and their changes."""

import json
import math
from pathlib import Path

import pytest
import torch
import yaml

from hypermlp import notice
from hypermlp.mixers import build_mixer
from hypermlp.models.lm import LanguageModel, ModelConfig, count_parameters
from hypermlp.paper.published import SIZES, TABLE2_MIXERS
from hypermlp.paper.tables import TABLE2
from hypermlp.runs.config_files import to_toml
from hypermlp.runs.configs import CONFIGS, RATES, UNSEARCHED, build_without_memory, configure, count
from hypermlp.train.config import RunConfig
from hypermlp.train.optimisation import parameter_groups

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
    config = configure(name)
    update = config.train.batch * config.data.context
    assert update == pytest.approx(0.5e6, rel=0.05)
    untied = 0 if config.model.tied else config.model.vocabulary * config.model.width
    assert count(config.model) - untied == pytest.approx(parameters, rel=0.05)
    assert config.tokens == pytest.approx(tokens, rel=0.02)
    assert config.train.warmup * update == pytest.approx(warmup, rel=0.02)
    assert (config.train.weight_decay, config.train.clip, config.train.betas) == (0.1, 1.0, (0.9, 0.95))


def test_nanogpt_has_nanogpts_numbers() -> None:
    """Of its train.py, config/train_gpt2.py and model.py at commit 3adf61e; its model prints 123.59M without positions."""
    config = configure("nanogpt-owt2", ["model.mixer=S", "model.heads=12"])
    model, how = config.model, config.train
    assert (model.vocabulary, model.width, model.depth, model.length, model.tied) == (50304, 768, 12, 1024, True)
    assert (how.lr, how.final * how.lr, how.warmup, how.decay) == (6e-4, pytest.approx(6e-5), 2000, 600_000)
    assert (how.weight_decay, how.betas, how.clip, how.precision) == (0.1, (0.9, 0.95), 1.0, "bfloat16")
    assert (how.batch, how.micro, how.batch * config.data.context) == (5 * 8 * 12, 12, 491_520)
    assert (how.steps, how.evaluate_every) == (80 * 500, 500)  # the paper's
    assert how.evaluate_batches * how.batch == 200 * 12
    net = build_without_memory(model)
    assert count_parameters(net) - 1024 * 768 == 123_587_328
    assert not [name for name, _ in net.named_parameters() if name.endswith("bias")]
    groups = parameter_groups(net, how.weight_decay, decayed=how.decayed)
    assert [sum(p.numel() for p in group["params"]) for group in groups] == [124_354_560, 19_200]


@pytest.mark.parametrize("mixer", ["S", "hyperglu", "mamba"])
def test_nanogpts_projections_to_the_residual_stream_begin_smaller(mixer: str) -> None:
    torch.manual_seed(0)
    config = ModelConfig(vocabulary=32, width=64, depth=8, length=16, mixer=mixer, style="nanogpt")
    model = LanguageModel(config)
    for again in (False, True):
        if again:
            model.reset_parameters()
        for name, parameter in model.named_parameters():
            if name.endswith(("mixer.o.weight", "ffn.down.weight")):
                assert float(parameter.detach().std()) == pytest.approx(0.02 / 4, rel=0.05), name
            elif name.endswith(("ffn.up.weight", "embedding.weight")):
                assert float(parameter.detach().std()) == pytest.approx(0.02, rel=0.05), name


# flame's configurations (e11e7be), 340M and 1.3B: layers, heads, width of a head's keys and values, inner width.
FLAME = {
    "340m-15b": {
        "softmax": (24, 16, 64, 64, 2816),
        "deltanet": (24, 8, 128, 128, 2816),
        "gated_deltanet": (21, 6, 256, 512, 2816),
        "gla": (24, 4, 128, 256, 2816),
        "gsa": (24, 4, 256, 256, 2816),
        "hgrn2": (24, 8, 128, 128, 2816),
    },
    "1.3b-100b": {
        "softmax": (24, 32, 64, 64, 5632),
        "deltanet": (24, 16, 128, 128, 5632),
        "gated_deltanet": (21, 6, 256, 512, 5632),
        "gla": (24, 4, 256, 512, 5632),
        "gsa": (24, 4, 512, 512, 5632),
        "hgrn2": (24, 16, 128, 128, 5632),
    },
}


@pytest.mark.parametrize("name, mixer", [(name, mixer) for name in FLAME for mixer in FLAME[name]])
def test_rivals_of_table_2_have_their_published_heads_and_widths(name: str, mixer: str) -> None:
    model = configure(name, [f"model.mixer={mixer}"]).model
    with torch.device("meta"):
        layer = model.build_mixer(0)
    widths = layer.state_shapes() if hasattr(layer, "state_shapes") else {}
    key, value = widths["S"][1:] if "S" in widths else (widths["K"][1], widths["V"][2]) if "K" in widths else (64, 64)
    assert (model.depth, layer.n_head, key, value, model.inner) == FLAME[name][mixer]
    if mixer == "softmax":
        assert layer.q.out_features == layer.v.out_features == 64 * layer.n_head  # type: ignore[union-attr]
    if mixer == "gsa":
        assert (layer.slots, layer.slowness) == (64, 4 if name == "340m-15b" else 8)
    assert (model.tied, model.vocabulary, model.length) == (False, 32000, 4096)
    assert configure(name, [f"model.mixer={mixer}", "model.heads=2"]).model.heads == 2


def test_every_model_of_table_2_can_be_trained() -> None:
    for name, size in SIZES.items():
        assert list(TABLE2_MIXERS[size]) == list(TABLE2[size])
        for mixer in TABLE2_MIXERS[size].values():
            model = configure(name, [f"model.mixer={mixer}"]).model
            assert len(model.mixers) == model.depth
    layers = configure("340m-15b", ["model.mixer=differential"]).model.mixers
    assert [build_mixer(one, 64, 8).lambda_init for one in layers[:2]] == pytest.approx([0.2, 0.8 - 0.6 * math.exp(-0.3)])


@pytest.mark.parametrize(
    "name, mixer, size, ratio",
    [
        ("1.3b-100b", "hyperglu", 512, 0.999),  # d/4
        ("340m-15b", "hyperglu", 128, 1.063),  # d/8, and still above: the factors of 4096 lags
        ("340m-15b", "hypermlp", 140, 0.999),
        ("nanogpt-owt2", "hyperglu", 132, 0.999),
    ],
)
def test_the_papers_budget_is_paid_by_q_and_k_alone(name: str, mixer: str, size: int, ratio: float) -> None:
    model = configure(name, [f"model.mixer={mixer}"]).model
    assert (model.size, model.inner) == (size, CONFIGS[name].model.inner)
    assert configure(name).model == configure(name, ["model.mixer=hyperglu"]).model
    with torch.device("meta"):
        layer = model.build_mixer(0)
    assert layer.config.n_head == 2
    assert count_parameters(layer) / (4 * model.width**2) == pytest.approx(ratio, abs=5e-4)
    assert configure(name, [f"model.mixer={mixer}", f"model.size={size + 8}"]).model.size == size + 8


def test_another_budget_can_be_asked_for(tmp_path: Path) -> None:
    reference = CONFIGS["340m-15b"].model
    assert configure("340m-15b", ["budget=none"]).model == reference
    inner = configure("340m-15b", ["budget=inner", "model.mixer=deltanet"]).model
    assert inner.heads == 8
    assert count(inner) == pytest.approx(count(reference), rel=1e-3)
    paper = configure("tiny", ["budget=paper", "model.mixer=hypermlp"]).model
    assert (paper.inner, paper.size) == (CONFIGS["tiny"].model.inner, 12)  # width / 8
    path = tmp_path / "my.toml"
    path.write_text('base = "340m-15b"\nbudget = "none"')
    assert configure(str(path)).model == reference
    with pytest.raises(ValueError, match=r"budget .* must be one of paper, inner, none"):
        configure("tiny", ["budget=all"])


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
        ("train.step=3", r"no field 'train.step'; did you mean 'train.steps'\? The fields .*model.vocabulary"),
        ("train.steps", "must be FIELD=VALUE"),
        ("train.steps=many", r"train.steps \(many\) must be a whole number"),
        ("train.steps=1.5", "must be a whole number"),
        ("train.lr=fast", "must be a number"),
        ("train.checkpointing=yes", "must be true or false"),
        ("train.parallel=both", "must be one of ddp, fsdp"),
        ("train.betas=0.9", "must be comma-separated numbers$"),
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
        ("[train]\nstep = 3", r"my.toml: \[train\]: a training run has no field .train.step.; did you mean .train.steps."),
        ('base = "tiny"\n[train]\nsteps = "many"', r"train.steps \(many\) must be a whole number"),
        ("[train]\nsteps = 3", r'lacks fields .* or a base such as base = "tiny"'),
        ('base = "tny"', r"my.toml: base .'tny'. must be one of .*did you mean 'tiny'"),
        ("[optimizer]\nlr = 3", "has optimizer; it may have base, budget, and the sections model, data, train"),
        ("train = 3", "train in .* must be a section"),
        ("[train", "cannot be read"),
        ('base = "tiny"\n[model]\nmixer = "mine.py:Mine"', "code of its own"),
    ],
)
def test_mistakes_in_a_configuration_file_are_named(text: str, rule: str, tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=rule):
        configure(str(path))
    with pytest.raises(ValueError, match="--print-config"):
        configure(str(tmp_path / "none.toml"))


def test_a_run_that_ends_within_its_warm_up_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", notice.logger.name):
        configure("tiny", ["train.steps=61"])
        assert not caplog.text
        configure("tiny", ["train.steps=30"])
    assert "training ends (train.steps=30) before its warm-up does (train.warmup=60)" in caplog.text
    assert "train.warmup=3" in caplog.text


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"known are tiny, nanogpt-owt2, 340m-15b, 1.3b-100b"):
        configure("tny")
