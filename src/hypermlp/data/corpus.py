"""A tokenised corpus: two long streams of tokens, in memory or mapped from shards, and where their documents end.

A shard is one file: its tokens, zeros up to a multiple of 8 bytes, and for each document the position after its last token (its
end-of-document token) as uint64. All little endian.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hypermlp.checks import choose_from
from hypermlp.data.text import Source, find_source
from hypermlp.data.tokenizers import ByteTokenizer, Tokenizer, tokenizer_from_dict
from hypermlp.files import TOKENIZER, file_sha256

SplitName = Literal["train", "validation"]
SPLITS: tuple[SplitName, ...] = ("train", "validation")
EDGE = 2**16  # bytes at both ends of a shard that are checked whenever it is opened
INDEX = "index.json"


class TokenStream:
    """The stream of one split, over one or more pieces."""

    def __init__(self, pieces: list[NDArray[Any]], ends: list[NDArray[Any]]) -> None:
        self.pieces = pieces
        self.starts = np.cumsum([0, *map(len, pieces)])
        self._ends = ends

    def __len__(self) -> int:
        return int(self.starts[-1])

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """The position after each document."""
        shifted = [ends.astype(np.int64) + start for ends, start in zip(self._ends, self.starts, strict=False)]
        return np.concatenate([np.zeros(0, np.int64), *shifted])

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens from start to stop, or to the end of the stream."""
        stop = min(stop, len(self))
        found = np.empty(max(stop - start, 0), np.int64)
        done = 0
        piece = int(np.searchsorted(self.starts, start, side="right")) - 1
        while done < len(found):
            offset = start + done - int(self.starts[piece])
            taken = self.pieces[piece][offset : offset + len(found) - done]
            found[done : done + len(taken)] = taken
            done += len(taken)
            piece += 1
        return found


@dataclass(frozen=True)
class Corpus:
    name: str
    tokenizer: Tokenizer
    splits: dict[SplitName, TokenStream]

    def split(self, name: SplitName) -> TokenStream:
        choose_from("split", name, SPLITS)
        return self.splits[name]


def read_corpus(source: Source | None = None, tokenizer: Tokenizer | None = None) -> Corpus:
    """Tokenise a source in memory; by default the standard library, by bytes."""
    source, tokenizer = source or find_source(), tokenizer or ByteTokenizer()
    pieces: dict[SplitName, list[NDArray[Any]]] = {name: [] for name in SPLITS}
    for document in source.documents():
        tokens = np.append(tokenizer.encode(document.text), np.uint32(tokenizer.end)).astype(tokenizer.dtype)
        pieces["validation" if document.validation else "train"].append(tokens)
    if not any(pieces.values()):
        raise ValueError(f"the corpus {source.name} holds no text")
    splits = {}
    for name, arrays in pieces.items():
        whole = np.concatenate([np.zeros(0, tokenizer.dtype), *arrays])
        splits[name] = TokenStream([whole], [np.cumsum([len(array) for array in arrays], dtype=np.uint64)])
    return Corpus(source.name, tokenizer, splits)


def open_corpus(folder: str | Path, *, verify: bool = False) -> Corpus:
    """Memory-map a corpus that `prepare` wrote to a folder.

    The size of every shard and both its ends are checked; `verify` reads and checks everything.
    """
    folder = Path(folder)
    index = read_index(folder)
    tokenizer = tokenizer_from_dict(json.loads((folder / TOKENIZER).read_text(encoding="utf-8")))
    if tokenizer.fingerprint != index["tokenizer"]["fingerprint"]:
        raise ValueError(f"{folder / TOKENIZER} is not the one the corpus was made with; {REMEDY}")
    splits: dict[SplitName, TokenStream] = {}
    for name in SPLITS:
        shards = index["shards"][name]
        for shard in shards:
            check_shard(folder / shard["file"], shard, verify)
        maps = [np.memmap(folder / shard["file"], np.uint8, "r") for shard in shards]
        itemsize = np.dtype(tokenizer.dtype).itemsize
        pieces = [m[: itemsize * s["tokens"]].view(tokenizer.dtype) for m, s in zip(maps, shards, strict=True)]
        ends = [m[len(m) - 8 * s["documents"] :].view("<u8") for m, s in zip(maps, shards, strict=True)]
        splits[name] = TokenStream(pieces, ends)
    return Corpus(index["source"]["name"], tokenizer, splits)


REMEDY = "remove the folder and prepare the corpus again"


def read_index(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / INDEX).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(
            f"{folder} holds no prepared corpus ({INDEX} is missing); prepare one there, or run the unfinished command again"
        ) from error
    except ValueError as error:
        raise ValueError(f"{folder / INDEX} is damaged ({error}); {REMEDY}") from error


def check_shard(path: Path, shard: dict[str, Any], whole: bool) -> None:
    """Raise a ValueError that names the file if the shard was changed after it was written."""
    if not path.is_file():
        raise ValueError(f"the shard {path} is missing; {REMEDY}")
    size = path.stat().st_size
    if size != shard["bytes"]:
        raise ValueError(f"the shard {path} has {size} bytes where {shard['bytes']} were written; {REMEDY}")
    if edge_checksum(path) != shard["edges"] or (whole and file_sha256(path) != shard["sha256"]):
        raise ValueError(f"the shard {path} was altered after it was written; {REMEDY}")


def edge_checksum(path: Path) -> str:
    with open(path, "rb") as file:
        head = file.read(EDGE)
        file.seek(max(path.stat().st_size - EDGE, 0))
        return hashlib.sha256(head + file.read()).hexdigest()
