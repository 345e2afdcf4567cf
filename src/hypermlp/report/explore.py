"""The explorer: one self-contained page on which any head of a model can be looked into, at any token of a text."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from markupsafe import Markup
from rich.console import Console
from torch import Tensor, nn

from hypermlp.analysis.capture import capture, recipe
from hypermlp.config import IGNORED
from hypermlp.data.tokenizers import Tokenizer
from hypermlp.files import refuse_foreign, write_own
from hypermlp.models.bundled import full_name, short_name
from hypermlp.models.lm import count_parameters
from hypermlp.report.markup import TEMPLATES
from hypermlp.report.terminal import say
from hypermlp.runs.generate import open_model
from hypermlp.studies.task_models import is_task_model, open_task_model
from hypermlp.tasks.mad_settings import spell
from hypermlp.verdicts.results import plain_name

HERE = Path(__file__).parent / "explorer"
GUESSES = 5  # of the next token that a page keeps
LONGEST = 4096  # tokens of a text
ROOM = 6_500_000  # bytes of single precision, from which values and directions are kept in half of it
HALVED = ("v", "g")  # they only set shares; what decides which slots are active stays in single precision
END = "⟨end⟩"  # how the end of a document is shown


@dataclass(frozen=True)
class Subject:
    """A model and the tokens to look at it with."""

    name: str
    model: nn.Module
    tokens: list[int]
    pieces: list[str]  # what each token is shown as
    spell: Callable[[int], str]  # a token of the vocabulary, as text
    special: list[int]  # places of tokens that are no text
    targets: list[int | None]  # the token to be predicted at each place; None: nothing is
    words: bool = False  # tokens are words, to be set apart, and targets stand at their own place


def show_explore(
    console: Console, text: str | None, folders: Sequence[Path], out: Path, *, example: int = 0, force: bool = False
) -> Path:
    """Write the page for one model, or two to compare on the same text, and say where it is.

    A model of a task reads a test example of the task instead of a text.
    """
    if not 1 <= len(folders) <= 2:
        raise ValueError(f"{len(folders)} models were given; the page shows one, or the difference of two")
    refuse_foreign(out, force=force)
    asked = [is_task_model(folder) for folder in folders]
    if text and any(asked):
        raise ValueError(
            f"{full_name(folders[asked.index(True)])} is a model of a task and reads the task's test examples: choose one with "
            "--example, and leave out the text"
        )
    subjects = [
        open_task(folder, example) if of_task else open_subject(folder, text)
        for folder, of_task in zip(folders, asked, strict=True)
    ]
    page = build_page(subjects)
    write_own(out, page, force=force)
    size = f"{len(subjects[0].tokens)} tokens, {out.stat().st_size / 1e6:.1f} MB"
    say(console, f"{size}. Open it in a browser: {out}")
    return out


def open_task(folder: Path, example: int) -> Subject:
    """A model of a task, and one of its test examples."""
    saved = open_task_model(folder)
    if not 0 <= example < len(saved.inputs):
        raise ValueError(f"example ({example}) must be at least 0 and below the {len(saved.inputs)} test examples")
    tokens = saved.inputs[example].tolist()
    targets = [None if token == IGNORED else token for token in saved.targets[example].tolist()]
    pieces = [spell(saved.setting, token) for token in tokens]
    special = [place for place, piece in enumerate(pieces) if not piece.isdigit()]
    return Subject(saved.mixer, saved.model, tokens, pieces, partial(spell, saved.setting), special, targets, words=True)


def open_subject(folder: Path, text: str | None) -> Subject:
    """A saved model or training run, and the text as its tokenizer cuts it, behind the end of a document."""
    model, tokenizer = open_model(folder)
    tokens = [tokenizer.end, *tokenizer.encode(text or "").tolist()]
    if len(tokens) == 1:
        raise ValueError('there is no text to look at; give some, such as: hypermlp explore "def add(a, b):"')
    if len(tokens) > LONGEST:
        raise ValueError(f"the text has {len(tokens)} tokens; the page takes {LONGEST}, so give less of it")
    spelled = speller(tokenizer)
    return Subject(short_name(folder), model, tokens, [END, *map(spelled, tokens[1:])], spelled, [0], [*tokens[1:], None])


def speller(tokenizer: Tokenizer) -> Callable[[int], str]:
    """A token as text; one that is no character of its own by its number."""

    def spell(token: int) -> str:
        if token == tokenizer.end:
            return END
        text = tokenizer.decode([token])
        if text in ("", "\N{REPLACEMENT CHARACTER}") or not (text.isprintable() or text.isspace()) or text in "\r\f\v":
            return f"\\x{token:02x}" if tokenizer.vocabulary == 257 else f"⟨{token}⟩"
        return text

    return spell


def build_page(subjects: Sequence[Subject]) -> str:
    """The page with all its data; two subjects must have the same tokens."""
    first = subjects[0]
    if any(subject.tokens != first.tokens or subject.pieces != first.pieces for subject in subjects):
        raise ValueError("the two models cut the text into different tokens; compare models that share a tokenizer")
    names = [subject.name for subject in subjects]
    if len(set(names)) < len(names):
        names = [f"{name} ({i})" for i, name in enumerate(names, 1)]
    data = {
        "about": about(subjects, names),
        "tokens": first.pieces,
        "special": first.special,
        "words": first.words,
        "targets": [None if token is None else first.spell(token) for token in first.targets],
        "models": [model_data(subject, name) for subject, name in zip(subjects, names, strict=True)],
    }
    written = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    files = {"maths": "maths.js", "draw": "draw.js", "page": "page.js", "css": "page.css"}
    own = {name: Markup((HERE / file).read_text(encoding="utf-8")) for name, file in files.items()}
    page = TEMPLATES.from_string((HERE / "page.html").read_text(encoding="utf-8"))
    return page.render(own, data=Markup(written), title=", ".join(names))


def about(subjects: Sequence[Subject], names: Sequence[str]) -> str:
    shown = [
        f"{known(name)} ({count_parameters(subject.model):,} parameters)" for subject, name in zip(subjects, names, strict=True)
    ]
    return (
        f"{' and '.join(shown)} read{'s' if len(shown) == 1 else ''} {len(subjects[0].tokens)} tokens. Choose a token, a layer "
        "and a head: the page shows which earlier tokens the head reads there, and why."
    )


def known(name: str) -> str:
    """A label with the name that a reader may know."""
    return name if plain_name(name) == name else f"{plain_name(name)} {name}"


def model_data(subject: Subject, name: str) -> dict[str, Any]:
    """Everything the page needs of one model."""
    found = capture(subject.model, torch.tensor([subject.tokens]))
    layers: list[tuple[dict[str, Any], dict[str, Tensor]]] = [
        ({"kind": "state", "heads": 0, "mixes": [False, False]}, {}) if opened is None else recipe(opened)
        for opened in found.traces()
    ]
    size = sum(4 * array.numel() for _, arrays in layers for array in arrays.values())
    return {
        "name": name,
        "layers": [
            {
                "mixer": type(mixer).__name__,
                **facts,
                "arrays": {key: pack(array, half=size > ROOM and key in HALVED) for key, array in arrays.items()},
            }
            for mixer, (facts, arrays) in zip(found.mixers, layers, strict=True)
        ],
        **predictions(found.logits, subject),
    }


def predictions(logits: Tensor, subject: Subject) -> dict[str, Any]:
    """The likeliest tokens at every place, and the probability of the right one."""
    probability = logits[0].softmax(-1)  # T vocabulary
    best = probability.topk(min(GUESSES, probability.shape[-1]))
    top = [
        [[subject.spell(token), round(p, 5)] for token, p in zip(tokens, values, strict=True)]
        for tokens, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
    came = [None if token is None else float(row[token]) for row, token in zip(probability, subject.targets, strict=True)]
    return {"top": top, "next": [None if p is None else float(f"{max(p, 1e-30):.5g}") for p in came]}


def pack(array: Tensor, half: bool = False) -> dict[str, Any]:
    """An array in base64, little-endian."""
    values = array.detach().to(torch.float32).contiguous().numpy().astype("<f2" if half else "<f4")
    encoded = base64.b64encode(values.tobytes()).decode()
    return {"type": "f2" if half else "f4", "shape": list(array.shape), "data": encoded}


def unpack(packed: dict[str, Any]) -> np.ndarray[Any, Any]:
    """The inverse of pack."""
    values = np.frombuffer(base64.b64decode(packed["data"]), f"<{packed['type']}")
    return values.reshape(packed["shape"]).astype(np.float64)
