"""Copying and looking up: rows that do not change, oracles that solve them from the inputs alone, lengths beyond training."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from hypermlp.tasks import TASKS
from hypermlp.tasks.base import Part
from hypermlp.tasks.copying import KINDS, CopyingSetting, copy_rows, needle_rows, variable_rows

each_task = pytest.mark.parametrize("name", KINDS)
PARTS: tuple[Part, ...] = ("validation", "test")
SMALL = {"num_train": 64, "num_test": 32}
GOLDEN = {
    "copy": "a2a4a20f3d0a8ea9",
    "phone-book": "9901f3e1eaac9502",
    "induction": "878b0be2418cbb2b",
    "needle": "fb47cc9390ecc599",
    "variables": "4ea6c8e314c77088",
}


@each_task
def test_rows_are_the_same_for_ever(name: str) -> None:
    task = TASKS[name]
    (rows,) = task.evaluation(task.baseline, 0, "test")[task.headline(task.baseline)[0]]
    assert hashlib.sha256(rows.inputs.tobytes() + rows.targets.tobytes()).hexdigest()[:16] == GOLDEN[name]


@each_task
@pytest.mark.parametrize("offsets", [False, True])
def test_the_oracle_solves_every_row_from_its_inputs(name: str, offsets: bool) -> None:
    setting = CopyingSetting(task=f"{name}-offsets" if offsets else name, reach=4, **SMALL)
    task = TASKS[setting.task]
    blank = KINDS[name].vocabulary
    groups = [
        *task.training(setting, 0, 3),
        *(rows for part in PARTS for groups in task.evaluation(setting, 0, part).values() for rows in groups),
    ]
    for rows in groups:
        begin = int((rows.inputs[0] != blank).argmax())  # offsets are blanks in front
        assert (rows.inputs[:, :begin] == blank).all()
        counted = rows.targets != -100
        assert counted.any(1).all()
        assert (task.solve(setting, rows.inputs[:, begin:])[counted[:, begin:]] == rows.targets[counted]).all()
        assert rows.inputs.max() < setting.vocab_size
        assert rows.inputs.shape[1] <= (setting.seq_len if offsets else 4 * setting.seq_len)


@each_task
def test_tests_are_longer_than_training_and_share_no_row_with_it(name: str) -> None:
    task, setting = TASKS[name], CopyingSetting(task=name, num_train=256, num_test=64)
    trained = task.training(setting, 0, 0)
    assert max(rows.inputs.shape[1] for rows in trained) == setting.seq_len
    sets = task.evaluation(setting, 0, "test")
    lengths = [group.inputs.shape[1] for groups in sets.values() for group in groups]
    assert lengths[0] == setting.seq_len
    assert lengths[-1] > 7 * setting.seq_len
    assert list(task.evaluation(setting, 0, "validation")) == list(task.headline(setting)) == list(sets)[:1]
    seen = {row.tobytes() for rows in trained for row in rows.inputs}
    assert not seen & {row.tobytes() for groups in sets.values() for group in groups for row in group.inputs}
    again = task.training(setting, 0, 1)
    assert [rows.inputs.shape for rows in again] == [rows.inputs.shape for rows in trained]
    assert not all((a.inputs == b.inputs).all() for a, b in zip(again, trained, strict=True)), "every epoch is new"


def test_offsets_train_every_lag_up_to_the_longest_test() -> None:
    setting = CopyingSetting(task="needle-offsets", **SMALL)
    assert setting.seq_len == 256
    lengths = {rows.inputs.shape[1] for epoch in range(40) for rows in TASKS["needle-offsets"].training(setting, 0, epoch)}
    assert min(lengths) < 80
    assert max(lengths) > 240


def test_a_copy_by_hand() -> None:
    rows = copy_rows(np.random.default_rng(0), 1, 3)
    s = rows.inputs[0, 1:4].tolist()
    assert rows.inputs.tolist() == [[26, *s, 27, *s]]
    assert rows.targets.tolist() == [[-100] * 4 + [*s, 28]]


def test_hops_and_needles_are_what_the_slices_say() -> None:
    rows = variable_rows(np.random.default_rng(0), 200, 64)
    assert sorted(set(rows.facts["hops"])) == [1, 2, 3, 4]
    assert ((rows.inputs == 64).sum(1) == 3 * rows.facts["hops"]).all()
    rows = needle_rows(np.random.default_rng(0), 200, 64)
    assert (((rows.inputs >= 32) & (rows.inputs < 64)).sum(1) == rows.facts["needles"]).all()
    assert set(rows.facts["depth"][rows.targets != -100]) == {0, 1, 2, 3}


def test_trivial_answers_are_computed_from_the_data() -> None:
    found = TASKS["variables"].baselines(CopyingSetting(task="variables", reach=1, num_test=256), 0)
    assert found["the last value shown"]["accuracy"] == pytest.approx(1 / 3, abs=0.1)
    assert found["most frequent"]["accuracy"] < 0.1


@pytest.mark.parametrize(("name", "least"), {"copy": 1, "phone-book": 1, "induction": 3, "needle": 10, "variables": 15}.items())
def test_the_smallest_rows_are_solved_and_smaller_ones_refused(name: str, least: int) -> None:
    rows = KINDS[name].draw(np.random.default_rng(0), 50, least)
    counted = rows.targets != -100
    assert (KINDS[name].solve(rows.inputs)[counted] == rows.targets[counted]).all()
    for size in (least - 1, 0):
        with pytest.raises(ValueError, match=rf"\({size}\) must be .*at least {least}"):
            KINDS[name].draw(np.random.default_rng(0), 2, size)


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match=r"reach \(3\)"):
        CopyingSetting(task="copy", reach=3)
    with pytest.raises(ValueError, match=r"seq_len \(10\) must be at least 34"):
        CopyingSetting(task="copy", seq_len=10)
