"""The loss that every training here minimises."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy (nats) of logits (B T vocabulary) over the counted targets (B T, −100 is not)."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
