"""transformers' own tensor parallelism: two processes compute and write what one does."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hf_small import native, some_tokens, write

from helpers import assert_same
from hypermlp.models.hf import HyperForCausalLM

configuration = pytest.importorskip("transformers.distributed.configuration_utils")
MIXERS: dict[str, str | tuple[str, ...]] = {"softmax": "softmax", "hybrid": ("softmax", "hyperglu")}


def process(rank: int, port: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for name in MIXERS:
        two = configuration.DistributedConfig(tp_size=2)
        model = HyperForCausalLM.from_pretrained(Path(folder) / name, distributed_config=two, dtype=torch.float32).eval()
        tokens = some_tokens(2, 9)
        with torch.no_grad():
            logits = model(tokens).logits
        written = {kind: write(model, tokens[:, :5], 6, cache_implementation=kind) for kind in (None, "static")}
        mixer = model.model.blocks[0].mixer
        found[name] = {"logits": logits, "written": written, "heads": mixer.cache_spec().slots["k"][0]}
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_write_what_one_does(tmp_path: Path) -> None:
    expected = {}
    for name, mixer in MIXERS.items():
        model = HyperForCausalLM.wrap(native(mixer, vocabulary=12)).eval()
        model.save_pretrained(tmp_path / name)
        with torch.no_grad():
            logits = model(some_tokens(2, 9)).logits
        expected[name] = (logits, write(model, some_tokens(2, 9)[:, :5], 6))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(process, (port, str(tmp_path)), nprocs=2)
    for rank in range(2):
        for name, found in torch.load(tmp_path / f"{rank}.pt").items():
            logits, written = expected[name]
            assert_same(found["logits"], logits, 1e-5)
            assert found["written"] == {None: written, "static": written}
            assert found["heads"] == (1 if name == "softmax" else 2)  # a plan names modules of all layers alike
