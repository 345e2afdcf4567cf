"""The cost model against hand counts: occupancy, scheduling, turns of loops, bytes, caches; and against published speeds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from hypermlp.bench import kernels, predictions, roofline
from hypermlp.bench.processors import occupancy, schedule
from hypermlp.bench.roofline import DEVICES, Gpu, KernelCost, L2Cache
from hypermlp.bench.work import LaunchWork, Touch, turns_of, work_of
from hypermlp.ops.triton import tiles
from hypermlp.report.gpu import predicted_markdown

L40S, A100, H100 = DEVICES
ONE = Gpu(name="one", arch=89, sms=1, clock=1.0, tflops=2 * 512e-3, memory=1e9, l2=1e9, l2_bytes=1 << 20)  # bytes are free
ROW = {
    "kernel": "k", "arch": 89, "tile": [64, 32], "warps": 8, "registers": 64, "shared": 0, "sync": False,
    "instructions": 110, "mma": 10, "outside": 50, "macs": 128.0,
}  # fmt: skip


@pytest.mark.parametrize(
    "arch, registers, warps, shared, tensor_memory, programs",
    [
        (80, 32, 4, 0, 0, 16),  # 64 warps
        (86, 32, 1, 0, 0, 16),  # 16 blocks
        (89, 32, 1, 0, 0, 24),
        (89, 128, 8, 0, 0, 2),
        (89, 168, 4, 0, 0, 3),  # 12 warps of 5376 registers
        (89, 166, 8, 32 << 10, 0, 1),
        (86, 255, 4, 0, 0, 2),
        (89, 32, 4, 48 << 10, 0, 2),
        (120, 32, 4, 48 << 10, 0, 2),
        (90, 32, 4, 232_448, 0, 1),
        (90, 32, 4, 232_449, 0, 0),
        (100, 32, 4, 0, 256, 2),
    ],
)
def test_occupancy(arch: int, registers: int, warps: int, shared: int, tensor_memory: int, programs: int) -> None:
    assert occupancy(arch, registers, warps, shared, tensor_memory) == programs


def test_programs_on_processors() -> None:
    assert schedule([100.0], 8, 1, 5) == 100  # as long as the program
    assert schedule([100.0], 4, 1, 5) == 200  # four warps hide half of the latency
    assert schedule([100.0], 1, 1, 5) == 800
    assert schedule([100.0, 100.0], 4, 2, 1) == 200  # together eight warps: full rate
    assert schedule([100.0, 100.0], 4, 1, 1) == 400
    assert schedule([100.0, 50.0], 4, 2, 1) == 100 + 100  # the shorter ends at 100, then one is alone with half of the rate
    assert schedule([30.0, 10.0, 10.0, 10.0], 8, 1, 2) == 30  # what follows goes where one ends
    with pytest.raises(ValueError, match="smaller tile"):
        schedule([1.0], 8, 0, 1)


def test_no_schedule_beats_its_work() -> None:
    clocks = np.random.default_rng(0).uniform(1, 100, 300).tolist()
    for fit, sms in ((1, 7), (3, 7), (2, 400)):
        taken = schedule(clocks, 8, fit, sms)
        assert taken >= max(sum(clocks) / sms, max(clocks)) - 1e-9
        assert taken <= sum(clocks) / sms + fit * max(clocks)


def known(blocks: int = 4, first: int = 0, **more: object) -> dict:
    """Row blocks of 64 of one sequence of 256 tokens, two heads, K 48, R 16."""
    table = torch.tensor([[0, 64 * n, 256, 0, 64 * n, 256, 0, 0] for n in range(first, first + blocks)])
    order = torch.arange(blocks - 1, -1, -1)  # the longest first
    return {"table": table, "order": order, "T": 256, "L": 256, "H": 2, "M": 64, "N": 32, **more}


def test_turns_by_hand() -> None:
    assert turns_of("forward_u", (4, 2, 1), known()).tolist() == 2 * [10, 8, 6, 4]  # 2 tiles per block of rows, and 2 late ones
    assert turns_of("backward_dz", (4, 2, 1), known()).tolist() == 2 * [8, 6, 4, 2]
    halves = turns_of("forward_u", (4, 1, 2), known(per=4)).tolist()
    assert halves == [6, 6, 6, 4, 6, 4, 0, 0]
    widths = {"W": 384, "W1": 128, "W2": 0, "SLOTS": 64}
    assert turns_of("row_product", (4, 1, 3), known(**widths)).tolist() == 3 * [5, 4, 3, 2]
    assert turns_of("row_product", (4, 1, 6), known(per=3, **widths)).tolist() == 3 * [3, 3, 3, 2] + 3 * [2, 1, 0, 0]
    slots = torch.tensor([[0, 0, 0, 256, 0, 4], [0, 0, 64, 256, 1, 4]])
    assert turns_of("slot_product", (2, 2, 1), known(slots=slots)).tolist() == [4, 3, 4, 3]
    assert turns_of("backward_parameters", (2, 1, 3), {"tallies": torch.tensor([4, 2])}).tolist() == [2, 1, 1, 1, 1, 0]
    with pytest.raises(ValueError, match="new_kernel"):
        turns_of("new_kernel", (1, 1, 1), {})


def test_bytes_by_hand() -> None:
    """forward_u of the last two of four row blocks: half of q and u, all of k and A1."""
    half = torch.bfloat16
    tensors = {"q": torch.empty(1, 256, 4, 48, dtype=half), "k": torch.empty(1, 256, 4, 48, dtype=half)}
    tensors |= {"A1": torch.empty(4, 256, 16, dtype=half), "u": torch.empty(1, 256, 4, 16)}
    constants = {"GLU": True, "K": 48, "R": 16}
    work = work_of("forward_u", (2, 2), known(2, 2) | tensors, constants)
    assert work.turns.tolist() == [10, 8, 10, 8]
    parts = {part.key[0]: part for part in work.touched}
    sizes = {name: parts[x.data_ptr()].size for name, x in tensors.items()}
    assert sizes == {"q": 128 * 4 * 48 * 2, "k": 256 * 4 * 48 * 2, "A1": 4 * 256 * 16 * 2, "u": 128 * 4 * 16 * 4}
    assert [name for name, x in tensors.items() if parts[x.data_ptr()].written] == ["u"]
    assert work.moved == 36 * 32 * 2 * (48 + 16) * 2  # turns, columns, routes, K and R, bytes


def test_the_cost_of_one_launch() -> None:
    """128 × 64 × 32 multiply-adds at 512 a clock, and 0.9 of 100 instructions of 8 warps on 4 schedulers."""
    turn, outside = 128 * 64 * 32 / 512 + 0.9 * 200, 0.9 * 100
    cost = roofline.cost_of(ROW, LaunchWork(np.array([2]), 0, []), ONE, L2Cache(1))
    assert cost.grid == pytest.approx((2 * turn + outside) * 1e-9)
    assert cost.bound == "launch"
    many = roofline.cost_of(ROW, LaunchWork(np.full(1000, 100), 0, []), ONE, L2Cache(1))
    assert many.grid == pytest.approx(1000 * (100 * turn + outside) * 1e-9)
    assert many.bound == "tensor"
    few = roofline.cost_of(
        ROW, LaunchWork(np.array([100_000]), 0, []), replace(ONE, sms=100, tflops=ONE.tflops * 100), L2Cache(1)
    )
    assert few.grid == pytest.approx((100_000 * turn + outside) * 1e-9)
    assert few.bound == "grid"


def test_bytes_bound_a_launch() -> None:
    touched = [Touch((1,), 4e9, True, False)]
    cost = roofline.cost_of(ROW, LaunchWork(np.array([1]), 9e9, touched), replace(ONE, memory=1.0, l2=9.0), L2Cache(1))
    assert cost.l2 == pytest.approx(1)
    assert cost.memory == pytest.approx(4 / 0.8)
    assert cost.bound == "DRAM"
    assert roofline.seconds([KernelCost("k", 1, 0, 0, 0, 0, 0)] * 10) == pytest.approx(10 * roofline.HOST)  # the host is slower


def test_the_cache_keeps_what_was_used_last() -> None:
    a, b, written = Touch((1,), 60, True, False), Touch((2,), 60, True, False), Touch((3,), 60, False, True)
    cache = L2Cache(130)
    assert cache.use([a, b]) == 120
    assert cache.use([b, a]) == 0
    assert cache.use([written]) == 0  # in place of b
    assert cache.use([a]) == 0
    assert cache.use([b]) == 60 + 60  # `written` must leave, and is written back
    assert cache.use([Touch((2,), 80, True, False)]) == 20  # the part that is new


@pytest.mark.parametrize("device, least, most", [(A100, 156, 228), (H100, 250, 345)], ids=["A100", "H100"])
def test_flash_attention_is_as_fast_as_published(device: Gpu, least: float, most: float) -> None:
    """50 to 73 % of an A100 (its paper); at most 335 TFLOP/s on an H100 (FlashAttention-3's, with wider heads)."""
    seconds = roofline.seconds(roofline.flash_costs(device, 1, 16384, "forward"))
    assert least < 4 * 16384**2 / 2 * 768 / seconds / 1e12 < most


def test_recorded_launches_have_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator's own launches, with numbers in place of what a compiler would count."""
    monkeypatch.setattr(tiles, "interpreted", lambda: False)  # tiles as on a GPU
    monkeypatch.setattr(roofline, "kept_measure", lambda launch, arch, dtype: {**ROW, "kernel": launch.name})
    costs = roofline.operator_costs(L40S, 1, 512)
    assert {"forward_u", "forward_y", "forward_w", "forward_v"} <= {cost.kernel for cost in costs["forward"]}
    assert set(kernels.BACKWARD) <= {cost.kernel for cost in costs["backward"]}
    assert all(np.isfinite(cost.seconds) and cost.seconds >= roofline.GAP for part in costs.values() for cost in part)
    rows = roofline.summary(costs["backward"])
    assert sum(row["ms"] for row in rows) == pytest.approx(1e3 * sum(cost.seconds for cost in costs["backward"]))


def made_up(device: str, ratio: float, model: float) -> dict:
    pair = {"hyperglu_ms": ratio, "flash_ms": 1.0, "ratio": ratio}
    shapes = {f"{phase} {b}×{t}": pair for b, t in predictions.SHAPES for phase in ("forward", "backward", "training")}
    models = {"hyperglu model": {"forward_ms": model, "training_ms": 3 * model}}
    models |= {"flash model": {"forward_ms": 20.0, "training_ms": 60.0}}
    return {"device": device, "predicted": True, **shapes, **models, "kernels": {}}


def test_targets_are_judged() -> None:
    """Table 5's row is scaled by what the paper's FlashAttention took: 30 / 20 and 88 / 60."""
    found = predictions.verdicts([made_up("L40S", 1.4, 22.0), made_up("A100", 1.6, 9.0)])
    assert [v.predicted for v in found] == pytest.approx([33.0, 66 * 88 / 60, 1.4, 1.6])
    assert [v.met for v in found] == [True, True, True, False]
    text = predicted_markdown([made_up("L40S", 1.4, 24.0), made_up("A100", 1.6, 9.0)])
    assert "| Table 5, forward, ms | 36.00 | 34 | missed |" in text
    assert "| training 1×16384 by FlashAttention-2, L40S | 1.40 | 1.5 | met |" in text
