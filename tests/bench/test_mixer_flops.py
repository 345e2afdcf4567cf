"""Operations counted from sizes are those that torch counts when each mixer is computed by its definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from hypermlp.bench import flops
from hypermlp.mixers import MIXERS, build_mixer, differential, forgetting, softmax
from hypermlp.models.lm import LanguageModel, ModelConfig
from hypermlp.ops import path, plain, recurrence, slots
from hypermlp.ops.recurrence import Steps

BATCH, WIDTH, TIME = 2, 16, 9
solve = torch.ops.aten.linalg_solve_triangular


def solve_flops(A: Any, B: Any, *rest: Any, out_shape: Any = None, **options: Any) -> int:
    """Half of the matrix with each column."""
    *batch, rows, columns = B
    return int(torch.tensor(batch).prod()) * 2 * (rows * rows * columns // 2)


def rows_of(factors: list[Tensor], sides: list[Tensor]) -> Tensor:
    """Σ factor ⊗ side as one product per row of the state: factors (B H K), sides (B H K V)."""
    left, right = torch.stack(factors, -1), torch.stack(sides, -2)
    made = torch.bmm(left.flatten(0, 2)[:, None], right.flatten(0, 2))
    return made.view(*left.shape[:3], -1)


def read(q: Tensor, S: Tensor) -> Tensor:
    return torch.bmm(q.flatten(0, 1)[:, None], S.flatten(0, 1)).view(*q.shape[:2], -1)


def by_definition(steps: Steps, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """The recurrence with every decay, write and read in a matrix product."""
    q, k, v, g, a, b, _ = steps
    S, o = q.new_zeros(q.shape[0], *q.shape[2:], v.shape[-1], requires_grad=True), []
    for t in range(q.shape[1]):
        value = v[:, t] if a is None or b is not None else v[:, t] + read(a[:, t], S)
        factors, sides = [k[:, t]], [value[:, :, None].expand_as(S)]
        if b is not None:
            assert a is not None
            factors, sides = [*factors, b[:, t]], [*sides, read(a[:, t], S)[:, :, None].expand_as(S)]
        if g is not None:
            decay = g[:, t].exp()
            factors, sides = [*factors, decay if decay.dim() == 3 else decay[..., None].expand_as(k[:, t])], [*sides, S]
        else:
            sides[0] = sides[0] + S / k[:, t, :, :, None]  # adding costs nothing: S + k v = k (v + S / k)
        S = rows_of(factors, sides)
        o.append(read(q[:, t], S))
    return torch.stack(o, 1), S


def slots_by_definition(q: Tensor, k: Tensor, s: Tensor, g: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """GSA's keys as that recurrence with the roles of keys and slots changed: rows of slots decay, keys are written."""
    S, scores = q.new_zeros(q.shape[0], q.shape[2], s.shape[-1], k.shape[-1]), []
    for t in range(q.shape[1]):
        S = rows_of([s[:, t], g[:, t].exp()], [k[:, t][:, :, None].expand_as(S), S])
        scores.append(torch.bmm(S.flatten(0, 1), q[:, t].flatten(0, 1)[..., None]).view(*s[:, t].shape))
    return torch.stack(scores, 1), S.mT


def attend_by_rows(q: Tensor, k: Tensor, v: Tensor, spans: Tensor | None = None) -> Tensor:
    """Softmax attention, each row with the slots that it sees."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    rows = []
    for t in range(q.shape[2]):
        scores = q[:, :, t : t + 1] @ k[:, :, : t + 1].mT * q.shape[-1] ** -0.5
        rows.append(scores.softmax(-1) @ v[:, :, : t + 1])
    return torch.cat(rows, 2).transpose(1, 2)


def conv(x: Tensor, weight: Tensor, position: Tensor | None, history: Tensor | None) -> Tensor:
    taps = weight.shape[1]
    return F.conv1d(F.pad(x.mT, (taps - 1, 0)), weight[:, None], groups=x.shape[2]).mT


@pytest.fixture
def definitions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrence, "run", by_definition)
    monkeypatch.setattr(slots, "in_blocks", slots_by_definition)
    monkeypatch.setattr(softmax, "attend", attend_by_rows)
    monkeypatch.setattr(differential, "attend", attend_by_rows)
    monkeypatch.setattr(forgetting, "attend", attend_by_rows)
    monkeypatch.setattr(plain, "conv", conv)
    monkeypatch.setattr(path, "CHUNK", 2)


def counted(layer: torch.nn.Module, x: Tensor, training: bool = False) -> int:
    with FlopCounterMode(display=False, custom_mapping={solve: solve_flops}) as counter:
        y = layer(x)
        if training:
            y.sum().backward()
    return counter.get_total_flops()


@pytest.mark.usefixtures("definitions")
@pytest.mark.parametrize("name", [*MIXERS, "S-pcg-q", "R-c-v", "G-2o!"])
def test_a_forward_by_definition_counts_what_the_sizes_say(name: str) -> None:
    torch.manual_seed(0)
    layer = build_mixer(name, WIDTH, 2 * TIME)
    x = torch.randn(BATCH, TIME, WIDTH)
    assert counted(layer, x) == flops.forward(layer, BATCH, TIME)


@pytest.mark.usefixtures("definitions")
@pytest.mark.parametrize("name", ["softmax", "linear", "gla", "rwkv7", "gsa"])
def test_a_training_step_costs_three_forwards(name: str) -> None:
    layer, x = build_mixer(name, WIDTH, TIME), torch.randn(BATCH, TIME, WIDTH, requires_grad=True)
    assert counted(layer, x, training=True) == pytest.approx(flops.TRAINING * counted(layer, x), rel=0.03)


@pytest.mark.parametrize("name", ["linear", "gla", "deltanet", "gated_deltanet", "rwkv7", "mamba2", "gsa", "softmax"])
def test_what_is_counted_is_the_mixer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer, x = build_mixer(name, WIDTH, TIME), torch.randn(BATCH, TIME, WIDTH)
    want = layer(x)
    for module, attribute, naive in (
        (recurrence, "run", by_definition),
        (slots, "in_blocks", slots_by_definition),
        (softmax, "attend", attend_by_rows),
        (plain, "conv", conv),
    ):
        monkeypatch.setattr(module, attribute, naive)
    torch.testing.assert_close(layer(x), want, rtol=1e-3, atol=1e-4)


def test_a_model_is_its_parts() -> None:
    net = LanguageModel(ModelConfig(vocabulary=50, width=WIDTH, depth=2, length=TIME, mixer="hyperglu", style="gpt2"))
    found = flops.model(net, BATCH, TIME)
    with FlopCounterMode(display=False) as counter:
        net(torch.zeros(BATCH, TIME, dtype=torch.long))
    assert found.forward == counter.get_total_flops()
    assert found.head == 2 * BATCH * TIME * WIDTH * 50
    assert found.training == 3 * found.forward
