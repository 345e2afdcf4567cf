"""HyperGLU inside your own small GPT: the attention of every block is swapped, the rest of the model stays.

python examples/own_gpt.py                      HyperGLU
python examples/own_gpt.py --mixer softmax      softmax attention, to compare
"""

from __future__ import annotations

import argparse
import inspect
import json

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp import HyperGLU, HyperGLUConfig

WIDTH, HEADS, DEPTH, CONTEXT, BATCH = 64, 2, 2, 64, 16


class SoftmaxAttention(nn.Module):
    """What HyperGLU replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.norm1, self.mixer, self.norm2 = nn.LayerNorm(WIDTH), mixer, nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, mixer: str) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        config = HyperGLUConfig(n_embd=WIDTH, n_head=HEADS, block_size=CONTEXT)
        self.blocks = nn.Sequential(
            *(Block(HyperGLU(config) if mixer == "hyperglu" else SoftmaxAttention()) for _ in range(DEPTH))
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixer", choices=("hyperglu", "softmax"), default="hyperglu")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()

    torch.manual_seed(0)
    text = "".join(inspect.getsource(module) for module in (argparse, inspect, json))  # Python's own source is always there
    data = torch.tensor(list(text.encode()))
    model = GPT(options.mixer)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, options.steps + 1):
        starts = torch.randint(len(data) - CONTEXT - 1, (BATCH,))
        batch = torch.stack([data[i : i + CONTEXT + 1] for i in starts.tolist()])
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 50 == 0 or step == options.steps:
            print(f"step {step:4d}   loss {loss.item():.3f} nats per byte")


if __name__ == "__main__":
    main()
