"""The scans against a loop over time: values, states and gradients, at odd lengths and with decays of any strength."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from helpers import assert_same, randn
from hypermlp.ops.scan import scan, selective_scan

LENGTHS = [0, 1, 2, 31, 32, 33, 100, 1025]
each_length = pytest.mark.parametrize("T", LENGTHS)
each_border = pytest.mark.parametrize("border", ["none", "begins", "padding"])


def loop(
    g: Tensor, x: Tensor, state: Tensor | None = None, *, begins: Tensor | None = None, padding: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """h_t = e^{g_t} h_{t−1} + x_t, step by step."""
    B, T = x.shape[:2]
    h, found = torch.zeros_like(x[:, 0]) if state is None else state, []
    one = (1,) * (x.dim() - 2)
    for t in range(T):
        old = h if begins is None else torch.where(begins[:, t].expand(B).view(B, *one), 0, h)
        new = g[:, t].exp() * old + x[:, t]
        h = new if padding is None else torch.where(padding[:, t].view(B, *one), h, new)
        found.append(h)
    return (torch.stack(found, 1) if found else x), h


def selective_loop(
    x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor | None = None, **borders: Tensor
) -> tuple[Tensor, Tensor]:
    """Mamba's equations, channel by channel and state by state, on top of the loop above."""
    g = torch.einsum("bte,en->btne", delta, A)
    h, last = loop(g, torch.einsum("bte,bte,btn->btne", delta, x, B), state, **borders)
    return torch.einsum("btn,btne->bte", C, h), last


def borders(border: str, T: int) -> dict[str, Tensor]:
    if border == "begins":
        return {"begins": (torch.arange(T) % 7 == 3)[None]}
    if border == "padding":
        return {"padding": torch.arange(T) >= torch.tensor([T, (T + 1) // 2])[:, None]}
    return {}


def run(
    function: Callable[..., tuple[Tensor, Tensor]], inputs: dict[str, Tensor], masks: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Outputs, the last state, and the gradients of everything that goes in."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in inputs.items()}
    y, last = function(**leaves, **masks)
    (y * randn(*y.shape, seed=90, dtype=y.dtype)).sum().add(
        (last * randn(*last.shape, seed=91, dtype=y.dtype)).sum()
    ).backward()
    grads = {f"d {name}": torch.zeros_like(t) if t.grad is None else t.grad for name, t in leaves.items()}
    return {"y": y.detach(), "last": last.detach(), **grads}


def scan_inputs(T: int, strength: float = 1.0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    g = -strength * randn(2, T, 3, 2, seed=1).exp()
    return {"g": g.to(dtype), "x": randn(2, T, 3, 2, seed=2, dtype=dtype), "state": randn(2, 3, 2, seed=3, dtype=dtype)}


def selective_inputs(
    T: int, E: int = 5, N: int = 3, strength: float = 1.0, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    inputs = {
        "x": randn(2, T, E, seed=1),
        "delta": 0.1 * strength * randn(2, T, E, seed=2).exp(),
        "A": -randn(E, N, seed=3).exp(),
        "B": randn(2, T, N, seed=4),
        "C": randn(2, T, N, seed=5),
        "state": randn(2, N, E, seed=6),
    }
    return {name: t.to(dtype) for name, t in inputs.items()}


@each_length
@each_border
def test_scan_equals_the_loop(T: int, border: str) -> None:
    inputs, masks = scan_inputs(T), borders(border, T)
    assert_same(run(scan, inputs, masks), run(loop, inputs, masks))


@each_length
def test_scan_without_a_state_begins_empty(T: int) -> None:
    inputs = scan_inputs(T)
    inputs["state"].zero_()
    expected, _ = loop(**inputs)
    del inputs["state"]
    assert_same(scan(**inputs)[0], expected)


@pytest.mark.parametrize("strength", [1e-8, 1e3, 1e30])
def test_decays_of_any_strength_are_exact(strength: float) -> None:
    inputs = scan_inputs(70, strength)
    inputs["g"][:, ::5] = float("-inf")
    inputs["g"][0, 1::5] = 0
    found = run(scan, inputs, {})
    assert all(t.isfinite().all() for t in found.values())
    assert_same(found, run(loop, inputs, {}))


@each_border
def test_scan_in_single_precision(border: str) -> None:
    found = run(scan, scan_inputs(100, 0.1, torch.float32), borders(border, 100))
    assert_same(found, run(loop, scan_inputs(100, 0.1), borders(border, 100)), 1e-5)


def test_half_precision_is_computed_in_single() -> None:
    inputs = scan_inputs(500, 1e-3, torch.bfloat16)
    h, last = scan(**inputs)
    assert (h.dtype, last.dtype) == (torch.bfloat16, torch.float32)
    assert_same(last, loop(**{name: t.double() for name, t in inputs.items()})[1], 1e-5)


@each_length
@each_border
def test_selective_scan_equals_the_loop(T: int, border: str) -> None:
    inputs, masks = selective_inputs(min(T, 200)), borders(border, min(T, 200))
    assert_same(run(selective_scan, inputs, masks), run(selective_loop, inputs, masks))


@pytest.mark.parametrize("T", [0, 1, 15, 16, 17, 100])
@pytest.mark.parametrize("E, N", [(1, 1), (5, 3), (33, 16), (300, 2)])
@each_border
def test_native_selective_scan_equals_the_loop(T: int, E: int, N: int, border: str) -> None:
    found = run(partial(selective_scan, impl="native"), selective_inputs(T, E, N, dtype=torch.float32), borders(border, T))
    assert_same(found, run(selective_loop, selective_inputs(T, E, N), borders(border, T)), 1e-5)


@pytest.mark.parametrize("strength", [1e-6, 1e4])
def test_native_selective_scan_with_decays_of_any_strength(strength: float) -> None:
    inputs = selective_inputs(50, strength=strength, dtype=torch.float32)
    found = run(partial(selective_scan, impl="native"), inputs, {})
    assert all(t.isfinite().all() for t in found.values())
    assert_same(found, run(selective_loop, {name: t.double() for name, t in inputs.items()}, {}), 1e-5)


def test_native_selective_scan_does_not_depend_on_threads() -> None:
    inputs, threads = selective_inputs(40, 300, dtype=torch.float32), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = run(partial(selective_scan, impl="native"), inputs, {})
        torch.set_num_threads(3)
        assert_same(run(partial(selective_scan, impl="native"), inputs, {}), alone, 0.0)
    finally:
        torch.set_num_threads(threads)


def test_opcheck() -> None:
    """Well-behaved torch operators: schema, fake tensors, autograd registration, dispatch."""
    g, x, state = (t.float().requires_grad_() for t in scan_inputs(5).values())
    torch.library.opcheck(torch.ops.hypermlp.scan.default, (g, x, state))
    x, delta, A, B, C, state = (t.float().requires_grad_() for t in selective_inputs(5).values())
    at = A.detach().mT.contiguous().requires_grad_()
    for begins in (None, borders("begins", 5)["begins"]):
        torch.library.opcheck(torch.ops.hypermlp.selective_scan.default, (x, delta, at, B, C, state, begins, True))
        inference = tuple(t.detach() for t in (x, delta, at, B, C, state))
        torch.library.opcheck(torch.ops.hypermlp.selective_scan.default, (*inference, begins, False))
