"""What can be tested of the GPU commands without a GPU: counting in compiled code, promises, tuning, the cost model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from hypermlp.bench import gpu, kernels, roofline
from hypermlp.bench.layer import Shape
from hypermlp.errors import RunError
from hypermlp.report.gpu import markdown, predicted_markdown

CODE = """
.L_x_1:
        HMMA.16816.F32.BF16 R4, R8, R10, R4 ;
        FADD R1, R2, R3 ;
        HMMA.1688.F32.TF32 R4, R8, R10, R4 ;
        @P0 BRA `(.L_x_1) ;
.L_x_2:
        FADD R1, R2, R3 ;
        @P0 BRA `(.L_x_2) ;
"""
NEEDED = {
    "forward_u": 128, "forward_y": 144, "forward_w": 144, "forward_v": 128, "backward_dw": 400, "backward_h": 192,
    "backward_parameters": 32, "backward_dz": 16, "backward_q": 48, "backward_k": 48, "backward_v": 128,
}  # fmt: skip


def made_up(arch: int) -> list[dict]:
    same = {"arch": arch, "dtype": "bfloat16", "tile": [64, 32], "warps": 4, "spill": 0, "shared": 1000, "registers": 100}
    return [{"kernel": k, **same, "instructions": 500, "mma": n // 4, "macs": n, "analytic": n} for k, n in NEEDED.items()]


def test_products_are_counted_in_the_hot_loop() -> None:
    body = kernels.hot_loop(CODE)
    assert sum(map(kernels.tensor_macs, body)) == 2048 + 1024
    assert kernels.tensor_macs("HGMMA.64x32x16.F32.BF16 R24, gdesc[UR8] ;") == 64 * 32 * 16 / 4


def test_what_the_algorithm_needs() -> None:
    c = {"K1": 32, "K2": 16, "BV": 128, "NV": 3, "RP": 16, "RP1": 16, "RP2": 16, "GLU": True, "W1": 128, "W2": 0}
    for name in ("forward_u", "forward_y", "forward_w", "forward_v", "backward_dw", "backward_h", "backward_v"):
        assert kernels.macs(name, c) == NEEDED[name]
    share = kernels.against_flash(made_up(89), 89)
    assert share["forward"] <= 1.06
    assert share["backward"] <= 0.75


def test_broken_promises_are_named() -> None:
    rows = made_up(89)
    assert kernels.problems(rows) == []
    rows[0] |= {"spill": 8}
    rows[1] |= {"shared": 200_000}
    rows[2] |= {"macs": 288}
    rows[5] |= {"spill": 256}
    assert [p.split()[0] for p in kernels.problems(rows)] == ["forward_u", "forward_y", "forward_w"]


def test_without_a_gpu_the_message_says_so() -> None:
    for start in (lambda: gpu.run(), lambda: gpu.need_gpu("bench tune")):
        with pytest.raises(RunError, match="needs an NVIDIA GPU"):
            start()


def test_tuning_keeps_the_fastest_that_compiles() -> None:
    def measure(tiles: dict, phase: str) -> float | None:
        M, _, warps, stages = next(iter(tiles.values()))
        return None if stages == 3 else 10.0 - stages + abs(M - 32) / 32 + warps / 100

    best = gpu.tune(measure)
    assert best["forward_u"] == [32, 32, 2, 2]
    assert {tuple(best[name][:2]) for name in gpu.BACKWARD_ROWS} == {(32, 32)}
    assert best["backward_v"][0] == 32
    with pytest.raises(RunError, match="none of the tiles"):
        gpu.tune(lambda tiles, phase: None)


def test_the_cost_model_and_its_tables() -> None:
    rows = [row for arch in kernels.ARCHITECTURES for row in made_up(arch)]
    predicted = roofline.predict(rows)
    assert [row["device"] for row in predicted] == ["L40S", "A100", "H100"]
    for row in predicted:
        assert row["predicted"]
        assert row["hyperglu model"]["training_ms"] > 2 * row["hyperglu model"]["forward_ms"]
    assert roofline.pairs_of(1, 64, 64, 32) == 64 * 64
    assert "| forward_u, bfloat16 | 64×32, 4 |" in markdown(rows)
    assert "39.5 and 119" in predicted_markdown(predicted)


def test_the_document_prints_what_the_program_wrote() -> None:
    root = Path(__file__).parents[2]
    record = json.loads((root / "results" / "bench" / "kernels.json").read_text())
    assert kernels.problems(record["rows"]) == []
    text = (root / "docs" / "gpu.md").read_text()
    assert markdown(record["rows"]) in text
    assert predicted_markdown(record["predicted"]) in text


def test_the_models_that_a_gpu_times_learn_on_any_device() -> None:
    kind = gpu.MODEL._replace(shape=Shape(2, 8, 64), depth=1, vocabulary=32)
    for name in (kind.mixer, kind.baseline):
        net, loss, tokens = gpu.language_model(kind, name, "cpu")
        loss(tokens).backward()
        assert loss(tokens).item() == pytest.approx(math.log(32), rel=0.2)
        assert all(p.dtype == torch.bfloat16 and p.grad is not None for p in net.parameters())
