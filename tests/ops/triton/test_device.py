"""Devices, streams and settings that this machine does not have, as far as they can be told without them."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hypermlp import ops
from hypermlp.ops.triton import blocks, device
from hypermlp.ops.triton.tiles import Tile


def test_kernels_start_on_the_device_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the current one, where the same addresses are somebody else's."""
    entered, started = [], []

    @contextmanager
    def current(index: torch.device) -> object:
        entered.append(str(index))
        yield
        entered.append("left")

    class Kernel:
        def __getitem__(self, grid: tuple) -> object:
            return lambda *arguments, **constants: started.append((grid, list(entered)))

    with FakeTensorMode():
        there, here = torch.empty(2, device="cuda:1"), torch.empty(2)
    monkeypatch.setattr(torch.cuda, "device", current)
    device.Device().start(Kernel(), (3,), (5, there), {}, Tile(16, 16, 4, 1, "some"))
    assert started == [((3,), ["cuda:1"])]
    assert entered == ["cuda:1", "left"]
    device.Device().start(Kernel(), (3,), (here,), {}, Tile(16, 16, 4, 1, "some"))
    assert len(entered) == 2


def test_capability_is_that_of_the_tensors_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda name: {"cuda:0": (7, 5), "cuda:1": (8, 9)}[name])
    assert ops.choose("auto", "cuda:0", "bfloat16").impl == "chunked"
    assert ops.choose("auto", "cuda:1", "bfloat16").reason.startswith("CUDA sm_89")


@pytest.mark.parametrize("spelling", ["set_float32_matmul_precision", "cuda.matmul", "all backends"])
def test_tf32_in_every_spelling(spelling: str) -> None:
    """In a process of its own: torch refuses to mix them."""
    import subprocess
    import sys

    allow = {
        "set_float32_matmul_precision": "torch.set_float32_matmul_precision('high')",
        "cuda.matmul": "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
        "all backends": "torch.backends.fp32_precision = 'tf32'",
    }[spelling]
    code = "import torch; from hypermlp.ops.triton.device import tf32_allowed; a = tf32_allowed()"
    subprocess.run([sys.executable, "-c", f"{code}; {allow}; assert not a and tf32_allowed()"], check=True)


def test_tables_are_read_after_they_were_copied() -> None:
    """By the stream that copied them at once, by another after the copy, which also keeps the memory."""
    waited, kept = [], []

    def stream(name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, wait_event=lambda event: waited.append((name, event)))

    tables = blocks.Tables("cpu", False, np.arange(6).reshape(2, 3), np.arange(3))
    assert [x.tolist() for x in tables.views()] == [[[0, 1, 2], [3, 4, 5]], [0, 1, 2]]
    assert all(x.data_ptr() % 16 == tables.memory.data_ptr() % 16 for x in tables.views())
    first, other = stream("first"), stream("other")
    tables.copied = (first, "copied")
    for current, expected in ((first, []), (other, [("other", "copied")])):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "current_stream", lambda where, current=current: current)
            patch.setattr(torch.Tensor, "record_stream", lambda self, stream: kept.append(stream.name))
            tables.views()
        assert waited == expected
    assert kept == ["other"]


@pytest.mark.parametrize("far", [False, True])
def test_tables_have_the_bits_that_offsets_need(far: bool) -> None:
    plan = blocks.Plan(np.array([[0, 0, 8, 0, 8]]).tobytes(), 8, 16, 16, "cpu", far)
    (chunk,), _ = blocks.chunk_rows(plan, 1 << 20, 16, 16)
    assert chunk.tables.views()[0].dtype == (torch.int64 if far else torch.int32)
