"""The comparison that precedes every timing on a GPU: on a CPU it passes, and it fails for every kind of wrong gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hypermlp import ops
from hypermlp.bench import kernels, parity
from hypermlp.bench.parity import HALF, TF32, LayerCase, OperatorCase
from hypermlp.errors import RunError
from hypermlp.mixers.hyper import HyperGLU
from hypermlp.ops.triton import gradients, launch, tiles

SPANS = ((0, 0, 20, 0, 20), (0, 20, 21, 20, 21), (0, 21, 60, 21, 60))
SMALL = OperatorCase(width=64, rows=60, block_size=40)
LAYER = LayerCase(tokens=40, changes={"n_embd": 64, "block_size": 32, "op1_rank": 4, "op2_rank": 4})


def test_a_right_implementation_passes() -> None:
    cases = [SMALL, OperatorCase(width=96, heads=3, rows=60, block_size=40, kind="relu", norm="none", dtype=torch.float16)]
    cases += [OperatorCase(width=64, rows=60, block_size=40, spans=SPANS, dtype=TF32, norm="l2")]
    layers = [LAYER, LayerCase(tokens=40, changes=LAYER.changes, documents=(0, 20, 21, 40), dtype=TF32)]
    rows = list(parity.run("chunked", "cpu", operators=cases, layers=layers, types=(HALF, TF32)))
    assert len(rows) == 3 + 2 + 4
    assert rows[0]["compared"] == 1 + 11
    assert all(row["part"] == "parity" for row in rows)


def test_what_is_compared_on_a_gpu() -> None:
    """Types, widths, heads, norms, both kinds, packed and padded rows, rows behind a cache, several chunks."""
    cases = parity.OPERATOR_CASES
    assert {case.dtype for case in cases} == {torch.bfloat16, torch.float16, torch.float32}
    assert {256, 512, 768, 1024, 1536, 2048} <= {case.width for case in cases}
    assert max(case.heads for case in cases) > 2
    assert {(case.kind, case.norm) for case in cases} == {(k, n) for k in ("glu", "relu") for n in ("out_scale", "l2", "none")}
    assert {case.spans for case in cases} == {None, parity.PACKED, parity.PADDED, parity.CACHED}
    assert {case.dtype for case in cases if case.small_scratch} == {torch.bfloat16, torch.float16, torch.float32}


class Corrupt(torch.autograd.Function):
    """The identity, whose gradient is spoiled."""

    @staticmethod
    def forward(ctx: object, x: Tensor, how: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.how = how
        return x.clone()

    @staticmethod
    def backward(ctx: object, g: Tensor) -> tuple[Tensor, None]:
        return ctx.how(g.clone()), None


def one_row_nan(g: Tensor) -> Tensor:
    g.flatten()[-1] = float("nan")
    return g


def last_part(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Only the last tenth, as where one chunk is wrong."""

    def apply(g: Tensor) -> Tensor:
        part = g.flatten()[-max(1, g.numel() // 10) :]
        part.copy_(change(part))
        return g

    return apply


CORRUPTIONS = {
    "doubled": lambda g: 2 * g,
    "halved": lambda g: g / 2,
    "missing": torch.zeros_like,
    "negative": torch.neg,
    "not a number": one_row_nan,
    "one place too far": lambda g: g.roll(1, -1),
    "other heads": lambda g: g.flip(-2),
    "one chunk added twice": last_part(lambda g: 2 * g),
    "one chunk missing": last_part(torch.zeros_like),
}


@pytest.mark.parametrize("how", CORRUPTIONS)
@pytest.mark.parametrize("dtype", [HALF, TF32], ids=["bfloat16", "float32"])
def test_a_wrong_gradient_is_found(how: str, dtype: torch.dtype) -> None:
    case = OperatorCase(width=64, rows=60, block_size=40, dtype=dtype)
    for name in parity.operands_of(case, "cpu").leaves():
        if how == "other heads" and name.endswith("diag"):
            continue  # a diagonal has no axis before its heads' columns

        def mix(operands: ops.MixCall, name: str = name) -> Tensor:
            leaves = operands.leaves()
            spoiled = Corrupt.apply(leaves[name], CORRUPTIONS[how])
            return parity.mix_by("chunked")(operands.with_leaves(leaves | {name: spoiled}))

        with pytest.raises(RunError, match=f"d {name}"):
            parity.check_operator(case, mix, "cpu")


@pytest.mark.parametrize(
    "how", [lambda o: 1.05 * o, lambda o: o.roll(1, 1), lambda o: o.flip(2)], ids=["scaled", "late", "heads"]
)
def test_a_wrong_value_is_found(how: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(RunError, match="'o'"):
        parity.check_operator(SMALL, lambda operands: how(parity.mix_by("chunked")(operands)), "cpu")


def layer_call(layer: HyperGLU, x: Tensor, **options: object) -> Tensor:
    return layer(x, impl="chunked", **options)


@pytest.mark.parametrize("dtype", [HALF, TF32], ids=["bfloat16", "float32"])
def test_a_wrong_gradient_of_a_layer_is_found(dtype: torch.dtype) -> None:
    """Every parameter, and the input, wrong by a factor of two in either direction."""
    case = LayerCase(tokens=40, changes=LAYER.changes, dtype=dtype)
    layer, _ = parity.layer_of(case, "cpu")
    for factor in (2.0, 0.5):
        for name, _ in layer.named_parameters():

            def call(layer: HyperGLU, x: Tensor, name: str = name, factor: float = factor) -> Tensor:
                layer.get_parameter(name).register_hook(lambda g: factor * g)
                return layer_call(layer, x)

            with pytest.raises(RunError, match=f"'{name}'"):
                parity.check_layer(case, call, "cpu")
        with pytest.raises(RunError, match="'dx'"):
            parity.check_layer(case, lambda layer, x: layer_call(layer, Corrupt.apply(x, lambda g: factor * g)), "cpu")  # noqa: B023


def test_a_wrong_step_of_decoding_is_found() -> None:
    def call(layer: HyperGLU, x: Tensor, **options: object) -> Tensor:
        y = layer_call(layer, x, **options)
        return 1.5 * y if x.shape[1] == 1 else y

    parity.check_decoding(HALF, layer_call, "cpu", n_embd=64)
    with pytest.raises(RunError, match="decoding"):
        parity.check_decoding(HALF, call, "cpu", n_embd=64)


def test_a_case_in_which_all_gates_flip_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "KEPT", 1.1)
    with pytest.raises(ValueError, match="smaller block_size"):
        parity.check_operator(SMALL, parity.mix_by("chunked"), "cpu")


def test_a_small_scratch_makes_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the cases that ask for it, forward and backward."""
    monkeypatch.setattr(tiles, "interpreted", lambda: False)  # tiles as on a GPU
    case = next(case for case in parity.OPERATOR_CASES if case.small_scratch)
    inputs = kernels.operator_inputs("bfloat16", case.batch, case.rows, case.rows, case.width, case.heads, 16)
    names: list[str] = []
    with kernels.observed(89, 142, 96 << 20, lambda one, arguments: names.append(one.name)), parity.small_scratch():
        spec = kernels.usual_spec(case.rows)
        made = launch.forward(inputs, spec, None)
        gradients.backward(torch.zeros_like(made[0]), *made, inputs, spec, None)
    assert names.count("forward_w") > 2
    assert names.count("backward_h") > 2
