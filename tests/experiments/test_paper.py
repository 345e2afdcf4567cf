"""The paper's numbers were copied without slips: its own sums and counts come out."""

import pytest

from hypermlp.experiments.paper import BENCHMARKS, TABLE1, TABLE2, TABLE4, TASKS
from hypermlp.mixers.labels import TABLE1 as LABELS

# Rows whose printed mean is not the mean of the printed accuracies.
MISPRINTED = {"R-12o!", "R-1o!"}


def test_table1_has_the_labels_and_its_means() -> None:
    assert tuple(TABLE1) == LABELS
    for label, row in TABLE1.items():
        mean = sum(row.accuracy[task] for task in TASKS) / len(TASKS)
        assert (abs(mean - row.average) < 0.02) == (label not in MISPRINTED), label


def test_a_lower_threshold_is_reached_later() -> None:
    for row in TABLE1.values():
        reached = [n for n in row.evaluations.values() if n is not None]
        assert reached == sorted(reached)
        assert list(row.evaluations.values())[: len(reached)] == reached, "once missed, a lower one is missed too"


@pytest.mark.parametrize("size", TABLE2)
def test_first_places_of_table2_cover_every_benchmark(size: str) -> None:
    rows = TABLE2[size].values()
    assert len(rows) == 8
    assert sum(row.first_places for row in rows) >= len(BENCHMARKS)


def test_table4_speaks_of_every_task() -> None:
    assert set(TABLE4) == set(TASKS)
