"""torch.export with free batch and time, AOTInductor and ONNX: what is exported computes what the layer computes."""

import warnings
from pathlib import Path

import pytest
import torch
from torch.export import Dim, export

from helpers import assert_same, perturb
from hypermlp.mixers import DISTINCT, Mixer, build_mixer

SHAPES = ((1, 1), (3, 7), (2, 130))
FREE = {0: Dim("batch", min=1, max=2**16), 1: Dim("time", min=1, max=2**20)}


def layer(name: str) -> Mixer:
    torch.manual_seed(0)
    return perturb(build_mixer(name, 16, 32)).eval()


@pytest.mark.parametrize("name", sorted(DISTINCT))
def test_batch_and_time_stay_free(name: str) -> None:
    mixer = layer(name)
    with torch.no_grad():
        program = export(mixer, (torch.randn(2, 20, 16),), dynamic_shapes=(FREE,)).module()
        for shape in SHAPES:
            x = torch.randn(*shape, 16)
            assert_same(program(x), mixer(x), 1e-5)


@pytest.mark.parametrize("example", [(2, 3), (4, 100)], ids=["few tokens", "many tokens"])
def test_any_example_gives_the_same_program(example: tuple[int, int]) -> None:
    """Few tokens and many take different shortcuts in eager mode; an exported program takes neither."""
    mixer = layer("hyperglu")
    with torch.no_grad():
        program = export(mixer, (torch.randn(*example, 16),), dynamic_shapes=(FREE,)).module()
        for shape in SHAPES:
            x = torch.randn(*shape, 16)
            assert_same(program(x), mixer(x), 1e-5)


def test_onnx_runtime_computes_the_layer(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    mixer = layer("hyperglu")
    with warnings.catch_warnings(), torch.no_grad():  # torch 2.12 cannot promote types of what requires gradients
        warnings.simplefilter("ignore")  # of the exporter, about itself
        program = torch.onnx.export(mixer, (torch.randn(2, 20, 16),), dynamic_shapes=(FREE,), verbose=False)
    program.save(tmp_path / "layer.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "layer.onnx")
    for shape in SHAPES:
        x = torch.randn(*shape, 16)
        (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        assert_same(torch.from_numpy(y), mixer(x).detach(), 1e-4)
