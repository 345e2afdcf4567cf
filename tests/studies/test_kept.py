"""A model of a task that is kept: the same that the demo trains, and the same when it is opened again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hypermlp.studies import demo
from hypermlp.studies.kept import is_kept, keep_model, open_kept


def test_a_kept_model_comes_back_with_its_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = demo.demo_study(quick=True)
    short = replace(study, steps=dict.fromkeys(demo.TASKS, 2), examples=64, tests=4)
    monkeypatch.setattr(demo, "demo_study", lambda quick: short)
    folder = tmp_path / "copying"
    assert not is_kept(folder)
    keep_model(folder, "selective-copying", quick=True)
    assert is_kept(folder)
    kept = open_kept(folder)
    assert kept.setting.task == "selective-copying"
    assert kept.inputs.shape == kept.targets.shape == (4, kept.setting.seq_len)
    assert kept.accuracy is not None
    assert 0 <= kept.accuracy <= 1
    first, again = (model(kept.inputs) for model in (kept.model, open_kept(folder).model))
    assert torch.equal(first, again)


def test_other_tasks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="task"):
        keep_model(tmp_path, "compression")
