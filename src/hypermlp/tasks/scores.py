"""Scores of answers, and those of the MAD benchmark: its own, averaged over batches, and plain ones over all tokens.

The benchmark's accuracy is the mean recall of the classes that a batch holds or a model guesses there; a class that is only
guessed counts as 0. It is neither the share of right tokens nor independent of the batch size, so both kinds are given.

Letters: N examples, T time, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from hypermlp.config import IGNORED
from hypermlp.eval_mode import evaluating


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


def counted_logits(model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Logits in eval mode where targets (N T) count (n V), and those targets (n).

    A model with an attribute `gathers` takes `at`, the counted places, and computes no other logits.
    """
    counted = targets != IGNORED
    with evaluating(model):
        logits = model(inputs, at=counted) if getattr(model, "gathers", False) else model(inputs)[counted]
    return logits.float(), targets[counted]


@torch.no_grad()
def evaluate(model: nn.Module, inputs: Tensor, targets: Tensor, batch: int) -> Scores:
    """All scores of `model` on inputs and targets (N T), in batches in order, the last one as large as is left."""
    device = next((p.device for p in model.parameters()), inputs.device)
    macro = perplexity = loss = 0.0
    right = counted = 0
    for x, y in zip(inputs.split(batch), targets.split(batch), strict=True):
        logits, y = counted_logits(model, x.to(device), y.to(device))
        guesses, tokens = logits.argmax(-1), len(y)
        total = F.cross_entropy(logits, y, reduction="sum").double()
        macro += len(x) * macro_accuracy(guesses, y, logits.shape[-1])
        perplexity += len(x) * float((total / tokens).exp())
        loss += float(total)
        right += int((guesses == y).sum())
        counted += tokens
    return Scores(macro / len(inputs), perplexity / len(inputs), right / counted, loss / counted)


# ---- any task: answers gathered at the scored tokens, and their means ----


# From outputs (M, or logits M V), targets (M) and facts (M) of scored tokens to measures (M).
Judge = Callable[[Tensor, Tensor, Mapping[str, Tensor]], dict[str, Tensor]]


class Answers(NamedTuple):
    """Measures at the M scored tokens of a set, in the order of its rows."""

    values: dict[str, NDArray[np.float64]]  # measure → M
    row: NDArray[np.int64]  # M: which row of the set
    place: NDArray[np.int64]  # M: which of the row's scored tokens, from 0
    facts: dict[str, NDArray[np.int64]]  # M

    @staticmethod
    def judged(examples: Any, outputs: Tensor, judge: Judge) -> Answers:
        """outputs: guesses (M) or logits (M V) at the scored tokens."""
        at = (examples.targets != IGNORED).nonzero(as_tuple=True)
        facts = {name: fact[at] if fact.ndim > 1 else fact[at[0]] for name, fact in examples.facts.items()}
        values = {name: found.double().numpy() for name, found in judge(outputs.cpu(), examples.targets[at], facts).items()}
        row = at[0].numpy()
        first = np.searchsorted(row, row)  # rows come in order
        return Answers(values, row, np.arange(len(row)) - first, {name: fact.numpy() for name, fact in facts.items()})

    @staticmethod
    def join(parts: Sequence[Answers]) -> Answers:
        starts = np.cumsum([0, *(1 + part.row.max(initial=-1) for part in parts)])
        return Answers(
            {name: np.concatenate([part.values[name] for part in parts]) for name in parts[0].values},
            np.concatenate([part.row + start for part, start in zip(parts, starts[:-1], strict=True)]),
            np.concatenate([part.place for part in parts]),
            {name: np.concatenate([part.facts[name] for part in parts]) for name in parts[0].facts},
        )


@torch.no_grad()
def answer(model: nn.Module, groups: Sequence[Any], batch: int, judge: Judge) -> Answers:
    """What `judge` finds at every scored token of the rows (Examples of one length each)."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    parts = []
    for rows in groups:
        for start in range(0, len(rows.inputs), batch):
            here = slice(start, start + batch)
            some = type(rows)(rows.inputs[here], rows.targets[here], {name: fact[here] for name, fact in rows.facts.items()})
            logits, _ = counted_logits(model, some.inputs.to(device), some.targets.to(device))
            parts.append(Answers.judged(some, logits, judge))
    return Answers.join(parts)


def summarise(answers: Answers, unit: str, slices: Sequence[str], label: Callable[[str, int], str]) -> dict[str, Any]:
    """The means of a set: each measure, the number of "rows", and "slices": fact → label → the same for that part.

    unit "row": accuracy is the share of rows with every scored token right; other measures are means over tokens.
    """
    found = means(answers, np.ones(len(answers.row), dtype=bool), unit)
    parts = {}
    for fact in slices:
        values = answers.facts[fact]
        parts[fact] = {label(fact, int(value)): means(answers, values == value, unit) for value in np.unique(values)}
    return {**found, "slices": parts}


def means(answers: Answers, where: NDArray[np.bool_], unit: str) -> dict[str, Any]:
    rows, row = np.unique(answers.row[where], return_inverse=True)
    found: dict[str, Any] = {name: float(value[where].mean()) for name, value in answers.values.items()}
    if unit == "row":
        found["accuracy"] = float((np.bincount(row, answers.values["accuracy"][where] < 1) == 0).mean())
    return {**found, "rows": len(rows)}
