"""The scores of the MAD benchmark: its own, averaged over batches, and plain ones over all tokens.

The benchmark's accuracy is the mean recall of the classes that a batch holds or a model guesses there; a class that is only
guessed counts as 0. It is neither the share of right tokens nor independent of the batch size, so both kinds are given.

Letters: N examples, T time, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp.config import IGNORED


class Scores(NamedTuple):
    macro_accuracy: float  # the benchmark's: by class within a batch, then over batches by their size
    perplexity: float  # the benchmark's: exp(mean loss) of a batch, then over batches by their size
    accuracy: float  # share of all counted tokens that are right
    loss: float  # mean over all counted tokens


def macro_accuracy(guesses: Tensor, targets: Tensor, classes: int) -> float:
    """Mean recall of the classes that occur among the counted targets or the guesses there."""
    counted = targets != IGNORED
    guesses, targets = guesses[counted], targets[counted]
    present, guessed = torch.bincount(targets, minlength=classes), torch.bincount(guesses, minlength=classes)
    right = torch.bincount(targets[guesses == targets], minlength=classes)
    recall = right.double() / present.clamp(min=1)
    return float(recall[present + guessed > 0].mean())


@torch.no_grad()
def evaluate(model: nn.Module, inputs: Tensor, targets: Tensor, batch: int) -> Scores:
    """All scores of `model` on inputs and targets (N T), in batches in order, the last one as large as is left."""
    was_training = model.training
    model.eval()
    device = next((p.device for p in model.parameters()), inputs.device)
    macro = perplexity = loss = 0.0
    right = counted = 0
    for x, y in zip(inputs.split(batch), targets.split(batch), strict=True):
        logits = model(x.to(device)).flatten(0, 1).float()  # NT V
        y = y.flatten().to(device)
        guesses, tokens = logits.argmax(-1), int((y != IGNORED).sum())
        total = F.cross_entropy(logits, y, ignore_index=IGNORED, reduction="sum").double()
        macro += len(x) * macro_accuracy(guesses, y, logits.shape[-1])
        perplexity += len(x) * float((total / tokens).exp())
        loss += float(total)
        right += int((guesses == y).sum())
        counted += tokens
    model.train(was_training)
    return Scores(macro / len(inputs), perplexity / len(inputs), right / counted, loss / counted)
