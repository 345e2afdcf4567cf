"""Tiles for every size: shared geometry, what happens where a kernel does not fit, offsets of 64 bits, AMD's GPUs."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources

from helpers import make_problem, randn
from hypermlp import notice, ops
from hypermlp.bench.kernel_sizes import ARCHITECTURES, sizes
from hypermlp.ops.triton import device, fallback, launch, tiles
from hypermlp.ops.triton.device import Device, Limits
from interpreter import assert_parity, run

SHARED = ("backward_dw", "backward_h", "backward_dz")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles as for a GPU."""
    for module in (tiles, launch):
        monkeypatch.setattr(module, "interpreted", lambda: False)


@pytest.fixture(autouse=True)
def nothing_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback, "taken", {})
    notice.once.cache_clear()


class Small(Device):
    """Remembers the tiles of kernels and executes none; those of `names` fit if they have no more than `cells` cells."""

    def __init__(
        self, cells: int = 1 << 30, names: tuple[str, ...] = ("backward_h", "forward_w", "decode"), arch: int = 89
    ) -> None:
        self.cells, self.names, self.arch = cells, names, arch
        self.tiles: list[Any] = []

    def limits(self, device: str) -> Limits:
        return Limits(89, 1, 64 << 20)

    def start(self, kernel: Any, grid: Any, arguments: Any, constants: Any, used: Any) -> None:
        if used.kernel in self.names and self.cells < used.M * used.N:
            raise OutOfResources(200_000, 101_376, "shared memory")
        self.tiles.append(used)


def started(where: Device, T: int = 40, **options: Any) -> None:
    """One forward and backward, or one decoding step where T is 1."""
    problem = make_problem(T, 40, L=40, **options).to(torch.bfloat16)
    with device.replaced(where):
        if T == 1:
            problem.mix("triton")
        else:
            run(problem, "triton", randn(*problem.q.shape[:2], *problem.v.shape[2:]))


def steps(kernel: str, arch: int, dtype: str, width: int, heads: int, rank: int) -> int:
    return tiles.steps_down(kernel, arch, dtype, width // (8 * heads), max(16, launch.power_of_two(rank)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_kernels_of_one_scratch_share_rows_and_columns(dtype: str, compiled: None) -> None:
    for arch, size in itertools.product((x for x in ARCHITECTURES if isinstance(x, int)), sizes()):
        found = [tiles.fitted(tiles.tile(k, arch, dtype), steps(k, arch, dtype, *size)) for k in SHARED]
        assert len({(x.M, x.N, x.warps) for x in found}) == 1, (arch, size, found)
        for used in found:
            assert used.N >= tiles.LEAST
            assert used.M in (used.N, 2 * used.N)  # what the skew can turn
            assert used.warps * tiles.LEAST == used.M  # more would compute products twice


def test_the_default_is_the_table(compiled: None) -> None:
    for dtype, kernel in itertools.product(("bfloat16", "float32"), SHARED):
        assert steps(kernel, 89, dtype, 768, 2, 16) == 0
    assert steps("forward_w", 89, "bfloat16", 1280, 2, 16) == 1
    assert steps("forward_w", 90, "bfloat16", 1280, 2, 16) == 0
    assert steps("backward_h", 90, "bfloat16", 4096, 2, 64) == 2


def test_smaller_ends_at_the_least() -> None:
    for table in (tiles.Tile(64, 32, 4, 2, "x"), tiles.Tile(32, 16, 2, 1, "x"), tiles.Tile(64, 64, 4, 2, "x")):
        least = tiles.fitted(table, tiles.MOST_STEPS)
        assert (least.M, least.N, least.warps) == (16, 16, 1)
        assert tiles.smaller(least) == least


@pytest.mark.parametrize("T, phase", [(40, "forward"), (40, "backward"), (1, "decode")])
def test_a_call_that_does_not_fit_is_repeated_with_smaller_tiles(
    T: int, phase: str, compiled: None, caplog: pytest.LogCaptureFixture
) -> None:
    name = {"forward": "forward_w", "backward": "backward_h", "decode": "decode"}[phase]
    where = Small(cells=16 * 32, names=(name,))
    with caplog.at_level("INFO", "hypermlp"):
        started(where, T)
    told = [x.message for x in caplog.records if "smaller tiles" in x.message]
    assert told
    assert all(f"the Triton {phase} " in x and "shared memory" in x for x in told)
    fitting = [x for x in where.tiles if x.kernel == name]
    assert max(x.M * x.N for x in fitting) <= 16 * 32
    if phase == "backward":
        before = where.tiles[: where.tiles.index(fitting[0])]
        after = [x for x in before if x.kernel == "backward_dw"][-1]  # the whole call was repeated
        assert (after.M, after.N) == (fitting[0].M, fitting[0].N)
    before, where.tiles = len(told), []
    started(where, T)  # remembered: nothing is tried in vain again
    assert len([x for x in caplog.records if "smaller tiles" in x.message]) == before


def test_where_nothing_fits_the_error_names_sizes_and_cure(compiled: None) -> None:
    with pytest.raises(ValueError, match=r'smallest tiles .*keys \d+, values \d+ and rank \d+ wide.*impl="chunked"'):
        started(Small(cells=0))


def test_float16_is_decoded_with_the_tiles_of_bfloat16(compiled: None) -> None:
    where = Small()
    with device.replaced(where):
        make_problem(1, 40, L=40).to(torch.float16).mix("triton")
    assert {x.kernel for x in where.tiles} == {"decode"}


@pytest.mark.parametrize("T", [1, 19])
def test_tables_of_64_bits(T: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows times stride beyond 32 bits: everything that is computed from a row has the type of its table."""
    monkeypatch.setattr(launch, "FAR", 0)
    assert_parity(make_problem(T, 24, L=24, B=1, H=1))


@pytest.mark.parametrize("rows, far", [(1 << 18, False), (1 << 19, True)])
def test_which_tensors_are_far(rows: int, far: bool) -> None:
    q, k, v = (torch.empty(1, rows, heads, 4096 // heads // part, device="meta") for heads, part in ((4, 4), (4, 4), (2, 1)))
    assert launch.LaunchInputs.far.fget(SimpleNamespace(q=q, k=k, v=v)) == far


def test_amd_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "interpreted", lambda: False)
    assert Device().untried() is None
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert "gfx942 and gfx90a, but have never been executed" in Device().untried()


def test_auto_does_not_take_kernels_that_nobody_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Amd(Device):
        def obstacle(self, device: str, dtype: str) -> None:
            return None

        def untried(self) -> str:
            return "never executed there"

    monkeypatch.delenv("HYPERMLP_IMPL", raising=False)
    with device.replaced(Amd()):
        assert ops.choose("auto", "cuda", "bfloat16") == ("chunked", "never executed there")
        assert ops.choose("triton", "cuda", "bfloat16").impl == "triton"
        monkeypatch.setenv("HYPERMLP_IMPL", "triton")
        assert ops.choose("auto", "cuda", "bfloat16").impl == "triton"
