"""What holds for every task: scores depend on neither batch size nor row order, and slices make up the whole."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hypermlp.config import IGNORED
from hypermlp.tasks.base import Examples, Part, Rows, Sizes, Task, by_length, tensors
from hypermlp.train import fit


@dataclass(frozen=True, kw_only=True)
class Small(Sizes):
    task: str = "echo"
    vocab_size: int = 5
    seq_len: int = 6
    num_train: int = 12
    num_test: int = 20


class Echo(Task):
    """Say every second token again."""

    name = "echo"
    baseline = Small()
    fresh = True
    slices = ("length", "place")

    def rows(self, setting: Small, seed: list[int], count: int, length: int) -> Rows:
        inputs = np.random.default_rng(seed).integers(setting.vocab_size, size=(count, length))
        targets = inputs.copy()
        targets[:, ::2] = IGNORED
        place = np.broadcast_to(np.arange(length), inputs.shape).copy()
        return Rows(inputs, targets, {"length": np.full(count, length), "place": place})

    def training(self, setting: Small, seed: int, epoch: int) -> list[Rows]:
        return [self.rows(setting, [seed, 0, epoch, n], setting.num_train, n) for n in (4, 6)]

    def evaluation(self, setting: Small, seed: int, part: Part) -> dict[str, list[Rows]]:
        return {
            "short": [self.rows(setting, [seed, 1, part == "test", n], setting.num_test, n) for n in (4, 6)],
            "long": [self.rows(setting, [seed, 2, part == "test"], setting.num_test, 8)],
        }

    def solve(self, setting: Small, inputs: Any) -> Any:
        return inputs


class Doubtful(nn.Module):
    """Right but where the token is 1."""

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.one_hot(torch.where(tokens == 1, 0, tokens), 5).float()


@pytest.mark.parametrize("unit", ["token", "row"])
def test_scores_depend_on_neither_batch_size_nor_order_and_slices_make_up_the_whole(unit: str) -> None:
    task = Echo()
    task.unit = unit
    sets = task.open(task.baseline, 0).test
    mixed = {
        name: [Examples(g.inputs.flip(0), g.targets.flip(0), {k: f.flip(0) for k, f in g.facts.items()}) for g in groups[::-1]]
        for name, groups in sets.items()
    }
    first = task.scores(Doubtful(), sets, 7, task.baseline, slices=True)
    for again in (task.scores(Doubtful(), s, b, task.baseline, slices=True) for s, b in ((sets, 3), (mixed, 64))):
        assert again["accuracy"] == first["accuracy"] < 1
        assert again["loss"] == pytest.approx(first["loss"])
        assert again["sets"]["short"]["slices"].keys() == first["sets"]["short"]["slices"].keys()
    whole = first["sets"]["short"]
    parts = whole["slices"]["length"]
    assert list(parts) == ["4", "6"]
    assert sum(part["rows"] for part in parts.values()) == whole["rows"] == 40
    weights = [2, 3] if unit == "token" else [1, 1]
    assert np.average([part["accuracy"] for part in parts.values()], weights=weights) == pytest.approx(whole["accuracy"])
    wrong = [(g.inputs[:, 1::2] == 1) for g in sets["short"]]
    right = torch.cat([1.0 - w.float().flatten() if unit == "token" else 1.0 - w.any(1).float() for w in wrong])
    assert whole["accuracy"] == pytest.approx(float(right.mean()))
    assert first["accuracy"] == pytest.approx((whole["accuracy"] + first["sets"]["long"]["accuracy"]) / 2)
    assert first["worst"] == min(one["accuracy"] for one in first["sets"].values())


def test_baselines_are_computed_from_the_data_and_the_oracle_solves_every_row() -> None:
    task = Echo()
    counts = np.bincount(np.concatenate([r.targets[r.targets >= 0] for r in task.training(task.baseline, 0, 0)]))
    tests = task.evaluation(task.baseline, 0, "test")
    scored = [g.targets[g.targets >= 0] for g in tests["short"]]
    found = task.baselines(task.baseline, 0)["most frequent"]
    assert found["sets"]["short"]["accuracy"] == pytest.approx((np.concatenate(scored) == counts.argmax()).mean())
    perfect = task.score_guesses(tests["long"], lambda rows: task.solve(task.baseline, rows.inputs))
    assert perfect.values["accuracy"].all()


def test_rows_that_cannot_be_read_or_scored_are_refused() -> None:
    task = Echo()
    with pytest.raises(
        ValueError, match=r"echo, validation set short: inputs 0 to 4 must be at least 0 and below vocab_size \(4\)"
    ):
        task.check(dataclasses.replace(task.baseline, vocab_size=4), task.training(task.baseline, 0, 0), "validation set short")
    silent = Rows(np.zeros((2, 3), np.int64), np.full((2, 3), IGNORED))
    with pytest.raises(ValueError, match="nothing to score"):
        task.check(task.baseline, [silent], "training")
    task.training = lambda setting, seed, epoch: [silent]  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="echo, training: every target is -100"):
        task.open(task.baseline, 0).train(0)


def test_batches_have_one_length_and_epochs_have_rows_of_their_own() -> None:
    task = Echo()
    batches = fit.EpochSampler(task.open(task.baseline, 0).train, batch=5, seed=0)
    assert batches.epoch == 6
    lengths = [batches(step)[0][0].shape for step in range(6)]
    assert sorted(lengths) == [(2, 4), (2, 6), (5, 4), (5, 4), (5, 6), (5, 6)]
    again = fit.EpochSampler(task.open(task.baseline, 0).train, batch=5, seed=0)
    assert torch.equal(again(7)[0][0], batches(7)[0][0]), "a batch depends on the step alone"
    rows = {tuple(row) for step in range(6) for row in batches(step)[0][0].tolist()}
    later = {tuple(row) for step in range(6, 12) for row in batches(step)[0][0].tolist()}
    assert rows != later


def test_an_epoch_with_other_lengths_is_refused() -> None:
    groups = [tensors(Rows(np.zeros((4, n), np.int64), np.zeros((4, n), np.int64))) for n in (2, 3)]
    batches = fit.EpochSampler(lambda epoch: groups[: 2 - epoch], batch=2, seed=0)
    batches(3)
    with pytest.raises(ValueError, match="as many rows of each length"):
        batches(4)


def test_rows_are_grouped_by_length_and_a_key_says_what_differs() -> None:
    groups = by_length([([1, 2], [3, 4]), ([5], [6]), ([7, 8], [9, 0])])
    assert [group.inputs.tolist() for group in groups] == [[[5]], [[1, 2], [7, 8]]]
    assert Small().key == "echo"
    assert dataclasses.replace(Small(), seq_len=9, num_test=3).key == "echo/seq_len=9,num_test=3"
