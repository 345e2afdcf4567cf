"""LoRA by name, and studies that adapt a model trained on another setting."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from helpers import randn
from hypermlp.mixers import build_mixer, lora
from hypermlp.studies import mad
from hypermlp.studies.cost import measure_costs
from hypermlp.studies.executors import LocalPool
from hypermlp.studies.folder import Folder
from hypermlp.studies.mad import TaskStudy
from hypermlp.studies.protocol import find_protocol, load_protocol

NAMES = ("G-cg-q-12o", "G-cg-q-12o+lora_vo=2", "G-cg-q-12o+lora_qk=2")


def small() -> TaskStudy:
    study = load_protocol(find_protocol("lora")).studies["mad"]
    assert isinstance(study, TaskStudy)
    changes = {"selective-copying": {"seq_len": 32, "num_tokens_to_copy": 4}}
    before = {"selective-copying": {"steps": 3, "lr": 2e-3, "changes": {"seq_len": 32, "num_tokens_to_copy": 2}}}
    return dataclasses.replace(
        study,
        tasks=("selective-copying",),
        steps={"selective-copying": 3},
        tests=8,
        examples=16,
        width=16,
        changes=changes,
        pretrain=before,
        search=None,
        rates=(1e-2,),
    )


def test_a_layer_with_adapters_begins_as_one_without() -> None:
    for name in ("hyperglu+lora_vo=2", "R-cg-q-12o+registers=2+lora_qk=3"):
        adapted = build_mixer(name, 32, 16)
        plain = build_mixer(lora.split(name)[0], 32, 16)
        plain.load_state_dict({key: adapted.state_dict()[key] for key in plain.state_dict()})
        x = randn(2, 8, 32, dtype=torch.float32)
        assert torch.allclose(adapted(x), plain(x), atol=1e-6)
        for parameter in adapted.parameters():
            parameter.data.add_(0.1)
        adapted.reset_parameters()
        ups = [p for key, p in adapted.named_parameters() if key.endswith(".up")]
        assert len(ups) == 2
        assert all((up == 0).all() for up in ups)


def test_only_adapters_move_after_the_training_that_comes_before(tmp_path: Path) -> None:
    study = small()
    with Folder(tmp_path) as folder:
        pairings = study.plan_pairings(folder, NAMES)
    assert len({(c.model.inner, c.model.mixer.size) for c in pairings}) == 1
    for pairing in pairings:
        (job,) = study.jobs(pairing.setting, pairing.mixer, pairing.model, seed=0)
        base = {name: value.clone() for name, value in mad.pretrained(job).items()}
        model, record = mad.train_model(job)
        assert record["metrics"] is not None
        moved = {name for name, value in model.state_dict().items() if name not in base or not torch.equal(value, base[name])}
        if pairing.mixer == NAMES[0]:
            assert moved == set(base)
        else:
            targets = ("v", "o") if "lora_vo" in pairing.mixer else ("q", "k")
            assert moved == {f"blocks.{i}.mixer.{t}.{part}" for i in range(2) for t in targets for part in ("down", "up")}


def test_such_a_study_runs_and_resumes(tmp_path: Path) -> None:
    records = small().run(tmp_path, NAMES, executor=LocalPool(1))
    assert [record["error"] for record in records] == [None] * 3
    again = small().run(tmp_path, NAMES, executor=LocalPool(1))
    assert [record["metrics"] for record in again] == [record["metrics"] for record in records]


@pytest.mark.parametrize(
    "name, rule",
    [
        ("softmax+lora_vo=2", "adapts HyperGLU, HyperMLP"),
        ("hyperglu+lora_vo=0", "at least 1"),
        ("hyperglu+lora_vo=x", "at least 1"),
    ],
)
def test_what_cannot_be_adapted_is_refused(name: str, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        build_mixer(name, 32, 16)


def test_mistakes_in_what_comes_before_are_named() -> None:
    with pytest.raises(ValueError, match=r"pretrain\.selective-copying must say steps, lr and changes"):
        dataclasses.replace(small(), pretrain={"selective-copying": {"steps": 3}})
    with pytest.raises(ValueError, match="noisy-recall has none"):
        dataclasses.replace(
            small(), tasks=("selective-copying", "noisy-recall"), steps={"selective-copying": 3, "noisy-recall": 3}
        )


def test_a_cost_counts_the_models_that_are_adapted_and_trains_none_of_them_to_the_end() -> None:
    study = dataclasses.replace(small(), steps={"selective-copying": 5000})
    before = {"selective-copying": {**(study.pretrain or {})["selective-copying"], "steps": 100_000}}
    costs = list(measure_costs(dataclasses.replace(study, pretrain=before), NAMES, 2))
    assert [(cost.mixer, cost.steps, cost.runs, cost.base) for cost in costs] == [
        (NAMES[0], 100_000, 2, True),
        *((name, 5000, 2, False) for name in NAMES),
    ]
    assert not mad.BASES
