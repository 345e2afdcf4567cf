"""The language model around any mixer."""

import pytest
import torch

from hypermlp.mixers import MIXERS, build_mixer
from hypermlp.models.lm import LanguageModel, count_parameters, match_inner_width
from hypermlp.train.loop import Trainer, accuracy


def model(name: str, inner: int = 32) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(11, 16, 2, inner, lambda: build_mixer(name, 16, 12))


@pytest.mark.parametrize("name", sorted(MIXERS))
def test_logits_do_not_depend_on_the_future(name: str) -> None:
    tokens = torch.randint(11, (2, 12))
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 11
    torch.testing.assert_close(model(name)(tokens)[:, :7], model(name)(changed)[:, :7])


@pytest.mark.parametrize("name", sorted(MIXERS))
def test_a_model_learns_a_constant_batch(name: str) -> None:
    net = model(name)
    tokens, targets = torch.randint(11, (4, 12)), torch.randint(11, (4, 12))
    trainer = Trainer(net, steps=150, lr=1e-2)
    first = trainer.step(tokens, targets)
    for _ in range(149):
        last = trainer.step(tokens, targets)
    assert last < 0.2 * first
    assert accuracy(net, tokens, targets) > 0.9


def test_parameter_counts_are_matched_by_the_feed_forward() -> None:
    target = count_parameters(model("hyperglu", 32))
    inner = match_inner_width(target, lambda width: model("softmax", width), 32)
    assert abs(count_parameters(model("softmax", inner)) - target) < 0.01 * target
