"""Statistics of a model's memory: counted by hand on small models, and known for operators of known rank."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from helpers import assert_same, perturb, seeded
from hypermlp.analysis.capture import capture
from hypermlp.analysis.memory import trace
from hypermlp.analysis.statistics import Statistics, analyse, random_noise, singular_values
from hypermlp.mixers.hyper import HyperGLU
from hypermlp.models.lm import LanguageModel, ModelConfig

T = 17


def make_model(*mixers: str, length: int = 32) -> LanguageModel:
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(vocabulary=20, width=16, depth=len(mixers), length=length, mixer=mixers))
    for block in model.blocks:
        perturb(block.get_submodule("mixer"))
    return model.eval()


def windows(count: int = 2) -> list[Tensor]:
    return list(torch.randint(20, (count, T), generator=seeded(1)))


@pytest.fixture(scope="module")
def found() -> Statistics:
    return analyse(make_model("hyperglu", "softmax", "R-12!", "gla"), windows())


def test_counts_are_those_of_single_rows(found: Statistics) -> None:
    """Every count by lag, collected row by row from the decomposition."""
    model = make_model("hyperglu", "softmax", "R-12!", "gla")
    for entry in found.heads:
        expected = {name: torch.zeros(T, dtype=torch.float64) for name in entry.by_lag}
        for window in windows():
            opened = capture(model, window[None]).traces()[entry.layer]
            assert opened is not None
            for token in range(T):
                mixed, plain = (opened.memory(token, entry.head, mixing=mixing) for mixing in (True, False))
                lag = mixed.lag
                expected["slots"][lag] += 1
                expected["active"][lag] += mixed.active
                expected["active_plain"][lag] += plain.active
                expected["on"][lag] += mixed.active & ~plain.active
                expected["off"][lag] += plain.active & ~mixed.active
                expected["weight"][lag] += mixed.w.abs()
                expected["signed"][lag] += mixed.w
        assert_same(entry.by_lag, expected)
        assert entry.rows == 2 * T


def test_every_head_with_slots_is_counted_and_states_are_left_out(found: Statistics) -> None:
    assert [(h.layer, h.head) for h in found.heads] == [(layer, head) for layer in range(3) for head in range(2)]
    assert (found.windows, found.tokens) == (2, 2 * T)
    softmax = found.heads[2]
    assert softmax.overall("active") == 1
    assert softmax.by_lag["weight"].sum() == pytest.approx(2 * T)
    assert 0 < softmax.reach < T


def test_mixing_switches_slots_where_there_is_mixing(found: Statistics) -> None:
    hyper, softmax = found.heads[0], found.heads[2]
    assert hyper.overall("on") > 0
    assert hyper.overall("off") > 0
    assert hyper.overall("active") == pytest.approx(hyper.overall("active_plain") + hyper.overall("on") - hyper.overall("off"))
    assert softmax.overall("on") == softmax.overall("off") == 0


def test_singular_values_without_the_matrix() -> None:
    A, B, s = (torch.randn(9, 3, generator=seeded(i), dtype=torch.float64) for i in range(3))
    dense = torch.stack([(A * s[t]) @ B.mT for t in range(9)])
    assert_same(singular_values(A, B, s), torch.linalg.svdvals(dense)[:, :3])


def test_operators_are_measured_beside_their_diagonals() -> None:
    """A rank-one operator has effective rank 1, equal controls do not move, and an untouched diagonal has not departed."""
    model = make_model("hyperglu")
    layer = model.blocks[0].get_submodule("mixer")
    assert isinstance(layer, HyperGLU)
    assert layer.op1 is not None
    assert layer.op2 is not None
    with torch.no_grad():
        layer.op1.A[:, :, 1:] = 0
        layer.op1.control.weight.zero_()
        layer.op1.control.bias.zero_()
        layer.op1.diag.zero_()
    found = {(op.name, op.head): op for op in analyse(model, windows()).operators}
    assert set(found) == {(name, head) for name in ("R1", "R1 scale", "R2") for head in range(2)}
    first = found["R1", 0]
    assert first.rank == pytest.approx(1)
    assert (first.control, first.moves, first.departure) == (0.5, 0, 0)
    product = 0.5 * layer.op1.A[0, -T:, :1] @ layer.op1.B[0, -T:, :1].mT
    assert first.strength == pytest.approx(float(product.detach().norm()) / T**0.5, rel=1e-5)
    second = found["R2", 1]
    assert 1 < second.rank <= second.full_rank == 16
    assert second.moves > 0
    assert second.departure > 0


def test_noise_is_counted_in_the_rows_of_real_tokens() -> None:
    model, window = make_model("hyperglu"), windows(1)[0]
    is_noise = torch.zeros(T, dtype=torch.bool)
    is_noise[[2, 3, 9, T - 1]] = True
    noisy = torch.where(is_noise, 7, window)
    entry = analyse(model, [window], noise=lambda _: (noisy, is_noise)).heads[1]
    opened = capture(model, noisy[None]).traces()[0]
    assert opened is not None
    active = slots = 0
    for token in (~is_noise).nonzero().flatten().tolist():
        memory = opened.memory(token, 1)
        here = is_noise[memory.place]
        active, slots = active + int((memory.active & here).sum()), slots + int(here.sum())
    assert entry.spurious("noise_active") == active / slots
    assert 0 < entry.spurious("weight") < 1


def test_token_wise_attention_activates_half_of_symmetric_noise() -> None:
    """Proposition I.3: without mixing, addresses that are symmetric about 0 are active half of the time."""
    model = make_model("R")
    layer = model.blocks[0].get_submodule("mixer")
    x = torch.randn(1, 400, 16, generator=seeded(3), dtype=torch.float64)  # keys are symmetric about 0
    opened = trace(layer.double(), x)
    share = float(opened.rows(range(399, 400), 0).active.double().mean())
    assert share == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(400))


def test_random_noise_replaces_its_share() -> None:
    window = torch.full((4000,), 3)
    noisy, is_noise = random_noise(20, seeded(0), 0.25)(window)
    assert float(is_noise.double().mean()) == pytest.approx(0.25, abs=0.03)
    assert (noisy[~is_noise] == 3).all()
    assert len(noisy[is_noise].unique()) == 20


def test_what_cannot_be_analysed_is_named() -> None:
    with pytest.raises(ValueError, match="no attention"):
        analyse(make_model("gla"), windows())
    with pytest.raises(ValueError, match="there is no text"):
        analyse(make_model("hyperglu"), [])
