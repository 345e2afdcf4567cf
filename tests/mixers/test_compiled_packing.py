"""Packed documents in one compiled graph: every mixer computes what it computes eagerly, without a break."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from helpers import assert_same, perturb, randn, run_layer
from hypermlp.mixers import MIXERS, build_mixer


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch's own tracing
@pytest.mark.parametrize("name", [*sorted(MIXERS), "G-12!", "S-pcg-q"])
def test_packed_documents_compile_into_one_graph(name: str) -> None:
    mixer = perturb(build_mixer(name, 16, 80))
    x, d_y = randn(1, 70, 16, dtype=torch.float32), randn(1, 70, 16, seed=1, dtype=torch.float32)
    bounds = torch.tensor([0, 3, 66, 67, 70])
    expected = run_layer(mixer, x, d_y, cu_seqlens=bounds)
    mixer.zero_grad()
    compiled = torch.compile(mixer, backend="aot_eager", fullgraph=True)
    found = run_layer(compiled, x, d_y, cu_seqlens=bounds)
    assert_same({key: found[key] for key in ("y", "dx")}, {key: expected[key] for key in ("y", "dx")}, 1e-4)
