"""The configuration of a language model as transformers keeps it: the fields of ModelConfig beside those of every model."""

from __future__ import annotations

from typing import Any

from hypermlp.models.hf.library import PreTrainedConfig
from hypermlp.models.lm import ModelConfig
from hypermlp.models.saved import MODEL_TYPE


class HyperConfig(PreTrainedConfig):
    """The fields of ModelConfig, token ids and use_cache; whatever else is given is kept, as in every configuration."""

    model_type = MODEL_TYPE
    attribute_map = {  # noqa: RUF012  (as transformers has it)
        "vocab_size": "vocabulary",
        "hidden_size": "width",
        "num_hidden_layers": "depth",
        "num_attention_heads": "heads",
        "intermediate_size": "inner",
        "max_position_embeddings": "length",
        "tie_word_embeddings": "tied",
    }
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012
    vocabulary: int = 257
    width: int = 512
    depth: int = 8
    length: int = 1024
    mixer: str | list[str] | tuple[str, ...] = "hyperglu"
    size: int | None = None
    heads: int | None = None
    init: str = "paper"
    inner: int | None = None
    style: str = "llama"
    tied: bool = True
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **options: Any) -> None:
        self.inner = self.plain().inner  # checks all fields, too
        super().__post_init__(**options)

    def plain(self) -> ModelConfig:
        return ModelConfig(**{name: getattr(self, name) for name in ModelConfig.__dataclass_fields__})
