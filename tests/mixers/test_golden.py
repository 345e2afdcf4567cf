"""The layer against vectors computed by the authors' own code: output, input gradient, every parameter gradient."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from helpers import each_impl, precision, run_layer
from hypermlp import HyperGLU, HyperGLUConfig
from hypermlp.mixers.authors import to_authors

FILES = sorted((Path(__file__).parent.parent / "golden").glob("*.safetensors"))
TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-4}


def load(path: Path, dtype: torch.dtype) -> tuple[HyperGLUConfig, dict[str, Tensor]]:
    with safe_open(path, "pt") as file:
        config = HyperGLUConfig.from_dict(json.loads(file.metadata()["config"]))
        return config, {key: file.get_tensor(key).to(dtype) for key in file.keys()}  # noqa: SIM118 (no dict)


def under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def test_vectors_exist() -> None:
    assert len(FILES) == 15


@each_impl
@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_equals_the_authors_layer(path: Path, impl: str, chunk: int | None) -> None:
    dtype = precision(impl)
    config, stored = load(path, dtype)
    layer = HyperGLU(config).to(dtype)
    layer.load_authors_state_dict(under(stored, "param."))
    found = run_layer(layer, stored["x"], stored["dy"], impl=impl, chunk_T=chunk)

    named = layer._by_authors_name()
    d_parameters = {name: to_authors(name, p.grad, config) for name, p in named.items()}
    assert d_parameters.keys() == under(stored, "grad.").keys()
    pairs = {"y": (found["y"], stored["y"]), "dx": (found["dx"], stored["dx"])}
    pairs |= {name: (d, stored[f"grad.{name}"]) for name, d in d_parameters.items()}
    for name, (ours, theirs) in pairs.items():
        relative = ((ours - theirs).norm() / theirs.norm()).item()
        assert relative <= TOLERANCE[dtype], f"{name}: {relative:.1e}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_authors_state_dict_is_lossless(path: Path) -> None:
    config, stored = load(path, torch.float64)
    layer = HyperGLU(config).double()
    layer.load_authors_state_dict(under(stored, "param."))
    saved = layer.authors_state_dict()
    assert saved.keys() == under(stored, "param.").keys()
    for name, value in saved.items():
        assert torch.equal(value, stored[f"param.{name}"]), name
