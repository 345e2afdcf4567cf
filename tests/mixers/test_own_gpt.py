"""The layer for people with a GPT of their own: fields by name, dropout, the mark of the residual projection, groups."""

import pytest
import torch
from torch import nn

from helpers import assert_same
from hypermlp import HyperGLU, HyperGLUConfig, HyperMLP, LanguageModel, ModelConfig, muon_parameters, parameter_groups


def test_fields_may_be_given_by_name() -> None:
    config = HyperGLUConfig(n_embd=32, n_head=2, block_size=16, use_rope=True)
    assert HyperGLU(n_embd=32, n_head=2, block_size=16, use_rope=True).config == config
    assert HyperGLU(config, bias=True).config == config.replace(bias=True)
    assert HyperMLP(n_embd=32, n_head=2, block_size=16).config.attn_kind == "relu"
    with pytest.raises(ValueError, match=r"the configuration lacks \['block_size'\]"):
        HyperGLU(n_embd=32, n_head=2)


@pytest.mark.parametrize("impl", ["dense", "chunked", "native"])
def test_dropout_is_on_the_readout_and_in_training_only(impl: str) -> None:
    torch.manual_seed(0)
    plain = HyperGLU(n_embd=32, n_head=2, block_size=16, impl_default=impl)
    layer = HyperGLU(plain.config, dropout=0.5)
    layer.load_state_dict(plain.state_dict())
    x, dropped = torch.randn(2, 9, 32), []
    assert torch.equal(layer.eval()(x), plain(x))
    layer.train().o.register_forward_pre_hook(lambda module, inputs: dropped.append(inputs[0]))
    first, second = layer(x), layer(x)
    assert not torch.equal(first, second)
    layer.eval()(x)
    whole = dropped.pop()  # some of it is zero by itself, where a ReLU is
    kept = dropped[0] != 0
    assert 0.4 < kept[whole != 0].double().mean().item() < 0.6
    assert_same(dropped[0][kept], 2 * whole[kept], 1e-6)  # what is kept is scaled up
    cache = plain.eval().new_cache(2)
    steps = torch.cat([layer(x[:, t : t + 1], cache=cache) for t in range(9)], 1)
    assert_same(steps, plain(x), 1e-4)


def test_dropout_must_be_a_share() -> None:
    with pytest.raises(ValueError, match=r"dropout \(1\.0\) must be at least 0 and less than 1"):
        HyperGLU(n_embd=32, n_head=2, block_size=16, dropout=1.0)


def test_the_projection_to_the_residual_stream_is_marked() -> None:
    layer = HyperGLU(n_embd=32, n_head=2, block_size=16)
    assert [name for name, module in layer.named_modules() if hasattr(module, "NANOGPT_SCALE_INIT")] == ["o"]


@pytest.mark.parametrize("tied", [True, False])
def test_matrices_are_the_linear_layers_inside(tied: bool) -> None:
    model = LanguageModel(ModelConfig(vocabulary=50, width=32, depth=1, length=16, tied=tied))
    names = {p: name for name, p in model.named_parameters()}
    found = {names[p] for p in muon_parameters(model)}
    assert {"blocks.0.mixer.o.weight", "blocks.0.mixer.op1.control.weight", "blocks.0.ffn.up.weight"} <= found
    assert all(name.endswith(".weight") and model.get_parameter(name).dim() == 2 for name in found)
    left_out = {"embedding.weight", "head.weight", "norm.weight", "blocks.0.mixer.op1.A", "blocks.0.mixer.op2.diag"}
    assert not found & {*left_out, "blocks.0.mixer.conv_k.weight"}
    decayed, others = parameter_groups(model, 0.1)
    assert {names[p] for p in decayed["params"]} == found | ({"head.weight"} if not tied else set())
    assert len(decayed["params"]) + len(others["params"]) == len(list(model.parameters()))


def test_matrices_of_a_model_of_ones_own() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.mlp = HyperGLU(n_embd=16, n_head=2, block_size=8), nn.Linear(16, 16)

    block = Block()
    assert any(p is block.mlp.weight for p in muon_parameters(block))
    assert not any(p is block.attn.op1.A for p in muon_parameters(block))
