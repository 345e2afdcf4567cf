"""Selective copying: remember the content tokens of a noisy sequence and write them down in order.

n_content = 3, length = 12                 `.` noise, `?` copy now

inputs    .  4  .  .  2  .  7  .  .  ?  ?  ?
targets   -  -  -  -  -  -  -  -  -  4  2  7          `-` does not count
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

NOISE, COPY, FIRST_CONTENT = 0, 1, 2
IGNORED = -100  # the target that torch's cross entropy leaves out


class Batch(NamedTuple):
    inputs: Tensor  # B T
    targets: Tensor  # B T


def selective_copying(size: int, length: int, n_content: int, vocabulary: int, generator: torch.Generator) -> Batch:
    """`size` sequences of `length` tokens, of which n_content are to be copied."""
    room = length - n_content
    if n_content < 1 or room < n_content:
        raise ValueError(f"length ({length}) must hold n_content ({n_content}) twice; try {2 * n_content} or more")
    if vocabulary <= FIRST_CONTENT:
        raise ValueError(f"vocabulary ({vocabulary}) must be at least {FIRST_CONTENT + 1}: noise, copy and content")
    content = torch.randint(FIRST_CONTENT, vocabulary, (size, n_content), generator=generator)
    place = torch.rand(size, room, generator=generator).argsort(1)[:, :n_content].sort(1).values
    inputs = torch.full((size, length), NOISE)
    inputs.scatter_(1, place, content)
    inputs[:, room:] = COPY
    targets = torch.full((size, length), IGNORED)
    targets[:, room:] = content
    return Batch(inputs, targets)
