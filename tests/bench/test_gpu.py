"""What can be tested of the GPU commands without a GPU: counting in compiled code, promises, tuning; the document's tables."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import torch

from hypermlp.bench import assembly, gpu, kernels
from hypermlp.bench.layer import Shape
from hypermlp.bench.processors import SM_LIMITS
from hypermlp.errors import RunError
from hypermlp.report.gpu import document_blocks, markdown
from hypermlp.report.markdown import fill

PROMISED = set(kernels.ARCHITECTURES) - set(kernels.AMD)
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
BLACKWELL = """
.L_x_1:
        UTCHMMA gdesc[UR32], gdesc[UR16], tmem[UR45], tmem[UR52], idesc[UR53], !UPT ;
        UTCHMMA tmem[UR49], gdesc[UR38], tmem[UR18], tmem[UR32], idesc[UR33], UP0 ;
        @P0 BRA `(.L_x_1) ;
.L_x_2:
        FADD R1, R2, R3 ;
        FADD R1, R2, R3 ;
        FADD R1, R2, R3 ;
        @P0 BRA `(.L_x_2) ;
        EXIT ;
.L_x_3:
        BRA `(.L_x_3);
        NOP;
"""
TTGIR = """
    ttng.tc_gen5_mma %a, %b, %c : !ttg.memdesc<64x16xbf16, #s, #smem>, !ttg.memdesc<16x16xbf16, #s, #smem>, !x loc(#l)
    %2 = scf.for %n = %c0 to %q step %c1 -> (i32)  : i32 {
      ttng.tc_gen5_mma %a, %b, %c : !ttg.memdesc<64x32xbf16, #s, #smem>, !ttg.memdesc<32x32xbf16, #s, #smem>, !x loc(#l)
      ttng.tc_gen5_mma %a, %b, %c : !ttg.memdesc<64x32xbf16, #t, #tmem>, !ttg.memdesc<32x16xbf16, #s, #smem>, !x loc(#l)
    } loc(#l)
    scf.for %n = %c0 to %q step %c1  : i32 {
      ttng.tc_gen5_mma %a, %b, %c : !ttg.memdesc<16x16xbf16, #s, #smem>, !ttg.memdesc<16x16xbf16, #s, #smem>, !x loc(#l)
    } loc(#l)
"""
AMD = """
	v_mfma_f32_32x32x8_bf16 v[0:15], v[20:21], v[22:23], v[0:15]
	v_add_f32 v1, v2, v3
	s_endpgm
    .private_segment_fixed_size: 24
    .sgpr_count:     50
    .vgpr_count:     230
"""
NEEDED = {
    "forward_u": 128, "forward_y": 144, "forward_w": 144, "forward_v": 128, "backward_dw": 400, "backward_h": 192,
    "backward_parameters": 32, "backward_dz": 16, "backward_q": 48, "backward_k": 48, "backward_v": 128,
}  # fmt: skip


def made_up(arch: int) -> list[dict]:
    same = {"arch": arch, "dtype": "bfloat16", "tile": [64, 32], "warps": 4, "spill": 0, "shared": 1000, "registers": 100}
    same |= {"outside": 300, "tensor_memory": 0, "sync": False}
    return [{"kernel": k, **same, "instructions": 500, "mma": n // 4, "macs": n, "analytic": n} for k, n in NEEDED.items()]


def test_products_are_counted_in_the_hot_loop() -> None:
    body = assembly.hot_loop(CODE)
    assert sum(map(assembly.tensor_macs, body)) == 2048 + 1024
    assert assembly.tensor_macs("HGMMA.64x32x16.F32.BF16 R24, gdesc[UR8] ;") == 64 * 32 * 16 / 4


def test_products_of_blackwell_are_counted_by_their_types() -> None:
    """The machine code names no shape. A loop with such products is hotter than a longer one without; padding is no loop."""
    body = assembly.hot_loop(BLACKWELL)
    assert sum(map(assembly.is_gen5, body)) == 2
    assert sum(map(assembly.tensor_macs, body)) == 0
    assert assembly.instructions(assembly.before_padding(BLACKWELL)) == 8
    assert assembly.gen5_macs(TTGIR) == 64 * 32 * 32 + 64 * 32 * 16
    assert assembly.hot_loop(".L_x_0:\n BRA `(.L_x_0);") == []


def test_registers_of_amd() -> None:
    found = assembly.count_amd(AMD)
    assert (found.registers, found.spill, found.mma, found.outside) == (230, 24, 1, 3)


def test_limits_of_every_architecture() -> None:
    """A block may ask for what an SM has, but for the KiB that it costs."""
    assert set(kernels.SHARED_LIMIT) == {*kernels.ARCHITECTURES, *kernels.AMD}
    assert set(SM_LIMITS) == set(kernels.ARCHITECTURES) - set(kernels.AMD)
    for arch, limits in SM_LIMITS.items():
        assert kernels.SHARED_LIMIT[arch] == limits.shared - 1024


A_LAUNCH = kernels.Launch("forward_u", None, {}, {"M": 64, "N": 32, "K1": 32, "RP": 16}, (), 4, 2, (1,))


def test_a_kernel_that_does_not_compile_is_a_row_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(launch: kernels.Launch, arch: int) -> None:
        raise ValueError("\nno such register\nsome more")

    monkeypatch.setattr(kernels, "compile_launch", broken)
    row = kernels.measure(A_LAUNCH, 942, "bfloat16")
    assert row["failure"] == "no such register"
    assert kernels.problems([row]) == ["forward_u gfx942 bfloat16: does not compile: no such register"]
    assert "does not compile" in markdown([*made_up(89), row])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_compiler_that_ends_the_process_is_such_a_row_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(launch: kernels.Launch, arch: int, dtype: str) -> None:
        os.write(2, b"error: couldn't allocate output register\n")
        os._exit(1)

    monkeypatch.setattr(kernels, "kept_measure", dies)
    assert kernels.guarded_measure(A_LAUNCH, 942, "bfloat16")["failure"] == "error: couldn't allocate output register"


def test_what_the_algorithm_needs() -> None:
    c = {"K1": 32, "K2": 16, "BV": 128, "NV": 3, "RP": 16, "RP1": 16, "RP2": 16, "GLU": True, "W1": 128, "W2": 0}
    for name in ("forward_u", "forward_y", "forward_w", "forward_v", "backward_dw", "backward_h", "backward_v"):
        assert kernels.macs(name, c) == NEEDED[name]
    share = kernels.against_flash(made_up(89), 89)
    assert share is not None
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


def test_the_document_prints_what_the_program_wrote() -> None:
    root = Path(__file__).parents[2]
    records = (json.loads((root / "results" / "bench" / f"{name}.json").read_text()) for name in ("kernels", "kernel_sizes"))
    document, blocks = (root / "docs" / "gpu.md").read_text(), document_blocks(*records)
    assert all(f"<!-- {name} -->" in document for name in blocks)
    assert fill(document, blocks) == document, "python docs/make_results.py writes the tables anew"


def test_what_was_recorded_keeps_the_promises_of_nvidia() -> None:
    record = json.loads((Path(__file__).parents[2] / "results" / "bench" / "kernels.json").read_text())
    assert kernels.problems([row for row in record["rows"] if row["arch"] in PROMISED]) == []


def test_the_models_that_a_gpu_times_learn_on_any_device() -> None:
    kind = gpu.MODEL._replace(shape=Shape(2, 8, 64), depth=1, vocabulary=32)
    for name in (kind.mixer, kind.baseline):
        net, loss, tokens = gpu.language_model(kind, name, "cpu")
        loss(tokens).backward()
        assert loss(tokens).item() == pytest.approx(math.log(32), rel=0.2)
        assert all(p.dtype == torch.bfloat16 and p.grad is not None for p in net.parameters())
