"""transformers' own tensor parallelism: two processes compute and write what one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_small import native, some_tokens, write

from helpers import assert_same
from hypermlp.models.hf import HyperForCausalLM
from processes import run_together

configuration = pytest.importorskip("transformers.distributed.configuration_utils")
MIXERS: dict[str, str | tuple[str, ...]] = {"softmax": "softmax", "hybrid": ("softmax", "hyperglu")}


def process(folder: Path) -> dict[str, dict[str, Any]]:
    found = {}
    for name in MIXERS:
        two = configuration.DistributedConfig(tp_size=2)
        model = HyperForCausalLM.from_pretrained(folder / name, distributed_config=two, dtype=torch.float32).eval()
        tokens = some_tokens(2, 9)
        with torch.no_grad():
            logits = model(tokens).logits
        written = {kind: write(model, tokens[:, :5], 6, cache_implementation=kind) for kind in (None, "static")}
        mixer = model.model.blocks[0].mixer
        found[name] = {"logits": logits, "written": written, "heads": mixer.cache_spec().slots["k"][0]}
    return found


def test_two_processes_write_what_one_does(tmp_path: Path) -> None:
    expected = {}
    for name, mixer in MIXERS.items():
        model = HyperForCausalLM.wrap(native(mixer, vocabulary=12)).eval()
        model.save_pretrained(tmp_path / name)
        with torch.no_grad():
            logits = model(some_tokens(2, 9)).logits
        expected[name] = (logits, write(model, some_tokens(2, 9)[:, :5], 6))
    for both in run_together(process, 2, tmp_path, tmp_path):
        for name, found in both.items():
            logits, written = expected[name]
            assert_same(found["logits"], logits, 1e-5)
            assert found["written"] == {None: written, "static": written}
            assert found["heads"] == (1 if name == "softmax" else 2)  # a plan names modules of all layers alike
