"""A model that a study has saved: the one that was trained, and the same when it is opened again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hypermlp.studies import demo, mad
from hypermlp.studies.task_models import find_task_models, is_task_model, open_task_model, save_task_model

TASK = "selective-copying"


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    folder = tmp_path_factory.mktemp("study")
    short = replace(demo.demo_study(quick=True), steps=dict.fromkeys(demo.TASKS, 2), examples=64, tests=4)
    (setting,) = short.settings_of(TASK)
    (job,) = short.jobs(setting, "R-12o!", short.match(setting, ["R-12o!"])["R-12o!"], 0)
    model, record = mad.train_model(job)
    save_task_model(folder / "models", model, job, record)
    return folder, model


def test_a_saved_model_comes_back_with_its_examples(study: tuple[Path, torch.nn.Module]) -> None:
    folder, trained = study
    (place,) = find_task_models(folder, TASK, ["R-12o!"])
    assert is_task_model(place)
    assert not is_task_model(folder)
    found = open_task_model(place)
    assert (found.mixer, found.setting.task) == ("R-12o!", TASK)
    assert found.inputs.shape == found.targets.shape == (4, found.setting.seq_len)
    assert found.accuracy is not None
    assert 0 <= found.accuracy <= 1
    first, again = (model.eval()(found.inputs) for model in (found.model, trained))
    assert torch.equal(first, again)


def test_a_missing_model_is_an_error_that_says_what_is_there(study: tuple[Path, torch.nn.Module], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no model selective-copying-S-pc; there are selective-copying-R-12o"):
        find_task_models(study[0], TASK, ["S-pc"])
    with pytest.raises(ValueError, match=r"hypermlp demo --out .* trains them"):
        find_task_models(tmp_path, TASK, ["S-pc"])
