"""Whether an implementation computes what the reference computes: values and every gradient, on any device.

`hypermlp gpu check` runs all of it before it times anything; tests run it on a CPU, also with gradients that were made wrong on
purpose. The reference is the dense implementation in float64, for the same rounded numbers.

In half precision the ReLU of a gate whose score rounds to the other side of zero turns its gradient on or off, which no bound
allows for. Rows of a head with such a gate get no gradient from above in the operator's cases (`flips`). In the layer's cases
they do, and the bound is wider; a gradient that is wrong by a factor of two exceeds it.

Letters as in ops/types.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol
from unittest.mock import patch

import torch
from torch import Tensor

from hypermlp import ops
from hypermlp.config import AttnKind, AttnNorm, HyperGLUConfig
from hypermlp.errors import RunError
from hypermlp.mixers.hyper import HyperGLU
from hypermlp.ops import reference

BOUND = {torch.bfloat16: 2e-2, torch.float16: 2e-2, torch.float32: 5e-3}  # float32 is multiplied as TF32 on a GPU
LAYER_GRADIENTS = {torch.bfloat16: 0.3, torch.float16: 0.3, torch.float32: 0.15}  # with flipped gates; wrong by two is 0.5
KEPT = 0.05  # share of rows and heads without a flip that a case needs, to say something
SMALL_SCRATCH = 1 << 20  # bytes: several chunks of rows
PACKED = ((0, 0, 90, 0, 90), (0, 90, 91, 90, 91), (0, 91, 291, 91, 291))  # three documents
PADDED = ((0, 0, 150, 0, 150), (1, 40, 130, 40, 130))  # rows and slots of the second sequence are missing at both ends
CACHED = ((0, 0, 60, 0, 150), (1, 0, 33, 20, 133))  # new rows behind slots that were there before


@dataclass(frozen=True, kw_only=True)
class OperatorCase:
    """One problem for ops.mix."""

    dtype: torch.dtype = torch.bfloat16
    width: int = 768
    heads: int = 2
    batch: int = 1
    rows: int = 150
    slots: int | None = None  # as many as rows
    block_size: int = 128
    kind: AttnKind = "glu"
    norm: AttnNorm = "out_scale"
    spans: tuple[tuple[int, ...], ...] | None = None
    small_scratch: bool = False

    @property
    def name(self) -> str:
        parts = [str(self.dtype).removeprefix("torch."), f"width {self.width}", f"{self.heads} heads", self.kind, self.norm]
        parts += [f"{self.batch}×{self.rows} rows", f"block_size {self.block_size}"]
        return ", ".join(parts + ["spans"] * (self.spans is not None) + ["small scratch"] * self.small_scratch)


@dataclass(frozen=True, kw_only=True)
class LayerCase:
    """One layer, by the changes to HyperGLUConfig, and how its tokens come."""

    dtype: torch.dtype = torch.bfloat16
    tokens: int = 130
    changes: Mapping[str, Any] = field(default_factory=dict)
    documents: tuple[int, ...] | None = None  # cu_seqlens
    padded: bool = False

    @property
    def name(self) -> str:
        parts = [
            str(self.dtype).removeprefix("torch."),
            f"{self.tokens} tokens",
            *(f"{k} {v}" for k, v in self.changes.items()),
        ]
        return ", ".join(["layer", *parts] + ["packed"] * (self.documents is not None) + ["padded"] * self.padded)


HALF, TF32 = torch.bfloat16, torch.float32
OPERATOR_CASES = (
    *(OperatorCase(width=width) for width in (256, 512, 768, 1024, 1536, 2048)),
    *(OperatorCase(width=width, dtype=TF32) for width in (256, 768, 2048)),
    *(OperatorCase(dtype=dtype, heads=heads) for dtype in (HALF, torch.float16, TF32) for heads in (1, 3, 4)),
    *(OperatorCase(dtype=dtype, kind="relu") for dtype in (HALF, torch.float16, TF32)),
    *(OperatorCase(norm=norm, kind=kind) for norm in ("l2", "none") for kind in ("glu", "relu")),
    *(OperatorCase(dtype=dtype, batch=2, rows=700, small_scratch=True) for dtype in (HALF, torch.float16, TF32)),
    OperatorCase(rows=700, kind="relu", norm="none", small_scratch=True),
    *(OperatorCase(rows=291, spans=PACKED, small_scratch=small, dtype=d) for small in (False, True) for d in (HALF, TF32)),
    *(OperatorCase(batch=2, spans=PADDED, dtype=dtype) for dtype in (HALF, TF32)),
    *(OperatorCase(batch=2, rows=60, slots=150, spans=CACHED, dtype=dtype) for dtype in (HALF, TF32)),
    *(OperatorCase(rows=rows, block_size=length) for rows, length in ((1, 64), (17, 64), (130, 256), (257, 100))),
)
LAYER_CASES = (
    *(LayerCase(dtype=dtype) for dtype in (HALF, torch.float16, TF32)),
    LayerCase(changes={"attn_kind": "relu"}),
    LayerCase(changes={"n_head": 4, "n_embd": 512, "attn_norm": "none"}),
    *(LayerCase(documents=(0, 60, 61, 130), dtype=dtype) for dtype in (HALF, TF32)),
    LayerCase(padded=True),
    LayerCase(changes={"op1_per_head": False, "use_op2": False}),
)


Mix = Callable[[ops.MixCall], Tensor]


def mix_by(impl: str) -> Mix:
    return lambda operands: ops.mix(operands, impl=impl)


def operands_of(case: OperatorCase, device: str) -> ops.MixCall:
    """Random numbers of the size of a layer's activations, rounded to the type of the case."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    B, T, H, L = case.batch, case.rows, case.heads, case.block_size
    S, G = case.slots or T, H * (2 if case.kind == "glu" else 1)
    K, V, R = case.width // 4 // G, case.width // H, 16

    def mixing(heads: int) -> ops.Mixing:
        left, right = 0.2 * randn(heads, L, R), 0.2 * randn(heads, L, R)
        return ops.Mixing(left, right, torch.sigmoid(randn(B, T, heads, R)), 0.5 * randn(heads, L), True)

    spec = ops.Spec(kind=case.kind, norm=case.norm, aligner="offset", causal=True, block_size=L, eps=1e-12)
    spans = None if case.spans is None else torch.tensor(case.spans)
    made = ops.MixCall(
        randn(B, T, G, K) / K**0.25, randn(B, S, G, K) / K**0.25, randn(B, S, H, V), mixing(G), mixing(H), spec, spans
    )
    return made.with_leaves({name: x.to(device, case.dtype) for name, x in made.leaves().items()})


def values_and_gradients(operands: ops.MixCall, mix: Mix, d_o: Tensor) -> dict[str, Tensor]:
    leaves = {name: x.detach().clone().requires_grad_() for name, x in operands.leaves().items()}
    o = mix(operands.with_leaves(leaves))
    found = torch.autograd.grad(o, list(leaves.values()), d_o.to(o.dtype))
    return {"o": o.detach(), **{f"d {name}": g for name, g in zip(leaves, found, strict=True)}}


class HasGates(Protocol):
    """What a gate's score depends on; `ops.MixCall`, or the problems of the tests."""

    @property
    def q(self) -> Tensor: ...
    @property
    def k(self) -> Tensor: ...
    @property
    def v(self) -> Tensor: ...
    @property
    def routing(self) -> ops.Mixing | None: ...
    @property
    def spec(self) -> ops.Spec: ...
    @property
    def spans(self) -> Tensor | None: ...


def flips(problem: HasGates) -> Tensor:
    """Which gates (B H T N) have another sign if scores and factors are rounded to bfloat16 as the kernels do it."""
    exact, rounded = gates(problem, lambda x: x), gates(problem, lambda x: x.float().bfloat16().double())
    doubtful = rounded.abs() < 1e-3 * rounded.abs().amax(-1, keepdim=True)
    return ((exact > 0) != (rounded > 0)) | (doubtful & (exact != 0))


def gates(problem: HasGates, rounding: Callable[[Tensor], Tensor]) -> Tensor:
    """h of the gates (B H T N) in float64, with `rounding` where kernels round."""
    q, k, H = problem.q.double(), problem.k.double(), problem.v.shape[2]
    layout = reference.make_layout(q.shape[0], q.shape[1], k.shape[1], problem.spec, problem.spans, q.device)
    z = torch.einsum("btgk,bsgk->bgts", q[:, :, :H], k[:, :, :H])
    z = z.gather(3, layout.slot[:, None].expand(*z.shape[:3], -1))
    z = rounding(torch.where(layout.exists, z, 0))
    if problem.routing is None:
        return z
    routing = problem.routing._replace(diag=None if problem.routing.diag is None else problem.routing.diag.double())
    A, B = (rounding(x.double()[:H, layout.lag[0]]) for x in (routing.A, routing.B))
    us = rounding(torch.einsum("bhtn,hnr->bhtr", z, A) * routing.control.double()[:, :, :H].transpose(1, 2))
    h = torch.einsum("bhtr,hnr->bhtn", us, B)
    D = routing.baseline()
    h = h if D is None else h + z * D[:H, layout.lag[0]][None, :, None]
    return torch.where(layout.exists, h, 0)


def rms(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖ / ‖expected‖; NaN and another shape count as infinite, and 0 of 0 as 0."""
    if found.shape != expected.shape:
        return float("inf")
    difference, norm = (found.double() - expected.double()).norm(), expected.double().norm()
    return 0.0 if difference == 0 else (difference / norm).nan_to_num(nan=float("inf")).item()


def judged(name: str, errors: Mapping[str, float], bounds: Mapping[str, float], **more: Any) -> dict[str, Any]:
    """A row, or an error where one bound is exceeded."""
    beyond = {key: f"{error:.2e} > {bounds[key]:.0e}" for key, error in errors.items() if not error <= bounds[key]}
    if beyond:
        raise RunError(f"wrong results in {name}: {beyond}; nothing is timed. Please report it with `hypermlp info`")
    worst = max(errors, key=lambda key: errors[key] / bounds[key])
    return {"part": "parity", "case": name, "compared": len(errors), "worst": worst, "worst_error": errors[worst], **more}


def check_operator(case: OperatorCase, mix: Mix, device: str) -> dict[str, Any]:
    """Values and the gradients of all inputs; raises RunError where they are wrong."""
    operands = operands_of(case, device)
    shape = (*operands.q.shape[:2], *operands.v.shape[2:])
    d_o = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device, case.dtype)
    flipped = flips(operands).any(-1).transpose(1, 2)  # B T H
    d_o = torch.where(flipped[..., None], 0, d_o)
    kept = 1 - flipped.double().mean().item()
    if kept < KEPT:
        raise ValueError(f"{case.name}: only {kept:.3f} of the rows have no flipped gate; take a smaller block_size")
    exact = values_and_gradients(operands.to(torch.float64), mix_by("dense"), d_o.double())
    with small_scratch() if case.small_scratch else nullcontext():
        found = values_and_gradients(operands, mix, d_o)
    errors = {name: rms(value, exact[name]) for name, value in found.items()}
    return judged(case.name, errors, dict.fromkeys(errors, BOUND[case.dtype]), kept=kept)


@contextmanager
def small_scratch() -> Iterator[None]:
    """Several chunks of rows in the Triton kernels: as on a device with one processor and a small cache."""
    from hypermlp.ops.triton import device, work

    before = device.current

    class Small(type(before)):  # type: ignore[misc]  # whatever starts kernels now, with other sizes
        def limits(self, where: str) -> device.Limits:
            return before.limits(where)._replace(processors=1, cache_bytes=2 * SMALL_SCRATCH)

    with device.replaced(Small()), patch.object(work, "LEAST_SCRATCH", SMALL_SCRATCH):
        yield


def layer_of(case: LayerCase, device: str) -> tuple[HyperGLU, HyperGLU]:
    """The layer of a case in its type, and the same numbers in float64."""
    torch.manual_seed(0)
    config = HyperGLUConfig(**{"n_embd": 768, "n_head": 2, "block_size": 100, **case.changes})
    layer = HyperGLU(config)
    with torch.no_grad():  # as after some training: biases, diagonals and low-rank parts count
        for p in layer.parameters():
            p.add_(torch.randn(p.shape) * (0.2 if p.dim() != 2 else 0.02))
    layer = layer.to(device, case.dtype)
    exact = HyperGLU(config).to(device, torch.float64)
    exact.load_state_dict(layer.state_dict())
    return layer, exact


def check_layer(case: LayerCase, call: Callable[..., Tensor], device: str) -> dict[str, Any]:
    """Output and the gradients of input and parameters. call(layer, x, **options) runs the layer under test."""
    layer, exact = layer_of(case, device)
    options: dict[str, Any] = {}
    batch = 1 if case.documents else 2
    if case.documents:
        options["cu_seqlens"] = torch.tensor(case.documents, device=device)
    if case.padded:
        options["attention_mask"] = torch.ones(batch, case.tokens, device=device)
        options["attention_mask"][1, : case.tokens // 3] = 0
    x = torch.randn(batch, case.tokens, layer.config.n_embd).to(device, case.dtype)
    d_y = torch.randn(x.shape).to(device, case.dtype)
    found = layer_results(layer, x, d_y, partial(call, layer, **options))
    expected = layer_results(exact, x.double(), d_y.double(), partial(exact, impl="dense", **options))
    errors = {name: rms(value, expected[name]) for name, value in found.items()}
    wide = LAYER_GRADIENTS[case.dtype]
    return judged(case.name, errors, {name: BOUND[case.dtype] if name == "y" else wide for name in errors})


def layer_results(layer: HyperGLU, x: Tensor, d_y: Tensor, call: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    x = x.detach().requires_grad_()
    y = call(x)
    names = [name for name, _ in layer.named_parameters()]
    grads = torch.autograd.grad(y, [x, *layer.parameters()], d_y)
    return {"y": y.detach(), "dx": grads[0], **dict(zip(names, grads[1:], strict=True))}


def check_decoding(dtype: torch.dtype, call: Callable[..., Tensor], device: str, **changes: Any) -> dict[str, Any]:
    """A prefill, a ragged second part and single tokens beyond the window equal one pass over everything."""
    case = LayerCase(dtype=dtype, changes={"block_size": 64, **changes})
    layer, exact = layer_of(case, device)
    x = torch.randn(2, 90, layer.config.n_embd).to(device, dtype)
    late = 11  # tokens that the second sequence lags behind after a ragged part
    cache = layer.new_cache(2, device=device, dtype=dtype)
    parts = [call(layer, x[:, :40], cache=cache)]
    mask = torch.ones(2, 30, device=device)
    mask[1, :late] = 0
    ragged = torch.stack([x[0, 40:70], torch.cat([x[1, :late], x[1, 40 : 70 - late]])])
    parts.append(call(layer, ragged, cache=cache, attention_mask=mask))
    parts += [call(layer, torch.stack([x[0, 70 + n], x[1, 70 - late + n]])[:, None], cache=cache) for n in range(9)]
    y = torch.cat(parts, 1)
    with torch.no_grad():
        full = exact(x.double(), impl="dense")
    errors = {"first": rms(y[0], full[0, :79]), "second": rms(torch.cat([y[1, :40], y[1, 40 + late :]]), full[1, : 79 - late])}
    return judged(f"decoding, {str(dtype).removeprefix('torch.')}", errors, dict.fromkeys(errors, BOUND[dtype]))


def run(
    impl: str,
    device: str,
    *,
    operators: Sequence[OperatorCase] = OPERATOR_CASES,
    layers: Sequence[LayerCase] = LAYER_CASES,
    types: Sequence[torch.dtype] = (HALF, torch.float16, TF32),
    tell: Callable[[str], None] = lambda text: None,
) -> Iterator[dict[str, Any]]:
    """All cases; a row each, and RunError at the first wrong one. float32 may be rounded to TF32 meanwhile."""

    def call(layer: HyperGLU, x: Tensor, **options: Any) -> Tensor:
        return layer(x, impl=impl, **options)

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        for case in operators:
            tell(f"parity: {case.name}")
            yield check_operator(case, mix_by(impl), device)
        for layer_case in layers:
            tell(f"parity: {layer_case.name}")
            yield check_layer(layer_case, call, device)
        for dtype, kind in itertools.product(types, ("glu", "relu")):
            tell(f"parity: decoding, {dtype}, {kind}")
            yield check_decoding(dtype, call, device, attn_kind=kind, n_embd=256)
    finally:
        torch.set_float32_matmul_precision(before)
