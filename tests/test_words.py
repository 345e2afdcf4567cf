"""How the documents are written: sentences of at most thirty words, and no phrase that once read as translated.

python tests/test_words.py prints every longer sentence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), ROOT / "examples" / "README.md"]
SOURCES = [*DOCUMENTS, *sorted((ROOT / "src").rglob("*.py")), *sorted((ROOT / "src").rglob("*.html"))]
LONGEST = 30  # words of a sentence
LONGER: dict[str, str] = {}  # how a longer sentence begins → why it may stay
# What was replaced, by what; the words of one sentence may be spread over lines.
REPLACED = {
    "follows it, unless": "dependent fields update unless you set them",
    "so it was, from": "it was not, so we removed it",
    "as long as the search leads on": "unknown until the search ends",
    "nobody has trained": "the new lags are untrained",
    "yours to say": "choose",
    "to be said": "notes",
    "with commas between them": "comma-separated",
    "there was none.": "no GPU was available",
    "of one's own": "your own",
    "ranks nobody": "too short to rank mixers",
    "who pays for": "what is resized",
    "too shortly": "for too few steps",
    "nobody wrote down": "it was not recorded",
    "nobody knows how": "it is unknown how",
    "none of the vocabulary": "outside the vocabulary",
    "not both and not neither": "one of the two",
}


def paragraphs(text: str) -> Iterator[str]:
    """The prose of a document: no code, tables, headings, pictures or comments; an item of a list is a paragraph."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"^(    (?! *[-*\d]).*|\|.*|#.*|!\[.*)$", "", text, flags=re.M)
    text = re.sub(r"^( *)([-*]|\d+\.) ", r"\n\1", text, flags=re.M)
    for paragraph in re.split(r"\n\s*\n", text):
        if paragraph.strip():
            yield " ".join(paragraph.split())


def sentences(text: str) -> Iterator[str]:
    """As a reader sees them: links without their targets, a piece of code as one word."""
    for paragraph in paragraphs(text):
        plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", paragraph)
        plain = re.sub(r"`[^`]*`", "code", plain)
        yield from re.split(r"(?<=[^.][.!?])[\"”')*]* +", plain)


def words(sentence: str) -> int:
    return len(re.findall(r"\w\S*", sentence))


def long_sentences(document: Path) -> list[str]:
    found = [sentence for sentence in sentences(document.read_text()) if words(sentence) > LONGEST]
    return [sentence for sentence in found if not any(sentence.startswith(start) for start in LONGER)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_sentences_are_short(document: Path) -> None:
    assert long_sentences(document) == [], "make two of each; or say in LONGER why it may stay"


def test_reasons_belong_to_sentences() -> None:
    every = [sentence for document in DOCUMENTS for sentence in sentences(document.read_text())]
    assert all(any(sentence.startswith(start) for sentence in every) for start in LONGER)


def test_phrases_that_were_replaced_stay_away() -> None:
    found = []
    for path in SOURCES:
        text = " ".join(path.read_text().split()).lower()
        found += [f"{path.relative_to(ROOT)}: {old!r}, say {new!r}" for old, new in REPLACED.items() if old in text]
    assert found == []


def test_a_long_sentence_is_found_and_code_is_not_counted() -> None:
    short = "It is short. " * 40
    long = "so " * (LONGEST + 1)
    code = f"```python\n{long}\n```\n\n`{long}` [is]({long.replace(' ', '/')}) one word."
    text = f"# {long}\n\n{short}\n\n- {long}\n\n| {long} |\n\n{code}"
    assert [sentence for sentence in sentences(text) if words(sentence) > LONGEST] == [long.strip()]


if __name__ == "__main__":
    for path in DOCUMENTS:
        for sentence in long_sentences(path):
            print(f"{path.relative_to(ROOT)}, {words(sentence)} words: {sentence}\n")
