"""Associative recall: zoology's rows, and what every row promises."""

import dataclasses

import numpy as np
import pytest

from helpers import digest
from hypermlp.tasks.mqar import MIXES, MQAR, MqarSetting, mqar_rows, segment_seeds


@pytest.mark.parametrize(
    ("size", "seed", "updates", "inputs", "targets"),
    [
        ((8192, 16, 64, 4), 843828734, 0, "623ba83c16b8988d", "a93d86690a571720"),
        ((512, 40, 64, 16), 5, 0, "8dd5a2d974e5b30d", "39c2d21aca8216f1"),  # 4k = L: every place is taken
        ((100, 50, 32, 4), 42, 2, "e6713069eca6e028", "c963bb41956e27c3"),
        ((300, 20, 128, 9), 7, 4, "9527ca83c17eb955", "91ae014bae41b861"),
    ],
)
def test_rows_are_those_of_zoology(size: tuple[int, int, int, int], seed: int, updates: int, inputs: str, targets: str) -> None:
    """The digests were compared with its own generators at commit d88d6f54."""
    assert tuple(map(digest, mqar_rows(*size, seed, updates=updates))) == (inputs, targets)


def test_seeds_of_segments_are_those_of_zoology() -> None:
    assert segment_seeds(0, 1, 1) == ([843828734], [3062119789])
    assert segment_seeds(0, 5, 7)[1][-1] == 3350193721


@pytest.mark.parametrize("task", MQAR)
@pytest.mark.parametrize("noise", [True, False])
def test_a_dictionary_solves_every_row_and_no_test_row_is_trained_on(task: str, noise: bool) -> None:
    setting = dataclasses.replace(MQAR[task].baseline, num_train=200, num_test=60, noise=noise)
    sets = MQAR[task].evaluation(setting, 0, "test")
    assert len(sets) == 4
    for groups in sets.values():
        answers = MQAR[task].score_guesses(groups, lambda rows: MQAR[task].solve(setting, rows.inputs))
        assert answers.values["accuracy"].all()
        assert len(answers.row) == (groups[0].targets != -100).sum() == 60 * groups[0].facts["pairs"][0]
    epochs = [MQAR[task].training(setting, 0, epoch) for epoch in (0, 1)]
    assert [g.inputs.shape for g in epochs[0]] == [g.inputs.shape for g in epochs[1]]
    trained = {row.tobytes() for groups in epochs for g in groups for row in g.inputs}
    assert len(trained) == 2 * sum(len(g.inputs) for g in epochs[0]), "every epoch has rows of its own"
    tested = {row.tobytes() for g in sets.values() for row in g[0].inputs}
    validated = {row.tobytes() for g in MQAR[task].evaluation(setting, 0, "validation").values() for row in g[0].inputs}
    assert not trained & (tested | validated)
    assert not tested & validated


def test_noise_fills_the_empty_places_and_changes_no_answer() -> None:
    quiet, loud = (mqar_rows(64, 30, 32, 3, 9, noise=noise) for noise in (None, range(64)))
    assert (quiet[1] == loud[1]).all()
    assert (np.where(quiet[0] == 0, loud[0], quiet[0]) == loud[0]).all()
    assert (loud[0] == 0).mean() < 0.05 < (quiet[0] == 0).mean()


def test_baselines_come_from_the_data() -> None:
    found = MQAR["mqar"].baselines(dataclasses.replace(MqarSetting(), num_test=400, num_train=64), 0)
    guess = found["a value of the row"]["sets"]
    assert guess["4 pairs in 32"]["accuracy"] == pytest.approx(1 / 4, abs=0.01)  # exactly one of the queries is right
    assert guess["32 pairs in 128"]["accuracy"] == pytest.approx(1 / 32, abs=0.001)
    assert found["most frequent"]["accuracy"] < 0.03


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((64, 1, 31, 4), "divisible by 2"), ((32, 1, 32, 4), "above the length"), ((64, 1, 32, 9), "must hold 9 pairs")],
)
def test_sizes_that_do_not_fit_are_refused(arguments: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mqar_rows(*arguments, seed=0)


def test_settings_of_all_mixes_can_be_drawn() -> None:
    for name, mix in MIXES.items():
        for segment in (*mix.train, *mix.test):
            mqar_rows(8192, 1, segment.length, segment.pairs, 0, updates=segment.updates)
        assert MqarSetting(mix=name, seq_len=1024).segments == mix
    with pytest.raises(ValueError, match="must be at least 256"):
        MqarSetting(mix="based", seq_len=128)
