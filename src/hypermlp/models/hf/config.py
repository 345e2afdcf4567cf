"""The configuration of a language model as transformers keeps it: the fields of ModelConfig beside those of every model."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from hypermlp.mixers.base import Mixer
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
        "intermediate_size": "inner",
        "max_position_embeddings": "length",
        "tie_word_embeddings": "tied",
    }
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012
    base_model_fsdp_plan = {  # noqa: RUF012
        "embedding": "free_full_weight",
        "blocks.*": "free_full_weight",
        "norm": "keep_full_weight",
    }
    vocabulary: int = 257
    width: int = 512
    depth: int = 8
    length: int = 1024
    mixer: str | list[str] | tuple[str, ...] = "hyperglu"
    size: int | list[int | None] | tuple[int | None, ...] | None = None
    heads: int | None = None
    init: str = "paper"
    init_scale: str = "0.02"
    inner: int | None = None
    style: str = "llama"
    tied: bool = True
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **options: Any) -> None:
        for name in [name for name in options if name == "num_attention_heads" or name in self.attribute_map]:
            setattr(self, name, options.pop(name))
        self.inner = self.plain().inner  # checks all fields, too
        super().__post_init__(**options)

    @property
    def num_attention_heads(self) -> int:
        """Of the mixers, also where `heads` leaves it to them."""
        if self.heads is not None:
            return self.heads
        found: list[Any] = [mixer for mixer in meta_mixers(self.plain()) if hasattr(mixer, "n_head")]
        if not found:
            raise AttributeError("the mixers of this model have no heads")
        return max(mixer.n_head for mixer in found)

    @num_attention_heads.setter
    def num_attention_heads(self, value: int | None) -> None:
        self.heads = value

    @property
    def layer_types(self) -> list[str]:
        """What each layer remembers, in transformers' words: all tokens, those of a window, or a state."""
        return [layer_type(mixer) for mixer in meta_mixers(self.plain())]

    @property
    def base_model_tp_plan(self) -> dict[str, str]:  # type: ignore[override]
        """What transformers splits over processes: embedding and feed-forwards, and mixers that all say how (`split_plan`).

        A plan names modules of all layers alike, so the mixers of a hybrid stay whole.
        """
        inside = {"up": "colwise", "down": "rowwise"} | ({"gate": "colwise"} if self.style == "llama" else {})
        plan = {"embedding": "embedding_rowwise"} | {f"blocks.*.ffn.{name}": how for name, how in inside.items()}
        plans = [
            {name: how for name, how in mixer.split_plan.items() if getattr(mixer, name) is not None}
            for mixer in meta_mixers(self.plain())
        ]
        if all(one == plans[0] for one in plans):
            plan |= {f"blocks.*.mixer.{name}": how for name, how in plans[0].items()}
        return plan

    def to_dict(self) -> dict[str, Any]:
        return Names(super().to_dict(), self)

    def plain(self) -> ModelConfig:
        return ModelConfig(**{name: getattr(self, name) for name in ModelConfig.__dataclass_fields__})


class Names(dict[str, Any]):
    """The fields of a configuration, which answer to the names of other models too (hidden_size for width)."""

    def __init__(self, fields: dict[str, Any], config: HyperConfig) -> None:
        super().__init__(fields)
        also = [*config.attribute_map, "num_attention_heads"]
        self.others = {name: getattr(config, name) for name in also if hasattr(config, name)}

    def __missing__(self, name: str) -> Any:
        return self.others[name]

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self.others

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name, self.others.get(name, default))


def layer_type(mixer: Mixer) -> str:
    try:
        spec = mixer.cache_spec()
    except ValueError:  # the identity layout has no cache, and sees all tokens
        return "full_attention"
    if spec.states:
        return "linear_attention"
    return "full_attention" if spec.window is None else "sliding_attention"


@cache
def meta_mixers(config: ModelConfig) -> tuple[Mixer, ...]:
    """The mixers of such a model, without memory."""
    with torch.device("meta"):
        return tuple(config.build_mixer(layer) for layer in range(config.depth))
