"""One training step after another: AdamW, warm-up and cosine decay, clipped gradients."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Trainer:
    """A model, its optimiser and its schedule. Call step(inputs, targets) `steps` times."""

    def __init__(self, model: nn.Module, *, steps: int, lr: float, weight_decay: float = 0.0, clip: float = 1.0) -> None:
        self.model, self.clip, self.done = model, clip, 0
        self.optimiser = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay, betas=(0.9, 0.98))
        warmup = max(1, steps // 20)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimiser,
            lambda n: (n + 1) / warmup if n < warmup else 0.5 * (1 + math.cos(math.pi * (n - warmup) / max(1, steps - warmup))),
        )

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        """One update; the loss before it."""
        loss = next_token_loss(self.model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimiser.step()
        self.schedule.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.done += 1
        return float(loss.detach())


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def accuracy(model: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    """Share of the counted targets (not −100) that the model ranks first."""
    counted = targets != -100
    return float((model(inputs).argmax(-1) == targets)[counted].float().mean())
