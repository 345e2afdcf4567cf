"""Adapters of the peft library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peft import LoraConfig


def lora_config(**changes: Any) -> LoraConfig:
    """Low-rank adapters on v and o, the readout, where the paper expects a small rank to do most (appendix H.6)."""
    try:
        from peft import LoraConfig
    except ModuleNotFoundError as error:
        raise ImportError("adapters need the peft library: pip install peft") from error
    return LoraConfig(**{"task_type": "CAUSAL_LM", "target_modules": ["v", "o"], **changes})
