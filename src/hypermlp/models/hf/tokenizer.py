"""Tokenizers of saved models as transformers' fast tokenizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypermlp.config import END
from hypermlp.files import TOKENIZER
from hypermlp.models.hf.library import CURE, PreTrainedTokenizerFast, tokenizers, transformers


class HyperTokenizer(PreTrainedTokenizerFast):
    """Reads the tokenizers of both formats; what it returns is an ordinary fast tokenizer."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *inputs: Any, **options: Any) -> Any:
        path = Path(pretrained_model_name_or_path) / TOKENIZER
        values = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if "kind" in values:
            return fast_tokenizer(values)
        return PreTrainedTokenizerFast.from_pretrained(pretrained_model_name_or_path, *inputs, **options)


def fast_tokenizer(values: dict[str, Any]) -> PreTrainedTokenizerFast:
    """What a native tokenizer.json describes: the same tokens; its end of document also begins and pads."""
    if transformers is None:
        raise ImportError(CURE)
    end = values.get("end", END)
    file = byte_file() if values["kind"] == "bytes" else values["file"]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(json.dumps(file)),
        bos_token=end,
        eos_token=end,
        pad_token=end,
        padding_side="left",
        split_special_tokens=True,  # what looks like the end of a document within a text is text
        clean_up_tokenization_spaces=False,
    )


def byte_file() -> dict[str, Any]:
    """A tokenizer.json of bytes: token i is byte i, 256 the end of document."""
    # The library shows each byte as a printable character: itself where it is one, else the next one from 256 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    shown = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={shown[byte]: byte for byte in range(256)}, merges=[]))
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    model.add_special_tokens([END])
    return json.loads(model.to_str())
