"""No operand of another shape reaches the compiled code, and empty tensors of any strides do."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from helpers import assert_same, make_problem, randn
from hypermlp import HyperGLU
from hypermlp.ops import native
from hypermlp.ops.native import kernels
from hypermlp.ops.native.layer import WholeCall
from hypermlp.ops.parameters import LayerParameters, LayerShape, LinearWeights
from hypermlp.ops.registered import Inputs, flatten

FLOAT = torch.float32


def longer(x: Tensor, axis: int) -> Tensor:
    """One more along an axis, so that code which believed the other shape would read what is there."""
    return torch.cat([x, x.narrow(axis, 0, 1)], axis).contiguous()


def shorter(x: Tensor, axis: int) -> Tensor:
    return x.narrow(axis, 1, x.shape[axis] - 1).contiguous()


def variations(names: list[str], tensors: list[Tensor | None]) -> list[tuple[str, list[Tensor | None]]]:
    """The operands with one of them longer or shorter along one axis."""
    return [
        (f"{change.__name__} {name} along {axis}", [*tensors[:i], change(x, axis), *tensors[i + 1 :]])
        for i, (name, x) in enumerate(zip(names, tensors, strict=True))
        if x is not None
        for axis in range(x.dim())
        for change in (longer, shorter)
    ]


def error_of(run: Callable[..., object], *tensors: Tensor | None) -> str:
    try:
        run(*tensors)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def refused(run: Callable[..., object], names: str, *tensors: Tensor | None, free: tuple[str, ...] = ()) -> None:
    """Every variation is refused, but for those along the axes that nothing else fixes."""
    run(*tensors)
    checked = 0
    for what, changed in variations(names.split(), list(tensors)):
        if what.partition(" ")[2] in free:
            continue
        error = error_of(run, *changed)
        assert re.search(r'impl="dense"|expand|shape|heads|widths', error), f"{what}: {error or 'taken'}"
        checked += 1
    assert checked > 1


@pytest.fixture
def usual() -> HyperGLU:
    torch.manual_seed(0)
    return HyperGLU(n_embd=64, n_head=2, block_size=20, qk_rank=128, vo_rank=64, op1_rank=32, op2_rank=32, bias=True).eval()


def test_operator() -> None:
    p = make_problem(T=9, S=9, L=11).to(FLOAT)
    names = " ".join(Inputs._fields[:-1])
    inputs = flatten(p)
    free = ("v along 3",)  # the width of the output
    o, rho = kernels.forward(inputs, p.spec, None)
    refused(lambda *t: kernels.forward(Inputs(*t, None), p.spec, None), names, *inputs.differentiable, free=free)
    refused(lambda d, r: kernels.backward(d, None, r, inputs, p.spec, None), "d_o rho", o, rho)


def test_convolutions_and_gates() -> None:
    x, w = randn(3, 9, 8, dtype=FLOAT), randn(8, 4, dtype=FLOAT)
    place, past = torch.arange(9).expand(3, 9).contiguous(), randn(3, 3, 8, dtype=FLOAT)
    refused(native.kernels.convs_forward, "x wk wv position history", x, w, w, place, past)
    refused(native.kernels.convs_backward, "dk dv x wk wv position", x, x, x, w, w, place, free=("wk along 1", "wv along 1"))
    refused(native.kernels.gate_forward, "x g", x, x)
    refused(lambda d, g: native.kernels.gate_backward(d, x, g), "d g", x, x)
    y, part = randn(3, 9, 20, dtype=FLOAT), randn(3, 9, 5, dtype=FLOAT)
    sizes = [5, 5, 5, 5]
    refused(lambda y: native.kernels.gates_forward(y, sizes), "y", y, free=("y along 0", "y along 1"))
    refused(lambda *t: native.kernels.gates_backward(*t, sizes), "dq ds1 ds2 y", part, part, part, y)
    with pytest.raises(ValueError, match="the native kernel takes"):
        native.kernels.gates_forward(y, [6, 4, 5, 5])
    refused(lambda d, y, g: native.kernels.ungate(d.clone(), y, g), "d y g", x, x, x)


def test_scans() -> None:
    E, N = randn(3, 9, 8, dtype=FLOAT), randn(3, 9, 3, dtype=FLOAT)
    A, state, begins = -randn(3, 8, dtype=FLOAT).abs(), randn(3, 3, 8, dtype=FLOAT), torch.zeros(3, 9)

    def scan(*tensors: Tensor) -> object:
        return native.kernels.scan_forward(native.kernels.scan_inputs(*tensors), marks=True)

    refused(scan, "x delta A B C state begins", E, E.abs(), A, N, N, state, begins)
    inputs = native.kernels.scan_inputs(E, E.abs(), A, N, N, state, begins)
    y, last, marks = native.kernels.scan_forward(inputs, marks=True)
    refused(lambda d, end, m: native.kernels.scan_backward(d, end, inputs, m), "d_y d_last marks", y, last, marks)


def step_of(p: LayerParameters, shape: LayerShape, x: Tensor, k: Tensor, v: Tensor, spans: Tensor, past: Tensor) -> Tensor:
    pairs = zip((*p[:7], p.o), (*p[7:14], p.o_bias), strict=True)
    linears = tuple(None if w is None else LinearWeights(w, None, b) for w, b in pairs)
    call = native.decode.LayerCall(p, linears, shape)
    call.attach(k, v, past)
    return call.run(x, spans, 0)


def test_layer(usual: HyperGLU) -> None:
    p, shape = usual.tensors(), usual.shape()
    p = LayerParameters._make(t.detach() if t is not None else None for t in p)
    x = randn(3, 9, 64, dtype=FLOAT)
    names = f"x {' '.join(p._fields)}"
    together = ("conv_k along 1", "conv_v along 1")  # one alone disagrees with the other
    refused(lambda x, *t: WholeCall(LayerParameters(*t), shape).forward(x), names, x, *p, free=("x along 0", "x along 1"))
    call, wanted = WholeCall(p, shape), LayerParameters._make(t is not None for t in p)
    y, kept = call.forward(x)
    refused(lambda d, k: call.backward(d, x, k, wanted), "d_y kept", y, kept)

    k, v, past = randn(3, 6, 4, 32, dtype=FLOAT), randn(3, 6, 2, 32, dtype=FLOAT), randn(3, 3, 64, dtype=FLOAT)
    spans = torch.tensor([[0, 0, 1, 0, 4], [1, 0, 1, 0, 6], [2, 0, 1, 1, 3]])

    def step(x: Tensor, k: Tensor, v: Tensor, past: Tensor, *t: Tensor | None) -> Tensor:
        return step_of(LayerParameters(*t), shape, x, k, v, spans, past)

    names = f"x k v past {' '.join(p._fields)}"
    refused(step, names, x[:, :1].contiguous(), k, v, past, *p, free=("k along 1", "past along 1"))
    with pytest.raises(ValueError, match='impl="dense"'):
        step_of(p, shape, x[:, :1], k, v, spans[:2], past)
    for wrong in ([0, 0, 0, 0, 0], [1, 0, 1, 0, 4], [0, 0, 1, 0, 7], [0, 0, 1, 4, 4]):  # row 0, its new slot, within the room
        with pytest.raises(RuntimeError, match="do not agree"):
            step_of(p, shape, x[:, :1], k, v, torch.tensor([wrong, *spans[1:].tolist()]), past)
    with pytest.raises(ValueError, match="float16"):
        step_of(p, shape, x[:, :1], k.half(), v.half(), spans, past.half())
    place, some = torch.arange(9)[None], [n for n in p._fields if n[0] not in "ABdo"]
    projections = [getattr(p, n) for n in some]

    def project(x: Tensor, position: Tensor, *t: Tensor | None) -> object:
        return native.project.forward(x, position, p._replace(**dict(zip(some, t, strict=True))))

    widths = tuple(f"{n} along 0" for n in some if "bias" not in n)  # a projection is as wide as its weight says
    free = ("x along 0", *widths, *together)
    y, out = native.project.forward(x, place, p)
    refused(project, f"x position {' '.join(some)}", x, place.expand(3, 9).contiguous(), *projections, free=free)
    d_names = "y " + " ".join(f"d{i}" for i in range(7))
    refused(lambda y, *d: native.project.backward(d, y, x, place, p, wanted), d_names, y, *out)


def test_a_layer_that_lacks_a_part_of_a_pair_is_refused(usual: HyperGLU) -> None:
    p, x = usual.tensors(), randn(1, 4, 64, dtype=FLOAT)
    k, v, past = randn(1, 4, 4, 32, dtype=FLOAT), randn(1, 4, 2, 32, dtype=FLOAT), randn(1, 3, 64, dtype=FLOAT)
    for name in ("conv_k", "conv_v", "A1", "B1", "A2", "B2", "control1", "control2", "q", "k", "v", "o"):
        lacking = p._replace(**{name: None})
        with pytest.raises((ValueError, RuntimeError, AttributeError)):
            WholeCall(lacking, usual.shape()).forward(x)
        with pytest.raises((ValueError, RuntimeError, AssertionError)):
            step_of(lacking, usual.shape(), x[:, :1], k, v, torch.tensor([[0, 0, 1, 0, 4]]), past)


@pytest.mark.parametrize("kind", ["narrow", "wide"])
@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0, 0), (0, 600)], ids=str)
@pytest.mark.parametrize("layout", ["plain", "expanded", "transposed", "features first"])
def test_empty_inputs_of_any_strides(shape: tuple[int, int], layout: str, kind: str, usual: HyperGLU) -> None:
    layer = usual if kind != "wide" else HyperGLU(n_embd=96, n_head=2, block_size=20)
    (B, T), C = shape, layer.width
    x = {
        "plain": lambda: torch.empty(B, T, C),
        "expanded": lambda: torch.empty(1, 1, C).expand(B, T, C) if B and T else torch.empty(B, T, 1).expand(B, T, C),
        "transposed": lambda: torch.empty(T, B, C).transpose(0, 1),
        "features first": lambda: torch.empty(B, C, T).transpose(1, 2),
    }[layout]()
    x = x.detach().requires_grad_()
    y = layer(x, impl="native")
    assert y.shape == x.shape
    y.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in layer.parameters())
    with torch.no_grad():
        layer(x, impl="native")
        cache = layer.new_cache(B)
        assert layer(x, cache=cache, impl="native").shape == x.shape
        assert layer(x[:, :1], cache=cache, impl="native").shape == x[:, :1].shape


def test_companions_on_empty_inputs_of_any_strides() -> None:
    for x in (torch.empty(0, 8, 5).transpose(1, 2), torch.empty(2, 8, 0).transpose(1, 2), torch.empty(0, 5, 1).expand(0, 5, 8)):
        w = randn(8, 4, dtype=FLOAT)
        assert_same(native.kernels.convs_forward(x, w, w, None, None)[0], x.contiguous(), 0)
        d_x, d_w, _ = native.kernels.convs_backward(x, x, x, w, w, None)
        assert d_x.shape == x.shape
        assert not d_w.any()
        assert native.kernels.gate_forward(x, x).shape == x.shape
        assert native.kernels.gates_forward(x, [2, 2, 2, 2])[0].shape == (*x.shape[:2], 2)
