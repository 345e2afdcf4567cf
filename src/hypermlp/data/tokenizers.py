"""From text to tokens and back: bytes, a byte-level BPE trained here, or any tokenizer.json. All are data, none is code."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hypermlp.config import END
from hypermlp.data.text import Source, optional
from hypermlp.files import TOKENIZER

# What published tokenizers call the end of a document, in the order in which they are looked for.
KNOWN_ENDS = (END, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>", "[SEP]")
BPE_SAMPLE = 2**24  # bytes of text that a BPE is trained on


class Tokenizer(ABC):
    name: str
    vocabulary: int
    end: int  # the token after every document

    @abstractmethod
    def encode(self, text: str) -> NDArray[np.uint32]:
        """The tokens of a text, without the end of document."""

    @abstractmethod
    def decode(self, tokens: Sequence[int] | NDArray[Any]) -> str:
        """The text of tokens, without ends of documents."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """The whole tokenizer as JSON data."""

    @property
    def fingerprint(self) -> str:
        """Equal for tokenizers that do the same, whatever they are called."""
        values = {key: value for key, value in self.to_dict().items() if key != "name"}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_dict()), encoding="utf-8")

    @property
    def dtype(self) -> str:
        """How a token is stored."""
        return "<u2" if self.vocabulary <= 2**16 else "<u4"


class ByteTokenizer(Tokenizer):
    """UTF-8: 256 bytes and the end of document."""

    name = "bytes"
    vocabulary = 257
    end = 256

    def encode(self, text: str) -> NDArray[np.uint32]:
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint32)

    def decode(self, tokens: Sequence[int] | NDArray[Any]) -> str:
        values = np.asarray(tokens, dtype=np.int64)
        return values[values < 256].astype(np.uint8).tobytes().decode("utf-8", "replace")

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "bytes"}


class FileTokenizer(Tokenizer):
    """A tokenizer.json, run by the tokenizers library.

    Words in a text that look like special tokens are text: an end of document is only where a document ends.
    """

    def __init__(self, name: str, file: dict[str, Any], end: str | None = None) -> None:
        library = optional("tokenizers")
        try:
            self.model = library.Tokenizer.from_str(json.dumps(file))
        except Exception as error:  # the library has no narrower class
            raise ValueError(f"{name} is not a tokenizer.json that the tokenizers library reads: {error}") from error
        self.model.no_truncation()
        self.model.no_padding()
        self.model.encode_special_tokens = True
        if end is None:
            end = next((token for token in KNOWN_ENDS if self.model.token_to_id(token) is not None), None)
        if end is None or self.model.token_to_id(end) is None:
            raise ValueError(f"{name} has no token {end or ' or '.join(KNOWN_ENDS)}; give the one that ends a document as end=")
        self.name, self.file, self.end_token = name, file, end
        self.end: int = self.model.token_to_id(end)
        self.vocabulary: int = max(self.model.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str) -> NDArray[np.uint32]:
        return np.array(self.model.encode(text, add_special_tokens=False).ids, dtype=np.uint32)

    def decode(self, tokens: Sequence[int] | NDArray[Any]) -> str:
        values = np.asarray(tokens, dtype=np.int64)
        return self.model.decode(values[values != self.end].tolist(), skip_special_tokens=False)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "tokenizers", "name": self.name, "end": self.end_token, "file": self.file}


def train_bpe(texts: Iterable[str], vocabulary: int) -> FileTokenizer:
    """A byte-level BPE with this vocabulary, learned from the texts; it can encode every text."""
    least = 256 + 1
    if vocabulary < least:
        raise ValueError(f"vocabulary ({vocabulary}) must be at least {least}: all bytes and the end of document")
    library = optional("tokenizers")
    model = library.Tokenizer(library.models.BPE())
    model.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = library.decoders.ByteLevel()
    alphabet = sorted(library.pre_tokenizers.ByteLevel.alphabet())
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator(texts, trainer)
    return FileTokenizer(f"bpe:{vocabulary}", json.loads(model.to_str()), END)


def tokenizer_from_dict(values: dict[str, Any]) -> Tokenizer:
    if values["kind"] == "bytes":
        return ByteTokenizer()
    return FileTokenizer(values["name"], values["file"], values["end"])


def find_tokenizer(name: str, source: Source | None = None, end: str | None = None) -> Tokenizer:
    """A tokenizer by its name.

    Args:
        name: "bytes"; "bpe:4096", trained on the source; or the path of a tokenizer.json, or of a folder with one in it.
        source: the text that it is for.
        end: the token of a tokenizer.json that ends a document; None: one of those that are known to.
    """
    if name == "bytes":
        return ByteTokenizer()
    kind, _, size = name.partition(":")
    if kind == "bpe" and size.isdigit() and source is not None:
        return train_bpe(source.sample(BPE_SAMPLE), int(size))
    path = Path(name)
    if not (path / TOKENIZER if path.is_dir() else path).is_file():
        raise ValueError(
            f"tokenizer ({name}) must be 'bytes', 'bpe:' and a size such as 'bpe:4096', or the path of a tokenizer.json"
        )
    return read_tokenizer(path, end)


def read_tokenizer(path: Path, end: str | None = None) -> Tokenizer:
    """The tokenizer of a file, or of the tokenizer.json in a folder, whatever their names."""
    if path.is_dir():
        path = path / TOKENIZER
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if isinstance(values, dict) and values.get("kind") in ("bytes", "tokenizers"):
        return tokenizer_from_dict(values)
    return FileTokenizer(path.parent.name or path.name, values, end)
