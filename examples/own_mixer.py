"""Your own mixer, through every law of the contract, and then on a task beside softmax attention.

    python examples/own_mixer.py

The mixer is an exponential moving average per channel: S_t = a ⊙ S_{t-1} + (1 - a) ⊙ x_t, y_t = S_t W.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from hypermlp.cache import Cache, CacheSpec
from hypermlp.cli import app
from hypermlp.mixers.base import Mixer, Tokens, visible_slots


class MovingAverage(Mixer):
    """CacheSpec the past as slots, so that its cache can go back. Written for clarity: its cost grows with T²."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.rate = nn.Parameter(torch.linspace(-3, 3, width))  # of forgetting, before the softplus
        self.proj = nn.Linear(width, width, bias=False)

    def cache_spec(self) -> CacheSpec:
        return CacheSpec(slots={"x": (self.width,)})

    def mix(self, tokens: Tokens, cache: Cache | None) -> Tensor:
        past, spans = tokens.x, tokens.spans
        if cache is not None:
            slots, spans = cache.append({"x": past}, tokens.x, tokens.counts())
            past = slots["x"]
        visible = visible_slots(tokens.x, past.shape[1], spans)  # B T S
        newest = visible.cumsum(-1).where(visible, 0).amax(-1, keepdim=True)
        lag = (newest - visible.cumsum(-1)).where(visible, 0)  # tokens since then
        rate = nn.functional.softplus(self.rate)
        weight = torch.exp(-lag[..., None] * rate) * visible[..., None] * (1 - torch.exp(-rate))  # B T S C
        return self.proj((weight * past[:, None]).sum(2))


def check_laws(mixer: Mixer, width: int) -> None:
    """The laws that `mixers/base.py` states; a registered mixer is held to them by the tests."""
    x = torch.randn(2, 13, width, dtype=torch.float64)
    y = mixer(x)

    changed = x.clone()
    changed[:, 6:] += 1
    torch.testing.assert_close(mixer(changed)[:, :6], y[:, :6])
    print("causality: the future never changes the past")

    torch.testing.assert_close(torch.cat([mixer(x[:1]), mixer(x[1:])]), y)
    print("batch:     a batch equals its rows")

    mask = torch.tensor([[0] * 4 + [1] * 9, [1, 0] * 6 + [1]])
    padded = mixer(x, attention_mask=mask)
    for row, real in enumerate(mask.bool()):
        torch.testing.assert_close(padded[row, real], mixer(x[row : row + 1, real])[0])
    print("padding:   changes nothing, wherever it lies")

    packed = mixer(x[:1], cu_seqlens=torch.tensor([0, 5, 6, 13]))
    torch.testing.assert_close(packed, torch.cat([mixer(part) for part in x[:1].split([5, 1, 7], 1)], 1))
    print("packing:   each document is computed as if alone")

    cache = mixer.new_cache(2)
    pieces = [mixer(piece, cache=cache) for piece in x.split([4, 1, 1, 7], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), y)
    cache.crop(9)
    torch.testing.assert_close(mixer(x[:, 9:], cache=cache), y[:, 9:])
    print("cache:     any split into pieces gives the full forward, and it can go back")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()

    torch.manual_seed(0)
    check_laws(MovingAverage(8).double(), 8)

    with tempfile.TemporaryDirectory() as folder:
        mixers, size = f"{Path(__file__)}:MovingAverage,S-pc", f"steps={options.steps} width=32 batch=16 examples=1600"
        words = f"study run mad {size} --mixers {mixers} --tasks in-context-recall --scale quick --out {folder}/study"
        app(words.split(), standalone_mode=False)  # hypermlp study run mad …


if __name__ == "__main__":
    main()
