"""A pre-norm decoder around any mixer: embedding, blocks of mixer and SwiGLU, head.

Letters: B batch, T time, C width, F inner width of the feed-forward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp.mixers.base import Mixer

INIT_STD = 0.02


class SwiGLU(nn.Module):
    """(silu(x W_gate) ⊙ x W_up) W_down."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """x + mixer(norm(x)), then x + feed-forward(norm(x))."""

    def __init__(self, mixer: Mixer, inner: int) -> None:
        super().__init__()
        self.norm_mixer, self.norm_ffn = nn.RMSNorm(mixer.width), nn.RMSNorm(mixer.width)
        self.mixer, self.ffn = mixer, SwiGLU(mixer.width, inner)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm_mixer(x))
        return x + self.ffn(self.norm_ffn(x))


class LanguageModel(nn.Module):
    """Tokens (B T) to logits (B T vocabulary)."""

    def __init__(self, vocabulary: int, width: int, depth: int, inner: int, make_mixer: Callable[[], Mixer]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.blocks = nn.ModuleList()
        for _ in range(depth):
            block = Block(make_mixer(), inner)
            for linear in (block.ffn.gate, block.ffn.up, block.ffn.down):
                nn.init.normal_(linear.weight, 0, INIT_STD)
            self.blocks.append(block)
        self.norm = nn.RMSNorm(width)
        nn.init.normal_(self.embedding.weight, 0, INIT_STD)
        nn.init.normal_(self.head.weight, 0, INIT_STD)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def count_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def match_inner_width(target: int, build: Callable[[int], nn.Module], start: int) -> int:
    """The feed-forward width at which build(width) has as many parameters as `target`, as nearly as whole widths allow."""
    base = count_parameters(build(start))
    slope = count_parameters(build(start + 1)) - base
    return max(1, start + round((target - base) / slope))
