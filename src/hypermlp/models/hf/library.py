"""The names that this package takes from transformers; without it, stand-ins that name the cure when used."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from torch import nn

CURE = "this needs Hugging Face transformers: pip install 'hypermlp[hf]'"

try:
    import tokenizers
    import transformers
    from transformers import (
        Cache,
        GenerationMixin,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerFast,
        StaticCache,
        initialization,
    )
    from transformers.modeling_layers import (
        GenericForSequenceClassification,
        GenericForTokenClassification,
        GradientCheckpointingLayer,
    )
    from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
except ModuleNotFoundError as error:
    if error.name not in ("tokenizers", "transformers"):
        raise

    class Missing(type):
        """Stand-in for a class whose library is not installed: using it raises an error with the cure."""

        def __call__(cls, *arguments: Any, **options: Any) -> Any:
            raise ImportError(CURE)

        def __getattr__(cls, name: str) -> Any:
            raise ImportError(CURE)

    class PreTrainedModel(metaclass=Missing):  # type: ignore[no-redef]
        @classmethod
        def from_pretrained(cls, *arguments: Any, **options: Any) -> Any:
            raise ImportError(CURE)

    class GenericForSequenceClassification(metaclass=Missing):  # type: ignore[no-redef]
        pass

    Cache = StaticCache = PreTrainedConfig = PreTrainedTokenizerFast = PreTrainedModel  # type: ignore[assignment,misc]
    GenericForTokenClassification = GenericForSequenceClassification  # type: ignore[assignment,misc]
    GenerationMixin = object  # type: ignore[assignment,misc]
    GradientCheckpointingLayer = nn.Module  # type: ignore[assignment,misc]
    transformers = tokenizers = initialization = None  # type: ignore[assignment]
    BaseModelOutputWithPast = CausalLMOutputWithPast = None  # type: ignore[assignment,misc]

__all__ = [
    "CURE",
    "BaseModelOutputWithPast",
    "Cache",
    "CausalLMOutputWithPast",
    "GenerationMixin",
    "GenericForSequenceClassification",
    "GenericForTokenClassification",
    "GradientCheckpointingLayer",
    "PreTrainedConfig",
    "PreTrainedModel",
    "PreTrainedTokenizerFast",
    "StaticCache",
    "initialization",
    "register",
    "tokenizers",
    "transformers",
]


def register(config: Any, tokenizer: Any, **models: Any) -> None:
    """Make the Auto classes know these classes; without the library, nothing.

    Tools such as TRL and `transformers serve` look the class that config.json names up in transformers itself. Trainer looks
    for its name in the Auto class's table, to know whether label smoothing must shift the labels.
    """
    if transformers is None:
        return
    transformers.AutoConfig.register(config.model_type, config, exist_ok=True)
    transformers.AutoTokenizer.register(config, fast_tokenizer_class=tokenizer, exist_ok=True)
    for auto, model in models.items():
        getattr(transformers, auto).register(config, model, exist_ok=True)
        getattr(transformers, auto)._model_mapping._model_mapping[config.model_type] = model.__name__
        for view in views():
            setattr(view, model.__name__, model)


def views() -> list[Any]:
    """The module transformers, which replaces itself while it is imported: every object that somebody holds by that name."""
    holders = [vars(module).get("transformers") for module in list(sys.modules.values()) if hasattr(module, "__dict__")]
    found = [transformers, sys.modules["transformers"], *holders]
    return [module for module in found if isinstance(module, ModuleType) and module.__name__ == "transformers"]
