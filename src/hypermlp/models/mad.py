"""The two backbones of the MAD benchmark around any mixer: a language model, and for compression an auto-encoder.

Initialised as published, but for the mixers, which initialise themselves: embeddings N(0, 0.02) and biases 0 in both; the other
weights by torch's default in the language model and N(0, 0.02) in the auto-encoder.

Letters: B batch, T time, C width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hypermlp.config import INIT_STD
from hypermlp.mixers.base import Mixer
from hypermlp.models.forecast import Forecaster
from hypermlp.models.lm import Block, published_inner

EPS = 1e-5  # of every norm


class MadBackbone(nn.Module):
    """Tokens (B T) to the residual stream (B T C) behind `depth` blocks of mixer and SwiGLU."""

    def __init__(self, vocabulary: int, width: int, depth: int, inner: int, make_mixer: Callable[[], Mixer]) -> None:
        super().__init__()
        self.gathers = True  # forward takes `at`
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, 0, INIT_STD)
        self.blocks = nn.ModuleList()
        for _ in range(depth):
            block = Block(make_mixer(), inner)
            if block.mixer.width != width:
                raise ValueError(f"make_mixer gave a mixer of width {block.mixer.width}; the model's width is {width}")
            for norm in (block.norm_mixer, block.norm_ffn):
                norm.eps = EPS
            self.blocks.append(block)
        self.norm = nn.RMSNorm(width, EPS)
        self.head = nn.Linear(width, vocabulary)
        nn.init.zeros_(self.head.bias)

    def encode(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x


class MadLanguageModel(MadBackbone):
    """Tokens (B T) to logits (B T vocabulary), or those of the tokens `at` (B T, n of them True) alone (n vocabulary)."""

    def forward(self, tokens: Tensor, at: Tensor | None = None) -> Tensor:
        x = self.encode(tokens)
        return self.head(self.norm(x if at is None else x[at]))


class MadAutoEncoder(MadBackbone):
    """Tokens (B T) to logits (B T vocabulary), each position rebuilt from the last one's state and its own place alone."""

    def __init__(self, vocabulary: int, width: int, depth: int, inner: int, make_mixer: Callable[[], Mixer]) -> None:
        super().__init__(vocabulary, width, depth, inner, make_mixer)
        if width < 4 or width % 2:
            raise ValueError(f"width ({width}) must be even and at least 4: positions are sines and cosines")
        layers = [(nn.RMSNorm(width, EPS), nn.Linear(width, width), nn.GELU()) for _ in range(2)]
        self.decoder = nn.Sequential(*(module for layer in layers for module in layer))
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear) and ".mixer." not in name:
                nn.init.normal_(module.weight, 0, INIT_STD)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, at: Tensor | None = None) -> Tensor:
        state = self.encode(tokens)[:, -1:]  # B 1 C
        places = positions(tokens.shape[1], state.shape[-1], tokens.device).to(state.dtype)
        x = state + places
        return self.head(self.norm(self.decoder(x if at is None else x[at])))


def positions(length: int, width: int, device: torch.device | str = "cpu") -> Tensor:
    """Sines, then cosines, of a place (T C) at frequencies from 1 down to 1/10000."""
    frequency = 10000.0 ** -torch.linspace(0, 1, width // 2, device=device)
    angle = torch.arange(length, device=device)[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


def build_model(
    setting: Any, make_mixer: Callable[[], Mixer], width: int = 128, inner: int | None = None, depth: int = 2
) -> nn.Module:
    """The backbone of the setting's task; `inner` (None: as published) is free, so that budgets can be matched with it.

    A setting with a `horizon` is that of a forecast (models/forecast.py).
    """
    inner = published_inner(width) if inner is None else inner
    if hasattr(setting, "horizon"):
        return Forecaster(setting.channels, setting.lookback, setting.horizon, width, depth, inner, make_mixer)
    backbone = MadAutoEncoder if setting.task == "compression" else MadLanguageModel
    return backbone(setting.vocab_size, width, depth, inner, make_mixer)
