"""Registers (appendix H.3): learned rows in front of every sequence. Their laws: test_laws and test_cache."""

from __future__ import annotations

import pytest
import torch

from helpers import assert_same, each_impl, make_layer, perturb, precision, randn, run_layer
from hypermlp import HyperGLU, HyperGLUConfig
from hypermlp.analysis.memory import trace
from hypermlp.mixers.labels import count_by_component
from hypermlp.models.lm import LanguageModel, ModelConfig, Style

N, T = 3, 11


@pytest.mark.parametrize("options", [{}, {"op1_shortcut": False}, {"attn_kind": "relu"}], ids=str)
@each_impl
def test_registers_are_older_tokens_that_the_layer_knows_by_heart(
    options: dict[str, object], impl: str, chunk: int | None
) -> None:
    """Without convolutions a layer with registers computes what a layer for as many more tokens does, given them as input."""
    dtype = precision(impl)
    layer = make_layer(dtype=dtype, block_size=T, registers=N, use_kv_conv=False, **options)
    longer = make_layer(dtype=dtype, block_size=T + N, use_kv_conv=False, **options)
    longer.load_state_dict({name: value for name, value in layer.state_dict().items() if name != "registers"})
    assert layer.registers is not None
    x, d_y = randn(2, T, layer.width, dtype=dtype), randn(2, T, layer.width, seed=1, dtype=dtype)
    found = run_layer(layer, x, d_y, impl=impl, chunk_T=chunk)
    rows = torch.cat([layer.registers.detach().flip(0).expand(2, -1, -1), x], dim=1)
    zeros = torch.zeros(2, N, layer.width, dtype=dtype)
    expected = run_layer(longer, rows, torch.cat([zeros, d_y], dim=1), impl=impl, chunk_T=chunk)
    tolerance = 1e-9 if dtype == torch.float64 else 2e-4
    assert_same(found["y"], expected["y"][:, N:], tolerance)
    assert_same(found["dx"], expected["dx"][:, N:], tolerance)
    assert layer.registers.grad is not None
    assert_same(layer.registers.grad.flip(0), expected["dx"][:, :N].sum(0), tolerance)


def test_they_are_in_the_window_of_every_token_that_has_lags_and_leave_it_then() -> None:
    layer, x = make_layer(block_size=T, registers=N), randn(1, T + N + 4, 16)
    assert layer.registers is not None
    y = layer(x)
    layer.registers.data.mul_(2)
    changed = (layer(x) != y).any(-1)[0]
    assert changed[: T + N - 1].all()
    assert not changed[T + N - 1 :].any()


def test_a_model_of_any_mixer_name_has_them() -> None:
    config = ModelConfig(vocabulary=17, width=16, depth=2, length=8, mixer="R-cg-q-12o+registers=2")
    model = LanguageModel(config)
    tokens = torch.arange(8)[None]
    cache = model.new_cache(1)
    steps = torch.cat([model(tokens[:, t : t + 1], cache=cache) for t in range(8)], dim=1)
    assert_same(steps.detach(), model(tokens).detach(), 1e-5)
    longer = model.extended(16, "hold")
    assert_same(longer(tokens).detach(), model(tokens).detach(), 1e-5)
    layer = config.build_mixer(0)
    assert count_by_component(layer)["registers"] == 2 * 16


@pytest.mark.parametrize("style", ["llama", "gpt2", "nanogpt"])
@pytest.mark.parametrize("mixer", ["hyperglu", "hyperglu+registers=2", "hyperglu+lora_vo=2", "softmax"])
def test_every_style_decodes_what_it_computes_at_once(style: Style, mixer: str) -> None:
    model = perturb(LanguageModel(ModelConfig(vocabulary=33, width=32, depth=2, length=16, mixer=mixer, style=style))).eval()
    tokens = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        cache = model.new_cache(2)
        steps = torch.cat([model(tokens[:, t : t + 1], cache=cache) for t in range(12)], dim=1)
        assert_same(steps, model(tokens), 1e-5)


def test_what_has_no_registers_says_so() -> None:
    with pytest.raises(ValueError, match=r"registers \(2\) need aligner_kind"):
        HyperGLUConfig(n_embd=16, n_head=2, block_size=8, registers=2, aligner_kind="identity")
    with pytest.raises(ValueError, match="registers"):
        HyperGLUConfig(n_embd=16, n_head=2, block_size=8, registers=-1)
    layer = HyperGLU(n_embd=16, n_head=2, block_size=8, registers=2)
    with pytest.raises(ValueError, match="registers=0"):
        layer.authors_state_dict()
    with pytest.raises(ValueError, match="registers are no tokens"):
        trace(layer, randn(1, 4, 16, dtype=torch.float32))
    assert layer.explain(randn(1, 4, 16, dtype=torch.float32)).why == "registers"
