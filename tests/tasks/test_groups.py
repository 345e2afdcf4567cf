"""Words of groups: the published tables and words, and an oracle."""

import random
from itertools import permutations

import numpy as np
import pytest

from helpers import digest
from hypermlp.config import IGNORED
from hypermlp.tasks.base import Rows
from hypermlp.tasks.groups import GROUP_WORDS, GROUPS, WordSetting, draw_words, group_table, running_products, word_setting


def test_tables_are_the_published_ones() -> None:
    found = {name: digest(group_table(name)) for name in ("S3", "S5", "A5")}
    assert found == {"S3": "bc3ff83846d7cc96", "S5": "1cc1b58c6d6c717e", "A5": "eda409cc773f0dd4"}


@pytest.mark.parametrize("name", GROUPS)
def test_tables_are_groups(name: str) -> None:
    table = group_table(name)
    numbers = np.arange(len(table))
    assert len(table) == {"Z2": 2, "S3": 6, "S5": 120}.get(name, 60)
    assert (table[0] == numbers).all()
    assert (table[:, 0] == numbers).all()
    assert (np.sort(table, axis=0) == numbers[:, None]).all()
    assert (np.sort(table, axis=1) == numbers).all()
    a, b, c = np.random.default_rng(0).integers(len(table), size=(3, 500))
    assert (table[table[a, b], c] == table[a, table[b, c]]).all()
    assert (table == table.T).all() == name.startswith("Z")


def test_words_and_products_are_the_published_ones() -> None:
    word = np.array([random.Random(0).choices(range(120), k=10)])
    assert word[0].tolist() == [101, 90, 50, 31, 61, 48, 94, 36, 57, 70]
    assert running_products(group_table("S5"), word)[0].tolist() == [101, 58, 108, 53, 119, 71, 26, 6, 33, 76]
    assert draw_words("S5", 1, 10, 0).tolist() == word.tolist()


def test_composing_permutations_solves_every_word() -> None:
    task, setting = GROUP_WORDS, WordSetting(num_test=30)
    elements = list(permutations(range(3)))
    for (rows,) in task.evaluation(setting, 0, "test").values():
        assert (rows.inputs[:, 0] == 7).all()
        assert (rows.targets[:, 0] == IGNORED).all()
        for row, targets in zip(rows.inputs[:, 1:], rows.targets[:, 1:], strict=True):
            state = (0, 1, 2)
            for token, target in zip(row, targets, strict=True):
                state = tuple(state[i] for i in elements[token])
                assert elements[target] == state
        assert (task.solve(setting, rows.inputs)[:, 1:] == rows.targets[:, 1:]).all()


def test_words_are_trained_at_all_lengths_and_those_of_a_test_differ() -> None:
    task, setting = GROUP_WORDS, word_setting("A5", num_train=150, num_test=40)
    groups = task.training(setting, 0, 0)
    assert [g.inputs.shape for g in groups] == [(10, length + 1) for length in range(2, 17)]
    parts = [
        {row.tobytes() for row in task.evaluation(setting, 0, part)["as trained, 16"][0].inputs}
        for part in ("validation", "test")
    ]
    assert len(parts[1]) == 40
    assert not parts[0] & parts[1]
    with pytest.raises(ValueError, match="vocab_size of 67"):
        WordSetting(group="A5")
    with pytest.raises(ValueError, match="different words"):
        draw_words("Z2", 100, 3, 0)


def test_the_curve_over_length_is_the_share_of_rows_right_so_far() -> None:
    task = GROUP_WORDS
    rows = Rows(np.zeros((4, 3), np.int64), np.array([[1, 1, 1], [1, 1, 2], [1, 2, 1], [2, 1, 1]]))
    answers = task.score_guesses([rows], lambda rows: np.ones_like(rows.inputs))
    assert task.curves(answers) == {"first t right": {"1": 0.75, "2": 0.5, "3": 0.25}}
