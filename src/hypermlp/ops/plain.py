"""Convolutions and gates in PyTorch, for any device, type and derivative; native/kernels.py and triton/pointwise.py are alike.

Letters: B batch, T time, C width, W taps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def convs_forward(
    x: Tensor, wk: Tensor, wv: Tensor, position: Tensor | None, history: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See ops.pointwise.convs."""
    return conv(x, wk, position, history), conv(x, wv, position, history)


def conv(x: Tensor, weight: Tensor, position: Tensor | None, history: Tensor | None) -> Tensor:
    """One convolution."""
    taps, time = weight.shape[1], x.shape[1]
    before = x.new_zeros(x.shape[0], taps - 1, x.shape[2]) if history is None else history.to(x.dtype)
    padded = torch.cat([before, x], dim=1)
    y = x * weight[:, -1]
    for j in range(1, taps):
        y = y + tap(padded[:, taps - 1 - j : taps - 1 - j + time], position, j) * weight[:, taps - 1 - j]
    return y


def tap(shifted: Tensor, position: Tensor | None, j: int) -> Tensor:
    """What a tap j places back sees (B T C): nothing beyond a token's own sequence."""
    return shifted if position is None else torch.where((position >= j)[..., None], shifted, 0)


def convs_backward(
    d_yk: Tensor, d_yv: Tensor, x: Tensor, wk: Tensor, wv: Tensor, position: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, wk and wv."""
    taps, time = wk.shape[1], x.shape[1]
    d_x, d_wk, d_wv = torch.zeros_like(x), torch.zeros_like(wk), torch.zeros_like(wv)
    for j in range(min(taps, time)):
        index, place = taps - 1 - j, None if position is None else position[:, j:]
        for d_y, weight, d_weight in ((d_yk, wk, d_wk), (d_yv, wv, d_wv)):
            d_tap = tap(d_y[:, j:], place, j)
            d_x[:, : time - j] += d_tap * weight[:, index]
            d_weight[:, index] = (d_tap * x[:, : time - j]).sum((0, 1))
    return d_x, d_wk, d_wv


def gate_forward(x: Tensor, g: Tensor) -> Tensor:
    """x ⊙ σ(g)."""
    return x * torch.sigmoid(g)


def gate_backward(d_y: Tensor, x: Tensor, g: Tensor, *, overwrite: bool = False) -> tuple[Tensor, Tensor]:
    """Gradients of x and g; overwrite: d_y may be."""
    s = torch.sigmoid(g)
    return d_y * s, torch.ops.aten.sigmoid_backward(d_y * x, s)


def gates_forward(y: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """q ⊙ σ(m1), σ(s1) and σ(s2) of y (B T C), which holds q, m1, s1, s2 of the widths `sizes` side by side."""
    q, m1, s1, s2 = y.split(list(sizes), dim=-1)
    return q * torch.sigmoid(m1), torch.sigmoid(s1), torch.sigmoid(s2)


def gates_backward(d_q: Tensor, d_s1: Tensor, d_s2: Tensor, y: Tensor, sizes: Sequence[int]) -> Tensor:
    """The gradient of y, in one piece."""
    q, m1, s1, s2 = y.split(list(sizes), dim=-1)
    d_s1, d_s2 = (torch.ops.aten.sigmoid_backward(d, torch.sigmoid(s)) for d, s in ((d_s1, s1), (d_s2, s2)))
    return torch.cat([*gate_backward(d_q, q, m1), d_s1, d_s2], dim=-1)
