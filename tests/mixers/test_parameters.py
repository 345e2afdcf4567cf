"""Initial values, appendix L's and ours, and the authors' parameter names."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from helpers import make_layer, seeded
from hypermlp import HyperGLU, HyperGLUConfig
from hypermlp.config import Init
from hypermlp.mixers import build_mixer
from hypermlp.mixers.labels import TABLE1
from hypermlp.mixers.parts import CausalConv

LAYERS = {
    "glu": {},
    "relu": {"attn_kind": "relu"},
    "one set of factors": {"op1_per_head": False, "op2_per_head": False},
    "one head": {"n_head": 1},
    "one head, relu, one set": {"n_head": 1, "attn_kind": "relu", "op1_per_head": False, "op2_per_head": False},
    "square factors": {"block_size": 3, "op1_rank": 3, "op2_rank": 3, "op1_per_head": False},
    "biased": {"bias": True},
    "no convolution": {"use_kv_conv": False},
    "bare": {"use_op1": False, "use_op2": False, "use_qk_gate": False, "use_vo_gate": False, "use_kv_conv": False},
    "no diagonal": {"op1_use_diag": False, "op2_use_diag": False},
}
each_layer = pytest.mark.parametrize("changes", LAYERS.values(), ids=LAYERS)


def test_initial_statistics() -> None:
    config = HyperGLUConfig(n_embd=256, n_head=2, block_size=512, bias=True, op1_init_std=0.1, op2_init_std=0.02)
    layer = HyperGLU(config)
    layer.reset_parameters(seeded(0))
    for name, p in layer.named_parameters():
        if name.endswith(("bias", "diag")):
            assert (p == 0).all(), name
            continue
        std = 0.1 if name in ("op1.A", "op1.B") else 0.02
        spread = std / math.sqrt(p.numel())  # of the mean; that of the standard deviation is smaller by √2
        assert abs(p.mean().item()) < 5 * spread, name
        assert abs(p.std().item() - std) < 5 * spread, name
        assert p.abs().max() > 2 * std, name  # a normal law has tails, a uniform one ends at √3 std


def test_papers_initialisation_is_exact() -> None:
    """Weight by weight in one order, all of them from the same normal law: a seed gives what it always gave."""
    layer, numbers = make_layer(), seeded(3)
    assert layer.config.init == "paper"
    layer.reset_parameters(seeded(3))
    linears = [f"{name}.weight" for name in ("q", "k", "v", "o", "conv_k", "conv_v", "gate_qk", "gate_vo")]
    mixing = [f"{op}.{name}" for op in ("op1", "op2") for name in ("A", "B", "control.weight")]
    for name in linears + mixing:
        p = layer.get_parameter(name)
        assert torch.equal(p, torch.empty_like(p).normal_(0, 0.02, generator=numbers)), name


def test_bank_of_decays() -> None:
    torch.manual_seed(0)
    layer = HyperGLU(n_embd=64, n_head=2, block_size=200, op1_rank=5, op2_rank=1, op2_init_std=0.1, init="decays")
    assert layer.op1 is not None
    assert layer.op2 is not None
    for op, spans in ((layer.op1, [200 ** (r / 4) for r in range(5)]), (layer.op2, [200**0.5])):
        torch.testing.assert_close(op.A.norm(dim=1), torch.ones(op.heads, len(spans)))
        ratio = op.A[:, 1:] / op.A[:, :-1]  # to the next newer lag
        assert torch.allclose(ratio[:, -40:], torch.tensor([math.exp(1 / span) for span in spans]), rtol=1e-4)
        assert op.B.std().item() == pytest.approx(op.init_std, rel=0.2)
    for name, p in layer.named_parameters():
        if name.endswith(("bias", "diag")):
            assert (p == 0).all(), name
        elif not name.startswith("conv") and not name.endswith((".A", ".B")):
            assert p.std().item() == pytest.approx(0.02, rel=0.1), name


@pytest.mark.parametrize("name", [*TABLE1, "hyperglu", "hypermlp"])
def test_one_rule_for_every_label(name: str) -> None:
    """Convolutions begin as torch's Conv1d of as many taps does, and everything else that is no lag factor as in the paper."""

    def build(init: Init) -> dict[str, Tensor]:
        torch.manual_seed(0)
        mixer = build_mixer(name, 64, 16, init=init)
        sizes = [m.weight.abs().max().item() for m in mixer.modules() if isinstance(m, CausalConv)]
        assert all(0.48 < size <= 0.5 if init == "decays" else size < 0.15 for size in sizes)  # 1/√4 for four taps
        assert bool(sizes) == ("c" in name.partition("-")[2].partition("-")[0] or name.startswith("hyper"))
        return mixer.state_dict()

    paper, ours = build("paper"), build("decays")
    changed = {key for key in paper if not torch.equal(paper[key], ours[key])}
    drawn_alike = {key for key in paper if key in ("q.weight", "k.weight", "v.weight", "o.weight") or "bias" in key}
    assert not changed & drawn_alike
    factors = {key for key in paper if key.endswith(".A")}
    convs = {key for key in paper if key.startswith("conv")}
    assert factors | convs <= changed
    if not factors | convs:
        assert not changed


def test_rivals_begin_as_published() -> None:
    for name in ("gated_deltanet", "softmax", "mamba"):
        torch.manual_seed(0)
        paper = build_mixer(name, 32, 16).state_dict()
        torch.manual_seed(0)
        assert all(torch.equal(p, paper[key]) for key, p in build_mixer(name, 32, 16, init="decays").state_dict().items())
    with pytest.raises(ValueError, match=r"init \('zeros'\) must be one of 'paper', 'decays'"):
        build_mixer("gla", 32, 16, init="zeros")


def test_generator_determines_everything() -> None:
    layer = make_layer()
    layer.reset_parameters(seeded(1))
    first = {name: p.clone() for name, p in layer.state_dict().items()}
    layer.reset_parameters(seeded(2))
    assert not torch.equal(layer.state_dict()["q.weight"], first["q.weight"])
    torch.manual_seed(5)
    before = torch.get_rng_state()
    layer.reset_parameters(seeded(1))
    assert torch.equal(torch.get_rng_state(), before)  # the global generator is left alone
    for name, p in layer.state_dict().items():
        assert torch.equal(p, first[name]), name


@each_layer
def test_authors_names_are_lossless(changes: dict) -> None:
    layer, other = make_layer(1, **changes), make_layer(2, **changes)
    state = layer.authors_state_dict()
    assert len(state) == len(layer.state_dict())
    other.load_authors_state_dict(state)
    for name, p in layer.state_dict().items():
        assert torch.equal(other.state_dict()[name], p), name
    for name, value in other.authors_state_dict().items():
        assert torch.equal(value, state[name]), name


@each_layer
def test_authors_state_is_a_copy(changes: dict) -> None:
    layer = make_layer(**changes)
    before = snapshot(layer)
    for value in layer.authors_state_dict().values():
        assert not value.requires_grad
        value.zero_()
    assert_unchanged(layer, before)


@pytest.mark.parametrize("changes", [LAYERS["glu"], LAYERS["one set of factors"]], ids=["per head", "one set"])
def test_authors_shapes(changes: dict) -> None:
    state = make_layer(**changes).authors_state_dict()
    heads1, heads2 = ((4,), (2,)) if changes == {} else ((), ())
    assert state["op.mix.U"].shape == (*heads1, 24, 3)
    assert state["op.mix.Vt"].shape == (*heads1, 3, 24)
    assert state["op.mix.d"].shape == (*heads1, 24)
    assert state["op2.mix.U"].shape == (*heads2, 24, 2)
    assert state["op2.mix.Vt"].shape == (*heads2, 2, 24)
    assert state["conv1.conv.weight"].shape == (16, 1, 4)


def snapshot(layer: HyperGLU) -> dict[str, Tensor]:
    return {name: p.clone() for name, p in layer.state_dict().items()}


def assert_unchanged(layer: HyperGLU, before: dict[str, Tensor]) -> None:
    for name, p in layer.state_dict().items():
        assert torch.equal(p, before[name]), name


def without_q(state: dict[str, Tensor]) -> None:
    del state["q.weight"]


def with_more(state: dict[str, Tensor]) -> None:
    state["attn_dropout"] = torch.zeros(1)


def misshapen(state: dict[str, Tensor]) -> None:
    state["v.weight"] = state["v.weight"][:-1]


@pytest.mark.parametrize(
    "spoil, message",
    [
        (without_q, r"missing \['q.weight'\], unknown \[\]; the configuration must have the options it was trained with"),
        (with_more, r"missing \[\], unknown \['attn_dropout'\]"),
        (misshapen, r"v.weight has shape \(15, 16\); this configuration needs \(16, 16\)"),
    ],
)
def test_misfit_is_refused_and_nothing_changes(spoil: object, message: str) -> None:
    layer = make_layer(1)
    before = snapshot(layer)
    state = make_layer(2).authors_state_dict()
    spoil(state)
    with pytest.raises(ValueError, match=message):
        layer.load_authors_state_dict(state)
    assert_unchanged(layer, before)
