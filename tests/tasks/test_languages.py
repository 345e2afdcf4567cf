"""Formal languages: the published rows, and an oracle for each."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helpers import digest
from hypermlp.config import IGNORED
from hypermlp.tasks.languages import (
    EQUALS,
    LANGUAGES,
    ParitySetting,
    arithmetic_answer,
    cycle_answer,
    parity_answer,
    parity_row,
)


def test_parity_has_the_published_rows() -> None:
    rows = [parity_row("train", number, 3, 40) for number in range(64)]
    assert [len(row) + 1 for row in rows[:8]] == [16, 26, 25, 40, 8, 16, 28, 4]
    inputs, targets = np.zeros((64, 255)), np.full((64, 255), -1)
    for i, row in enumerate(rows):
        inputs[i, : len(row)] = row
        targets[i, len(row) - 1] = parity_answer(row)
    assert (digest(inputs), digest(targets)) == ("9b315d43c325090b", "43ee49086e3a10c2")


def test_tests_of_parity_are_the_published_rows_beyond_40() -> None:
    """Published lengths are 40 to 256, drawn after the bits of a row."""
    task, setting = LANGUAGES["parity"], ParitySetting(num_test=300)
    published = [parity_row("test", number, 40, 256) for number in range(300)]
    kept = [tuple(row) for row in published if len(row) >= 40]
    assert len(kept) < 300, "some have 40 tokens"
    found = {tuple(row) for rows in task.evaluation(setting, 0, "test")["lengths 41-256"] for row in rows.inputs.tolist()}
    assert set(kept) <= found
    assert len(found) == 300


def test_rows_longer_than_the_published_ones_have_slices_of_their_own() -> None:
    task, setting = LANGUAGES["parity"], ParitySetting(num_test=200, tested=600)
    groups = task.evaluation(setting, 0, "test")["lengths 41-600"]
    lengths = {rows.inputs.shape[1] + 1: int(rows.facts["length"][0]) for rows in groups}
    assert max(lengths) > 512
    assert all(length <= end for length, end in lengths.items())
    assert task.label("length", lengths[max(lengths)]) == "513-1024"


def test_answers_of_the_languages() -> None:
    assert [parity_answer(row) for row in ([1, 2], [2, 2], [1, 1, 1])] == [2, 1, 1]
    assert cycle_answer([2, 2, 1, 3, 2]) == 2 + 4
    assert cycle_answer([3]) == 4 + 4
    text = {"+": 1, "-": 2, "*": 3, "=": EQUALS}
    for line in ("3=", "2+3*4=", "1-4*4-2=", "4*4*4-3+2*2="):
        row = [text.get(sign, 5 + int(sign) if sign.isdigit() else 0) for sign in line]
        assert arithmetic_answer(row) == eval(line[:-1]) % 5 + 5


@pytest.mark.parametrize("name", LANGUAGES)
def test_rows_of_a_language_ask_once_at_their_end_and_are_longer_in_the_test(name: str) -> None:
    task = LANGUAGES[name]
    setting = dataclasses.replace(task.baseline, num_train=76, num_test=50)
    for groups in (task.training(setting, 0, 0), task.training(setting, 0, 1)):
        assert {g.inputs.shape[1] for g in groups} <= set(range(2, 40))
        assert sum(len(g.inputs) for g in groups) == 76
    short, long = task.evaluation(setting, 0, "test").items()
    assert (short[0], long[0]) == ("lengths 3-40", "lengths 41-256")
    for groups, lengths in ((short[1], range(2, 40)), (long[1], range(40, 256))):
        assert sum(len(g.inputs) for g in groups) == 50
        for g in groups:
            assert g.inputs.shape[1] in lengths
            assert ((g.targets != IGNORED).sum(1) == 1).all()
            assert (task.solve(setting, g.inputs)[:, -1] == g.targets[:, -1]).all()
            assert g.inputs.min() > 0
            assert max(g.inputs.max(), g.targets.max()) < setting.vocab_size
    found = task.baselines(setting, 0)["most frequent"]["sets"]["lengths 41-256"]
    assert found["accuracy"] == pytest.approx(0.5 if name == "parity" else 0.25, abs=0.2)
    assert set(found["slices"]["length"]) <= {"41-80", "81-160", "161-256"}


class Sure(nn.Module):
    """Right about short rows, wrong about long ones, and sure of both."""

    def forward(self, tokens: Tensor) -> Tensor:
        right = torch.where((tokens == 2).sum(1) % 2 == 1, 2, 1)
        guess = right if tokens.shape[1] < 16 else 3 - right
        return 20 * nn.functional.one_hot(guess, 3).float()[:, None].expand(-1, tokens.shape[1], -1)


def test_the_loss_that_chooses_rates_is_that_of_rows_as_trained() -> None:
    task, setting = LANGUAGES["parity"], LANGUAGES["parity"].scale("laptop").settings[0]
    found = task.scores(Sure(), task.open(setting, 0).validation, 64, setting, slices=True)
    assert found["accuracy"] == 0
    assert found["loss"] == found["sets"]["lengths 3-16"]["loss"] < 1e-6
    assert found["sets"]["lengths 17-64"]["loss"] > 10


def test_placed_rows_have_every_offset_and_the_same_answers() -> None:
    setting = ParitySetting(placed=True, tested=64, seq_len=64, num_train=380)
    (rows,) = LANGUAGES["parity"].training(setting, 0, 0)
    assert rows.inputs.shape == (380, 64)
    offsets = set()
    for row, targets in zip(rows.inputs, rows.targets, strict=True):
        (begin, *_, end) = np.flatnonzero(row)
        assert targets[end] == parity_answer(row[begin : end + 1])
        assert (targets != IGNORED).sum() == 1
        offsets.add(int(begin))
    assert len(offsets) > 40
    with pytest.raises(ValueError, match="must be at least 64"):
        ParitySetting(placed=True, tested=64)
