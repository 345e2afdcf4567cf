"""Small Triton kernels executed as compiled: right ones pass, each fault is found."""

from __future__ import annotations

import ptx_kernels
import pytest
import torch

from compiled import in_child
from hypermlp.testing.ptx import Fault, Race
from hypermlp.testing.ptx.emulator import Emulator

each_arch = pytest.mark.parametrize("arch", [80, 89, 90])
ORDERS = ("together", "forward", "reverse", 11)


@each_arch
def test_add(arch: int) -> None:
    for order in ORDERS:
        assert in_child(ptx_kernels.add, arch, order, 0) == 0


def test_an_output_that_is_too_short() -> None:
    with pytest.raises(Fault, match=r"add_kernel, program \(2, 0, 0\).*ptx_kernels\.py.*out are outside"):
        in_child(ptx_kernels.add, 80, "together", 4)


def test_a_mask_that_is_one_too_wide() -> None:
    with pytest.raises(Fault, match="x are outside of its 1200"):
        in_child(ptx_kernels.too_far, 80)


@each_arch
@pytest.mark.parametrize("dtype, bound", [(torch.bfloat16, 1e-6), (torch.float16, 1e-6), (torch.float32, 2e-3)])
def test_matmul(arch: int, dtype: torch.dtype, bound: float) -> None:
    """Sums are in float32; float32 operands are rounded to TF32."""
    for order, warps, stages in (("together", 4, 3), ("reverse", 2, 1), (11, 4, 2)):
        error = in_child(ptx_kernels.matmul, arch, dtype, order, warps, stages)
        assert 0 < error < bound


@each_arch
def test_softmax(arch: int) -> None:
    for order in ORDERS:
        assert in_child(ptx_kernels.softmax, arch, order) < 1e-6


@pytest.mark.parametrize("order", ORDERS)
def test_softmax_without_its_barriers(order: str | int) -> None:
    with pytest.raises(Fault, match=r"softmax_kernel, program .*(nothing between|nobody wrote)"):
        in_child(ptx_kernels.softmax, 80, order, False)


@each_arch
def test_gather(arch: int) -> None:
    assert all(in_child(ptx_kernels.gather, arch, order) for order in ORDERS)


@each_arch
def test_a_value_with_two_names_before_a_loop(arch: int) -> None:
    """Python, and the interpreter, carry two values. Triton carries one: the emulator executes what it made of it."""
    assert in_child(ptx_kernels.delayed, arch, False)
    assert not in_child(ptx_kernels.delayed, arch, True)


def test_an_offset_that_wraps_around() -> None:
    assert in_child(ptx_kernels.strided, 80, True)
    with pytest.raises(Fault, match="x are outside of its 256"):
        in_child(ptx_kernels.strided, 80, False)


def test_a_small_tensor_in_place() -> None:
    assert in_child(ptx_kernels.in_place, 80, 256)
    with pytest.raises(Race, match="several warps of program 0"):
        in_child(ptx_kernels.in_place, 80, 32)


@pytest.mark.parametrize("arch, stages", [(80, 2), (80, 3), (90, 1)])
def test_a_tile_that_a_product_and_a_sum_use(arch: int, stages: int) -> None:
    assert in_child(ptx_kernels.twice_used, arch, stages) < 1e-6


@pytest.mark.parametrize("stages", [2, 3])
def test_triton_copies_over_a_tile_that_a_product_still_reads(stages: int) -> None:
    """On sm_90 the pipeline gives such a tile one buffer too few. A fault of the compiler (3.7.1); one stage avoids it."""
    with pytest.raises(Race, match=r"cp\.async.*that a product still reads"):
        in_child(ptx_kernels.twice_used, 90, stages)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_matmul_of_warp_groups(dtype: torch.dtype) -> None:
    bound = 2e-3 if dtype == torch.float32 else 1e-6
    for order, stages in (("together", 3), ("reverse", 1), (11, 2)):
        assert 0 < in_child(ptx_kernels.matmul, 90, dtype, order, 4, stages, 64) < bound


def test_two_architectures_with_the_same_program() -> None:
    assert in_child(ptx_kernels.one_program)


def test_the_interpreter_cannot_compile() -> None:
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        Emulator(80).run(ptx_kernels.add_kernel, (1,), torch.zeros(4), torch.zeros(4), torch.zeros(4), 4, N=16)


def test_tensors_elsewhere_are_refused() -> None:
    assert Emulator(80).obstacle("cpu", "bfloat16") is None
    assert "CPU" in (Emulator(80).obstacle("cuda:0", "bfloat16") or "")
