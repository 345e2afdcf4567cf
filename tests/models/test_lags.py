"""Models in a longer context than they were trained for: what their new lags hold, and what they compute with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import assert_same, make_layer, perturb, randn
from hypermlp import HyperGLU
from hypermlp.mixers.lags import extend_layer
from hypermlp.models.lm import LanguageModel, ModelConfig
from hypermlp.models.saved import load_model, save_model

SHORT, LONG = 6, 15
KINDS = ("hold", "decay", "zero", "fresh")
each_kind = pytest.mark.parametrize("kind", KINDS)


def layer(**changes: Any) -> HyperGLU:
    return perturb(make_layer(block_size=SHORT, **changes))


def model(**changes: Any) -> LanguageModel:
    torch.manual_seed(0)
    fields = {"vocabulary": 11, "width": 16, "depth": 2, "length": SHORT, "mixer": ("hyperglu", "deltanet"), **changes}
    return perturb(LanguageModel(ModelConfig(**fields)).double())


def tokens(length: int) -> Tensor:
    return torch.randint(11, (2, length), generator=torch.Generator().manual_seed(0))


@each_kind
@pytest.mark.parametrize("options", [{}, {"attn_kind": "relu", "op1_shortcut": False, "use_rope": True}], ids=["glu", "relu"])
def test_inputs_of_the_trained_length_are_computed_as_before(kind: str, options: dict[str, Any]) -> None:
    short, x = layer(**options), randn(2, SHORT, 16)
    assert_same(extend_layer(short, LONG, kind)(x), short(x))


def test_zero_is_the_sliding_window_of_lemma_c6_at_any_length() -> None:
    for options in ({}, {"attn_kind": "relu"}, {"op1_shortcut": False, "op2_shortcut": False, "op2_use_diag": False}):
        short, x = layer(**options), randn(2, 2 * LONG, 16)
        assert_same(extend_layer(short, LONG, "zero")(x), short(x))


@pytest.mark.parametrize("kind, kept", [("hold", [1.0] * 4), ("decay", [0, 1 / 4, 2 / 4, 3 / 4]), ("zero", [0.0] * 4)])
def test_new_lags_hold_or_lose_what_the_longest_trained_one_had(kind: str, kept: list[float]) -> None:
    short = layer()
    long = extend_layer(short, SHORT + 4, kind)
    share = torch.tensor(kept, dtype=torch.float64)
    for old, new in ((short.op1, long.op1), (short.op2, long.op2)):
        assert_same(new.A[:, :4], old.A[:, :1] * share[:, None])
        assert_same(new.B[:, :4], old.B[:, :1] * share[:, None])
        assert_same(1 + new.diag[:, :4], (1 + old.diag[:, :1]) * share)  # D, the shortcut included
        assert_same(new.A[:, 4:], old.A)


@each_kind
def test_new_lags_are_read_and_learn(kind: str) -> None:
    long, x = extend_layer(layer(), LONG, kind), randn(2, LONG, 16)
    if kind != "zero":
        assert (long(x)[:, SHORT:] - layer()(x)[:, SHORT:]).abs().max() > 1e-3
    long(x).square().sum().backward()
    for mixing in (long.op1, long.op2):
        assert (mixing.A.grad[:, : LONG - SHORT].abs().amax((0, 2)) > 0).all()


@each_kind
def test_a_saved_model_is_continued_in_a_longer_context(kind: str, tmp_path: Path) -> None:
    short = model().float()
    save_model(short, tmp_path)
    long = load_model(tmp_path, length=LONG, lag_extension=kind)
    assert long.config == short.config.replace(length=LONG)
    assert_same(long(tokens(SHORT)), short(tokens(SHORT)), 1e-5)
    if kind == "zero":
        assert_same(long(tokens(2 * LONG)), short(tokens(2 * LONG)), 1e-5)
    assert load_model(tmp_path, length=SHORT).config.length == SHORT


def test_transformers_load_a_longer_context_too(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    import hypermlp.models.hf  # noqa: F401  registers the classes

    short = model().float()
    save_model(short, tmp_path)
    load = transformers.AutoModelForCausalLM.from_pretrained
    for kind in ("hold", "zero"):
        long = load(tmp_path, length=LONG, lag_extension=kind)
        assert long.config.length == LONG
        x = tokens(2 * LONG)
        assert_same(long(x).logits, load_model(tmp_path, length=LONG, lag_extension=kind)(x), 1e-5)
    long.save_pretrained(tmp_path / "long")
    assert_same(load(tmp_path / "long")(x).logits, short(x), 1e-5)
    with pytest.raises(ValueError, match="lag_extension"):
        load(tmp_path, length=LONG)


def test_what_cannot_be_extended_is_refused() -> None:
    with pytest.raises(ValueError, match=r"op1.A has parameters for 15 lags.*lag_extension.*hold, decay, zero, fresh"):
        model().extended(LONG)
    with pytest.raises(ValueError, match=r"positions.weight .*keeps its length"):
        model(style="gpt2").extended(LONG, "hold")
    with pytest.raises(ValueError, match="counts places, not lags"):
        model(mixer="R-12!").extended(LONG, "hold")
    with pytest.raises(ValueError, match=r"length \(5\) must be at least the trained one, 6"):
        model().extended(5, "hold")
    with pytest.raises(ValueError, match="needs a diagonal beside the shortcut"):
        extend_layer(layer(op1_use_diag=False), LONG, "zero")
    with pytest.raises(ValueError, match="lag_extension"):
        extend_layer(layer(), LONG, "stretch")  # type: ignore[arg-type]


def test_rivals_without_lags_need_no_extension() -> None:
    short = model(mixer=("softmax", "rwkv7"))
    assert_same(short.extended(LONG)(tokens(LONG)), short(tokens(LONG)))
