"""Every tokenizer gives back the text it was given, and is restored from what it saved."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from hypermlp.config import END
from hypermlp.data.text import find_source
from hypermlp.data.tokenizers import ByteTokenizer, FileTokenizer, Tokenizer, find_tokenizer, train_bpe

TEXTS = [
    "def f(x):\n    return x + 1\n",
    "the cat sat on the mat, the rat sat on the cat\n",
    "naïve café, 東京 🙂\r\n\t\x00",
] * 4


def bpe() -> Tokenizer:
    return train_bpe(TEXTS, 300)


TOKENIZERS = {"bytes": ByteTokenizer(), "bpe": bpe()}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from([*TEXTS, f"a{END}b", "", " leading"]))
def test_decoding_undoes_encoding(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.uint32
    assert all(0 <= token < tokenizer.vocabulary for token in tokens.tolist())
    assert tokenizer.end not in tokens, "the end of document is never part of a text"
    assert tokenizer.decode(tokens) == text
    assert tokenizer.decode([*tokens.tolist(), tokenizer.end]) == text


@pytest.mark.parametrize("name", TOKENIZERS)
def test_saving_and_loading_changes_nothing(name: str, tmp_path: Path) -> None:
    tokenizer = TOKENIZERS[name]
    tokenizer.save(tmp_path / "t.json")
    loaded = find_tokenizer(str(tmp_path / "t.json"))
    assert loaded.fingerprint == tokenizer.fingerprint
    assert (loaded.name, loaded.vocabulary, loaded.end) == (tokenizer.name, tokenizer.vocabulary, tokenizer.end)
    assert loaded.encode(TEXTS[0]).tolist() == tokenizer.encode(TEXTS[0]).tolist()


def test_sizes_and_names() -> None:
    assert (ByteTokenizer().vocabulary, ByteTokenizer().end, ByteTokenizer().dtype) == (257, 256, "<u2")
    assert ByteTokenizer().encode("é!").tolist() == [0xC3, 0xA9, 0x21]
    trained = TOKENIZERS["bpe"]
    assert trained.name == "bpe:300"
    assert trained.vocabulary == 300
    assert len(trained.encode(TEXTS[1])) < len(TEXTS[1]) / 2
    assert len({t.fingerprint for t in TOKENIZERS.values()}) == 2


def test_training_is_deterministic() -> None:
    assert bpe().fingerprint == TOKENIZERS["bpe"].fingerprint


def test_a_bpe_is_trained_on_the_source_without_what_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcabcabc\n" * 950 + "xyzxyzxyz\n" * 50)
    tokenizer = find_tokenizer("bpe:270", find_source(tmp_path / "a.txt"))
    assert len(tokenizer.encode("abcabcabc")) < 4
    assert len(tokenizer.encode("xyzxyzxyz")) == 9


def published(end: str, words: int) -> dict[str, object]:
    """A tokenizer.json as others write it: another model, with truncation and padding that must not bite."""
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(words)}, unk_token="w0"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.add_special_tokens([end])
    library.enable_truncation(2)
    library.enable_padding(length=8)
    return json.loads(library.to_str())


def test_a_tokenizer_of_others_is_loaded_from_file_or_folder(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(published("</s>", 10)))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = find_tokenizer(str(path))
        assert (loaded.end, loaded.vocabulary) == (10, 11)
        assert loaded.encode("w1 w2 w3 w9").tolist() == [1, 2, 3, 9]
    (tmp_path / "tokenizer.json").write_text(json.dumps(published("<stop>", 10)))
    with pytest.raises(ValueError, match=r"has no token .*</s>.*; give the one that ends a document as end="):
        find_tokenizer(str(tmp_path))
    assert find_tokenizer(str(tmp_path), end="<stop>").end == 10


def test_a_large_vocabulary_is_stored_in_four_bytes() -> None:
    assert FileTokenizer("large", published("</s>", 2**16)).dtype == "<u4"
    assert FileTokenizer("just fits", published("</s>", 2**16 - 1)).dtype == "<u2"


def test_mistakes_are_named_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"tokenizer \(nothing\) must be 'bytes', 'bpe:' and a size"):
        find_tokenizer("nothing")
    with pytest.raises(ValueError, match=r"vocabulary \(256\) must be at least 257"):
        train_bpe(TEXTS, 256)
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ValueError, match=r"a\.json is not JSON"):
        find_tokenizer(str(tmp_path / "a.json"))
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(ValueError, match=r"is not a tokenizer\.json"):
        find_tokenizer(str(tmp_path / "a.json"))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"needs tokenizers; install it with: pip install 'hypermlp\[hf\]'"):
        train_bpe(TEXTS, 300)
