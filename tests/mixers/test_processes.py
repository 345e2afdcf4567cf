"""Layers split over two processes by other people's recipes: equal to one process, or refused with the cure."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from helpers import assert_same, error, perturb, randn, run_layer
from hypermlp.mixers import MIXERS, Mixer, build_mixer

WIDTH, LENGTH, T = 32, 12, 8
RECIPES = ["llama", "every linear", "o alone", "context", "fully_shard"]
each_mixer = pytest.mark.parametrize("name", sorted(MIXERS))


def plan(mixer: Mixer, recipe: str) -> dict[str, ColwiseParallel | RowwiseParallel]:
    """Llama's: q, k and v by columns, o by rows."""
    linears = [name for name, module in mixer.named_modules() if isinstance(module, nn.Linear)]
    columns = {"llama": ("q", "k", "v"), "every linear": tuple(linears), "o alone": ()}[recipe]
    return {name: ColwiseParallel() for name in linears if name in columns} | {"o": RowwiseParallel()}


def attempt(name: str, recipe: str, mesh: DeviceMesh) -> str | float:
    """How far output and gradients of the input are from those of one process; or what was said instead."""
    mixer = perturb(build_mixer(name, WIDTH, LENGTH))
    x, d_y = (randn(2, T, WIDTH, seed=seed, dtype=torch.float32) for seed in (0, 1))
    expected = run_layer(mixer, x, d_y)
    try:
        if recipe == "context":
            with context_parallel(mesh, buffers=[x, d_y], buffer_seq_dims=[1, 1]):
                run_layer(mixer, x, d_y)
            return "computed"
        mixer = (
            fully_shard(mixer, mesh=mesh) if recipe == "fully_shard" else parallelize_module(mixer, mesh, plan(mixer, recipe))
        )
        found = run_layer(mixer, x, d_y)
        return max(error(found[what], expected[what]) for what in ("y", "dx"))
    except Exception as failure:
        return f"{type(failure).__name__}: {failure}"


def decode(recipe: str, mesh: DeviceMesh) -> str:
    """What a softmax layer says while it decodes; nothing where it does so rightly."""
    mixer, x = perturb(build_mixer("softmax", WIDTH, LENGTH)), randn(2, T, WIDTH, dtype=torch.float32)
    with torch.no_grad():
        expected = mixer(x)
        mixer = (
            fully_shard(mixer, mesh=mesh) if recipe == "fully_shard" else parallelize_module(mixer, mesh, plan(mixer, recipe))
        )
        cache = mixer.new_cache(2)
        try:
            steps = torch.cat([mixer(part, cache=cache) for part in x.split(1, 1)], 1)
        except ValueError as refusal:
            return str(refusal)
    assert_same(steps, expected, 1e-5)
    return ""


def process(rank: int, port: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    results = {(name, recipe): attempt(name, recipe, mesh) for name in sorted(MIXERS) for recipe in RECIPES}
    results |= {("decoding", recipe): decode(recipe, mesh) for recipe in ("llama", "fully_shard")}
    torch.save(results, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], str | float]]:
    """Of both processes."""
    folder = tmp_path_factory.mktemp("processes")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(process, (port, str(folder)), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


# Softmax attention computes the heads that a process has; Llama's recipe knows no gate, so it leaves that whole.
SPLIT = {
    *((name, "every linear") for name in ("softmax", "softmax_qknorm", "gated_softmax")),
    *((name, "llama") for name in ("softmax", "softmax_qknorm")),
}


@each_mixer
@pytest.mark.parametrize("recipe", ["llama", "every linear", "o alone"])
def test_tensor_parallel(name: str, recipe: str, results: list[dict[tuple[str, str], str | float]]) -> None:
    for result in results:
        found = result[name, recipe]
        if (name, recipe) in SPLIT:
            assert isinstance(found, float), found
            assert found < 1e-5
        else:
            assert str(found).startswith("ValueError: "), found
            assert "plan" in str(found) or "fully_shard" in str(found)


@each_mixer
def test_context_parallel_is_refused(name: str, results: list[dict[tuple[str, str], str | float]]) -> None:
    for result in results:
        assert str(result[name, "context"]).startswith("ValueError: context_parallel splits sequences between processes")


@each_mixer
def test_divided_parameters(name: str, results: list[dict[tuple[str, str], str | float]]) -> None:
    """What every refusal advises."""
    for result in results:
        assert isinstance(result[name, "fully_shard"], float), result[name, "fully_shard"]
        assert result[name, "fully_shard"] < 1e-5


def test_decoding(results: list[dict[tuple[str, str], str | float]]) -> None:
    """Each process keeps the heads that it computes."""
    for result in results:
        assert result["decoding", "fully_shard"] == ""
        assert result["decoding", "llama"] == ""
