"""Weights that are not plain tensors in memory: quantised, offloaded, dispatched, distributed."""

import copy
import os
import socket
import warnings
from pathlib import Path

import pytest
import torch
from hf_small import native, some_tokens, write
from torch import nn

from helpers import assert_same
from hypermlp.mixers import DISTINCT, build_mixer
from hypermlp.models.hf import HyperForCausalLM


def quantised(model: HyperForCausalLM, bits: int) -> HyperForCausalLM:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the library, about torch
        from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_
        from torchao.quantization.granularity import PerGroup

        four = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(16))
        quantize_(model, Int8WeightOnlyConfig() if bits == 8 else four)
    return model


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("mixer", ["hyperglu", "softmax", "gated_deltanet"])
def test_quantised_weights_compute_what_their_values_say(mixer: str, bits: int) -> None:
    sizes = {"width": 32, "inner": 64, "tied": False}
    model = quantised(HyperForCausalLM.wrap(native(mixer, **sizes)), bits)
    values = copy.deepcopy(model)
    changed = 0
    for module in values.modules():
        if isinstance(module, nn.Linear) and hasattr(module.weight, "dequantize"):
            module.weight = nn.Parameter(module.weight.dequantize(), requires_grad=False)
            changed += 1
    assert changed >= 2 * 7
    prompt = some_tokens(2, 5)
    with torch.no_grad():
        assert_same(model(prompt).logits, values(prompt).logits, 1e-4)
    assert write(model, prompt, 20) == write(values, prompt, 20)
    assert write(model, prompt, 20) == write(model, prompt, 20, use_cache=False)


@pytest.mark.parametrize("name", [*sorted(DISTINCT), "S-c"])
def test_offloaded_weights_are_brought_where_they_are_read(name: str, tmp_path: Path) -> None:
    import accelerate

    model = HyperForCausalLM.wrap(native(name, depth=1))
    prompt = some_tokens(2, 5)
    expected, text = model(prompt).logits, write(model, prompt, 8)
    if name == "hyperglu":
        accelerate.disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    else:
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert all(p.is_meta for p in model.parameters())
    with torch.no_grad():
        assert_same(model(prompt, use_cache=False).logits, expected, 1e-5)
    assert write(model, prompt, 8) == text
    assert all(p.is_meta for p in model.parameters())


def test_a_device_map_is_made_by_itself(tmp_path: Path) -> None:
    model = HyperForCausalLM.wrap(native())
    model.save_pretrained(tmp_path)
    prompt = some_tokens(2, 5)
    loaded = HyperForCausalLM.from_pretrained(tmp_path, device_map="auto")
    assert write(loaded, prompt) == write(model, prompt)
    assert model._no_split_modules == {"HyperBlock"}
    for device_map in ({"": "cpu"}, {"model.embedding": "cpu", "model.blocks": "disk", "model.norm": "cpu", "head": "cpu"}):
        loaded = HyperForCausalLM.from_pretrained(tmp_path, device_map=device_map, offload_folder=str(tmp_path / "weights"))
        assert write(loaded, prompt) == write(model, prompt)


def test_a_layer_can_be_distributed() -> None:
    """DTensor parameters on a mesh of one process take the paths of plain operators."""
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, distribute_module
    from torch.distributed.tensor.experimental import implicit_replication

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    before = dict(os.environ)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}
    init_process_group("gloo")
    try:
        torch.manual_seed(0)
        layer = build_mixer("hyperglu", 16, 12)
        x = torch.randn(2, 9, 16)
        expected = layer(x).detach()
        mesh = init_device_mesh("cpu", (1,))
        distributed = distribute_module(layer, mesh)
        with implicit_replication():
            found = distributed(DTensor.from_local(x, mesh, [Replicate()]))
            assert_same(found.to_local().detach(), expected, 1e-5)
            found.to_local().sum().backward()
        assert all(p.grad is not None for p in distributed.parameters())
    finally:
        destroy_process_group()
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)
