"""Rotary position embedding, shared by the mixers that use it."""

from __future__ import annotations

import torch
from torch import Tensor


def angles(position: Tensor, width: int, base: float) -> Tensor:
    """Angle of each of the width/2 frequencies at each position (1|B T K/2), exact far into a stream."""
    exact = torch.float32 if position.device.type == "mps" else torch.float64
    frequency = base ** -(torch.arange(0, width, 2, device=position.device, dtype=exact) / width)
    return position.clamp(min=0)[..., None].to(exact) * frequency


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    """x (B T H K) with its pairs (even, odd) turned by `angle` (1|B T K), one angle per coordinate."""
    cos, sin = angle[:, :, None].cos().to(x.dtype), angle[:, :, None].sin().to(x.dtype)
    turned = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
    return x * cos + turned * sin
