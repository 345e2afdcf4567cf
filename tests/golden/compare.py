"""Runs the authors' released layer beside ours: on the stored vectors, and on larger inputs than are stored.

python tests/golden/compare.py PATH/hyperglu.py --commit COMMIT --out results/parity/authors.json

hyperglu.py is theirs (github.com/LJC-FVNR/HyperMLP) and no part of this repository. For every stored file their layer gets its
parameters, input and dy, and must give its output and gradients: so the vectors are theirs at that commit. For larger cases,
in float32 and float64, both layers get the same parameters, and the record has the largest relative difference of output and
gradients. This is also how such vectors are made: `theirs` returns all that a file holds.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib.util
import json
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from hypermlp import HyperGLU, HyperGLUConfig
from hypermlp.mixers.authors import to_authors
from hypermlp.provenance import provenance

FOLDER = Path(__file__).parent
# Larger than what is stored; (batch, tokens) and the options of the layer.
LARGER: dict[str, tuple[int, int, dict[str, Any]]] = {
    "HyperGLU, width 256, 512 tokens": (2, 512, {"n_embd": 256, "n_head": 2, "block_size": 512}),
    "HyperMLP, width 256, 512 tokens": (2, 512, {"n_embd": 256, "n_head": 2, "block_size": 512, "attn_kind": "relu"}),
    "HyperGLU with RoPE, width 256, 512 tokens": (2, 512, {"n_embd": 256, "n_head": 2, "block_size": 512, "use_rope": True}),
    "HyperGLU, 4 heads, 300 of 512 lags": (2, 300, {"n_embd": 256, "n_head": 4, "block_size": 512}),
}
Results = dict[str, Tensor]  # y, dx and the gradient of every parameter, by the authors' names


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("authors_hyperglu", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # their dataclasses look it up
    spec.loader.exec_module(module)
    return module


def theirs(module: ModuleType, config: dict[str, Any], parameters: Results, x: Tensor, d_y: Tensor) -> Results:
    known = {field.name for field in dataclasses.fields(module.HyperGLUConfig)}
    layer = module.HyperGLU(module.HyperGLUConfig(**{name: value for name, value in config.items() if name in known}))
    layer.to(x.dtype).load_state_dict(parameters)
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(d_y)
    return {"y": y.detach(), "dx": grad(x)} | {name: grad(p) for name, p in layer.named_parameters()}


def ours(config: HyperGLUConfig, parameters: Results, x: Tensor, d_y: Tensor) -> Results:
    layer = HyperGLU(config).to(x.dtype)
    layer.load_authors_state_dict(parameters)
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(d_y)
    gradients = {name: to_authors(name, grad(p), config) for name, p in layer._by_authors_name().items()}
    return {"y": y.detach(), "dx": grad(x)} | gradients


def grad(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def difference(found: Results, expected: Results) -> tuple[float, str]:
    """The largest relative difference, and where."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    return max((float((found[name] - value).norm() / value.norm().clamp(min=1e-30)), name) for name, value in expected.items())


def stored(path: Path) -> tuple[dict[str, Any], Results]:
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["config"]), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def check_stored(module: ModuleType) -> list[dict[str, Any]]:
    rows = []
    for path in sorted(FOLDER.glob("*.safetensors")):
        config, tensors = stored(path)
        parameters, gradients = (
            {n.removeprefix(p): t for n, t in tensors.items() if n.startswith(p)} for p in ("param.", "grad.")
        )
        expected = {"y": tensors["y"], "dx": tensors["dx"]} | gradients
        largest, where = difference(theirs(module, config, parameters, tensors["x"], tensors["dy"]), expected)
        rows.append({"vectors": path.stem, "shape": list(tensors["x"].shape), "difference": largest, "where": where})
    return rows


def compare_larger(module: ModuleType) -> list[dict[str, Any]]:
    rows = []
    for (name, (batch, tokens, options)), dtype in ((c, d) for c in LARGER.items() for d in (torch.float32, torch.float64)):
        generator, config = torch.Generator().manual_seed(0), HyperGLUConfig(**options)
        torch.manual_seed(0)
        layer = HyperGLU(config).to(dtype)
        for parameter in layer.parameters():
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator, dtype=dtype)
        parameters = layer.authors_state_dict()
        x, d_y = (torch.randn(batch, tokens, config.n_embd, generator=generator, dtype=dtype) for _ in range(2))
        expected = theirs(module, {**options, "chunk_T": 128}, parameters, x, d_y)
        largest, where = difference(ours(config, parameters, x, d_y), expected)
        rows.append(
            {"case": name, "batch": batch, "dtype": str(dtype).removeprefix("torch."), "difference": largest, "where": where}
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the authors' hyperglu.py")
    parser.add_argument("--commit", required=True, help="the commit of their repository that it is from")
    parser.add_argument("--out", type=Path, default=Path("results/parity/authors.json"))
    given = parser.parse_args()
    module, begin = load(given.file), time.perf_counter()
    vectors, larger = check_stored(module), compare_larger(module)
    for row in (*vectors, *larger):
        print(f"{row.get('vectors') or row['case'] + ', ' + row['dtype']:<50} {row['difference']:.1e}  ({row['where']})")
    record = {
        "provenance": {**provenance(0), "seconds": time.perf_counter() - begin},
        "authors": {
            "repository": "https://github.com/LJC-FVNR/HyperMLP",
            "commit": given.commit,
            "sha256 of hyperglu.py": hashlib.sha256(given.file.read_bytes()).hexdigest(),
        },
        "stored vectors, their layer again": vectors,
        "larger, ours against theirs": larger,
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
