"""Perplexity: every token once, from the context it should have, in whatever batches."""

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers import perturb
from hypermlp.data.corpus import TokenStream, read_corpus
from hypermlp.data.text import find_source
from hypermlp.data.tokenizers import ByteTokenizer, Tokenizer, train_bpe
from hypermlp.evals.perplexity import Perplexity, measure
from hypermlp.models.lm import LanguageModel, ModelConfig

TEXTS = ["naïve 日本語", "x", "def f(x):\n    return x * x\n", "the cat and the hat"]


def model(vocabulary: int = 257, **changes: object) -> LanguageModel:
    torch.manual_seed(0)
    net = LanguageModel(ModelConfig(vocabulary=vocabulary, width=16, depth=1, length=16, inner=32, **changes)).double()
    perturb(net)
    return net


def stream(tokenizer: Tokenizer) -> TokenStream:
    pieces = [np.append(tokenizer.encode(text), np.uint32(tokenizer.end)) for text in TEXTS]
    return TokenStream([np.concatenate(pieces)], [np.cumsum([len(piece) for piece in pieces])])


def one_by_one(net: LanguageModel, tokens: list[int], end: int, context: int, stride: int) -> float:
    """Nats of a text, a forward for each token."""
    total = 0.0
    for place, token in enumerate(tokens):
        window = 0 if place < context else -(-(place + 1 - context) // stride)  # the first that reaches so far
        seen = [end, *tokens][window * stride : place + 1]
        total -= net(torch.tensor([seen]))[0, -1].log_softmax(-1)[token].item()
    return total


@pytest.mark.parametrize("context, stride", [(16, 16), (16, 5), (7, 1), (200, 200)])
@pytest.mark.parametrize("documents", [False, True])
def test_every_token_counts_once_from_its_own_context(context: int, stride: int, documents: bool) -> None:
    net, tokenizer = model(), ByteTokenizer()
    text = stream(tokenizer)
    bounds = [0, *text.ends.tolist()] if documents else [0, len(text)]
    pieces = [text.read(a, b).tolist() for a, b in pairwise(bounds)]
    expected = sum(one_by_one(net, piece, tokenizer.end, context, stride) for piece in pieces)
    for batch in (1, 3, 100):
        found = measure(net, text, tokenizer, context=context, stride=stride, documents=documents, batch=batch)
        assert found.nats == pytest.approx(expected, rel=1e-12)
        assert (found.tokens, found.bytes) == (len(text), sum(len(t.encode()) for t in TEXTS))


def test_figures_are_per_token_and_per_byte() -> None:
    found = Perplexity(nats=math.log(8) * 10, tokens=10, bytes=30)
    assert found.perplexity == pytest.approx(8)
    assert found.bits_per_byte == pytest.approx(1)
    assert found.loss == pytest.approx(math.log(8))


def test_bytes_are_those_of_the_text_whatever_the_tokenizer() -> None:
    bpe = train_bpe(TEXTS, 300)
    found = measure(model(bpe.vocabulary), stream(bpe), bpe)
    assert found.bytes == sum(len(text.encode()) for text in TEXTS)
    assert found.tokens == len(stream(bpe)) < found.bytes


def test_a_uniform_model_has_the_perplexity_of_its_vocabulary(tmp_path: Path) -> None:
    net = model(tied=False)
    torch.nn.init.zeros_(net.head.weight)
    (tmp_path / "text.txt").write_text("\n".join(TEXTS * 20))
    corpus = read_corpus(find_source(tmp_path / "text.txt"), ByteTokenizer())
    seen: list[tuple[int, int]] = []
    net.train()
    found = measure(net, corpus.split("validation"), corpus.tokenizer, progress=lambda done, total: seen.append((done, total)))
    assert found.perplexity == pytest.approx(257)
    assert seen[-1] == (found.tokens, found.tokens)
    assert sorted(seen) == seen
    assert net.training


@pytest.mark.parametrize("bad", [{"stride": 17}, {"stride": 0}, {"batch": 0}])
def test_bad_windows_are_refused(bad: dict[str, int]) -> None:
    name, value = next(iter(bad.items()))
    with pytest.raises(ValueError, match=rf"{name} \({value}\) must be at least 1"):
        measure(model(), stream(ByteTokenizer()), ByteTokenizer(), **bad)
    with pytest.raises(ValueError, match="no text to predict"):
        measure(model(), TokenStream([], []), ByteTokenizer())
