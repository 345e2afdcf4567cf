"""What a model reads in one pass: made by data and tasks, read by train."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Batch(NamedTuple):
    """Rows of one length and what is to be predicted at each of their places."""

    inputs: Tensor  # B T; packed documents: 1 B·T
    targets: Tensor  # the same shape; config.IGNORED does not count
    cu_seqlens: Tensor | None = None  # of packed documents: where each one begins, and B·T
