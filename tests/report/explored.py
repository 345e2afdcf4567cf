"""Models of every kind of attention, saved for the explorer's tests."""

from __future__ import annotations

from pathlib import Path

import torch

from helpers import perturb
from hypermlp.data.tokenizers import ByteTokenizer
from hypermlp.models.lm import LanguageModel, ModelConfig
from hypermlp.models.saved import save_model

TEXT = "the cat <b>& the dog</b>\n\tthe café"
MIXERS = ("hyperglu", "R-cg-q-12o", "R-12!", "softmax", "differential", "path", "gla", "R-c")


def save_small(folder: Path, mixers: tuple[str, ...] = MIXERS, seed: int = 0, length: int = 64) -> LanguageModel:
    """One layer of each mixer, with parameters that make every term count."""
    torch.manual_seed(seed)
    model = LanguageModel(ModelConfig(vocabulary=257, width=16, depth=len(mixers), length=length, mixer=mixers))
    for block in model.blocks:
        perturb(block.get_submodule("mixer"), seed)
    save_model(model, folder, ByteTokenizer().to_dict())
    return model.eval()
