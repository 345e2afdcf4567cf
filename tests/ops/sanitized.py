"""Random layers, caches and scans through the native kernel; test_sanitizers.py runs it in a process with sanitizers.

python sanitized.py SEED LAYERS
"""

from __future__ import annotations

import random
import sys

import torch

from hypermlp import HyperGLU, HyperGLUConfig, LanguageModel, ModelConfig, quantize
from hypermlp.mixers import build_mixer
from hypermlp.ops import native
from hypermlp.ops.native import build

SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g1")
build.FLAGS = tuple("-O1" if flag == "-O3" else flag for flag in build.FLAGS) + SANITIZERS


def layer_of_whole_panels(draw: random.Random) -> HyperGLU:
    """Its projections go by blocks of rows."""
    layer = HyperGLU(
        n_embd=draw.choice([32, 64]),
        n_head=2,
        block_size=draw.choice([7, 150]),
        qk_rank=64,
        vo_rank=64,
        conv_kernel_size=draw.choice([1, 2, 4, 5]),
        use_kv_conv=draw.random() < 0.8,
        use_vo_gate=draw.random() < 0.8,
        bias=draw.random() < 0.3,
    )
    assert native.fits(torch.empty(1, 1, layer.width), layer.tensors())
    return layer


def random_layer(draw: random.Random) -> HyperGLU:
    if draw.random() < 0.25:
        return layer_of_whole_panels(draw)
    n_head = draw.choice([1, 2, 3])
    parts = "use_kv_conv use_qk_gate use_vo_gate use_op1 use_op2 op1_use_diag op2_use_diag"
    names = f"{parts} op1_per_head op2_per_head op1_shortcut op2_shortcut".split()
    flip = {name: draw.random() < 0.75 for name in names}
    config = HyperGLUConfig(
        n_embd=draw.choice([1, 3, 8, 17, 33, 64]),
        n_head=n_head,
        block_size=draw.choice([1, 2, 7, 40, 150]),
        attn_kind=draw.choice(["glu", "relu"]),
        attn_norm=draw.choice(["out_scale", "none"]),
        qk_rank=2 * n_head * draw.choice([1, 2, 9, 16, 17]),
        vo_rank=n_head * draw.choice([1, 3, 16, 32, 33]),
        conv_kernel_size=draw.choice([1, 2, 4, 5]),
        op1_rank=draw.choice([1, 3, 16, 17, 40]),
        op2_rank=draw.choice([1, 3, 16, 17, 40]),
        bias=draw.random() < 0.3,
        **flip,
    )
    return HyperGLU(config)


def train(layer: torch.nn.Module, x: torch.Tensor, **options: object) -> None:
    y = layer(x.to(next(layer.parameters()).dtype, copy=True).requires_grad_(), **options)
    assert torch.isfinite(y).all()
    y.sum().backward()


def stream(layer: HyperGLU, draw: random.Random, batch: int) -> None:
    """A cache that is filled, cropped, reordered and filled again; without rewind, its ring has no slot to spare."""
    rewind = draw.choice([None, 0])
    cache = layer.new_cache(batch, rewind=rewind)
    for _ in range(draw.randint(2, 16)):
        T = draw.choice([1, 1, 1, 2, 5, 40])
        x = torch.randn(batch, T, layer.width, dtype=layer.q.weight.dtype)
        mask = None if draw.random() < 0.7 else (torch.rand(batch, T) < 0.6).long()
        assert torch.isfinite(layer(x, cache=cache, attention_mask=mask)).all()
        if draw.random() < 0.3:
            cache.reorder([draw.randrange(batch) for _ in range(batch)])
        if draw.random() < 0.3 and rewind is None:
            cache.crop(max(0, int(cache.lengths.min()) - draw.randint(0, 3)))


def decode(draw: random.Random, batch: int) -> None:
    """A small model in one call for each token, past its window, with rows that come and go."""
    heads = draw.choice([1, 2])
    model = LanguageModel(
        ModelConfig(
            vocabulary=draw.choice([1, 5, 33]),
            width=8 * heads * draw.choice([1, 3]),
            depth=draw.choice([1, 2]),
            length=draw.choice([1, 6, 40]),
            inner=draw.choice([1, 7, 40]),
            mixer=draw.choice(["hyperglu", "hypermlp"]),
            heads=heads,
            style=draw.choice(["llama", "gpt2"]),
            tied=draw.random() < 0.5,
        )
    )
    model = model.to(draw.choice([torch.float32, torch.bfloat16])).eval()
    model = quantize(model) if draw.random() < 0.5 else model
    cache, count = model.new_cache(batch), model.config.length if model.positions is not None else 60
    with torch.no_grad():
        for n in range(count):
            tokens = torch.randint(model.config.vocabulary, (cache.batch_size, 1))
            assert model.explain(tokens, cache).startswith("model")
            assert torch.isfinite(model(tokens, cache=cache)).all()
            if n % 7 == 5:
                cache = cache.select([draw.randrange(cache.batch_size) for _ in range(draw.choice([1, 2, 5]))])


def main(seed: int, layers: int) -> None:
    draw = random.Random(seed)
    assert build.library().handle is not None, build.library().reason
    for i in range(layers):
        torch.manual_seed(i)
        torch.set_num_threads(draw.choice([1, 2, 3]))
        layer = random_layer(draw).to(draw.choice([torch.float32, torch.bfloat16]))
        batch, T = draw.choice([1, 2, 5]), draw.choice([1, 2, 3, 4, 13, 97, 140])
        x = torch.randn(batch, T, layer.width)
        native.MOST_TOKENS = draw.choice([-1, 512])
        train(layer, x)
        train(layer, x, attention_mask=(torch.rand(batch, T) < 0.7).long())
        if T > 2:
            cut = draw.randint(1, T - 1)
            train(layer, x[:1], cu_seqlens=[0, cut, T])
        stream(layer, draw, batch)
        if i % 4 == 0:
            stream(quantize(layer), draw, batch)
            decode(draw, batch)
        mamba = build_mixer("mamba", draw.choice([3, 16, 40]), 8)
        train(mamba, torch.randn(batch, T, mamba.width))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
