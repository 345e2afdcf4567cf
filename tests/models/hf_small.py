"""Small models within Hugging Face transformers, for the tests of models/hf."""

import os

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import pytest
import torch
from torch import Tensor

from helpers import perturb
from hypermlp.models.hf import HyperForCausalLM
from hypermlp.models.lm import LanguageModel, ModelConfig

VOCABULARY, LENGTH = 11, 12
each_model = pytest.mark.parametrize(
    "changes",
    [{"mixer": ("hyperglu", "softmax")}, {"style": "gpt2", "length": 60}, {"tied": False, "mixer": "hypermlp"}],
    ids=["hybrid", "gpt2", "untied"],
)
# A window, a window beside a growing cache, a state.
each_memory = pytest.mark.parametrize("mixer", ["hyperglu", ("hyperglu", "softmax"), "mamba2"], ids=str)


def native(mixer: str | tuple[str, ...] = "hyperglu", **changes: object) -> LanguageModel:
    torch.manual_seed(0)
    given = {"vocabulary": VOCABULARY, "width": 16, "depth": 2, "length": LENGTH, "mixer": mixer, "inner": 32, **changes}
    net = LanguageModel(ModelConfig(**given)).eval()
    return stronger(perturb(net))


@torch.no_grad()
def stronger(net: LanguageModel) -> LanguageModel:
    """Larger matrices, so that what is written depends on the whole past."""
    for p in net.blocks.parameters():
        if p.dim() == 2:
            p *= 3
    return net


def pair(**changes: object) -> tuple[LanguageModel, HyperForCausalLM]:
    """A model in float64, and a view of it."""
    net = native(**changes).double()
    return net, HyperForCausalLM.wrap(net)


def some_tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def write(model: HyperForCausalLM, prompt: Tensor, count: int = 25, **options: object) -> list[list[int]]:
    """The new tokens."""
    out = model.generate(
        prompt, max_new_tokens=count, **{"do_sample": False, "attention_mask": torch.ones_like(prompt), **options}
    )
    return out[:, prompt.shape[1] :].tolist()
