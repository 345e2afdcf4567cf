"""The paper's numbers were copied without slips: its own sums and counts come out."""

import pytest
import torch

from hypermlp.bench import flops
from hypermlp.mixers.labels import TABLE1 as LABELS
from hypermlp.mixers.path import PathAttention
from hypermlp.models.lm import LanguageModel, ModelConfig
from hypermlp.paper.counter import SEEN, TIME, D, flops_per_token
from hypermlp.paper.tables import BENCHMARKS, TABLE1, TABLE2, TABLE4, TABLE5, TABLE5_TOKENS, TASKS

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


@pytest.mark.parametrize("name", TABLE5)
def test_the_flops_of_table_5_are_explained(name: str) -> None:
    row = TABLE5[name]
    forward, training = flops_per_token(SEEN[name])
    assert f"{forward / 1e6:.2f}" == f"{row.flops_per_token[0]:.2f}"
    assert training / 1e6 == pytest.approx(row.flops_per_token[1], rel=2e-4)


def test_the_columns_of_table_5_agree_with_each_other() -> None:
    for row in TABLE5.values():
        for phase in (0, 1):
            assert row.flops[phase] == pytest.approx(row.flops_per_token[phase] * TABLE5_TOKENS / 1e6, abs=0.0051)
            assert row.tokens_per_second[phase] == pytest.approx(TABLE5_TOKENS / row.seconds[phase] / 1e3, rel=0.002)


def test_the_papers_counter_on_our_layers() -> None:
    """Where our layer has the paper's sizes it sees the same products."""
    for name, ours in (("HyperGLU", "hyperglu"), ("HGRN2", "hgrn2"), ("PaTH", None)):
        with torch.device("meta"):
            net = LanguageModel(ModelConfig(vocabulary=8, width=D, depth=12, length=TIME, style="gpt2", mixer=ours or "hgrn2"))
            if ours is None:
                for block in net.blocks:
                    block.mixer = PathAttention(D, 12)
        assert flops.seen(net, 1, TIME) == TIME * 24 * (SEEN[name].products + 8 * D * D)
