"""The scores of MAD, against hand-made cases and a slow formula written from the definition."""

import math

import pytest
import torch
from torch import Tensor, nn

from hypermlp.tasks.scores import evaluate, macro_accuracy


class Given(nn.Module):
    """A model that looks its logits up: the first input of a row says which."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits  # N T V

    def forward(self, tokens: Tensor) -> Tensor:
        assert not self.training
        return self.logits[tokens[:, 0]]


@pytest.mark.parametrize(
    "guesses, targets, expected",
    [
        ([0, 0, 1, 1], [0, 1, 1, 1], (1 + 2 / 3) / 2),  # class 0: 1 of 1; class 1: 2 of 3
        ([2, 2], [0, 0], 0.0),  # class 2 is guessed and never right: it counts as 0
        ([0, 2], [0, 0], (1 / 2 + 0) / 2),
        ([0, 3, 1], [0, -100, 1], 1.0),  # a guess where nothing is asked does not count
        ([1, 1, 1, 1], [1, 1, 1, 1], 1.0),  # absent classes have no say
    ],
)
def test_macro_accuracy_by_hand(guesses: list[int], targets: list[int], expected: float) -> None:
    assert macro_accuracy(torch.tensor(guesses), torch.tensor(targets), 5) == pytest.approx(expected)


def slow_scores(logits: Tensor, targets: Tensor, batch: int) -> tuple[float, float, float, float]:
    macros, perplexities, sizes, right, losses = [], [], [], [], []
    for begin in range(0, len(logits), batch):
        pairs = []  # guess, target, loss
        for row, wanted in zip(logits[begin : begin + batch].tolist(), targets[begin : begin + batch].tolist(), strict=True):
            for scores, target in zip(row, wanted, strict=True):
                if target != -100:
                    loss = math.log(sum(math.exp(s) for s in scores)) - scores[target]
                    pairs.append((scores.index(max(scores)), target, loss))
        recalls = []
        for c in range(logits.shape[-1]):
            hit, miss = sum(g == t == c for g, t, _ in pairs), sum(g != c and t == c for g, t, _ in pairs)
            false = sum(g == c and t != c for g, t, _ in pairs)
            if hit + miss + false:
                recalls.append(hit / (hit + miss) if hit + miss else 0.0)
        macros.append(sum(recalls) / len(recalls))
        perplexities.append(math.exp(sum(loss for *_, loss in pairs) / len(pairs)))
        sizes.append(len(logits[begin : begin + batch]))
        right += [g == t for g, t, _ in pairs]
        losses += [loss for *_, loss in pairs]

    def weighted(values: list[float]) -> float:
        return sum(v * n for v, n in zip(values, sizes, strict=True)) / sum(sizes)

    return weighted(macros), weighted(perplexities), sum(right) / len(right), sum(losses) / len(losses)


@pytest.mark.parametrize("batch", [1, 4, 7, 10, 64])
def test_all_scores_equal_the_slow_formula_whatever_is_left_for_the_last_batch(batch: int) -> None:
    generator = torch.Generator().manual_seed(batch)
    logits = torch.randn(10, 6, 5, generator=generator)
    targets = torch.randint(5, (10, 6), generator=generator)
    logits.scatter_add_(2, targets[..., None], torch.ones(10, 6, 1))  # right more often than by chance
    targets[torch.rand(10, 6, generator=generator) < 0.5] = -100
    targets[:, -1] = 2
    model = Given(logits).train()
    found = evaluate(model, torch.arange(10)[:, None].expand(10, 6), targets, batch)
    assert tuple(found) == pytest.approx(slow_scores(logits, targets, batch), rel=1e-6)
    assert model.training


def test_the_benchmarks_scores_depend_on_the_batch_and_the_plain_ones_do_not() -> None:
    logits = torch.randn(8, 4, 6, generator=torch.Generator().manual_seed(0))
    targets = torch.randint(6, (8, 4), generator=torch.Generator().manual_seed(1))
    inputs = torch.arange(8)[:, None]
    one, two = (evaluate(Given(logits), inputs, targets, batch) for batch in (2, 8))
    assert one.macro_accuracy != pytest.approx(two.macro_accuracy)
    assert one.perplexity != pytest.approx(two.perplexity)
    assert one.accuracy == two.accuracy
    assert one.loss == pytest.approx(two.loss)


def test_guessing_the_trivial_token_of_compression_scores_as_published() -> None:
    """With 15 data tokens and the constant last one: micro 1/32 + 31/32/15, macro (1 + 1) / 16 for a constant guess."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(15, (1280, 32), generator=generator)
    targets[:, -1] = 15
    logits = torch.zeros(1280, 32, 16)
    logits[:, :-1, 3] = 1
    logits[:, -1, 15] = 1
    found = evaluate(Given(logits), torch.arange(1280)[:, None], targets, 128)
    assert found.macro_accuracy == pytest.approx(2 / 16)
    assert found.accuracy == pytest.approx(1 / 32 + 31 / 32 / 15, abs=2e-3)


def test_a_model_is_scored_in_eval_mode_and_left_as_it_was_whatever_happens() -> None:
    net = nn.Sequential(nn.Embedding(5, 5), nn.Dropout(0.5))
    net[0].eval()  # frozen by its user
    tokens = torch.randint(5, (8, 6), generator=torch.Generator().manual_seed(0))
    assert evaluate(net, tokens, tokens, 3) == evaluate(net, tokens, tokens, 3)
    assert [module.training for module in net.modules()] == [True, False, True]
    with pytest.raises(IndexError):
        evaluate(net, tokens + 5, tokens, 3)
    assert [module.training for module in net.modules()] == [True, False, True]
