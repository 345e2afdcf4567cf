"""torch's FlopCounterMode counts our operators as bench.flops does by hand."""

import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hypermlp import HyperGLU, HyperGLUConfig
from hypermlp.bench import flops
from hypermlp.mixers import build_mixer


def counted(layer: torch.nn.Module, x: torch.Tensor, backward: bool = False, **options: object) -> int:
    with FlopCounterMode(display=False) as counter:
        y = layer(x, **options)
        if backward:
            y.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("impl", ["native", "chunked"])
@pytest.mark.parametrize("time", [40, 100])
def test_a_forward_counts_what_the_sizes_say(impl: str, time: int) -> None:
    config = HyperGLUConfig(n_embd=32, n_head=2, block_size=64, impl_default=impl)
    layer, x = HyperGLU(config), torch.randn(3, time, 32)
    assert counted(layer, x) == flops.forward(layer, 3, time)
    assert 2.5 < counted(layer, x, backward=True) / counted(layer, x) < 4  # as a training step does


def test_documents_count_their_own_pairs_only() -> None:
    config = HyperGLUConfig(n_embd=32, n_head=2, block_size=64)
    layer, x = HyperGLU(config), torch.randn(1, 50, 32)
    packed = counted(layer, x, cu_seqlens=torch.tensor([0, 20, 50]))
    assert packed == sum(2 * sum(flops.hyper(layer, time)) for time in (20, 30))


def test_scans_are_counted() -> None:
    with_scan = counted(build_mixer("mamba", 16, 32), torch.randn(2, 20, 16))
    linears = sum(
        2 * 2 * 20 * m.weight.numel() for m in build_mixer("mamba", 16, 32).modules() if isinstance(m, torch.nn.Linear)
    )
    assert with_scan > linears


def test_the_counter_may_be_imported_first_or_last() -> None:
    script = """
import sys
{first}
import hypermlp.mixers, torch
assert {imported} == ("torch.utils.flop_counter" in sys.modules)
from torch.utils.flop_counter import flop_registry
assert torch.ops.hypermlp.chunked in flop_registry and torch.ops.hypermlp.scan in flop_registry
"""
    for first, imported in (("", False), ("import torch.utils.flop_counter", True)):
        subprocess.run([sys.executable, "-c", script.format(first=first, imported=imported)], check=True)
