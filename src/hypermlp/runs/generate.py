"""Text from a saved model or a training run, token by token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from hypermlp import notice
from hypermlp.data.corpus import INDEX, Corpus, open_corpus, read_corpus
from hypermlp.data.text import find_source
from hypermlp.data.tokenizers import Tokenizer, read_tokenizer
from hypermlp.files import TOKENIZER
from hypermlp.models.bundled import LANGUAGE, find_model
from hypermlp.models.generate import stream
from hypermlp.models.lm import LanguageModel
from hypermlp.models.saved import CONFIG, load_model
from hypermlp.train.checkpoint import load_checkpoint
from hypermlp.train.run_folder import RunFolder


def open_model(folder: str | Path) -> tuple[LanguageModel, Tokenizer]:
    """A model and its tokenizer from a saved model or a training run: its finished model, else its newest checkpoint."""
    folder = find_model(folder)
    saved = find_saved(folder)
    source = saved or RunFolder(folder).newest()
    if source is None:
        raise ValueError(
            f"{folder} holds neither a saved model ({CONFIG}) nor a training run with a checkpoint; hypermlp train tiny makes "
            f"one, and {LANGUAGE} comes with the package"
        )
    model = load_model(source) if saved else load_checkpoint(source)
    if not (source / TOKENIZER).is_file():
        raise ValueError(f"{source} has no {TOKENIZER}, which turns text into tokens")
    return model.eval(), read_tokenizer(source)


def find_saved(folder: Path) -> Path | None:
    """The folder of a saved model: this one, or that of a training run, unless the run was resumed and is not finished."""
    return folder if (folder / CONFIG).is_file() else RunFolder(folder).finished_model()


def export_model(folder: Path, out: Path) -> Path:
    """Turn a saved model, or the newest checkpoint of a training run, into a folder for Hugging Face; returns which it was."""
    from hypermlp.models.hf.card import model_card
    from hypermlp.models.hf.folder import export

    folder = find_model(folder)
    if not (folder / CONFIG).is_file():
        return RunFolder(folder).export(out)
    model, tokenizer = open_model(folder)
    card = folder / "README.md"
    export(model, out, tokenizer.to_dict(), card.read_text(encoding="utf-8") if card.is_file() else model_card(model))
    return folder


def write_text(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt: str,
    count: int,
    *,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
) -> Iterator[str]:
    """Up to `count` tokens after the prompt, in pieces of text; they end where the document does.

    Args:
        model: in eval mode, if it has dropout.
        tokenizer: the one it was trained with.
        prompt: what the document begins with; it may be empty.
        count: most tokens to write.
        temperature, top_k, top_p, seed: how each is drawn (models/generate.py: stream).
    """
    start = [tokenizer.end, *tokenizer.encode(prompt).tolist()]  # a document begins where another has ended
    if not model.has_cache:
        notice.once("this model has no cache: every token takes a pass over the whole text, which ends at model.length")
    if model.config.learned_positions or not model.has_cache:
        count = min(count, model.config.length - len(start))
    tokens = torch.tensor([start], device=next(model.parameters()).device)
    sampling: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    written = stream(model, tokens, count, use_cache=model.has_cache, **sampling)
    return decode(tokenizer, until(tokenizer.end, (int(token) for token in written)))


def until(end: int, tokens: Iterable[int]) -> Iterator[int]:
    for token in tokens:
        if token == end:
            return
        yield token


def decode(tokenizer: Tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    """The text of tokens that arrive one by one: a character that is not complete yet waits for the rest of its bytes."""
    seen: list[int] = []
    shown, text = 0, ""
    for token in tokens:
        seen.append(token)
        text = tokenizer.decode(seen)
        ready = len(text) - text.endswith("\N{REPLACEMENT CHARACTER}")
        if ready > shown:
            yield text[shown:ready]
            shown = ready
    if text[shown:]:
        yield text[shown:]


def corpus_for(name: str, tokenizer: Tokenizer) -> Corpus:
    """A prepared corpus, if it was made with this tokenizer, or a text tokenised by it."""
    if not (Path(name) / INDEX).is_file():
        return read_corpus(find_source(name), tokenizer)
    corpus = open_corpus(name)
    if corpus.tokenizer.fingerprint != tokenizer.fingerprint:
        raise ValueError(
            f"the corpus {name} was prepared with another tokenizer ({corpus.tokenizer.name}) than the model's "
            f"({tokenizer.name}); give the text itself"
        )
    return corpus
