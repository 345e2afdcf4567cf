"""ListOps and pictures as sequences: rows that do not change, oracles, splits, and baselines from the data."""

from __future__ import annotations

import dataclasses
import hashlib
import random

import numpy as np
import pytest

from hypermlp.tasks import TASKS
from hypermlp.tasks.base import Rows
from hypermlp.tasks.listops import CLOSE, MAX, MED, MIN, SM, ListOpsSetting, draw_tree, operate
from hypermlp.tasks.pixels import split_pictures

SMALL = ListOpsSetting(num_train=300, num_test=100)


def digest(groups: list[Rows]) -> str:
    return hashlib.sha256(b"".join(rows.inputs.tobytes() + rows.targets.tobytes() for rows in groups)).hexdigest()[:16]


def test_listops_rows_are_the_same_for_ever_and_solved_by_a_stack() -> None:
    task = TASKS["listops"]
    assert digest(task.training(ListOpsSetting(num_train=20, num_test=10), 0, 0)) == "b1c9ae87f8c3deba"
    seen: list[bytes] = []
    for groups in (task.training(SMALL, 0, 0), *(task.evaluation(SMALL, 0, part)["test"] for part in ("validation", "test"))):
        for rows in groups:
            assert (task.solve(SMALL, rows.inputs)[:, -1] == rows.targets[:, -1]).all()
            assert (rows.targets[:, :-1] == -100).all()
            assert 20 < rows.inputs.shape[1] - 1 < 200
            seen += [row.tobytes() for row in rows.inputs]
    assert len(seen) == 300 + 50 + 100 == len(set(seen)), "no row of a test is trained on"


def test_operations_by_hand() -> None:
    assert [operate(op, [4, 9, 3, 8]) for op in (MIN, MAX, MED, SM)] == [3, 9, 6, 4]
    assert operate(MED, [1, 2]) == 1
    inputs = np.array([[MAX, 4, 3, MIN, 2, 3, CLOSE, 1, SM, 9, 8, CLOSE, CLOSE, 15]])
    assert TASKS["listops"].solve(SMALL, inputs)[0, -1] == 7


def test_trees_are_no_deeper_and_wider_than_allowed() -> None:
    stream = random.Random(1)
    trees = [draw_tree(stream, 3, 4) for _ in range(500)]
    assert max(tree.depth for tree in trees) == 2
    assert max(len(tree.tokens) for tree in trees) <= 2 + 4 * 6


def test_the_root_operator_alone_is_a_strong_baseline() -> None:
    found = TASKS["listops"].baselines(ListOpsSetting(num_train=3000, num_test=600), 0)
    assert 0.3 < found["root operator"]["accuracy"] < 0.42
    assert found["most frequent"]["accuracy"] < 0.22


def test_pictures_are_split_by_class_and_never_shared() -> None:
    pytest.importorskip("sklearn")
    task = TASKS["pixels"]
    assert digest(task.evaluation(task.baseline, 0, "test")["test"]) == "52fc0b6e52ab398d"
    parts = split_pictures(0)
    assert {name: len(which) for name, which in parts.items()} == {"train": 1097, "validation": 200, "test": 500}
    assert len(set(np.concatenate(list(parts.values())).tolist())) == 1797
    (rows,) = task.evaluation(task.baseline, 0, "test")["test"]
    counts = np.bincount(rows.targets[:, -1])[18:]
    assert counts.min() >= 47
    assert counts.max() <= 53
    assert task.baselines(task.baseline, 0)["nearest neighbour"]["accuracy"] > 0.97


def test_few_pictures_are_of_every_class() -> None:
    pytest.importorskip("sklearn")
    task = TASKS["pixels"]
    setting = dataclasses.replace(task.baseline, num_train=100, num_test=50)
    for (rows,) in (task.training(setting, 0, 0), task.evaluation(setting, 0, "test")["test"]):
        assert len(set(rows.targets[:, -1])) == 10


def test_next_pixels_are_scored_in_bits() -> None:
    pytest.importorskip("sklearn")
    task = TASKS["pixels-next"]
    (rows,) = task.evaluation(task.baseline, 0, "test")["test"]
    assert (rows.inputs[:, 1:] == rows.targets[:, :-1]).all()
    found = task.baselines(task.baseline, 0)
    bits = {name: scores["bits"] for name, scores in found.items()}
    assert 2 < bits["shades by place and pixel before"] < bits["shades by place"] < np.log2(17)
    assert found["shades by place"]["sets"]["test"]["bits"] == pytest.approx(bits["shades by place"])
